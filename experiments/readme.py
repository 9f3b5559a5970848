"""Fill the README's figures from stored results, and its example from a real run: ``python experiments/readme.py``.

Nothing between the README's markers is typed. Figures come from the newest record of each kind under
``experiments/results/``; ``--example`` also runs the main job and stores what it prints.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "experiments" / "results"
EXAMPLE = RESULTS / "example.txt"
PROMPT = "Tom has 3 boxes with 4 apples in each box. How many apples does he have?"
COMMAND = ["generate", PROMPT, "--show", "rounds", "--compare"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--example", action="store_true", help="run the main job again and keep its output")
    args = parser.parse_args()
    if args.example:
        dflash = shutil.which("dflash", path=str(Path(sys.executable).parent)) or "dflash"
        run = subprocess.run(
            [dflash, *COMMAND], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
        )
        EXAMPLE.write_text(run.stdout)
    readme = ROOT / "README.md"
    text = readme.read_text()
    text = _between(text, "output", _example())
    parts = (_bench(), _end_to_end(), _rounds(), _kernels(), _backends(), _parity(), _speed())
    text = _between(text, "figures", "\n\n".join(part for part in parts if part))
    readme.write_text(text)
    return 0


def _between(text: str, name: str, content: str) -> str:
    pattern = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}{content.strip()}\n{match[2]}", text)


def _example() -> str:
    if not EXAMPLE.exists():
        return ""
    shown = " ".join(f'"{word}"' if " " in word else word for word in COMMAND)
    return f"```\n$ dflash {shown}\n{EXAMPLE.read_text().strip()}\n```"


def _records(name: str, kind: str) -> list[dict[str, Any]]:
    file = RESULTS / name
    lines = file.read_text().splitlines() if file.exists() else []
    return [record for line in lines if (record := json.loads(line)).get("kind") == kind]


def _spread(values: dict[str, float], digits: int) -> str:
    return f"{values['median']:.{digits}f} [{values['min']:.{digits}f}–{values['max']:.{digits}f}]"


def _bench() -> str:
    """One table for each prompt set and block size, from its newest whole record."""
    newest = {
        (record["prompt_set"]["name"], record["block_size"], record["max_new_tokens"]): record
        for record in _records("bench.jsonl", "bench")
        if not record["partial"]
    }
    return "\n\n".join(_bench_table(record) for record in newest.values())


def _bench_table(record: dict[str, Any]) -> str:
    prompts, hardware = record["prompt_set"], record.get("hardware", {})
    sampling = (
        "greedy" if record["sampling"]["temperature"] == 0 else f"temperature {record['sampling']['temperature']}"
    )
    lines = [
        f"**The bundled pair, prompt set `{prompts['name']}`** ({prompts['prompts']} prompts, {sampling}, "
        f"{record['max_new_tokens']} new tokens, block {record['block_size']}, {record['dtype']}, "
        f"{hardware.get('cpu', 'CPU')}, {hardware.get('cores', '?')} cores; both ways interleaved, median "
        f"[min–max] of {record['repeats']} repeats):",
        "",
        "| | τ | accepted ÷ drafted | plain tok/s | DFlash tok/s | speedup | break-even τ | same tokens |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, part in {"all": record, **record["domains"]}.items():
        even = part["break_even_acceptance_length"]
        lines.append(
            f"| {name} | {part['mean_acceptance_length']:.2f} | {part['draft_acceptance_rate']:.3f} "
            f"| {_spread(part['plain']['end_to_end_tokens_per_second'], 1)} "
            f"| {_spread(part['dflash']['end_to_end_tokens_per_second'], 1)} | {_spread(part['speedup'], 2)} "
            f"| {even['median']:.2f} | {part['identical_prompts']}/{part['prompts']} |"
        )
    return "\n".join(lines)


def _newest(kind: str, *by: str) -> list[dict[str, Any]]:
    """The newest whole record of each combination of ``by``, in the order in which these were first measured."""
    whole = [record for record in _records("bench.jsonl", kind) if not record["partial"]]
    return list({json.dumps([record.get(name) for name in by]): record for record in whole}.values())


def _machine(record: dict[str, Any]) -> str:
    hardware = record["hardware"]
    gpu = f"{hardware['gpus'][0]}, " if record["device"].startswith("cuda") and hardware["gpus"] else ""
    threads = f", {record['threads']} threads" if record["device"] == "cpu" else ""
    return f"{record['dtype']}, {gpu}{hardware['cpu']}, {hardware['cores']} cores{threads}"


def _table(head: str, columns: tuple[str, ...], rows: list[tuple[str, ...]], *after: str) -> str:
    lines = [head, "", *(f"| {' | '.join(row)} |" for row in (columns, ("---",) * len(columns), *rows))]
    return "\n".join((*lines, *(("", " ".join(after)) if after else ())))


def _end_to_end() -> str:
    return "\n\n".join(_end_to_end_table(record) for record in _newest("bench-end-to-end", "models", "device")[-1:])


def _end_to_end_table(record: dict[str, Any]) -> str:
    """Every arm beside transformers' own generate and the official package."""
    arms = record["arms"]
    bases = [base for base in ("transformers", "official") if base in arms]
    rows = [
        (
            _named(name, arm),
            _spread(arm["tokens_per_second"], 1),
            *(_spread(arm["over"][base], 2) if base in arm["over"] else "1" for base in bases),
            f"{arm['identical_prompts']}/{record['prompts']}",
        )
        for name, arm in arms.items()
    ]
    after = [
        f"{name} computes on {arm['weights']} weights and the others on the same values as {record['dtype']}."
        for name, arm in arms.items()
        if "weights" in arm
    ]
    reasons: dict[str, list[str]] = {}
    for name, reason in record["not_measured"].items():
        reasons.setdefault(re.sub(r" \(/[^)]*\)", "", reason), []).append(name)  # a path says nothing to others
    after += [f"Not measured: {', '.join(names)} ({reason})." for reason, names in reasons.items()]
    return _table(
        f"**End to end beside other programs**, {_pair(record)}, prompt set `{record['prompt_set']['name']}` "
        f"({record['prompts']} prompts, greedy, {record['max_new_tokens']} new tokens, block {record['block_size']}, "
        f"{_machine(record)}; prompt by prompt in turn, each program in a process of its own, median [min–max] of "
        f"{record['repeats']} repeats):",
        ("", "tok/s", *(f"÷ {base}" for base in bases), "tokens of plain"),
        rows,
        *after,
    )


def _named(name: str, arm: dict[str, Any]) -> str:
    package = {"official": "dflash", "llama.cpp": "llama-cpp-python"}.get(name, "transformers")
    return name if name in ("plain", "dflash") else f"{name} ({package} {arm['versions'][package]})"


def _pair(record: dict[str, Any]) -> str:
    name = record["models"]["target"]["name"]
    return "the bundled pair" if name == "smollm2-135m" else f"`{name}`"


def _rounds() -> str:
    return "\n\n".join(_rounds_table(record) for record in _newest("bench-rounds", "models", "device", "dtype"))


def _rounds_table(record: dict[str, Any]) -> str:
    """What a round costs, by context length and block size; a ratio's spread is in the record."""
    rows = []
    for cell in record["cells"]:
        plain = cell["block_size"] == 1
        share = cell["overhead_share"]
        ratios = [cell[name] for name in ("verify_over_one_row", "draft_over_verify", "over_shortest_context")]
        rows.append(
            (
                f"{cell['context']:,}",
                "plain" if plain else str(cell["block_size"]),
                "–" if plain else f"{cell['draft_seconds']['median'] * 1000:.1f}",
                f"{cell['verify_seconds']['median'] * 1000:.1f}",
                "–" if plain else f"{share['median']:.1%}",
                _spread({name: value * 1000 for name, value in cell["seconds"].items()}, 1),
                *(f"{ratio['median']:.2f}" if ratio and not plain else "–" for ratio in ratios),
            )
        )
    streamed = "; ".join(
        f"{_percent(real['overhead_share'])} at {real['context']:,} tokens" for real in record["real"] if real["rounds"]
    )
    return _table(
        f"**What a round costs**, {_pair(record)} ({_machine(record)}; median [min–max] of {record['repeats']} repeats "
        f"of {record['rounds']} rounds at a context that is held):",
        ("context", "block", "draft ms", "verify ms", "rest", "round ms", "verify ÷ one row", "draft ÷ verify",
         "÷ shortest context"),
        rows,
        f"Streamed with block {record['real'][0]['block_size']}, neither drafting nor verifying is {streamed}.",
    )  # fmt: skip


def _kernels() -> str:
    newest = _newest("bench-kernels", "models", "device", "dtype")
    return "\n\n".join(_triton_table(r) if "kernels" in r else _products_table(r) for r in newest)


def _products_table(record: dict[str, Any]) -> str:
    rows = [
        (
            part["model"],
            str(part["rows"]),
            *(_spread({k: v * 1000 for k, v in part[way]["seconds"].items()}, 1) for way in ("linear", "backend")),
            _spread(part["linear_over_backend"], 2),
            f"{part['backend']['bytes_per_second']['median'] / 1e9:.1f}",
            f"{part['backend']['of_roofline']['median']:.0%}",
        )
        for part in record["passes"]
    ]
    return _table(
        f"**The products of a pass**, {_pair(record)} ({_machine(record)}; median [min–max] of {record['repeats']} "
        f"repeats; memory was seen to be read at {record['roofline']['bytes_per_second'] / 1e9:.1f} GB/s):",
        ("pass", "rows", "`F.linear` ms", f"{record['backend_products']} ms", "ratio", "GB/s of weights", "of that"),
        rows,
    )


def _triton_table(record: dict[str, Any]) -> str:
    rows = [
        (
            kernel["name"],
            f"{kernel['seconds'] * 1e6:.1f}",
            f"{kernel['plain'] * 1e6:.1f}",
            f"{kernel['plain'] / kernel['seconds']:.2f}",
            f"{kernel['of_copy']:.0%}",
        )
        for kernel in record["kernels"]
    ]
    return _table(
        f"**The Triton kernels** ({_machine(record)}; a copy moves {record['copy_bytes_per_second'] / 1e9:.0f} GB/s):",
        ("", "µs", "plain µs", "ratio", "bandwidth ÷ a copy's"),
        rows,
    )


def _backends() -> str:
    runs, summaries = _records("agreement.jsonl", "agreement-run"), _records("agreement.jsonl", "agreement-summary")
    if not runs or not summaries:
        return ""
    run, last = runs[-1], summaries[-1]
    parted = last["prompts"] - last["same_tokens"]
    near = f"; {last['near_ties']} of {parted} differences are near-ties" if parted else ""
    return (
        f"**PyTorch and MLX beside each other**, the bundled pair, {last['prompts']} evaluation prompts, greedy, "
        f"float32, at most {run['max_new_tokens']} new tokens: the same tokens ({last['tokens']:,} in all) on "
        f"{last['same_tokens']} prompts{near}; the same drafts and accepted lengths in every round on "
        f"{last['same_rounds']}."
    )


def _parity() -> str:
    return "\n\n".join(filter(None, (_agreement("parity.jsonl"), _agreement("parity_mlx.jsonl"))))


def _agreement(name: str) -> str:
    """One paragraph about the newest comparison with the official code of one backend."""
    records = _records(name, "summary")
    if not records:
        return ""
    last = records[-1]
    official = dict(last["official"])
    package = official.pop("dflash")
    versions = ", ".join(f"{library} {version}" for library, version in official.items() if library != "torch")
    verdict = "the same" if last["agrees"] else "**not all the same**"
    mended = sum(record["rounds"] for record in _records(name, "case") if record.get("mended"))
    aside = f" ({mended:,} of them with a mended official cache of sliding layers, see the log)" if mended else ""
    return (
        f"**Against the official package's {'MLX' if 'mlx' in official else 'PyTorch'} code** (`dflash` {package}, "
        f"{versions}, float32): proposals, accepted lengths and tokens {verdict} over {last['rounds']:,} rounds{aside} "
        f"with {last['draft_tokens']:,} drafted tokens; draft logits within {last['worst_logit_difference']:.1e} "
        "relative."
    )


def _speed() -> str:
    return "\n\n".join(filter(None, (_beside("parity_speed.jsonl"), _beside("parity_mlx_speed.jsonl"))))


def _beside(name: str) -> str:
    """One paragraph about the newest measurement beside the official code of one backend."""
    records = _records(name, "summary")
    if not records:
        return ""
    last = records[-1]
    rates, taken = last["tokens_per_second"], last.get("round")
    text = (
        f"**Speed beside {'its MLX code' if taken else 'it'}**, the bundled pair on {last['cpu']}, {last['threads']} "
        f"threads, interleaved, {last['prompts']} prompts × {last['repeats']} repeats: official "
        f"{_spread(rates['official'], 1)} tok/s, ours {_spread(rates['ours'], 1)} tok/s, ratio "
        f"**{_spread(last['ours_over_official'], 2)}**; same tokens: {'yes' if last['same_tokens'] else 'no'}."
    )
    if taken:
        text += (
            f" The same rounds one after another: ours takes **{_spread(taken['ours_over_official'], 3)}** of theirs; "
            f"{_percent(taken['not_the_model'])} of it is not the model's kernels, and "
            f"{_percent(taken['beyond_a_bare_loop'])} is more than a loop written by hand takes "
            f"(MLX {last['versions']['ours']['mlx']} on its CPU build, BLAS {last['preloaded'] or 'as installed'})."
        )
    return text


def _percent(values: dict[str, float]) -> str:
    return f"{values['median']:.1%} [{values['min']:.1%} – {values['max']:.1%}]"


if __name__ == "__main__":
    raise SystemExit(main())
