"""Train a drafter, on the torch backend: responses from the target, the training run, and the drafter's folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash.prompts import EvalPrompt
    from dflash.recipe import Recipe

HELP = "train a drafter: `data` lets the target answer prompts, `run` trains, `export` writes what a run has so far"

# Flag → what it is; types and defaults come from the recipe itself.
RECIPE_FLAGS = {
    "draft_layers": "layers of the drafter",
    "taps": "how many target layers it sees",
    "target_layer_ids": "which ones, instead of the paper's rule: 1,8,15",
    "block_size": "tokens of a block, its anchor included",
    "mask_token_id": "the id that stands for a token to draft (default: a special token that is never used)",
    "steps": "optimiser steps",
    "batch_rows": "sequences a step",
    "anchors": "blocks a sequence",
    "max_length": "longer sequences are left out",
    "heldout_rows": "sequences never trained on",
    "learning_rate": "its peak",
    "warmup": "share of the steps in which it rises to it",
    "weight_decay": "of AdamW",
    "clip": "largest norm of a gradient",
    "gamma": "decay of the slots' weights (0: the paper's)",
    "loss_vocab": "full, or seen: the softmax covers only tokens of the data",
    "soft_labels": "share of the loss that follows the target's own distribution",
    "loss_chunk": "slots whose logits are in memory at a time",
    "init": "target: start from copies of the target's last layers; or normal",
    "precision": "float32, or bfloat16 products",
    "seed": "of weights, order and anchors",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="data|run|export")
    data = actions.add_parser("data", help="let the target answer prompts; resumes where it was")
    data.add_argument("--target", required=True, help="the target: a pair's name, a folder or a hub id")
    data.add_argument("--out", required=True, type=Path, help="the .jsonl file to append to")
    source = data.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", type=Path, help="JSON lines with prompt (text, messages or ids) and domain")
    source.add_argument("--rows", type=int, help="make this many prompts from the project's templates")
    data.add_argument("--domains", default="math,code,chat", help="of the templates (default: %(default)s)")
    data.add_argument("--max-new-tokens", type=int, default=224, help="of a response (default: %(default)s)")
    data.add_argument("--temperature", type=float, default=0.6, help="of the sampled ones (default: %(default)s)")
    data.add_argument("--share", type=float, default=0.3, help="of prompts to sample (default: %(default)s)")
    data.add_argument("--seed", type=int, default=0, help="of templates and sampling (default: %(default)s)")
    data.add_argument("--batch-rows", type=int, default=96, help="answered at a time (default: %(default)s)")
    _device_flags(data)

    run = actions.add_parser("run", help="train; resumes where the folder's run was")
    for name, text in RECIPE_FLAGS.items():
        run.add_argument("--" + name.replace("_", "-"), help=text)
    run.add_argument("--recipe", type=Path, metavar="FILE", help="a recipe in JSON; the flags above override it")
    run.add_argument("--cache", type=Path, help="the folder of the feature cache (default: features in --out)")
    run.add_argument("--cache-gb", type=float, default=8.0, help="its size at most; 0: none (default: %(default)s)")
    run.add_argument("--micro-batches", type=int, default=1, help="split a step to fit memory (default: %(default)s)")
    run.add_argument("--evaluate-every", type=int, default=250, help="steps (default: %(default)s)")
    run.add_argument("--save-every", type=int, default=100, help="steps (default: %(default)s)")
    run.add_argument("--out", required=True, type=Path, help="the run's folder; the drafter goes to drafter in it")

    export = actions.add_parser("export", help="write the drafter of a run as it stands, measured")
    export.add_argument("--run", dest="folder", required=True, type=Path, help="the run's folder")
    export.add_argument("--out", required=True, type=Path, help="the drafter's folder")
    for part in (run, export):
        part.add_argument("--target", help="the target: a pair's name, a folder or a hub id (resuming: the run's)")
        part.add_argument("--data", nargs="+", type=Path, help="response records (resuming: the run's)")
        part.add_argument("--prompts", metavar="SET", help="also serve it on mini, a JSON-lines file, or hf:OWNER/NAME")
        part.add_argument("--served-rows", type=int, default=32, help="held-out prompts served (default: %(default)s)")
        part.add_argument("--max-new-tokens", type=int, default=128, help="when served (default: %(default)s)")
        part.add_argument("--json", action="store_true", help="end with one JSON line")
        _device_flags(part)


def _device_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 … (default: the best there is)")
    parser.add_argument("--dtype", default="float32", help="the target's (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    return _data(args) if args.action == "data" else _train(args)


# Data -----------------------------------------------------------------------------------------------------------------


def _data(args: argparse.Namespace) -> int:
    from dflash.backends import find_backend
    from dflash.cli.progress import Bar, duration
    from dflash.errors import PromptError
    from dflash.registry import locate
    from dflash.stopping import all_stop_ids
    from dflash.tokenizer import Tokenizer

    prompts = _prompts(args)
    backend = find_backend("torch")
    from torch_dflash.target import load_model, stop_token_ids
    from torch_dflash.training.regenerate import Progress, PromptIds, Settings, regenerate

    settings = Settings(args.max_new_tokens, args.batch_rows, args.temperature, args.share, args.seed)
    folder = locate(args.target, what="target", backend=backend)
    tokenizer = Tokenizer.load(folder)
    if tokenizer is None and not all(isinstance(part, int) for prompt in prompts for part in prompt.prompt):
        raise PromptError(f"{folder} has no tokenizer; give the prompts as lists of token ids")
    ids = [
        PromptIds(tuple(tokenizer.encode(prompt.prompt) if tokenizer else prompt.prompt), prompt.domain)  # type: ignore[arg-type]
        for prompt in prompts
    ]
    target = load_model(folder, device=args.device, dtype=args.dtype).eval().requires_grad_(False)
    last: list[Progress] = []
    try:
        with Bar("responses") as bar:

            def report(progress: Progress) -> None:
                last[:] = [progress]
                bar.update(
                    progress.rows,
                    progress.total,
                    f"{progress.tokens_per_second:.0f} tok/s · {duration(progress.seconds_left)} left",
                )

            stops = all_stop_ids(stop_token_ids(target), tokenizer)
            added = regenerate(target, ids, args.out, stops, settings, report)
    except KeyboardInterrupt:
        print(f"stopped; {args.out} keeps every finished row, and the same command continues", file=sys.stderr)
        return 130
    speed = f", {last[0].tokens:,} tokens at {last[0].tokens_per_second:.0f} tok/s" if last else ""
    print(f"{added:,} rows added{speed}", file=sys.stderr)
    print(args.out)
    return 0


def _prompts(args: argparse.Namespace) -> list[EvalPrompt]:
    from dflash.prompt_templates import template_prompts
    from dflash.prompts import EvalPrompt, read_prompts

    if args.prompts:
        return read_prompts(args.prompts)
    made = template_prompts(args.rows, [name.strip() for name in args.domains.split(",")], args.seed)
    return [EvalPrompt(prompt.prompt, prompt.domain) for prompt in made]


# Run and export -------------------------------------------------------------------------------------------------------


def _train(args: argparse.Namespace) -> int:
    import json
    import os

    from dflash.backends import find_backend
    from dflash.cli.common import Interruption
    from dflash.cli.progress import Bar, duration
    from dflash.prompts import load_prompts
    from dflash.registry import locate
    from dflash.served import Served

    training = args.action == "run"
    folder = args.out if training else args.folder
    source, files = _sources(args, folder)
    chosen = [load_prompts(args.prompts)] if args.prompts else []
    backend = find_backend("torch")

    from torch_dflash.training.run import Ending, Job, View
    from torch_dflash.training.run import run as run_job
    from torch_dflash.training.trainer import Progress

    target = locate(source, what="target", backend=backend)
    local = Path(source).expanduser().is_dir()
    recipe = _recipe(args, folder, target, files)
    job = Job(
        target=target,
        source=str(Path(source).expanduser().absolute()) if local else source,
        name=target.name if local else source,
        data=tuple(files),
        folder=folder,
        recipe=recipe,
        device=args.device,
        dtype=args.dtype,
        **_options(args, folder) if training else {},
    )
    ending = Ending(
        out=args.out / "drafter" if training else args.out,
        prompts={each.name: each.prompts for each in chosen},
        served_rows=args.served_rows,
        max_new_tokens=args.max_new_tokens,
        command=_command(job.name, files, recipe),
    )
    shown = os.environ.get("RANK", "0") == "0"
    with Interruption() as stopping, Bar("training", shown=shown) as bar:

        def step(progress: Progress) -> None:
            heldout = "–" if progress.heldout is None else f"{progress.heldout:.3f}"
            text = f"loss {progress.loss:.3f} · held-out {heldout} · {duration(progress.seconds_left)} left"
            bar.update(progress.step, progress.steps, text)

        def served(title: str, total: int, part: Served) -> None:
            tau = part.overall.mean_acceptance_length
            bar.title = "serving"
            bar.update(len(part.metrics), total, f"τ {'–' if tau is None else f'{tau:.3f}'} · {title}")
            if stopping:
                raise KeyboardInterrupt

        try:
            facts = run_job(job, ending, View(bar.say, step, served, lambda: bool(stopping)), train=training)
        except KeyboardInterrupt:
            bar.say(f"stopped; {folder} keeps the run, and the same command resumes it")
            return 130
    if facts:
        print(json.dumps(facts | {"drafter": str(ending.out)}) if args.json else ending.out)
    return 0


def _options(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from dflash.errors import UsageError

    for flag in ("micro_batches", "evaluate_every", "save_every"):
        if getattr(args, flag) < 1:
            raise UsageError(f"{flag} is {getattr(args, flag)}; it must be at least 1")
    options = {flag: getattr(args, flag) for flag in ("micro_batches", "evaluate_every", "save_every", "cache_gb")}
    return options | {"cache": (args.cache or folder / "features") if args.cache_gb > 0 else None}


def _sources(args: argparse.Namespace, folder: Path) -> tuple[str, list[Path]]:
    """Target and data as given, or as the run in ``folder`` has them."""
    from dflash.checkpoint import read_json
    from dflash.errors import UsageError

    kept = read_json(folder / "run.json") if (folder / "run.json").exists() else {}
    source = args.target or kept.get("source")
    files = args.data or [Path(path) for path in kept.get("files", [])]
    if not source or not files:
        raise UsageError(f"{folder} holds no run that names its target and data; give --target and --data")
    return source, files


def _recipe(args: argparse.Namespace, folder: Path, target: Path, files: list[Path]) -> Recipe:
    """The run's own recipe, or the file's, or the defaults; flags override."""
    from dflash.checkpoint import read_json
    from dflash.recipe import Recipe

    given: dict[str, Any] = {}
    if args.action == "run":
        given = {flag: _value(flag, getattr(args, flag)) for flag in RECIPE_FLAGS if getattr(args, flag) is not None}
    base = read_json(args.recipe) if getattr(args, "recipe", None) else {}
    if not base and (folder / "recipe.json").exists():
        base = read_json(folder / "recipe.json")
    values = base | given
    if "mask_token_id" not in values:
        from torch_dflash.training.run import unused_special_token

        from dflash.records import read_records

        values["mask_token_id"] = unused_special_token(target, read_records(files))
    return Recipe.from_dict(values)


def _value(flag: str, text: str) -> Any:
    """A flag's text as the type that the recipe has for it."""
    from dflash.errors import UsageError
    from dflash.recipe import Recipe

    if flag == "target_layer_ids":
        read: Any = lambda value: [int(part) for part in value.split(",")]  # noqa: E731
    elif flag == "mask_token_id":
        read = int
    else:
        read = type(getattr(Recipe, flag))
    try:
        return read(text)
    except ValueError:
        raise UsageError(f"--{flag.replace('_', '-')} is {text!r}; it must be a number") from None


def _command(name: str, files: list[Path], recipe: Recipe) -> str:
    """The command that trains this drafter again, without this machine's folders."""
    from dflash.recipe import Recipe

    plain = Recipe(mask_token_id=recipe.mask_token_id).to_dict()
    parts = ["dflash train run", f"--target {name}", "--data " + " ".join(path.name for path in files), "--out FOLDER"]
    for key, value in recipe.to_dict().items():
        if key in RECIPE_FLAGS and (value != plain[key] or key == "mask_token_id"):
            text = ",".join(map(str, value)) if isinstance(value, list) else value
            parts.append(f"--{key.replace('_', '-')} {text}")
    return " ".join(parts)
