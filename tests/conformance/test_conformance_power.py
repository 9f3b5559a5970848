"""The suite catches what it is there for: backends broken on purpose, each fault named by layer or choice.

Its length is that of its three tables of faults: a target's, a drafter's, a verifier's."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch_dflash import drafter as drafter_module
from torch_dflash.backend import TorchBackend
from torch_dflash.rotary import Rotary
from torch_dflash.stack import rms_norm
from torch_dflash.stacks import make_stack
from torch_dflash.verify import MatchVerifier

from dflash.conformance.cases import CASES, TARGET_EPS, Case
from dflash.conformance.run import run, run_case
from dflash.errors import BackendError
from dflash.interfaces import Backend
from dflash.rope import RopeConfig
from dflash.types import TargetOutput, Verdict

NAMED = {case.name: case for case in CASES}
Break = Callable[[Any], None]


class BrokenBackend(TorchBackend):
    """The torch backend with a fault in it: what it loads and makes goes through ``target``, ``drafter`` or
    ``verifier`` first, layer ids and dtype through ``ids`` and ``dtype``."""

    def __init__(self, **faults: Any) -> None:
        self.faults = faults

    def _pass(self, kind: str, made: Any) -> Any:
        if kind in self.faults:
            self.faults[kind](made)
        return made

    def load_target(self, folder, *, device, dtype, layer_ids):
        ids, dtype = self.faults.get("ids", list)(layer_ids), self.faults.get("dtype", dtype)
        return self._pass("target", super().load_target(folder, device=device, dtype=dtype, layer_ids=ids))

    def load_drafter(self, folder, config, target, *, bits=None):
        return self._pass("drafter", super().load_drafter(folder, config, target, bits=bits))

    def verifier(self, rule, sampling, target, *, detail=False):
        sampling = self.faults.get("sampling", lambda same: same)(sampling)
        return self._pass("verifier", super().verifier(rule, sampling, target, detail=detail))


# Faults of a target ------------------------------------------------------------------------------------------------


def restack(target: Any, **changes: Any) -> None:
    """The target's layers anew, with these ``changes`` to what they are made of."""
    old = target.stack
    parts = {"layers": old.layers, "size": old.size, "sights": old.sights, "rotary": old.rotary} | changes
    target.stack = make_stack(**parts)


def layer_without(index: int, name: str) -> Break:
    """Leave a norm or a bias of one layer out."""

    def break_it(target: Any) -> None:
        layers = list(target.stack.layers)
        weight = getattr(layers[index], name)
        neutral = torch.ones_like(weight) if name.endswith("norm") else torch.zeros_like(weight)
        layers[index] = dataclasses.replace(layers[index], **{name: neutral})
        restack(target, layers=layers)

    return break_it


def rope_of(config: RopeConfig, factor: float | None = None) -> Break:
    def break_it(target: Any) -> None:
        rotary = Rotary(config, target.stack.size.head_dim)
        if factor is not None:
            rotary.factor = factor
            rotary._grow(1024)
        restack(target, rotary=rotary)

    return break_it


def eps_of(eps: float) -> Break:
    def break_it(target: Any) -> None:
        restack(target, size=dataclasses.replace(target.stack.size, eps=eps))

    return break_it


def last_tap_after_the_norm(target: Any) -> None:
    """What transformers hands out as the last of its hidden states."""
    forward, last = target.forward, target.info.num_layers - 1

    def broken(*args: Any, **options: Any) -> TargetOutput:
        output = forward(*args, **options)
        if not target.tapping:
            return output
        parts = list(output.features.chunk(len(target.layer_ids), dim=-1))
        place = target.layer_ids.index(last)
        parts[place] = rms_norm(parts[place], target.norm, target.stack.size.eps)
        return TargetOutput(output.logits, torch.cat(parts, dim=-1))

    target.forward = broken


def keeps_the_newest(target: Any) -> None:
    """A rewind that drops the right number of tokens at the wrong end."""
    keep = target.keep

    def broken(path: Any) -> None:
        start, end = target.length, target.length + target._last
        cache = target.stack.cache.tensor
        cache[..., start : start + len(path), :] = cache[..., end - len(path) : end, :].clone()
        keep(path)

    target.keep = broken


def forgets_nothing(target: Any) -> None:
    keep = target.keep
    target.keep = lambda path: keep(range(target._last))


def plain_rows_are_rolled(target: Any) -> None:
    forward = target.forward

    def broken(*args: Any, **options: Any) -> TargetOutput:
        output = forward(*args, **options)
        return output if target.tapping else TargetOutput(output.logits.roll(1, dims=-1), output.features)

    target.forward = broken


TARGET_FAULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "q_norm of a layer left out": ("qwen3", {"target": layer_without(2, "q_norm")}, "target layer 2 is off by"),
    "k_norm of the first layer left out": ("qwen3", {"target": layer_without(0, "k_norm")}, "target layer 0 is off by"),
    "biases of a layer left out": ("qwen2", {"target": layer_without(1, "qkv_bias")}, "target layer 1 is off by"),
    "output bias left out": ("llama-biases", {"target": layer_without(3, "output_bias")}, "target layer 3 is off by"),
    "MLP bias left out": ("llama-biases", {"target": layer_without(0, "down_bias")}, "target layer 0 is off by"),
    "nested base ignored": (
        "llama-theta-nested", {"target": rope_of(RopeConfig(1e4))}, "target layer 0 is off by .* in the prefill",
    ),
    "nested scaling ignored": (
        "llama-linear-nested", {"target": rope_of(RopeConfig(5e3))}, "target layer 0 is off by .* in the prefill",
    ),
    "YaRN's factor left out": (
        "qwen3-yarn-nested", {"target": rope_of(NAMED["qwen3-yarn-nested"].rope, 1.0)}, "target layer 0 is off by",
    ),
    "another eps": ("llama", {"target": eps_of(1e-6)}, "target layer 0 is off by"),
    "all taps off by one": ("llama", {"ids": lambda ids: [(i + 1) % 4 for i in ids]}, "target layer 0 is off by"),
    "the drafter's taps off by one": (
        "taps-first-last", {"ids": lambda ids: ids if len(ids) > 2 else [i - 1 if i else 0 for i in ids]},
        "tap of target layer 3 is off by .* in the prefill",
    ),
    "taps sorted": ("taps-all-unordered", {"ids": sorted}, "tap of target layer 5 is off by"),
    "last tap after the final norm": (
        "taps-first-last", {"target": last_tap_after_the_norm}, "target layer 3 is off by",
    ),
    "a rewind at the wrong end": (
        "llama", {"target": keeps_the_newest}, "tap of target layer 1 is off by .* in round 1",
    ),
    "no rewind": ("llama", {"target": forgets_nothing}, "the length of target and context in round 0"),
    "another dtype": ("llama", {"dtype": "bfloat16"}, "the target's dtype is 'bfloat16', not 'float32'"),
    "plain rows wrong": ("qwen2", {"target": plain_rows_are_rolled}, "output of the engine without a drafter: "),
    "a 16-bit target without its biases": (
        "bfloat16-qwen2", {"target": layer_without(0, "qkv_bias")}, "target layer 0 is off by",
    ),
    "a 16-bit target with another base": (
        "float16", {"target": rope_of(RopeConfig(100.0))}, "target layer 0 is off by",
    ),
}  # fmt: skip


# Faults of a drafter ------------------------------------------------------------------------------------------------


def remake(drafter: Any) -> None:
    """The drafter anew from its model, which is not what it was."""
    type(drafter).__init__(drafter, drafter.model, drafter.embedding, drafter.head)


def norm_without(*path: str | int) -> Break:
    """Leave out a norm of the drafter's model."""

    def break_it(drafter: Any) -> None:
        module = drafter.model
        for name in path:
            module = module[name] if isinstance(name, int) else getattr(module, name)
        module.weight.data = torch.ones_like(module.weight)
        remake(drafter)

    return break_it


def draft_rope_of(config: RopeConfig) -> Break:
    def break_it(drafter: Any) -> None:
        drafter.model.config = dataclasses.replace(drafter.config, rope=config)
        remake(drafter)

    return break_it


def sees(**changes: Any) -> Break:
    def break_it(drafter: Any) -> None:
        drafter.model.config = dataclasses.replace(drafter.config, **changes)
        remake(drafter)

    return break_it


def draft_eps_of(eps: float) -> Break:
    def break_it(drafter: Any) -> None:
        drafter.model.hidden_norm.eps = eps
        remake(drafter)

    return break_it


def another_mask(drafter: Any) -> None:
    drafter._masks = drafter._masks + 1


def anchor_slot_predicts(drafter: Any) -> None:
    states = drafter.layer_states
    drafter.logits = lambda anchor, count: drafter_module.product(
        drafter.model.norm(states(anchor, count)[-1][:-1]), drafter.head
    )


def second_best(drafter: Any) -> None:
    propose = drafter.propose

    def broken(anchor: int, count: int, *args: Any, **options: Any) -> Any:
        tokens = drafter.logits(anchor, count).topk(2, dim=-1).indices[:, 1]
        block = torch.cat((torch.tensor([anchor]), tokens))
        return dataclasses.replace(propose(anchor, count, *args, **options), tokens=tokens, block=block)

    drafter.propose = broken


def another_chunk_lost(drafter: Any) -> None:
    """Of a prompt in chunks only the first reaches the drafter's context."""
    observe = drafter.observe
    drafter.observe = lambda features, count: observe(features if not drafter.length else features * 0, count)


def rows_shifted(drafter: Any) -> None:
    observe = drafter.observe
    drafter.observe = lambda features, count: observe(features.roll(1, dims=0), count)


def no_numbers(drafter: Any) -> None:
    logits = drafter.logits
    drafter.logits = lambda anchor, count: logits(anchor, count) * float("nan")


_FULL, _SLIDING = "full_attention", "sliding_attention"

DRAFTER_FAULTS: dict[str, tuple[str, Break, str]] = {
    "context's norm left out": ("llama", norm_without("hidden_norm"), "context is off by .* in the prefill"),
    "the target's eps": ("qwen3", draft_eps_of(TARGET_EPS), "context is off by"),
    "q_norm of a layer left out": (
        "draft-biases", norm_without("layers", 1, "self_attn", "q_norm"), "draft layer 1 is off by .* in round 0",
    ),
    "k_norm of the last layer left out": (
        "draft-biases", norm_without("layers", 2, "self_attn", "k_norm"), "draft layer 2 is off by .* in round 0",
    ),
    "final norm left out": ("qwen2", norm_without("norm"), "draft logits is off by"),
    "the target's RoPE": ("draft-yarn", draft_rope_of(NAMED["draft-yarn"].rope), "draft layer 0 is off by"),
    "whole heads rotated": ("draft-partial", draft_rope_of(RopeConfig(1e4)), "draft layer 0 is off by"),
    "window ignored in the second layer": (
        "sliding-grouped-yarn", sees(layer_types=(_FULL, _FULL), causal=(False, True)), "draft layer 1 is off by",
    ),
    "window one too long": ("sliding-narrowest", sees(sliding_window=6), "draft layer 0 is off by"),
    "window in the wrong layer": (
        "sliding-full", sees(layer_types=(_FULL, _SLIDING, _SLIDING), causal=(True, False, True)),
        "draft layer 0 is off by",
    ),
    "sliding layers bidirectional": ("sliding", sees(causal=(False, False)), "draft layer 0 is off by"),
    "full layers causal in spite of the config": (
        "sliding-bidirectional", sees(causal=(False, True)), "draft layer 1 is off by",
    ),
    "causality ignored": ("full-causal", sees(causal=(False, False)), "draft layer 0 is off by"),
    "another mask token": ("block-2", another_mask, "draft layer 0 is off by .* in round 0"),
    "anchor's slot predicts": ("block-32", anchor_slot_predicts, "draft logits is off by .* in round 0"),
    "second-best proposals": ("llama", second_best, "proposals in round 0: "),
    "chunks lost": ("llama-yarn-flat", another_chunk_lost, "draft layer 0 is off by .* in round 0"),
    "features of the token before": ("llama", rows_shifted, "draft layer 0 is off by .* in round 0"),
    "no numbers": ("llama", no_numbers, "draft logits is off by nan in round 0"),
    "16 bits, a norm left out": ("bfloat16", norm_without("hidden_norm"), "context is off by"),
    "16 bits, window ignored": (
        "float16-qwen3", sees(layer_types=(_FULL, _FULL), causal=(True, True)), "draft layer 0 is off by",
    ),
}  # fmt: skip


# Faults of a verifier -----------------------------------------------------------------------------------------------


def judged_by(judge: Callable[[MatchVerifier, Any, TargetOutput, Verdict], Verdict]) -> Break:
    def break_it(verifier: Any) -> None:
        verify = verifier.verify
        verifier.verify = lambda proposal, output: judge(verifier, proposal, output, verify(proposal, output))

    return break_it


def counts_all_matches(verifier: Any, proposal: Any, output: TargetOutput, verdict: Verdict) -> Verdict:
    """Also those behind the first rejection."""
    choices = output.logits.argmax(-1)
    accepted = int((proposal.tokens == choices[: proposal.count]).sum())
    return dataclasses.replace(verdict, accepted=accepted, next_token=int(choices[accepted]))


def bonus_from_the_row_before(verifier: Any, proposal: Any, output: TargetOutput, verdict: Verdict) -> Verdict:
    if verdict.kind == "correction":
        return verdict
    return dataclasses.replace(verdict, next_token=int(output.logits[-2:][0].argmax()))


def numbers_begin_anew(verifier: Any, proposal: Any, output: TargetOutput, verdict: Verdict) -> Verdict:
    """The seed's numbers belong to rounds instead of positions."""
    verifier._position = 0
    return verdict


VERIFIER_FAULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "matches behind a rejection count": ("llama", {"verifier": judged_by(counts_all_matches)}, "verdicts in round"),
    "bonus from the wrong row": ("block-16", {"verifier": judged_by(bonus_from_the_row_before)}, "verdicts in round 1"),
    "random numbers by round": ("match", {"verifier": judged_by(numbers_begin_anew)}, "verdicts in round"),
    "top-k ignored": (
        "match-top-k", {"sampling": lambda sampling: dataclasses.replace(sampling, top_k=0)}, "verdicts in round",
    ),
    "top-p ignored": (
        "match-top-p", {"sampling": lambda sampling: dataclasses.replace(sampling, top_p=1.0)}, "verdicts in round",
    ),
    "another seed": (
        "match", {"sampling": lambda sampling: dataclasses.replace(sampling, seed=0)}, "verdicts",
    ),
}  # fmt: skip

FAULTS = (
    {f"target: {name}": fault for name, fault in TARGET_FAULTS.items()}
    | {f"drafter: {name}": (case, {"drafter": how}, said) for name, (case, how, said) in DRAFTER_FAULTS.items()}
    | {f"verifier: {name}": fault for name, fault in VERIFIER_FAULTS.items()}
)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_and_named(name: str) -> None:
    case, faults, said = FAULTS[name]
    result = run_case(BrokenBackend(**faults), NAMED[case])
    assert not result.ok
    assert result.fault and re.match(said, result.fault), result.fault
    report = result.report()
    assert report[0] == f"{case}: {result.fault}"
    if said.split(" is off")[0] in result.drift:  # the first array beyond, in the order in which they come about
        marked = [line.split("  ")[1].strip() for line in report if line.endswith("← beyond")]
        assert marked[0] == said.split(" is off")[0]


def test_without_a_fault_the_same_backend_passes() -> None:
    result = run_case(BrokenBackend(), NAMED["llama"])
    assert result.ok, result.report()


class Odd(TorchBackend):
    """Raises in some cases."""

    def __init__(self, wrong: Callable[[int], bool]) -> None:
        self.calls, self.wrong = 0, wrong

    def load_target(self, folder, **where):
        self.calls += 1
        if self.wrong(self.calls):
            raise RuntimeError("nothing of this kind can be loaded")
        return super().load_target(folder, **where)


def test_what_a_backend_raises_fails_its_case_alone() -> None:
    results = list(run(Odd(lambda call: call == 3), CASES[:3]))
    assert [result.ok for result in results] == [True, False, True]
    assert results[1].fault == "RuntimeError: nothing of this kind can be loaded"
    assert isinstance(results[1].error, RuntimeError)
    assert results[1].drift == {} and results[1].worst == 0


def test_a_device_that_is_not_there_is_one_error() -> None:
    with pytest.raises(BackendError, match="device 'nowhere' cannot be used here"):
        list(run(TorchBackend(), CASES, device="nowhere"))


def test_every_call_of_a_backend_goes_through_its_own_thread() -> None:
    """Loading, tracing and generating happen inside one ``run`` a case."""
    inside: list[bool] = []

    class Watched(TorchBackend):
        depth = 0

        def run(self, call):
            self.depth += 1
            try:
                return super().run(call)
            finally:
                self.depth -= 1

        def __getattribute__(self, name: str) -> Any:
            if name in {"load_target", "load_drafter", "verifier", "proposal", "numpy", "clock"}:
                inside.append(object.__getattribute__(self, "depth") > 0)
            return object.__getattribute__(self, name)

    backend: Backend = Watched()
    assert run_case(backend, CASES[0]).ok
    assert len(inside) > 40 and all(inside)


def test_the_fault_mlx_lm_ships_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-lm's classes overlook a nested RoPE and take a default of their own."""
    target_module = pytest.importorskip("mlx_dflash.target", reason="mlx is not installed", exc_type=ImportError)
    from mlx_dflash.backend import MlxBackend

    case: Case = NAMED["llama-theta-nested"]
    assert run_case(MlxBackend(), case).ok
    monkeypatch.setattr(target_module, "flat_rope", lambda config, arguments: {})
    monkeypatch.setattr(target_module, "own_rope", lambda config: None)
    result = run_case(MlxBackend(), case)
    assert result.fault and result.fault.startswith("target layer 0 is off by")
    assert run_case(MlxBackend(), NAMED["llama-theta-flat"]).ok  # the same weights, in the spelling that it reads
