"""A whole run from a job: target, records, features and trainer; then the drafter's folder, measured, with a card."""

from __future__ import annotations

import gc
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dflash.anchors import valid_anchors
from dflash.checkpoint import read_json
from dflash.engine import Engine
from dflash.errors import TrainingError, UsageError
from dflash.loading import load
from dflash.prompts import EvalPrompt
from dflash.recipe import Recipe
from dflash.records import ResponseRecord, read_records
from dflash.served import Served, evaluate
from dflash.storage import sha256
from dflash.tokenizer import Tokenizer
from torch_dflash.target import choose_device, load_model
from torch_dflash.training.export import card_text, export_drafter, refuse_foreign, write_card
from torch_dflash.training.features import FeatureStore
from torch_dflash.training.heldout import HeldOut, evaluate_heldout
from torch_dflash.training.setup import draft_config
from torch_dflash.training.trainer import LOG_FILE, STATE_FILE, Progress, Trainer

RUN_FILE = "run.json"


@dataclass(frozen=True)
class Job:
    """What ``dflash train run`` was asked for. ``target`` is a local folder, ``source`` what the user called it, and
    ``name`` what its card calls it.

    ``dtype`` is the target's, while features are made and when the drafter is served at the end. ``cache_gb`` bounds
    the feature cache in ``cache``; None keeps nothing."""

    target: Path
    source: str
    name: str
    data: tuple[Path, ...]
    folder: Path
    recipe: Recipe
    device: str = "auto"
    dtype: str = "float32"
    cache: Path | None = None
    cache_gb: float = 8.0
    micro_batches: int = 1
    evaluate_every: int = 250
    save_every: int = 100


@dataclass(frozen=True)
class Ending:
    """What happens after the last step: the drafter goes to ``out`` and is served on ``prompts`` and on the prompts of
    ``served_rows`` held-out rows, so that the two figures can be compared. ``command`` goes into the card."""

    out: Path
    prompts: Mapping[str, Sequence[EvalPrompt]]
    served_rows: int = 32
    max_new_tokens: int = 128
    command: str = ""


@dataclass(frozen=True)
class View:
    """How a run shows itself. ``stop`` is asked after every step; true ends the run there, saved."""

    say: Callable[[str], None] = lambda _: None
    step: Callable[[Progress], None] = lambda _: None
    served: Callable[[str, int, Served], None] = lambda title, total, served: None
    stop: Callable[[], bool] = lambda: False


def run(job: Job, ending: Ending, view: View, *, train: bool = True) -> dict[str, Any]:
    """Train (unless not ``train``) from where ``job.folder`` stands, export, evaluate, write the card.

    Returns the figures of the card; empty on ranks other than 0. Raises ``KeyboardInterrupt`` after a stop, with the
    state saved, and ``DFlashError``s that say what would be right."""
    refuse_foreign(ending.out)
    if not train and not (job.folder / STATE_FILE).exists():
        raise TrainingError(f"{job.folder} holds no trained state; nothing can be exported from it")
    with processes(job.device) as device:
        with rank_zero_first():
            trainer, facts = open_run(job, device)
        if train:
            state = f"resuming at step {trainer.step:,}" if trainer.step else "starting"
            view.say(f"{state} of {job.recipe.steps:,} in {job.folder}: {_summary(trainer)}")

            def report(progress: Progress) -> None:
                view.step(progress)
                if _any_rank(view.stop(), device):
                    raise KeyboardInterrupt

            trainer.run(report)
        if trainer.rank:
            return {}
    facts |= _training_facts(job, trainer) | {"command": ending.command}
    heldout = [trainer.store.records[row] for row in trainer.plan.heldout]
    _export(job, ending, trainer)
    view.say(f"exported step {trainer.step:,} to {ending.out}; evaluating what was written")
    del trainer  # its target makes room for the one that serves
    return _measure(job, ending, view, facts, heldout)


def open_run(job: Job, device: str) -> tuple[Trainer, dict[str, Any]]:
    """The trainer of ``job`` with its state loaded, and what is known of its data. Raises ``TrainingError`` where the
    folder holds a run on other data or another target."""
    if job.dtype != "float32" and job.recipe.precision == "float32":
        raise UsageError(
            f"dtype is {job.dtype} and precision float32; train in bfloat16, or load the target in float32"
        )
    records = read_records(job.data)
    target = load_model(job.target, device=device, dtype=job.dtype).eval().requires_grad_(False)
    vocabulary = target.config.get_text_config().vocab_size  # type: ignore[operator, union-attr]
    if (highest := max(max(record.prompt + record.response, default=0) for record in records)) >= vocabulary:
        raise TrainingError(f"the data hold the id {highest}; the target's ids are 0 to {vocabulary - 1}")
    fingerprint, hashes = target_fingerprint(target), [sha256(path) for path in job.data]
    identity = {"target": fingerprint, "data": hashes}
    kept = job.folder / RUN_FILE
    if kept.exists():
        known = read_json(kept)
        for what, value in identity.items():
            if known.get(what, value) != value:
                raise TrainingError(f"{job.folder} holds a run with another {what}; use the same, or a new folder")
    store = FeatureStore(
        target,
        records,
        draft_config(job.recipe, target).target_layer_ids,
        folder=job.cache,
        limit_bytes=round(job.cache_gb * (1 << 30)),
        precision=job.recipe.precision,
        fingerprint=fingerprint,
    )
    trainer = Trainer(
        target,
        store,
        job.recipe,
        job.folder,
        micro_batches=job.micro_batches,
        evaluate_every=job.evaluate_every,
        save_every=job.save_every,
    )
    if not kept.exists() and not trainer.rank:
        paths = {"source": job.source, "files": [str(path.absolute()) for path in job.data]}
        kept.write_text(json.dumps(paths | identity, indent=2) + "\n")
    return trainer, {"data": _data_facts(job, records, hashes)}


def _export(job: Job, ending: Ending, trainer: Trainer) -> None:
    tokenizer = Tokenizer.load(job.target)
    export_drafter(
        trainer.model,
        ending.out,
        {
            "target": job.name,
            "template_sha256": tokenizer.template_sha256 if tokenizer else None,
            "thinking": None,
            "recipe": job.recipe.to_dict(),
            "step": trainer.step,
        },
    )


def _measure(
    job: Job, ending: Ending, view: View, facts: dict[str, Any], heldout_records: Sequence[ResponseRecord]
) -> dict[str, Any]:
    """Held-out and served figures of the exported folder, loaded as any user would load it, and its card."""
    gc.collect()
    torch.cuda.empty_cache()
    engine = load(target=job.target, draft=ending.out, backend="torch", device=job.device, dtype=job.dtype)
    heldout = heldout_of(engine, heldout_records)
    sets: dict[str, Sequence[EvalPrompt]] = dict(ending.prompts)
    if ending.served_rows:
        some = heldout_records[: ending.served_rows]
        sets["Prompts of held-out rows"] = [EvalPrompt(list(record.prompt), record.domain) for record in some]
    served = {}
    for title, prompts in sets.items():
        result = evaluate(
            engine,
            prompts,
            max_new_tokens=ending.max_new_tokens,
            report=lambda part, title=title, prompts=prompts: view.served(title, len(prompts), part),  # type: ignore[misc]
        )
        served[title] = result.to_dict()
    facts |= {
        "target_layer_ids": list(engine.drafter.config.target_layer_ids),
        "dtype": engine.target.info.dtype,
        "device": engine.target.info.device,
        "max_new_tokens": ending.max_new_tokens,
        "heldout": asdict(heldout),
        "served": served,
    }
    write_card(ending.out, card_text(facts))
    for title, figures in served.items():
        view.say(side_by_side(heldout.acceptance_length, title, figures["mean_acceptance_length"]))
    return facts


def heldout_of(engine: Engine, records: Sequence[ResponseRecord]) -> HeldOut:
    """The all-anchor figure of a loaded pair, in the precision it is served in."""
    target: Any = engine.target
    drafter: Any = engine.drafter
    usable = [record for record in records if len(valid_anchors(record.loss_mask))]
    if not usable:
        raise TrainingError("no held-out row has an anchor; a response of at least two tokens has one")
    store = FeatureStore(target.model, usable, drafter.config.target_layer_ids)
    try:
        return evaluate_heldout(
            drafter.model, drafter.embedding, drafter.head, drafter.stack.rotary, store, range(len(usable))
        )
    finally:
        store.close()


def side_by_side(heldout: float, title: str, tau: float | None) -> str:
    """Both figures in one sentence, and a warning where they are too far apart to measure the same drafter: what they
    add to 1 differs by more than 60 % and 0.1."""
    text = f"held-out, all anchors {heldout:.3f} · served τ {'–' if tau is None else f'{tau:.3f}'} ({title})"
    if tau is not None:
        low, high = sorted((heldout - 1, tau - 1))
        if high > 1.6 * low + 0.1:
            text += "; warning: the two differ by much, so other data, another template, or a fault in between"
    return text


def unused_special_token(folder: Path, records: Sequence[ResponseRecord]) -> int:
    """The mask by default: the last special token that neither the data nor the chat template hold.

    Raises ``UsageError`` where there is none; the user must then name one."""
    entries = (
        read_json(folder / "tokenizer.json").get("added_tokens", []) if (folder / "tokenizer.json").exists() else []
    )
    tokenizer = Tokenizer.load(folder)
    template = (tokenizer.chat_template if tokenizer else None) or ""
    used = {token for record in records for token in record.prompt + record.response}
    free = [entry["id"] for entry in entries if entry["special"] and entry["content"] not in template]
    if unused := sorted(set(free) - used):
        return int(unused[-1])
    raise UsageError("the target has no special token that is never used; name a mask token with --mask-token-id")


def target_fingerprint(target: nn.Module) -> str:
    """Sixteen hex digits of the target's names, shapes and the first values of every weight."""
    digest = hashlib.sha256()
    for name, weight in target.named_parameters():
        digest.update(f"{name}{list(weight.shape)}".encode())
        digest.update(weight.detach().flatten()[:256].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


# More than one process ------------------------------------------------------------------------------------------------


@contextmanager
def processes(device: str) -> Iterator[str]:
    """This process's device; under ``torchrun`` joined with the others (NCCL on CUDA, gloo elsewhere)."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield device
        return
    cuda = choose_device(device).type == "cuda"
    if cuda:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


@contextmanager
def rank_zero_first() -> Iterator[None]:
    """Rank 0 goes through the body before the others do, so that they find the files it makes."""
    joined = dist.is_initialized()
    if joined and dist.get_rank():
        dist.barrier()
    yield
    if joined and not dist.get_rank():
        dist.barrier()


def _any_rank(stop: bool, device: str) -> bool:
    """Whether any rank was asked to stop, so that all stop after the same step."""
    if not dist.is_initialized():
        return stop
    flag = torch.tensor(float(stop), device=device if device.startswith("cuda") else "cpu")
    dist.all_reduce(flag)
    return bool(flag)


# What is said about a run ---------------------------------------------------------------------------------------------


def _summary(trainer: Trainer) -> str:
    parameters = sum(weight.numel() for weight in trainer.model.parameters())
    return (
        f"{parameters / 1e6:.1f} M parameters, {len(trainer.plan.train):,} rows, {len(trainer.plan.heldout)} held out, "
        f"{trainer.plan.steps_per_epoch} steps an epoch, {trainer.plan.supervised_share():.0%} of valid anchors a visit"
    )


def _data_facts(job: Job, records: Sequence[ResponseRecord], hashes: Sequence[str]) -> dict[str, Any]:
    return {
        "files": [{"name": path.name, "sha256": digest} for path, digest in zip(job.data, hashes, strict=True)],
        "rows": len(records),
        "response_tokens": sum(len(record.response) for record in records),
        "sampled": sum(record.temperature > 0 for record in records),
        "domains": dict(sorted(Counter(record.domain for record in records).items())),
    }


def _training_facts(job: Job, trainer: Trainer) -> dict[str, Any]:
    cuda = trainer.device.type == "cuda"
    return {
        "target": job.name,
        "parameters": sum(weight.numel() for weight in trainer.model.parameters()),
        "recipe": job.recipe.to_dict(),
        "step": trainer.step,
        "epochs": trainer.step / trainer.plan.steps_per_epoch,
        "hours": trainer.spent / 3600,
        "hardware": torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} CPU threads",
        "train_rows": len(trainer.plan.train),
        "heldout_rows": len(trainer.plan.heldout),
        "curve": curve(job.folder),
    }


def curve(folder: Path) -> list[tuple[int, float, float]]:
    """Step, hours and held-out acceptance length of every evaluation of a run; a repeated step counts once."""
    found: dict[int, tuple[int, float, float]] = {}
    if (folder / LOG_FILE).exists():
        for line in (folder / LOG_FILE).read_text().splitlines():
            entry = json.loads(line)
            if "acceptance_length" in entry:
                found[entry["step"]] = (entry["step"], entry["seconds"] / 3600, entry["acceptance_length"])
    return [found[step] for step in sorted(found)]
