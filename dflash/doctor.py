"""Why a pair cannot work or accepts badly: every check with its result, none stopped by another's failure.

Everything is read from configs, tokenizer files and safetensors headers: no tensor library, no weights, no network.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from dflash import bundled
from dflash.backends import announced_backends, install_command, mlx_part, mlx_runs_here, this_platform, versions_of
from dflash.checkpoint import CONFIG_FILE, DraftConfig, check_weights, read_header, read_json, weight_files
from dflash.errors import CheckpointError, ConfigError, DFlashError
from dflash.model_folder import read_target_config, spans, stop_token_ids
from dflash.registry import BUNDLED, MLX_QUANTISED_BLOCK, find_local, resolve

Status = Literal["ok", "warn", "fail"]
_BACKEND_PACKAGES = {"torch": ("torch", "transformers", "safetensors"), "mlx": ("mlx", "mlx-lm", "transformers")}
_TRANSFORMERS = ((5, 12), (6, 0))  # from, below
# in names of layer types and of families: a state that cannot forget a token
_NO_REWIND = ("linear_attention", "mamba", "recurrent", "rwkv", "conv")
_RECURRENT_KEYS = ("mamba_", "ssm_", "linear_conv_")


@dataclass(frozen=True)
class Check:
    """``detail`` is one sentence: what was found and, unless ``ok``, what would be right."""

    name: str
    status: Status
    detail: str


class Unknown(Exception):
    """A fact that another check already reports as missing."""


@dataclass
class Facts:
    """What is known of a pair. Reading a property raises the ``DFlashError`` of the file it comes from."""

    target: str
    draft: str
    target_folder: Path | None = None
    draft_folder: Path | None = None
    _headers: dict[Path, dict[str, tuple[tuple[int, ...], str]]] = field(default_factory=dict)

    @cached_property
    def draft_config(self) -> DraftConfig:
        return DraftConfig.load(_known(self.draft_folder, "the drafter's folder"))

    @cached_property
    def target_config(self) -> dict[str, Any]:
        """The language model's part of the target's config."""
        return read_target_config(_known(self.target_folder, "the target's folder"))

    def target_number(self, key: str) -> int:
        value = self.target_config.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{key} is {value!r} in the target's {CONFIG_FILE}; it must be a whole number")
        return value

    def tensors(self, folder: Path | None, whose: str) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name → (shape, dtype) of every tensor in a folder."""
        folder = _known(folder, f"the {whose}'s folder")
        if folder not in self._headers:
            found: dict[str, tuple[tuple[int, ...], str]] = {}
            for file in weight_files(folder):
                found |= read_header(file)
            self._headers[folder] = found
        return self._headers[folder]

    @cached_property
    def tokenizer(self) -> dict[str, Any]:
        folder = _known(self.target_folder, "the target's folder")
        if not (folder / "tokenizer.json").exists():
            raise Unknown("the target's folder holds no tokenizer.json")
        return read_json(folder / "tokenizer.json")

    @cached_property
    def tokens(self) -> dict[int, tuple[str, bool]]:
        """Id → (token, whether it is special)."""
        vocab = self.tokenizer.get("model", {}).get("vocab", {})
        pairs = vocab.items() if isinstance(vocab, dict) else ((entry[0], index) for index, entry in enumerate(vocab))
        known = {index: (token, False) for token, index in pairs}
        for entry in self.tokenizer.get("added_tokens", []):
            known[entry["id"]] = (entry["content"], bool(entry.get("special")))
        return known

    @cached_property
    def stop_ids(self) -> set[int]:
        """The model's own, and the tokenizer's end token: what ends a text when the pair is served."""
        return {*stop_token_ids(_known(self.target_folder, "the target's folder")), *self._end_token()}

    def _end_token(self) -> set[int]:
        file = _known(self.target_folder, "the target's folder") / "tokenizer_config.json"
        end = read_json(file).get("eos_token") if file.exists() else None
        text = end.get("content") if isinstance(end, dict) else end
        if not isinstance(text, str):
            return set()
        try:
            return {index for index, (token, _) in self.tokens.items() if token == text}
        except Unknown:
            return set()

    @cached_property
    def template(self) -> str | None:
        """The target's default chat template."""
        folder = _known(self.target_folder, "the target's folder")
        if (folder / "chat_template.jinja").exists():
            return (folder / "chat_template.jinja").read_text(encoding="utf-8")
        if not (folder / "tokenizer_config.json").exists():
            return None
        template = read_json(folder / "tokenizer_config.json").get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        return template if isinstance(template, str) else None


def examine(target: str, draft: str, backend: str = "auto") -> list[Check]:
    """Every check of the pair, in the order in which a user would mend things. Never raises ``DFlashError``."""
    facts = Facts(target, draft)
    checks = list(_environment(backend))
    checks += [_check(f"{what} found", partial(_find, facts, what)) for what in ("target", "draft")]
    return checks + [_check(name, partial(check, facts)) for name, check in _CHECKS.items()]


Result = tuple[Status, str]


def _check(name: str, check: Callable[[], Result]) -> Check:
    try:
        return Check(name, *check())
    except Unknown as missing:
        return Check(name, "warn", f"not checked: {missing}")
    except DFlashError as error:
        return Check(name, "fail", str(error))
    except (OSError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        return Check(name, "fail", f"a file of the pair is malformed: {type(error).__name__}: {error}")


def _known(folder: Path | None, what: str) -> Path:
    if folder is None:
        raise Unknown(f"{what} is not on this machine")
    return folder


def _config(facts: Facts) -> DraftConfig:
    """The drafter's config, for checks that are not the one that reports its faults."""
    try:
        return facts.draft_config
    except CheckpointError:
        raise Unknown("the drafter's config cannot be used") from None


def _environment(wanted: str) -> Iterator[Check]:
    checks = {name: _backend(name) for name in announced_backends()}
    usable = [name for name, check in checks.items() if check.status == "ok"]
    for name, check in checks.items():
        if usable and check.status == "warn" and not versions_of(_BACKEND_PACKAGES.get(name, ())[:1]):
            check = replace(check, status="ok", detail=f"not needed beside {usable[0]}: {check.detail}")
        yield check
    if not usable:
        named = f"none of the backends {', '.join(checks)} can be used" if checks else "no backend is installed"
        yield Check("backend", "fail", f"{named}; {install_command()}")
    elif wanted not in ("auto", *usable):
        yield Check("backend", "fail", f"the backend {wanted} cannot be used; {', '.join(usable)} can")


def _backend(name: str) -> Check:
    """Whether the packages of a backend are there, by their metadata: none is imported."""
    title, packages = f"backend {name}", _BACKEND_PACKAGES.get(name, ())
    versions = versions_of(packages)
    shown = ", ".join(f"{package} {version}" for package, version in versions.items())
    if name == "mlx" and not mlx_runs_here():
        return Check(title, "warn", f"it is for Apple silicon and Linux, not for {this_platform()}")
    if missing := [package for package in packages if package not in versions]:
        return Check(title, "warn", f"missing: {', '.join(missing)}; {install_command(name)}")
    if not _transformers_fits(versions.get("transformers")):
        return Check(title, "fail", f"{shown}; transformers must be at least 5.12 and below 6")
    if name != "mlx":
        return Check(title, "ok", shown or "installed")
    if (part := mlx_part()) is None:
        return Check(title, "fail", f"{shown}, without the part that does the work; {install_command(name)}")
    return Check(title, "ok", f"{shown}, on {part}")


def _transformers_fits(version: str | None) -> bool:
    if version is None:  # a backend that does without
        return True
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    return _TRANSFORMERS[0] <= parts < _TRANSFORMERS[1]


def _find(facts: Facts, what: str) -> Result:
    source = getattr(facts, what)
    folder = find_local(source, what=what)
    if folder is not None:
        setattr(facts, f"{what}_folder", folder)
        return "ok", str(folder)
    if resolve(source) is BUNDLED:
        return "warn", f"not prepared yet; the first run does it, or: dflash models --fetch {BUNDLED.name}"
    return "fail", f"{source} is not on this machine; dflash models --fetch {source} brings it, or give a local folder"


def _weights_whole(folder: Path | None, facts: Facts, whose: str) -> Result:
    tensors = facts.tensors(folder, whose)
    kinds = sorted({kind for _, kind in tensors.values()})
    return "ok", f"{len(tensors)} tensors, {', '.join(kinds)}, every file as long as its header says"


def _target_config(facts: Facts) -> Result:
    numbers = {key: facts.target_number(key) for key in ("num_hidden_layers", "hidden_size", "vocab_size")}
    return "ok", f"{facts.target_config.get('model_type')}: " + ", ".join(f"{key} {n}" for key, n in numbers.items())


def _target_rewind(facts: Facts) -> Result:
    config, stuck = facts.target_config, defaultdict[str, list[int]](list)
    for layer, kind in enumerate(map(str, config.get("layer_types") or [])):
        if any(word in kind for word in _NO_REWIND):
            stuck[kind].append(layer)
    if stuck:
        found = "; ".join(f"{kind} in layers {spans(layers)}" for kind, layers in stuck.items())
        return "fail", f"the target has layers whose state cannot forget rejected tokens: {found}"
    family = str(config.get("model_type"))
    signs = [family] if any(word in family for word in _NO_REWIND) else []
    signs += [key for key in config if key.startswith(_RECURRENT_KEYS)]
    if signs and not config.get("layer_types"):  # older configs of hybrid models do not say which layers are which
        return "fail", f"the target has recurrent layers ({signs[0]}), whose state cannot forget rejected tokens"
    return "ok", "every layer's cache can forget rejected tokens"


def _target_dtype(facts: Facts) -> Result:
    config, trained = facts.target_config, "drafters are trained for the unquantised weights and accept less here"
    if isinstance(mlx := config.get("quantization"), dict):  # mlx-lm's own key, which it writes beside the usual one
        kind = f"quantised for MLX, {mlx.get('bits')} bits in groups of {mlx.get('group_size')}"
        if _backend("mlx").status != "ok":
            return "fail", f"{kind}, which only the mlx backend reads; give the unquantised model"
        return "warn", f"{kind}; {trained}; the official package advises a block of {MLX_QUANTISED_BLOCK} or less"
    if "quantization_config" in config:
        return "warn", f"the target is quantised; {trained}"
    return "ok", f"{config.get('dtype') or config.get('torch_dtype') or 'not stated'}"


def _draft_config(facts: Facts) -> Result:
    config = facts.draft_config
    return "ok", f"native DFlash, {config.num_hidden_layers} layers, RoPE {config.rope.kind} base {config.rope.theta:g}"


def _draft_weights(facts: Facts) -> Result:
    check_weights(_known(facts.draft_folder, "the drafter's folder"), _config(facts))
    return "ok", "exactly the tensors that the config asks for"


def _draft_dtype(facts: Facts) -> Result:
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    found = {names.get(kind, kind) for _, kind in facts.tensors(facts.draft_folder, "drafter").values()}
    stated = _config(facts).dtype
    if "float16" in found | {stated}:
        return (
            "warn",
            "float16 overflows on large hidden states and then nothing is accepted; bfloat16 or float32 is safe",
        )
    if found != {stated}:
        return (
            "warn",
            f"config.json says {stated} and the weights are {', '.join(sorted(found))}; it should say what they are",
        )
    return "ok", stated


def _equal(key: str, target_key: str | None = None) -> Callable[[Facts], Result]:
    def check(facts: Facts) -> Result:
        ours, theirs = getattr(_config(facts), key), facts.target_number(target_key or key)
        if ours is None:
            return "warn", f"the drafter's config does not say {key}; the target has {theirs}"
        if ours != theirs:
            return "fail", f"{key} is {ours} in the drafter and {theirs} in the target; they must be equal"
        return "ok", f"{ours} in both"

    return check


def _taps(facts: Facts) -> Result:
    taps, layers = _config(facts).target_layer_ids, facts.target_number("num_hidden_layers")
    if max(taps) >= layers:
        return "fail", f"target_layer_ids holds {max(taps)}; the target's layers are 0 to {layers - 1}"
    if max(taps) == layers - 1:
        return "warn", f"{list(taps)} taps the last layer, whose state before the final norm some engines cannot give"
    return "ok", f"{list(taps)} of {layers} layers"


def _mask(facts: Facts) -> Result:
    mask = _config(facts).mask_token_id
    shapes = facts.tensors(facts.target_folder, "target")
    rows = [shape[0] for name, (shape, _) in shapes.items() if name.endswith(("embed_tokens.weight", "wte.weight"))]
    count = rows[0] if rows else facts.target_number("vocab_size")
    if mask >= count:
        return "fail", f"mask_token_id is {mask}; the target's embedding has rows 0 to {count - 1}"
    if mask in facts.stop_ids:
        return "warn", f"mask_token_id is {mask}, which is also a stop id; a token that text never uses is right"
    token, special = facts.tokens.get(mask, ("", True))
    if not special:
        return (
            "warn",
            f"mask_token_id is {mask}, which the tokenizer emits as {token!r}; a special or unused id is right",
        )
    return "ok", f"{mask}, " + (f"the special token {token}" if token else "which the tokenizer never emits")


def _block(facts: Facts) -> Result:
    config = _config(facts)
    longest, most = facts.target_number("max_position_embeddings"), config.max_position_embeddings
    if most < longest:
        return "warn", f"block {config.block_size}; the drafter has {most} positions and the target {longest}"
    return "ok", f"block {config.block_size}: {config.block_size - 1} drafted a round; {most} positions"


def _template(facts: Facts) -> Result:
    wanted = _config(facts).extra.get("dflash_lab", {}).get("template_sha256")
    template = facts.template
    if template is None:
        return "warn", "the target has no chat template; prompts are taken as plain text"
    if wanted is None:
        return "ok", "present; the drafter does not record which one it was trained with"
    if hashlib.sha256(template.encode()).hexdigest() != wanted:
        return "warn", "not the chat template that the drafter was trained with; expect less acceptance"
    return "ok", "the one that the drafter was trained with"


def _stops(facts: Facts) -> Result:
    if not facts.stop_ids:
        return "warn", "neither the target's configs nor its tokenizer name an end token; only the budget ends a text"
    if beyond := [index for index in facts.stop_ids if not 0 <= index < facts.target_number("vocab_size")]:
        return "fail", f"the stop id {beyond[0]} is outside the target's vocabulary"
    try:
        tokens = facts.tokens
    except Unknown:
        tokens = {}
    return "ok", ", ".join(f"{index} {tokens.get(index, ('', True))[0]}".strip() for index in sorted(facts.stop_ids))


def _tokenizer(facts: Facts) -> Result:
    return "ok", f"{len(facts.tokens)} tokens"


def _hashes(facts: Facts) -> Result:
    if facts.target_folder != bundled.SMOLLM2_135M.folder:
        return "ok", "only the bundled target has pinned hashes"
    if faults := bundled.damage(bundled.SMOLLM2_135M):
        return "fail", f"{faults[0]}; dflash models --fetch {BUNDLED.name} prepares it anew"
    return "ok", "the pinned weights, and every file as it was written"


_CHECKS: dict[str, Callable[[Facts], Result]] = {
    "target config": _target_config,
    "target weights": lambda facts: _weights_whole(facts.target_folder, facts, "target"),
    "target hashes": _hashes,
    "target dtype": _target_dtype,
    "target rewind": _target_rewind,
    "tokenizer": _tokenizer,
    "stop ids": _stops,
    "draft config": _draft_config,
    "draft files": lambda facts: _weights_whole(facts.draft_folder, facts, "drafter"),
    "draft weights": _draft_weights,
    "draft dtype": _draft_dtype,
    "hidden size": _equal("hidden_size"),
    "vocabulary": _equal("vocab_size"),
    "target layers": _equal("num_target_layers", "num_hidden_layers"),
    "taps": _taps,
    "mask id": _mask,
    "block": _block,
    "chat template": _template,
}
