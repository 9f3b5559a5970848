"""The reference against transformers' own models, and its choices against the torch backend's sampling."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch_dflash.sampling import draw, shape_probabilities
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb
from transformers.models.qwen3 import modeling_qwen3

from dflash.checkpoint import DraftConfig
from dflash.conformance.cases import CASES, DRAFT_EPS, MASK_ID, MAX_POSITIONS, Case
from dflash.conformance.checkpoints import random_ids, write_pair
from dflash.conformance.reference import Reference, choose
from dflash.types import SamplingParams

CLOSE = 2e-5  # relative to the largest number; transformers' norms and RoPE compute in float32


def close(ours: np.ndarray, theirs: torch.Tensor) -> bool:
    expected = theirs.double().numpy()
    return ours.shape == expected.shape and bool(np.abs(ours - expected).max() < CLOSE * np.abs(expected).max())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_target_is_the_one_of_transformers(case: Case, tmp_path: Path) -> None:
    """Every layer and the logits, of the model that transformers reads from the case's own files."""
    folder, _ = write_pair(case, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    seen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(
            lambda _module, _args, output: seen.append(output[0] if isinstance(output, tuple) else output)
        )
    tokens = random_ids(case, 70)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    states, ours = Reference(case).target(tokens)
    assert len(states) == len(seen) == case.layers
    for state, theirs in zip(states, seen, strict=True):
        assert close(state, theirs.reshape(len(tokens), -1))
    assert close(ours, logits)


def qwen3_layers(case: Case, weights: dict[str, np.ndarray]) -> tuple[list[torch.nn.Module], torch.nn.Module]:
    """Decoder layers of transformers' Qwen3 with the drafter's weights, and its RoPE over the rotated channels."""
    rope, heads = case.draft_rope, case.draft_heads
    settings = dict(
        hidden_size=case.hidden,
        intermediate_size=3 * case.hidden,
        num_hidden_layers=case.draft_layers,
        num_attention_heads=heads.queries,
        num_key_value_heads=heads.keys,
        attention_bias=case.draft_bias,
        rms_norm_eps=DRAFT_EPS,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_theta": rope.theta, "rope_type": rope.kind, **dict(rope.scaling)},
        attn_implementation="eager",
    )
    config = Qwen3Config(head_dim=heads.size, **settings)
    layers = []
    for index in range(case.draft_layers):
        layer = modeling_qwen3.Qwen3DecoderLayer(config, index).double().eval()
        prefix = f"layers.{index}."
        state = {name[len(prefix) :]: torch.tensor(weights[name]) for name in weights if name.startswith(prefix)}
        layer.load_state_dict(state, strict=True)
        layers.append(layer)
    return layers, modeling_qwen3.Qwen3RotaryEmbedding(Qwen3Config(head_dim=rope.rotated(heads.size), **settings))


@torch.no_grad()
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_drafter_is_qwen3_over_context_and_block(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer's attention is transformers' Qwen3 attention over the context and the normed block in one sequence."""
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", apply_rotary_pos_emb)  # it can turn a part of a head
    _, folder = write_pair(case, tmp_path)
    config = DraftConfig.load(folder)  # what a slot sees is read from the files
    reference = Reference(case)
    weights = reference.draft_weights
    layers, rotary = qwen3_layers(case, weights)
    length, n = 37, case.block
    features = np.random.default_rng(case.seed).normal(size=(length, len(case.taps) * case.hidden))
    norm = modeling_qwen3.Qwen3RMSNorm(case.hidden, DRAFT_EPS).double()
    norm.weight.data = torch.tensor(weights["hidden_norm.weight"])
    context = norm(torch.tensor(features @ weights["fc.weight"].T))
    assert close(reference.context(features), context)
    states, logits = reference.draft(reference.context(features), 5, case.count)

    x = torch.tensor(reference.embedding[[5] + [MASK_ID] * case.count])
    total = length + n
    position_embeddings = tuple(part.double() for part in rotary(x, torch.arange(total)[None]))
    for index, layer in enumerate(layers):
        mask = torch.zeros(total, total, dtype=torch.float64)
        window = config.windows()[index]
        for query in range(length, total):
            for key in range(total):
                if (config.causal[index] and key > query) or (window is not None and abs(query - key) >= window):
                    mask[query, key] = float("-inf")
        source = torch.cat((context, layer.input_layernorm(x)))[None]
        attended = layer.self_attn(source, position_embeddings=position_embeddings, attention_mask=mask[None, None])
        x = x + attended[0][0, length:]
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        assert close(states[index], x), f"layer {index}"
    norm.weight.data = torch.tensor(weights["norm.weight"])
    assert close(logits, norm(x[1:]) @ torch.tensor(reference.head).T)


SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3, top_k=5),
    SamplingParams(temperature=1.0, top_p=0.6),
    SamplingParams(temperature=0.9, top_k=9, top_p=0.8),
    SamplingParams(temperature=1.0, top_k=1),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_choices_are_those_of_the_torch_backend(sampling: SamplingParams) -> None:
    generator = np.random.default_rng(1)
    tokens = set()
    for _ in range(300):
        logits, uniform = generator.normal(size=24) * 2, generator.random()
        token, clear = choose(logits, sampling, uniform)
        if clear < 1e-5:
            continue
        rows = torch.tensor(logits, dtype=torch.float32)[None]
        theirs = (
            rows.argmax(-1)
            if sampling.greedy
            else draw(shape_probabilities(rows, sampling), torch.tensor([uniform], dtype=torch.float64))
        )
        assert token == int(theirs[0])
        tokens.add(token)
    assert len(tokens) > 15


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_a_clear_choice_survives_whatever_moves_less(sampling: SamplingParams) -> None:
    """Moved by less than ``clear`` every choice stays, whichever way each logit goes; moved by five times as much, as
    many do not."""
    generator = np.random.default_rng(2)
    changed = 0
    for _ in range(200):
        logits, uniform = generator.normal(size=12) * 2, generator.random()
        token, clear = choose(logits, sampling, uniform)
        signs = generator.choice([-1.0, 1.0], size=(60, 12))
        for sign in signs:
            step = clear * np.abs(logits).max() * sign
            assert choose(logits + 0.999 * step, sampling, uniform)[0] == token
        changed += any(
            choose(logits + 5 * clear * np.abs(logits).max() * sign, sampling, uniform)[0] != token for sign in signs
        )
    assert changed > 80
