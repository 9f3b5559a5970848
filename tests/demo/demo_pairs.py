"""Small pairs on disk for the tests of the demo: a target that recites a text, and a drafter that knows it by half.

No training and no tensor library. A text is cut into pieces, each a token of its own, and the tokens of a text are
points that follow each other on circles. The target's head takes the next point; a head of the drafter looks back by
a fixed distance and turns what it finds to the slot it drafts for, with some noise, so that some guesses are wrong.

  target, draft = write_pair(folder, {"?": "An answer.", "!": "Another one."})
  engine = dflash.load(target=target, draft=draft, device="cpu")
  engine.generate("Any prompt?").text == "An answer."

The last character of a prompt chooses the text: the one under it, or the first of all. Every text ends with a stop
token. Pieces may end in mid-character, and ``CONTROL`` in a text is a special token. With blocks of 8 about 4 tokens
come from a round; more ``noise`` brings fewer. Sampling with a temperature jumps to and fro in the texts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from saved_tokenizer import SPECIAL, _byte_alphabet, save_byte_tokenizer

from dflash.checkpoint import CONFIG_FILE, WEIGHTS_FILE
from dflash.conformance.cases import MASK_ID, STOP_ID, Case, Heads
from dflash.conformance.checkpoints import (
    Weights,
    draft_config,
    draft_weights,
    target_config,
    target_weights,
    write_safetensors,
)
from dflash.engine import Engine

CONTROL = "<|system|>"
TEMPLATE = "{% for message in messages %}<|user|>{{ message.content }}{% endfor %}"  # it ends as the prompt does
STORY = (
    "Tom puts 4 apples into each of his 3 boxes. That makes 3 × 4 = 12 apples.\n\n"
    "def apples(boxes: int, each: int) -> int:\n    return boxes * each  # naïve, but right 🍎\n\n"
    "So the answer is **12**. A drafter that has read this far will guess the rest; one that has not, will not.\n"
)
MARKUP = (
    'Before <img src=x onerror="window.hacked = 1"> and </script><script>window.hacked = 2</script> come\n'
    f"\ttabs,  two spaces, <b>bold</b> &amp; 東京 👩‍👩‍👧{CONTROL} — and then the end."
)
TEXTS = {"?": STORY, "!": MARKUP}  # a question gets the first one, as everything does that is no exclamation

_CIRCLES = 16  # that a point lies on; two coordinates each
_WIDTH, _HIDDEN = 2 * _CIRCLES, 48
_SURE = 0.3  # of the target, at temperature 1
_GAP = 20  # points between two texts, so that a guess beyond the end of one is none of the next one's
_TURNS = np.random.Generator(np.random.PCG64(5)).uniform(0, 2 * np.pi, _CIRCLES)  # from one point to the next


def write_pair(
    folder: Path, texts: Mapping[str, str] = TEXTS, *, block: int = 8, noise: float = 0.7, seed: int = 1
) -> tuple[Path, Path]:
    """``folder/target`` and ``folder/draft``, as ``dflash.load`` takes them."""
    pieces = _pieces(list(texts.values()))
    vocabulary = list(dict.fromkeys(piece for text in pieces for piece in text if piece != CONTROL.encode()))
    first = len(SPECIAL) + 256
    chains = [
        [SPECIAL.index(CONTROL) if piece == CONTROL.encode() else first + vocabulary.index(piece) for piece in text]
        for text in pieces
    ]
    case = Case(
        "reciting", "a target that recites", "llama", seed, vocab=first + len(vocabulary), hidden=_HIDDEN, layers=4,
        block=block, taps=(1, 2), draft_layers=2, draft_heads=Heads(block - 1, 1, _WIDTH), draft_bias=True,
    )  # fmt: skip
    target, draft = folder / "target", folder / "draft"
    for place, config, weights in (
        (target, target_config(case), _target_weights(case, chains, list(texts))),
        (draft, draft_config(case), _draft_weights(case, noise)),
    ):
        place.mkdir(parents=True)
        (place / CONFIG_FILE).write_text(json.dumps({**config, "dtype": "float32"}))
        write_safetensors(place / WEIGHTS_FILE, weights, "float32")
    save_byte_tokenizer(target, template=TEMPLATE)
    _add_to_tokenizer(target / "tokenizer.json", vocabulary)
    return target, draft


def slow(engine: Engine, seconds: float) -> Engine:
    """The same engine, every pass of whose target takes at least so long."""
    forward = engine.target.forward

    def slowed(*inputs: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return forward(*inputs, **options)

    engine.target.forward = slowed  # type: ignore[method-assign]
    return engine


def _pieces(texts: Sequence[str]) -> list[list[bytes]]:
    """Each text as pieces of at least two bytes, no two of them alike: always the shortest one that is new."""
    taken: set[bytes] = set()
    found = []
    for text in texts:
        pieces: list[bytes] = []
        for at, part in enumerate(text.encode() for text in text.split(CONTROL)):
            if at:
                pieces.append(CONTROL.encode())
            start = 0
            while start < len(part):
                end = next((end for end in range(start + 2, len(part) + 1) if part[start:end] not in taken), None)
                if end is None:  # what is left is not new: it goes to the piece before it
                    pieces[-1] += part[start:]
                    break
                taken.add(part[start:end])
                pieces.append(part[start:end])
                start = end
        taken.update(pieces)
        found.append(pieces)
    return found


def _add_to_tokenizer(file: Path, vocabulary: Sequence[bytes]) -> None:
    raw, letters = json.loads(file.read_text()), _byte_alphabet()
    words = raw["model"]["vocab"]
    for piece in vocabulary:
        words["".join(letters[byte] for byte in piece)] = len(words)
    file.write_text(json.dumps(raw))


def _point(number: int) -> np.ndarray:
    angles = number * _TURNS
    return np.concatenate([np.cos(angles), np.sin(angles), np.zeros(_HIDDEN - _WIDTH)])


def _turn(steps: int) -> np.ndarray:
    """[width, width]: from a point to the one so many steps behind it."""
    cos, sin = np.diag(np.cos(steps * _TURNS)), np.diag(np.sin(steps * _TURNS))
    return np.block([[cos, -sin], [sin, cos]])


def _target_weights(case: Case, chains: Sequence[Sequence[int]], ends: Sequence[str]) -> Weights:
    """Attention and MLP add nothing, so that hidden states are embeddings; the head knows what comes after a point."""
    weights = target_weights(case)
    for name, values in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            values[:] = 0
        elif name.endswith("norm.weight"):
            values[:] = 1
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    embedding[:], head[:] = 0, 0
    bytes_at, start = len(SPECIAL), 1
    for end, chain in zip(ends, chains, strict=True):
        places = range(256) if start == 1 else end.encode()[-1:]  # the first text answers everything
        for byte in places:
            embedding[bytes_at + byte] = _point(start - 1)
        for at, token in enumerate(chain, start):
            embedding[token], head[token] = _point(at), _SURE * _point(at - 1)
        head[STOP_ID] += _SURE * _point(start + len(chain) - 1)
        start += len(chain) + _GAP
    embedding[MASK_ID] = 0
    return weights


def _draft_weights(case: Case, noise: float) -> Weights:
    """Head h of the first layer looks h tokens back, where a text's token is h points before the one to draft. Slots
    are empty, so that only the anchor and the context say anything. The second layer looks about and says nothing."""
    weights = draft_weights(case)
    random = np.random.Generator(np.random.PCG64(case.seed))
    for name, values in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", ".bias")):
            values[:] = 0
        elif name.endswith("norm.weight") and "layers.1" not in name:
            values[:] = 1
    weights["fc.weight"][:] = np.concatenate([np.eye(_HIDDEN), np.zeros((_HIDDEN, _HIDDEN))], axis=1)
    attention = "layers.0.self_attn."
    for letter in "qkv":
        weights[f"{attention}{letter}_proj.weight"][:] = 0
    weights[attention + "v_proj.weight"][:, :_WIDTH] = np.eye(_WIDTH)
    sharp = (np.arange(_CIRCLES) < _CIRCLES // 2) * 1.0  # the slower half of RoPE's frequencies tells few tokens apart
    weights[attention + "k_proj.bias"][:_CIRCLES] = sharp
    weights[attention + "q_norm.weight"][:] = 40
    frequencies, _ = case.draft_rope.frequencies(_WIDTH)
    for head in range(case.count):
        back = (head + 1) * np.asarray(frequencies)
        rows = slice(head * _WIDTH, (head + 1) * _WIDTH)
        weights[attention + "q_proj.bias"][rows] = np.concatenate([sharp * np.cos(back), -sharp * np.sin(back)])
        turned = _turn(head) + noise * random.standard_normal((_WIDTH, _WIDTH)) / np.sqrt(2)
        weights[attention + "o_proj.weight"][:_WIDTH, rows] = turned
    return weights
