"""Workers of the end-to-end suite: long-lived processes under interpreters of other environments."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dflash.errors import UsageError
from dflash.suites.arms import Programs
from dflash.suites.end_to_end import ArmError
from dflash.suites.workers import Worker, WorkerArm, script

ARMS = script("answering.py").parent
SCRIPT = f"""
import os, signal, sys
sys.path.insert(0, {str(ARMS)!r})
from answering import serve

def load(request):
    print("chatter of a library")
    def count(asked):
        return asked["prompt"] + [asked["max_new_tokens"], *asked["stop"]]
    def environment(asked):
        return [int(os.environ["OMP_NUM_THREADS"]), int("PYTHONPATH" in os.environ), os.getpid()]
    def fail(asked):
        raise RuntimeError("no luck\\nand more")
    def die(asked):
        sys.stderr.write("first\\nout of memory\\n")
        sys.stderr.flush()
        os._exit(3)
    return {{"count": count, "environment": environment, "fail": fail, "die": die}}, {{"versions": request["given"]}}

serve(load)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(SCRIPT)
    return path


def test_a_worker_answers_again_and_again(file: Path) -> None:
    with Worker(sys.executable, file, threads=2) as worker:
        assert worker.ask("load", given={"x": "1"}) == {"versions": {"x": "1"}}
        arm = WorkerArm(worker, "count", [9], {"versions": {}})
        answers = [arm.run([1, 2], budget) for budget in (5, 6)]
        assert [answer.tokens for answer in answers] == [[1, 2, 5, 9], [1, 2, 6, 9]]
        assert all(0 <= answer.seconds < 1 for answer in answers)
        pids = {WorkerArm(worker, "environment", [], {}).run([], 0).tokens[2] for _ in range(2)}
        assert len(pids) == 1
        pid = pids.pop()
        assert os.getsid(pid) != os.getsid(0)  # Ctrl-C in our terminal is not its business
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_threads_are_told_and_a_foreign_environment_gets_no_path_of_ours(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = tmp_path / "python"
    foreign.symlink_to(sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = {}
    for python in (sys.executable, str(foreign)):
        with Worker(python, file, threads=3) as worker:
            worker.ask("load", given={})
            found[python] = WorkerArm(worker, "environment", [], {}).run([], 0).tokens[:2]
    assert found == {sys.executable: [3, 1], str(foreign): [3, 0]}


def test_what_goes_wrong_in_a_worker_is_one_sentence(file: Path) -> None:
    with Worker(sys.executable, file, threads=1) as worker:
        worker.ask("load", given={})
        with pytest.raises(ArmError, match=r"^RuntimeError: no luck$"):
            worker.ask("fail")
        assert worker.ask("count", prompt=[], max_new_tokens=1, stop=[])["tokens"] == [1]  # it goes on
        for _ in range(2):
            with pytest.raises(ArmError, match=r"^its process ended: out of memory$"):
                worker.ask("die")
    file.write_text("import nothing_like_it\n")
    with Worker(sys.executable, file, threads=1) as worker, pytest.raises(ArmError, match="No module named 'nothing"):
        worker.ask("load", given={})
    with pytest.raises(ArmError, match="cannot be started"):
        Worker(file.parent / "nobody", file, threads=1)


def test_a_worker_in_mid_answer_is_ended_with_an_error_of_ours(file: Path) -> None:
    file.write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(KeyboardInterrupt), Worker(sys.executable, file, threads=1) as worker:
        raise KeyboardInterrupt
    assert worker._process.returncode is not None


def test_programs_that_are_not_there_are_refused_at_once(tmp_path: Path) -> None:
    for flag, name in (("--official", "official"), ("--llama", "llama")):
        with pytest.raises(UsageError, match=f"{flag} is .*nobody, which is no program"):
            Programs(**{name: tmp_path / "nobody"})
    plain = tmp_path / "file"
    plain.touch()
    with pytest.raises(UsageError, match="no program"):
        Programs(official=plain)
    with pytest.raises(UsageError, match=r"--gguf is .*model\.gguf; there is no such file"):
        Programs(gguf=tmp_path / "model.gguf")
