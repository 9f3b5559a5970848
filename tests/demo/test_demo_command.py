"""``dflash demo``: a page written without a server or a model, a server that starts and ends, and every refusal."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from demo_events import Story

from dflash.cli.main import main

HIDING = """
import sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {hidden!r} else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
from dflash.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    story = Story("<b>Hi?")
    story.first("A")
    story.round("bc</script>", 2, "!")
    file = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    story.trace("stop").save(file)
    return str(file)


def run_without(*hidden: str, words: list[str]) -> subprocess.CompletedProcess[str]:
    """The command in a process that cannot import these packages."""
    code = HIDING.format(hidden=set(hidden))
    return subprocess.run([sys.executable, "-c", code, "demo", *words], capture_output=True, text=True, timeout=120)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one sentence of a command that does nothing else."""
    try:
        code = main(["demo", *words])
    except SystemExit as leaving:
        code = int(str(leaving.code))
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.strip() and not line.startswith("dflash: loading ")]
    assert out == "" and len(lines) == 1 and lines[0].startswith("dflash: error: "), err
    assert code in (1, 2)
    return lines[0].removeprefix("dflash: error: ")


# A page without a server -------------------------------------------------------------------------------------------


def test_a_page_is_written_where_nothing_but_the_core_is_installed(trace: str, tmp_path: Path) -> None:
    done = run_without(
        "gradio", "gradio_client", "torch", "mlx", "mlx_lm", "transformers", "safetensors",
        words=["--trace", trace, "--html", str(tmp_path / "page.html")],
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr == f"dflash: wrote {tmp_path / 'page.html'}\n"
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and "<b>Hi?" not in text and "bc</script>" not in text
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//""", text)
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


def test_without_gradio_the_page_cannot_be_served_and_what_brings_it_is_named(trace: str) -> None:
    done = run_without("gradio", words=["--trace", trace])
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and done.stdout == ""
    assert done.stderr.startswith("dflash: error: the demo needs gradio (")
    assert done.stderr.endswith("); pip install 'dflash-lab[demo]'\n")


# Refusals ----------------------------------------------------------------------------------------------------------


def test_a_page_needs_a_trace_to_show(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = refused(capsys, "--html", str(tmp_path / "page.html"))
    assert words == "--html writes a saved trace as a page; name it with --trace"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("auth", ["", "user", "user:", ":password", ":"])
def test_auth_is_a_name_and_a_password(capsys: pytest.CaptureFixture[str], auth: str) -> None:
    assert refused(capsys, "--auth", auth) == "--auth needs a name and a password: USER:PASSWORD"


def test_a_password_may_hold_colons() -> None:
    from dflash.cli.demo import _auth

    assert _auth("user:pass:word") == ("user", "pass:word")
    assert _auth(None) is None


@pytest.mark.parametrize("words", [["--port", "many"], ["--port", "1.5"], ["--colour"], ["extra"]], ids=" ".join)
def test_unknown_flags_and_values_are_usage_errors(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert "--help)" in refused(capsys, *words)


def test_a_trace_that_is_none_is_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str], trace: str, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("notes")
    assert refused(capsys, "--trace", str(tmp_path / "notes.txt")).endswith("is not a whole trace of format 1")
    assert "cannot be read" in refused(capsys, "--trace", str(tmp_path / "missing.jsonl"), "--html", "page.html")
    words = refused(capsys, "--trace", trace, "--html", str(tmp_path / "no" / "page.html"))
    assert "cannot be written" in words and not (tmp_path / "no").exists()
    assert "no regular file" in refused(capsys, "--trace", trace, "--html", str(tmp_path))


def test_a_model_that_is_none_is_told_before_the_page_opens(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("gradio")
    assert "nobody" in refused(capsys, "--target", "nobody", "--backend", "torch")
    assert "there is no backend 'jax'" in refused(capsys, "--backend", "jax")


@pytest.mark.parametrize("port", ["-1", "0", "70000"])
def test_a_port_that_is_none_is_told(capsys: pytest.CaptureFixture[str], trace: str, port: str) -> None:
    words = refused(capsys, "--trace", trace, f"--port={port}")
    assert words == f"--port is {port}; it must be between 1 and 65535"


def test_a_port_that_is_taken_is_told(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    pytest.importorskip("gradio")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        words = refused(capsys, "--trace", trace, "--port", str(port))
    assert words == (
        f"the page cannot be served at 127.0.0.1, port {port}: it is taken, or the address is not this machine's"
    )


# Flags and what they mean ------------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """What the command would serve, without serving it."""
    pytest.importorskip("gradio")
    import gradio

    def run(*words: str) -> dict[str, Any]:
        options: dict[str, Any] = {}
        with monkeypatch.context() as patch:
            patch.setattr(gradio.Blocks, "launch", lambda self, **given: options.update(given))
            assert main(["demo", *words]) == 0
        return options

    return run


def test_the_page_is_for_this_machine_alone_unless_asked_otherwise(
    launched: Callable[..., dict[str, Any]], trace: str
) -> None:
    options = launched("--trace", trace)
    assert options["server_name"] == "127.0.0.1" and options["share"] is False and options["auth"] is None
    assert options["server_port"] is None and options["inbrowser"] is False and options["ssr_mode"] is False
    options = launched("--trace", trace, "--host", "0.0.0.0", "--port", "7999", "--share", "--auth", "me:pw", "--open")
    assert (options["server_name"], options["server_port"], options["share"]) == ("0.0.0.0", 7999, True)
    assert options["auth"] == ("me", "pw") and options["inbrowser"] is True


def test_without_a_trace_the_named_pair_is_loaded_at_once(
    launched: Callable[..., dict[str, Any]], models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradio_dflash import studio

    loads: list[dict[str, Any]] = []
    monkeypatch.setattr(studio, "load", lambda *_, **options: loads.append(options))
    launched("--target", models["target"], "--draft", models["draft"], "--backend", "torch", "--device", "cpu")
    assert len(loads) == 1
    assert {name: loads[0][name] for name in ("target", "draft", "backend", "device")} == {
        **models, "backend": "torch", "device": "cpu",
    }  # fmt: skip


# A real server -----------------------------------------------------------------------------------------------------


def test_a_trace_is_served_without_a_model_until_ctrl_c(trace: str) -> None:
    pytest.importorskip("gradio")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    # Where the tests run in the background, Ctrl-C is ignored, and so it would be by what they start.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += HIDING.format(hidden={"torch", "mlx", "mlx_lm", "transformers"})
    words = ["demo", "--trace", trace, "--port", str(port)]
    environment = os.environ | {"GRADIO_ANALYTICS_ENABLED": "False", "PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=environment,
    )  # fmt: skip
    try:
        text, until = "", time.monotonic() + 90
        while not text:
            assert server.poll() is None, server.stdout.read()  # type: ignore[union-attr]
            assert time.monotonic() < until
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as answer:
                    text = answer.read().decode()
            except OSError:
                time.sleep(0.1)
        assert "DFlash" in text
        server.send_signal(signal.SIGINT)
        out, _ = server.communicate(timeout=30)
        assert server.returncode == 0 and "Traceback" not in out, out
        assert f"http://127.0.0.1:{port}" in out
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
