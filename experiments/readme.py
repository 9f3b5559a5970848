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
    text = _between(text, "figures", "\n\n".join(part for part in (_bench(), _backends(), _parity(), _speed()) if part))
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
