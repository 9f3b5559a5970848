"""When a pass is captured, when anew, when not at all; and what it may rely on."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from graph_tape import Tape, Tapes
from torch import Tensor
from torch_dflash import graphs
from torch_dflash.graphs import SWITCH, CudaRecorder, GraphedPasses, Recorder

CPU = torch.device("cpu")


class Table:
    """A pass that reads by address, and counts how often it is written down."""

    def __init__(self) -> None:
        self.table, self.calls = torch.arange(10.0), 0

    def places(self) -> tuple[Tensor, ...]:
        return (self.table,)

    def look_up(self, ids: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        assert shift.dtype == torch.int32 and shift.shape == (1,)
        return self.table[ids + shift], ids * 2


@pytest.fixture
def table() -> Table:
    return Table()


def passes_of(table: Table) -> tuple[GraphedPasses, Tapes]:
    passes, tapes = GraphedPasses(CPU, table.places), Tapes()
    passes._recorder.capture = tapes  # type: ignore[method-assign]
    return passes, tapes


def ask(passes: GraphedPasses, table: Table, ids: list[int], shift: int) -> list[float]:
    found, doubled = passes(len(ids), table.look_up, torch.tensor(ids), shift)
    assert doubled.tolist() == [2 * one for one in ids]
    return found.tolist()


def test_the_second_time_is_captured(table: Table) -> None:
    passes, tapes = passes_of(table)
    assert ask(passes, table, [1, 2], 3) == [4, 5] and (table.calls, len(tapes.made)) == (1, 0), (
        "it may never come back"
    )
    assert ask(passes, table, [3, 0], 4) == [7, 4] and (table.calls, tapes.replays) == (2, 1)
    assert ask(passes, table, [5, 6], 1) == [6, 7] and (table.calls, tapes.replays) == (2, 2)
    assert ask(passes, table, [5], 1) == [6] and table.calls == 3, "another kind"
    assert ask(passes, table, [0, 9], 0) == [0, 9] and (table.calls, tapes.replays) == (3, 3)


def test_results_and_inputs_are_the_callers(table: Table) -> None:
    """The next pass changes neither."""
    passes, _ = passes_of(table)
    given = [torch.tensor([turn, 3]) for turn in range(5)]
    found = [passes("kind", table.look_up, ids, turn) for turn, ids in enumerate(given)]
    for turn, (looked_up, doubled) in enumerate(found):
        assert looked_up.tolist() == [2 * turn, 3 + turn] and doubled.tolist() == [2 * turn, 6]
        assert given[turn].tolist() == [turn, 3]
    with pytest.raises(AssertionError, match="inputs of one shape"):
        passes("kind", table.look_up, torch.tensor([4, 3, 2]), 0)


def test_nothing_waits_for_the_device(table: Table) -> None:
    """A replay with everything around it: ``Tape`` refuses whoever asks."""
    passes, tapes = passes_of(table)
    for turn in range(4):
        ids = torch.tensor([turn, 1])
        with Tape() if turn > 1 else nullcontext():
            found, _ = passes("kind", table.look_up, ids, turn)
        assert found.tolist() == [2 * turn, 1 + turn]
    assert tapes.replays == 3


def test_what_was_captured_goes_with_what_it_read(table: Table) -> None:
    passes, tapes = passes_of(table)
    for _ in range(3):
        ask(passes, table, [1], 1)
        ask(passes, table, [1, 2], 1)
    table.table[2] = 20.0
    assert ask(passes, table, [1], 1) == [20] and tapes.replays == 5, "written to where it is: nothing to be done"
    table.table, calls = torch.arange(100.0, 110.0), table.calls
    for _ in range(3):
        assert ask(passes, table, [1], 1) == [102] and ask(passes, table, [1, 2], 1) == [102, 103]
    assert table.calls == calls + 4 and len(tapes.made) == 4


def test_graphs_can_be_left_off(
    table: Table, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graphs._say_once.cache_clear()
    monkeypatch.setenv(SWITCH, "0")
    with caplog.at_level(logging.INFO, "torch_dflash"):
        for _ in range(2):
            passes, tapes = passes_of(table)
            assert [ask(passes, table, [2], shift) for shift in range(4)] == [[2], [3], [4], [5]]
            assert table.calls and not tapes.made
    assert [record.getMessage() for record in caplog.records] == [f"no CUDA graphs: {SWITCH} is 0"]


def test_a_pass_that_cannot_be_captured_is_launched(table: Table, caplog: pytest.LogCaptureFixture) -> None:
    graphs._say_once.cache_clear()

    def waits(ids: Tensor, shift: Tensor) -> tuple[Tensor]:
        return (ids + shift.item(),)

    passes, tapes = passes_of(table)
    with caplog.at_level(logging.INFO, "torch_dflash"):
        for shift in range(4):
            assert passes("waits", waits, torch.tensor([7]), shift)[0].tolist() == [7 + shift]
            assert ask(passes, table, [1], shift) == [1 + shift]
    assert tapes.replays == 0 and caplog.text.count("item is not permitted") == 1


def test_a_pass_that_fails_leaves_nothing(table: Table) -> None:
    passes, _ = passes_of(table)
    with pytest.raises(IndexError):
        ask(passes, table, [1], 90)
    assert [ask(passes, table, [1], shift) for shift in range(3)] == [[1], [2], [3]]


def test_on_a_cpu_a_replay_is_a_call(table: Table) -> None:
    passes = GraphedPasses(CPU, table.places)
    assert type(passes._recorder) is Recorder
    assert [ask(passes, table, [2], shift) for shift in range(5)] == [[2], [3], [4], [5], [6]]


class FakeCuda:
    """What the recorder asks of ``torch.cuda``, written down in order."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.known = inspect.signature(torch.cuda.graph.__init__)

    def Stream(self, device: Any) -> Any:
        fake, stream = self, type("Stream", (), {})()
        stream.wait_stream = lambda other: fake.said.append("recording waits" if other == "current" else "?")
        return stream

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.said.append("on it")
        yield
        self.said.append("off it")

    @contextmanager
    def graph(self, *args: Any, **options: Any) -> Iterator[None]:
        bound = self.known.bind(self, *args, **options).arguments
        assert bound["pool"] == "pool" and bound["stream"] is not None
        self.said.append("capture")
        yield
        self.said.append("captured")


def test_the_recorder_warms_up_aside_and_captures_there(monkeypatch: pytest.MonkeyPatch, table: Table) -> None:
    """The order of its calls, with a ``torch.cuda`` that is none."""
    fake = FakeCuda()

    class Current(str):
        def wait_stream(self, other: Any) -> None:
            fake.said.append("current waits")

    for name in ("Stream", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Current("current"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: fake.said.append("settled"))
    graph = type("Graph", (), {"replay": lambda self: fake.said.append("replay")})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    passes = GraphedPasses(CPU, table.places)
    passes._recorder = CudaRecorder(CPU)
    aside = ["recording waits", "on it", "off it", "current waits"]
    for said in (aside, ["capture", "captured", "replay"], ["replay"]):
        fake.said.clear()
        passes("kind", table.look_up, torch.tensor([1]), 1)
        assert fake.said == said
    fake.said.clear()
    table.table = table.table.clone()
    passes("kind", table.look_up, torch.tensor([1]), 1)
    assert fake.said == ["settled", *aside]
