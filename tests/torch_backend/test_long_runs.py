"""Ten thousand rounds leave nothing behind: neither memory nor objects grow with what has been generated."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path

import cpu_dflash
import pytest
import torch
from cpu_cases import needs_compiled
from tiny_models import TinyPair, make_config
from torch_dflash.cpu_stack import CpuStack
from torch_dflash.native import NativeTarget

ROUNDS, PROMPT = 10_000, [9, 8, 7]
GROWTH = 2 << 20  # bytes that the allocator may keep: 200 a round


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def objects() -> Counter[str]:
    gc.collect()
    return Counter(type(thing).__name__ for thing in gc.get_objects())


@needs_compiled
@pytest.mark.filterwarnings("ignore:none of:RuntimeWarning")  # that the random drafter does not fit
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_ten_thousand_rounds_leave_nothing_behind() -> None:
    """Requests of every length, some ended early, some with a longer prompt, one after the other in the same engine."""
    with cpu_dflash.forced(True):
        pair = TinyPair("qwen3")
        pair.target = NativeTarget(pair.model, make_config().target_layer_ids)
        engine = pair.engine()
    assert isinstance(pair.target.stack, CpuStack) and isinstance(engine.drafter.stack, CpuStack)

    def request(turn: int) -> int:
        prompt = PROMPT * (1 + turn % 5)
        stream = engine.stream(prompt, max_new_tokens=(490, 60, 300)[turn % 3], ignore_eos=True)
        rounds = 0
        for event in stream:
            rounds += event.kind == "round"
            if turn % 4 == 3 and rounds == 40:
                break
        return rounds

    def run(rounds: int) -> int:
        done = turn = 0
        while done < rounds:
            done += request(turn)
            turn += 1
        engine.generate(PROMPT, max_new_tokens=5, ignore_eos=True)  # the engine keeps the newest one's steps
        return turn

    run(1000)
    objects()  # the first count makes objects itself
    held, before = objects(), resident_bytes()
    requests = run(ROUNDS)
    holds, after = objects(), resident_bytes()
    assert requests > 20
    grown = {name: more for name, count in holds.items() if (more := count - held[name]) > 20}
    assert not grown, f"{requests} requests left objects behind: {grown}"
    assert after - before <= GROWTH, f"resident memory grew by {(after - before) / 2**20:.1f} MB"
    assert pair.target.length < 512 and pair.target.stack.cache.capacity <= 1024


@needs_compiled
def test_trees_leave_nothing_behind() -> None:
    with cpu_dflash.forced(True):
        pair = TinyPair("llama")
        target = NativeTarget(pair.model, (0, 2))
    parents, tokens = [-1, 0, 0, 1, 2, 2, -1], torch.arange(7)

    def run(rounds: int) -> None:
        for _ in range(rounds):
            if target.length > 400:
                target.reset()
            target.forward(tokens, parents=parents)
            target.keep((0, 2, 5))

    run(200)
    objects()
    held, before = objects(), resident_bytes()
    run(2000)
    holds, after = objects(), resident_bytes()
    grown = {name: more for name, count in holds.items() if (more := count - held[name]) > 20}
    assert not grown and after - before <= GROWTH
