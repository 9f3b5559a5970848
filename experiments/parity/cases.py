"""The pairs that both implementations are run on: tiny Llama and Qwen3 targets, each with a drafter.

Weights come from a seed through the raw 64-bit stream of PCG64, which numpy keeps stable, so a case needs no files. A
*fitted* drafter was trained for a few hundred steps on its target's own greedy output, so that its accepted lengths
vary; its weights depend on the machine and are therefore stored, in bfloat16, beside the traces.

Shapes: S tokens in a sequence, N anchors, B block size, H hidden size, K taps.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch_dflash.modeling import DraftModel
from torch_dflash.rotary import Rotary
from torch_dflash.taps import Taps
from torch_dflash.training.forward import training_forward
from torch_dflash.training.loss import chunked_cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from dflash.anchors import default_gamma, draw_anchors, label_blocks
from dflash.checkpoint import CONFIG_FILE, WEIGHTS_FILE, DraftConfig, read_json
from dflash.tokenizer import Tokenizer

PROMPT_LENGTHS = (1, 3, 9, 17, 33)
FIT_ROWS, FIT_ROW, FIT_PROMPT = 128, 1000, 4  # rows a drafter is fitted on, the first one's number, prompt length


@dataclass(frozen=True)
class Case:
    """One pair and the requests made of it. ``fit_steps`` 0 leaves the drafter random. ``layer_types`` empty is full
    attention; ``is_causal`` None follows them. ``rope`` is the drafter's ``rope_parameters``, base excluded.
    ``serve_block`` serves smaller blocks than the drafter's own. ``stop`` picks a stop id that the target does emit."""

    name: str
    family: str
    seed: int
    taps: tuple[int, ...]
    draft_layers: int = 1
    block: int = 8
    vocab: int = 24
    hidden: int = 32
    target_layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    tied: bool = False
    bias: bool = False
    fit_steps: int = 0
    layer_types: tuple[str, ...] = ()
    window: int | None = None
    is_causal: bool | None = None
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default"})
    prompts: int = 4
    max_new_tokens: int = 40
    serve_block: int | None = None
    stop: bool = False

    def to_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))

    @property
    def mask_token_id(self) -> int:
        return self.vocab - 1

    def draft_config(self) -> DraftConfig:
        raw: dict[str, Any] = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_size": self.hidden,
            "intermediate_size": 2 * self.hidden,
            "num_hidden_layers": self.draft_layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "num_target_layers": self.target_layers,
            "max_position_embeddings": 256,
            "attention_bias": self.bias,
            "block_size": self.block,
            "rope_parameters": {"rope_theta": 10_000.0, **self.rope},
            "dflash_config": {"mask_token_id": self.mask_token_id, "target_layer_ids": list(self.taps)},
            "dtype": "float32",
        }
        if self.layer_types:
            raw |= {"layer_types": list(self.layer_types), "sliding_window": self.window}
        if self.is_causal is not None:
            raw["is_causal"] = self.is_causal
        return DraftConfig.from_dict(raw)


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"

CASES = (
    # Random drafters: nearly nothing is accepted, so proposals and logits are what is compared.
    Case("random-llama-first-tap", "llama", 1, taps=(0,), block=4),
    Case("random-qwen3-one-layer", "qwen3", 2, taps=(2,), block=16, vocab=40),
    Case("random-llama-five-layers", "llama", 3, taps=(0, 1, 2, 3, 4), draft_layers=5, target_layers=6),
    Case("random-qwen3-unordered-taps", "qwen3", 4, taps=(3, 0, 2), draft_layers=3, target_layers=5, hidden=48),
    Case("random-llama-bias", "llama", 5, taps=(1, 2), draft_layers=2, bias=True, tied=True, kv_heads=4),
    Case("random-qwen3-wide-heads", "qwen3", 6, taps=(0, 2), draft_layers=2, head_dim=16, kv_heads=1, hidden=64),
    Case("random-llama-yarn", "llama", 7, taps=(0, 2), draft_layers=2, rope=_YARN),
    Case("random-qwen3-linear", "qwen3", 8, taps=(1,), rope={"rope_type": "linear", "factor": 2.0}),
    Case("random-llama-llama3", "llama", 9, taps=(1,), rope=_LLAMA3),
    Case("random-qwen3-sliding", "qwen3", 10, taps=(0, 1), draft_layers=2, layer_types=(_SLIDING,) * 2, window=12),
    # Fitted drafters: accepted lengths vary from none to the whole block.
    Case("fitted-llama-block-4", "llama", 21, taps=(0, 1), block=4, fit_steps=600),
    Case("fitted-qwen3-block-5", "qwen3", 22, taps=(2,), block=5, fit_steps=600),
    Case("fitted-llama-block-8", "llama", 23, taps=(0, 1, 2), draft_layers=2, fit_steps=600, max_new_tokens=64),
    Case("fitted-qwen3-block-8", "qwen3", 24, taps=(1, 3), draft_layers=2, target_layers=5, fit_steps=600),
    Case("fitted-llama-block-16", "llama", 25, taps=(0, 2), block=16, fit_steps=800, max_new_tokens=64),
    Case("fitted-qwen3-block-16", "qwen3", 26, taps=(0, 1, 2), block=16, vocab=32, fit_steps=800, max_new_tokens=64),
    Case("fitted-llama-three-layers", "llama", 27, taps=(0, 2, 4), draft_layers=3, target_layers=6, fit_steps=600),
    Case("fitted-qwen3-served-smaller", "qwen3", 28, taps=(0, 2), fit_steps=600, serve_block=5),
    Case("fitted-llama-stop", "llama", 29, taps=(1, 2), fit_steps=600, stop=True),
    Case("fitted-qwen3-stop", "qwen3", 30, taps=(0, 2), fit_steps=600, stop=True),
    Case(
        "fitted-llama-sliding-mixed", "llama", 31, taps=(0, 2), draft_layers=2, fit_steps=600,
        layer_types=(_SLIDING, _FULL), window=10,
    ),
    Case(
        "fitted-qwen3-sliding-bidirectional", "qwen3", 32, taps=(0, 2), draft_layers=2, fit_steps=600,
        layer_types=(_SLIDING, _FULL), window=8, is_causal=False,
    ),
    Case("fitted-llama-causal", "llama", 33, taps=(0, 2), fit_steps=600, is_causal=True),
)  # fmt: skip


def fill(module: nn.Module, seed: int, gain: float) -> None:
    """Weights by name and seed alone: matrices uniform with deviation ``gain`` / √fan-in, norms around 1."""
    with torch.no_grad():
        for name, weight in module.named_parameters():
            raw = np.random.PCG64([seed, zlib.crc32(name.encode())]).random_raw(weight.numel())
            unit = torch.from_numpy((raw >> 11) * 2.0**-53 * 2 - 1).reshape(weight.shape).float()  # in [-1, 1)
            if weight.dim() == 2:
                weight.copy_(unit * gain * (3 / weight.shape[1]) ** 0.5)
            else:
                weight.copy_(unit * 0.2 + (0.0 if name.endswith("bias") else 1.0))


def make_target(case: Case) -> nn.Module:
    """The case's target, in float32."""
    config = AutoConfig.for_model(
        case.family,
        vocab_size=case.vocab,
        hidden_size=case.hidden,
        intermediate_size=2 * case.hidden,
        num_hidden_layers=case.target_layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
        head_dim=case.head_dim,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        tie_word_embeddings=case.tied,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    target = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    fill(target, case.seed, gain=1.0)
    return target


def make_drafter(case: Case, target: nn.Module, weights: str | None = None) -> DraftModel:
    """The case's drafter, in float32: from its seed, from stored ``weights``, or fitted to ``target``."""
    drafter = DraftModel(case.draft_config())
    fill(drafter, case.seed + 1000, gain=1.0)
    if weights is not None:
        unpack_weights(drafter, weights)
    elif case.fit_steps:
        fit(drafter, target, case)
        unpack_weights(drafter, pack_weights(drafter))  # what is stored is what is run
    return drafter.eval()


def pack_weights(drafter: nn.Module) -> str:
    """All weights in the order of their names, as bfloat16, in base64."""
    flat = torch.cat([weight.detach().flatten() for _, weight in sorted(drafter.named_parameters())])
    return base64.b64encode(flat.to(torch.bfloat16).view(torch.int16).numpy().tobytes()).decode()


def unpack_weights(drafter: nn.Module, packed: str) -> None:
    flat = torch.from_numpy(np.frombuffer(base64.b64decode(packed), np.int16).copy()).view(torch.bfloat16)
    named = [weight for _, weight in sorted(drafter.named_parameters())]
    with torch.no_grad():
        for weight, values in zip(named, flat.split([weight.numel() for weight in named]), strict=True):
            weight.copy_(values.view(weight.shape))


@torch.no_grad()
def greedy(target: nn.Module, prompts: Tensor, count: int) -> Tensor:
    """``count`` greedy tokens after ``prompts`` [b, S], without a cache: [b, S+count]."""
    tokens = prompts
    for _ in range(count):
        logits = target(input_ids=tokens, use_cache=False).logits[:, -1]
        tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True)), dim=1)
    return tokens


def ids(case: Case, row: int, length: int) -> list[int]:
    """Prompt ids, anything but the mask."""
    raw = np.random.PCG64([case.seed, row]).random_raw(length)
    return [int(value % (case.vocab - 1)) for value in raw]


def fit(drafter: DraftModel, target: nn.Module, case: Case) -> None:
    """A short training run on the target's own greedy output, just long enough for accepted lengths to vary."""
    rng = np.random.default_rng(case.seed)
    prompts = torch.tensor([ids(case, FIT_ROW + row, FIT_PROMPT) for row in range(FIT_ROWS)])
    tokens = greedy(target, prompts, 64)
    taps = Taps(target, case.taps)
    with torch.no_grad():
        target(input_ids=tokens, use_cache=False)
    features = taps.take()
    taps.close()
    assert features is not None
    rotary = Rotary(drafter.config.rope, case.head_dim)
    embedding = target.get_input_embeddings().weight.detach()
    head = target.get_output_embeddings().weight.detach()
    mask = np.arange(tokens.shape[1]) >= FIT_PROMPT
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(case.fit_steps):
        for group in optimiser.param_groups:
            group["lr"] = 3e-3 * (1 - step / case.fit_steps)
        batch = rng.permutation(FIT_ROWS)[:16]
        drawn = []
        for row in batch:
            anchors, keep = draw_anchors(mask, 8, rng)
            gamma = default_gamma(case.block)
            drawn.append((anchors, *label_blocks(tokens[row].numpy(), mask, anchors, keep, case.block, gamma)))
        anchors, labels, weights = (torch.from_numpy(np.stack(part)) for part in zip(*drawn, strict=True))
        hidden = training_forward(drafter, embedding, rotary, features[batch], tokens[batch], anchors)
        used = weights > 0
        loss = chunked_cross_entropy(hidden[used], head, labels[used], weights[used]) / weights.sum()
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)


def requests(case: Case, target: nn.Module, first: int, count: int) -> list[dict[str, Any]]:
    """Requests ``first`` … ``first + count − 1`` of a case: prompt ids, budget, stop ids, block size. Every other
    request of a fitted case begins with a prompt of its fit, where whole blocks get accepted."""
    made = []
    for index in range(first, first + count):
        length = PROMPT_LENGTHS[index % len(PROMPT_LENGTHS)]
        prompt = ids(case, index, length)
        if case.fit_steps and index % 2:
            length = FIT_PROMPT
            prompt = ids(case, FIT_ROW + index % FIT_ROWS, length)
        stop = None
        if case.stop:  # an id that comes up late enough for some rounds to pass
            output = greedy(target, torch.tensor([prompt]), case.max_new_tokens)[0, length:].tolist()
            stop = [max(dict.fromkeys(output), key=output.index)]
        budget = case.max_new_tokens + index % 3  # the last block is cut at different places
        made.append({"prompt": prompt, "max_new_tokens": budget, "stop": stop, "block_size": case.serve_block})
    return made


def write_pair(case: Case, folder: Path, weights: str | None = None) -> tuple[nn.Module, DraftModel]:
    """``folder/target`` and ``folder/draft``, as either implementation loads them."""
    target = make_target(case)
    drafter = make_drafter(case, target, weights)
    target.save_pretrained(folder / "target")
    (folder / "draft").mkdir(parents=True, exist_ok=True)
    (folder / "draft" / CONFIG_FILE).write_text(json.dumps(drafter.config.to_dict(), indent=2) + "\n")
    state = {name: weight.detach().contiguous() for name, weight in drafter.named_parameters()}
    save_file(state, folder / "draft" / WEIGHTS_FILE, metadata={"format": "pt"})
    return target, drafter


TEXTS = (
    "A farmer has 17 sheep and buys 8 more. He then sells 9. How many sheep does he have? Explain step by step.",
    "What is 12 times 15? Show how you work it out.",
    "Write a Python function that returns the largest number in a list.",
    "Write a Python loop that prints the even numbers from 0 to 20.",
    "Why is the sky blue?",
    "Name three things that help a person sleep well, with one sentence about each.",
    "Escreva uma frase curta sobre o mar.",
    "Repeat this list exactly: red, green, blue, red, green, blue, red, green, blue.",
)


def text_requests(tokenizer: Tokenizer, target: Path, max_new_tokens: int = 96) -> list[dict[str, Any]]:
    """Requests of a real pair: one user message each, ended by the model's own stop ids."""
    stop = read_json(target / CONFIG_FILE).get("eos_token_id")
    stops = stop if isinstance(stop, list) else [stop]
    return [
        {"prompt": tokenizer.encode(text), "max_new_tokens": max_new_tokens, "stop": stops, "block_size": None}
        for text in TEXTS
    ]


def id_requests(target: Path, count: int = 8, max_new_tokens: int = 48) -> list[dict[str, Any]]:
    """Requests of a pair without a tokenizer."""
    vocab = read_json(target / CONFIG_FILE)["vocab_size"]
    return [
        {
            "prompt": [int(value % (vocab - 1)) for value in np.random.PCG64([count, row]).random_raw(6)],
            "max_new_tokens": max_new_tokens,
            "stop": None,
            "block_size": None,
        }
        for row in range(count)
    ]
