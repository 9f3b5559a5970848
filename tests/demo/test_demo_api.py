"""The app over a network: named endpoints of a server that really runs, as ``gradio_client`` and a script see them."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("gradio")

import httpx
from demo_events import Story, checked, records, running_text
from demo_pairs import MARKUP, STORY
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError
from gradio_dflash.app import launch_options, make_app
from gradio_dflash.studio import Studio
from gradio_dflash.view import page_lines

from dflash.trace import Trace

NAMES = {"/generate", "/race", "/conditioning", "/replay", "/stop", "/models"}
Server = SimpleNamespace


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def server(models: dict[str, str]) -> Iterator[Server]:
    """``url``, the ``studio`` behind it, and ``pause``: seconds that every pass of the target takes longer."""
    studio = Studio({"device": "cpu", "backend": "torch"}, {"reciting": models})
    state = Server(studio=studio, pause=0.0, passes=0)
    target = studio.load("reciting").target
    forward = target.forward

    def paused(*inputs: Any, **options: Any) -> Any:
        state.passes += 1
        time.sleep(state.pause)
        return forward(*inputs, **options)

    target.forward = paused  # type: ignore[method-assign]
    app = make_app(studio)
    _, state.url, _ = app.launch(
        server_name="127.0.0.1", server_port=free_port(), prevent_thread_lock=True, quiet=True, **launch_options()
    )
    yield state
    app.close()


@pytest.fixture
def join(server: Server) -> Iterator[Callable[[], Client]]:
    """A new visitor's client. None of them is closed, which takes seconds: they end with the server."""
    server.pause = 0.0
    yield lambda: Client(server.url, verbose=False)
    server.pause = 0.0


@pytest.fixture(scope="module")
def visitor(server: Server) -> Client:
    """One client for all tests that need no visitor of their own."""
    return Client(server.url, verbose=False)


def asked(prompt: str = "Hi?", budget: float = 200, **changes: Any) -> tuple[Any, ...]:
    values = {
        "prompt": prompt, "pair": "reciting", "backend": "auto", "block": "auto", "rule": "auto", "temperature": 0,
        "top_p": 1, "seed": 0, "budget": budget,
    }  # fmt: skip
    return tuple((values | changes).values())


def wait(ready: Callable[[], Any], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < until
        time.sleep(0.01)


def steps_of(job: Any) -> int:
    outputs = job.outputs()
    return len(records(outputs[-1], "step")) if outputs else 0


def error_of(call: Callable[[], Any]) -> str:
    """The one sentence that an endpoint answers with."""
    with pytest.raises(AppError) as raised:
        call()
    words = str(raised.value)
    assert len(words.splitlines()) == 1 and not words[0].isspace() and words.endswith(".") and "Traceback" not in words
    return words


# What there is ------------------------------------------------------------------------------------------------------


def test_every_endpoint_has_a_name_and_says_what_it_does(visitor: Client) -> None:
    described: Any = visitor.view_api(return_format="dict", print_info=False)
    assert set(described["named_endpoints"]) == NAMES
    assert described["unnamed_endpoints"] == {}
    for name, endpoint in described["named_endpoints"].items():
        assert len(endpoint["description"]) > 40, f"{name} says nothing of itself"


def test_the_page_is_served_on_this_machine_and_asks_nothing_of_another(server: Server) -> None:
    assert server.url.startswith("http://127.0.0.1:")
    page = httpx.get(server.url).text
    assert "DFlash" in page
    for elsewhere in ("fonts.googleapis", "fonts.gstatic", "googletagmanager", "cdnjs."):
        assert f'href="https://{elsewhere}' not in page and f'src="https://{elsewhere}' not in page


def test_models_tells_what_can_be_asked_for(visitor: Client) -> None:
    told = visitor.predict(api_name="/models")
    assert told["pairs"] == ["reciting", "smollm2-135m"] and "torch" in told["backends"]
    assert told["rules"] == ["greedy", "match", "rejection"]


# A generation -------------------------------------------------------------------------------------------------------


def test_a_generation_streams_and_every_update_goes_on_from_the_last(
    server: Server, join: Callable[[], Client]
) -> None:
    server.pause = 0.02
    job = join().submit(*asked("Shout!"), api_name="/generate")
    text = ""
    for update in job:
        assert update.startswith(text)
        text = update
    assert len(set(job.outputs())) >= 5
    checked(text)
    assert running_text(text) == MARKUP.replace("<|system|>", "") and records(text)[-1]["finish"] == "stop"


def test_numbers_come_as_a_page_sends_them(visitor: Client) -> None:
    client = visitor
    lines = client.predict(*asked(budget=12.0, block="4", seed=3.0, temperature=0.5), api_name="/generate")
    head = dict(map(tuple, records(lines, "head")[0]["settings"]))
    assert (head["block size"], head["seed"], head["temperature"], head["budget"]) == ("4", "3", "0.5", "12")
    lines = client.predict(*asked(budget=5, temperature=1, seed=None), api_name="/generate")
    assert "seed" not in dict(map(tuple, records(lines, "head")[0]["settings"]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": ""}, "The prompt is empty; give at least one token."),
        ({"block": "many"}, "The block size is 'many'; it must be a whole number."),
        ({"block": "1"}, "block_size is 1; a block is the anchor and at least one slot, so 2 or more."),
        ({"block": "2.5"}, "The block size is '2.5'; it must be a whole number."),
        ({"rule": "greedy", "temperature": 1}, "Verify 'greedy' needs temperature 0, and it is 1; 'match' samples."),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_one_sentence_and_the_next_request_works(
    visitor: Client, changes: dict[str, Any], words: str
) -> None:
    client = visitor
    assert error_of(lambda: client.predict(*asked(**changes), api_name="/generate")) == words
    assert error_of(lambda: client.predict(*asked(**changes), api_name="/race")) == words
    assert records(client.predict(*asked(budget=3), api_name="/generate"))[-1]["finish"] == "length"


@pytest.mark.parametrize("changes", [{"pair": "nobody"}, {"backend": "jax"}, {"budget": 10**6}, {"top_p": -1}], ids=str)
def test_what_no_control_offers_is_refused(visitor: Client, changes: dict[str, Any]) -> None:
    with pytest.raises(AppError) as raised:
        visitor.predict(*asked(**changes), api_name="/generate")
    assert "Traceback" not in str(raised.value) and str(next(iter(changes.values()))) in str(raised.value)


# Stopping and leaving -----------------------------------------------------------------------------------------------


def test_stop_ends_a_generation_in_mid_round(server: Server, join: Callable[[], Client]) -> None:
    server.pause = 0.05
    client = join()
    job = client.submit(*asked(), api_name="/generate")
    wait(lambda: steps_of(job) >= 2)
    log = client.predict(api_name="/stop")
    checked(log)
    assert records(log)[-1]["finish"] == "cancelled" and STORY.startswith(running_text(log))
    assert len(records(log, "step")) < 20
    assert job.result(20) == log
    server.pause = 0.0
    assert json.loads(client.predict(1, api_name="/conditioning"))["state"] == "done", "the answer is kept"
    assert running_text(client.predict(*asked(), api_name="/generate")) == STORY


def test_a_cancelled_job_ends_at_the_next_round(server: Server, join: Callable[[], Client]) -> None:
    server.pause = 0.05
    client = join()
    job = client.submit(*asked(), api_name="/generate")
    wait(lambda: steps_of(job) >= 2)
    job.cancel()
    before = server.passes
    time.sleep(0.5)
    after = server.passes
    time.sleep(0.3)
    assert server.passes == after and after - before <= 8
    log = client.predict(api_name="/stop")
    assert records(log)[-1]["finish"] == "cancelled"


def test_a_visitor_who_goes_away_ends_the_generation(server: Server) -> None:
    """A page that is closed: both of its connections are gone."""
    server.pause = 0.05
    session = "gone"
    url = server.url.rstrip("/") + "/gradio_api"
    index = next(
        each["id"] for each in httpx.get(server.url + "config").json()["dependencies"] if each["api_name"] == "generate"
    )
    try:
        with httpx.stream("GET", f"{url}/heartbeat/{session}", timeout=60) as beats:
            alive = beats.iter_lines()  # held: without its reader a connection is closed
            next(alive)
            body = {"data": list(asked()), "fn_index": index, "session_hash": session}
            assert httpx.post(f"{url}/queue/join", json=body).status_code == 200
            with httpx.stream("GET", f"{url}/queue/data?session_hash={session}", timeout=60) as lines:
                updates = lines.iter_lines()
                for _ in range(3):
                    next(line for line in updates if "process_generating" in line)
                assert session in server.studio._runs
        wait(lambda: session not in server.studio._runs, 20)
        before = server.passes
        time.sleep(0.4)
        assert server.passes - before <= 2
        assert session not in server.studio._runs and server.studio.answer(session) is None
    finally:
        server.pause = 0.0


def test_two_visitors_at_once_wait_for_each_other_and_both_are_right(
    server: Server, join: Callable[[], Client]
) -> None:
    server.pause = 0.02
    one, other = join(), join()
    first = one.submit(*asked("One?"), api_name="/generate")
    wait(lambda: steps_of(first) >= 1)
    second = other.submit(*asked("Other!"), api_name="/generate")
    wait(lambda: second.status().rank is not None or steps_of(second) or second.done())
    assert not second.outputs() and not first.done(), "the second one waits in the queue"
    assert running_text(first.result(60)) == STORY
    assert running_text(second.result(60)) == MARKUP.replace("<|system|>", "")


# Race, looking inside, replay ---------------------------------------------------------------------------------------


def test_a_race_ends_with_both_arms(visitor: Client) -> None:
    job = visitor.submit(*asked(budget=40), api_name="/race")
    done = json.loads(job.result(60))
    assert done["state"] == "done" and done["identical"] and [arm["tokens"] for arm in done["arms"]] == [40, 40]
    assert {json.loads(each)["state"] for each in job.outputs()[:-1]} <= {"running", "done"}


def test_looking_inside_needs_an_answer_of_ones_own(join: Callable[[], Client]) -> None:
    one, other = join(), join()
    one.predict(*asked(budget=20), api_name="/generate")
    assert json.loads(one.predict(2, api_name="/conditioning"))["index"] == 2
    words = error_of(lambda: other.predict(1, api_name="/conditioning"))
    assert words == "There is no answer yet to look into; generate one first."
    assert "There is no round 999; there are 1 to " in error_of(lambda: one.predict(999, api_name="/conditioning"))


def test_a_saved_trace_is_replayed_and_shared_as_one_file(visitor: Client, tmp_path: Path) -> None:
    story = Story("<b>Hi?")
    story.first("A")
    story.round("bc</script>", 2, "!")
    for name in ("trace.jsonl", "trace.jsonl.gz"):
        story.trace("stop").save(tmp_path / name)
        lines, page = visitor.predict(handle_file(str(tmp_path / name)), api_name="/replay")
        assert lines == page_lines(Trace.load(tmp_path / name)) and checked(lines)
        file = page["value"] if isinstance(page, dict) else page
        text = Path(file if isinstance(file, str) else file["path"]).read_text(encoding="utf-8")
        assert text.startswith("<!doctype html>") and text.count("</script>") == text.count("<script")


def test_a_file_that_is_no_trace_is_told_in_one_sentence(visitor: Client, tmp_path: Path) -> None:
    (tmp_path / "notes.jsonl").write_text('{"trace": 1}\n')
    words = error_of(lambda: visitor.predict(handle_file(str(tmp_path / "notes.jsonl")), api_name="/replay"))
    assert words == "notes.jsonl is not a whole trace of format 1.", "a name, and none of the server's folders"


def test_no_file_is_nothing(visitor: Client) -> None:
    assert visitor.predict(None, api_name="/replay")[0] == ""
