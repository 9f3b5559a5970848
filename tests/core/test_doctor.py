"""Every check of ``dflash doctor``: seen to pass, seen to complain, and never stopping the others."""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from model_folders import draft_dict, target_dict, write_draft, write_target, write_tensors

from dflash import backends, bundled, doctor
from dflash.doctor import Check, examine
from dflash.errors import ModelNotFoundError, UsageError

TEMPLATE = "{{ messages }}"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target", template=TEMPLATE)


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return write_draft(tmp_path / "draft")


def results(target: Path, draft: Path) -> dict[str, Check]:
    checks = examine(str(target), str(draft))
    assert len({check.name for check in checks}) == len(checks)
    assert all(check.detail and "\n" not in check.detail for check in checks)
    return {check.name: check for check in checks}


def test_a_pair_that_fits_passes_every_check(target: Path, draft: Path) -> None:
    checks = results(target, draft)
    unhappy = [check for check in checks.values() if check.status != "ok" and not check.name.startswith("backend")]
    assert unhappy == []
    assert {"target found", "draft found", *doctor._CHECKS} <= set(checks)
    assert any(name.startswith("backend") for name in checks)


@pytest.mark.parametrize(
    ("check", "status", "changes", "message"),
    [
        ("hidden size", "fail", {"hidden_size": 32}, "hidden_size is 16 in the drafter and 32 in the target"),
        ("vocabulary", "fail", {"vocab_size": 48}, "vocab_size is 40 in the drafter and 48 in the target"),
        ("target layers", "fail", {"num_hidden_layers": 9}, "num_target_layers is 6 in the drafter and 9"),
        ("taps", "fail", {"num_hidden_layers": 3}, "holds 3; the target's layers are 0 to 2"),
        ("taps", "warn", {"num_hidden_layers": 4}, "taps the last layer"),
        ("mask id", "fail", {"vocab_size": 3}, "mask_token_id is 3; the target's embedding has rows 0 to 2"),
        ("mask id", "warn", {"eos_token_id": [2, 3]}, "also a stop id"),
        ("block", "warn", {"max_position_embeddings": 512}, "the drafter has 256 positions and the target 512"),
        ("stop ids", "warn", {"eos_token_id": None}, "only the budget ends a text"),
        ("stop ids", "fail", {"eos_token_id": 99}, "stop id 99 is outside"),
        (
            "target rewind",
            "fail",
            {"layer_types": ["conv", *["linear_attention"] * 3, "full_attention", "linear_attention"]},
            "cannot forget rejected tokens: conv in layers 0; linear_attention in layers 1-3, 5",
        ),
        ("target rewind", "ok", {"layer_types": ["sliding_attention"] * 6}, "can forget"),
        ("target rewind", "fail", {"model_type": "falcon_mamba"}, "recurrent layers (falcon_mamba)"),
        ("target rewind", "fail", {"linear_conv_kernel_dim": 4}, "recurrent layers (linear_conv_kernel_dim)"),
        ("target rewind", "ok", {"mamba_d_state": 4, "layer_types": ["attention"] * 6}, "can forget"),
        ("target dtype", "warn", {"quantization_config": {}}, "quantised"),
        ("target config", "fail", {"hidden_size": "16"}, "hidden_size is '16'"),
        ("hidden size", "fail", {"hidden_size": None}, "hidden_size is None in the target's config.json"),
    ],
)
def test_a_target_that_does_not_fit_is_named(
    check: str, status: str, changes: dict[str, Any], message: str, target: Path, draft: Path
) -> None:
    raw = target_dict(**changes)
    (target / "config.json").write_text(json.dumps(raw))
    if isinstance(raw.get("vocab_size"), int):
        write_tensors(target / "model.safetensors", {"model.embed_tokens.weight": (raw["vocab_size"], 16)})
    found = results(target, draft)[check]
    assert found.status == status
    assert message in found.detail


@pytest.mark.parametrize(
    ("check", "status", "changes", "message"),
    [
        ("draft config", "fail", {"rope_theta": None}, "rope_theta is missing"),
        ("draft config", "fail", {"architectures": ["DFlash2DraftModel"]}, "DFlash 2"),
        ("draft weights", "fail", {"intermediate_size": 32}, "the config makes it"),
        ("draft dtype", "warn", {"dtype": "bfloat16"}, "config.json says bfloat16 and the weights are float32"),
        ("draft dtype", "warn", {"dtype": "float16"}, "float16 overflows"),
        ("target layers", "warn", {"num_target_layers": None}, "does not say num_target_layers"),
        (
            "mask id",
            "warn",
            {"dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 3]}},
            "which the tokenizer emits as 't7'",
        ),
        ("chat template", "warn", {"dflash_lab": {"template_sha256": "0" * 64}}, "not the chat template"),
        ("chat template", "ok", {"dflash_lab": "?"}, "does not record"),
    ],
)
def test_a_drafter_that_does_not_fit_is_named(
    check: str, status: str, changes: dict[str, Any], message: str, target: Path, draft: Path
) -> None:
    (draft / "config.json").write_text(json.dumps(draft_dict(**changes)))
    found = results(target, draft)[check]
    assert found.status == status
    assert message in found.detail


def test_a_failure_does_not_stop_the_other_checks(target: Path, draft: Path) -> None:
    (draft / "config.json").write_text("{")
    (target / "model.safetensors").write_bytes((target / "model.safetensors").read_bytes()[:-1])
    checks = results(target, draft)
    assert checks["draft config"].status == "fail"
    assert checks["target weights"].status == "fail"
    assert "promises" in checks["target weights"].detail
    assert checks["hidden size"] == Check(
        "hidden size", "warn", "not checked: the drafter's config cannot be used"
    )  # reported once, as the config's fault
    assert checks["draft files"].status == "ok"
    assert checks["stop ids"].status == "ok"
    assert {"target found", "draft found", *doctor._CHECKS} <= set(checks)


@pytest.mark.parametrize("broken", ["config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"])
def test_no_malformed_file_of_the_target_is_a_traceback(broken: str, target: Path, draft: Path) -> None:
    for content in (b"", b"[]", b"{}", b"\xff\xff", b'{"added_tokens": [1], "model": {"vocab": [1]}}'):
        (target / broken).write_bytes(content)
        results(target, draft)


def test_the_template_is_found_where_each_release_puts_it(target: Path, draft: Path) -> None:
    wanted = hashlib.sha256(TEMPLATE.encode()).hexdigest()
    (draft / "config.json").write_text(json.dumps(draft_dict(dflash_lab={"template_sha256": wanted})))
    assert "was trained with" in results(target, draft)["chat template"].detail
    (target / "chat_template.jinja").unlink()
    for spelling in (TEMPLATE, [{"name": "tool", "template": "x"}, {"name": "default", "template": TEMPLATE}]):
        (target / "tokenizer_config.json").write_text(json.dumps({"chat_template": spelling}))
        assert results(target, draft)["chat template"] == Check(
            "chat template", "ok", "the one that the drafter was trained with"
        )
    (target / "tokenizer_config.json").unlink()
    assert "no chat template" in results(target, draft)["chat template"].detail


def test_a_nested_text_config_and_a_generation_config_are_read(target: Path, draft: Path) -> None:
    nested = target_dict(eos_token_id=None)
    (target / "config.json").write_text(json.dumps({"model_type": "omni", "hidden_size": 999, "text_config": nested}))
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    checks = results(target, draft)
    assert checks["hidden size"].status == "ok"
    assert checks["stop ids"].detail == "1 <1>, 2 <2>"


def test_a_folder_without_tokenizer_is_a_warning(target: Path, draft: Path) -> None:
    (target / "tokenizer.json").unlink()
    checks = results(target, draft)
    assert checks["tokenizer"].status == checks["mask id"].status == "warn"
    assert checks["stop ids"].status == "ok"


def test_models_that_are_not_here_are_not_fetched(cache: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash.hub.cached", lambda source: None)
    monkeypatch.setattr("dflash.hub.fetch", lambda source, near: pytest.fail("fetched"))
    checks = {check.name: check for check in examine("Qwen/Qwen3-8B", "no such thing")}
    assert checks["target found"].status == "fail"
    assert "not on this machine" in checks["target found"].detail
    assert checks["draft found"].status == "fail"
    assert "no pair, local folder or hub id" in checks["draft found"].detail
    assert checks["hidden size"].status == "warn"
    fresh = {check.name: check for check in examine("smollm2-135m", str(draft))}
    assert fresh["target found"].status == "warn"
    assert "dflash models --fetch smollm2-135m" in fresh["target found"].detail
    assert not cache.exists()


def test_the_bundled_target_is_held_to_its_hashes(
    cache: Path, target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = bundled.SMOLLM2_135M.folder
    folder.parent.mkdir(parents=True)
    target.rename(folder)
    monkeypatch.setattr(bundled, "is_ready", lambda model: True)
    monkeypatch.setattr(bundled, "damage", lambda model: [])
    assert results(Path("smollm2-135m"), draft)["target hashes"].status == "ok"
    monkeypatch.setattr(bundled, "damage", lambda model: [f"{folder}/model.safetensors has changed"])
    found = results(Path("smollm2-135m"), draft)["target hashes"]
    assert found.status == "fail"
    assert "has changed; dflash models --fetch" in found.detail


TORCH = {"torch": "2.7", "transformers": "5.12.1", "safetensors": "0.5"}
MLX = {"mlx": "0.32.4", "mlx-lm": "0.32.2", "transformers": "5.12.1"}


def install(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], platform: tuple[str, str]) -> None:
    """Make these the machine's packages and platform; both backends announce themselves."""

    def version(package: str) -> str:
        if package not in versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions[package]

    points = [importlib.metadata.EntryPoint(name, "nowhere:Backend", "dflash.backends") for name in ("torch", "mlx")]
    monkeypatch.setattr(backends, "entry_points", lambda group: points)
    monkeypatch.setattr(backends, "version", version)
    monkeypatch.setattr("platform.system", lambda: platform[0])
    monkeypatch.setattr("platform.machine", lambda: platform[1])


@pytest.mark.parametrize("platform", [("Linux", "x86_64"), ("Darwin", "arm64"), ("Windows", "AMD64")])
@pytest.mark.parametrize(
    ("versions", "status"),
    [
        (TORCH, {"backend torch": "ok", "backend mlx": "ok"}),
        (TORCH | {"transformers": "6.0.0"}, {"backend torch": "fail", "backend mlx": "warn", "backend": "fail"}),
        (TORCH | {"transformers": "5.9"}, {"backend torch": "fail", "backend mlx": "warn", "backend": "fail"}),
        ({"torch": "2.7"}, {"backend torch": "warn", "backend mlx": "warn", "backend": "fail"}),
        ({}, {"backend torch": "warn", "backend mlx": "warn", "backend": "fail"}),
    ],
)
def test_the_torch_backend_and_its_versions_are_checked(
    versions: dict[str, str], status: dict[str, str], platform: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, versions, platform)
    assert {check.name: check.status for check in doctor._environment("auto")} == status


def test_one_sentence_says_what_the_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {}, ("Darwin", "arm64"))
    wanted = "none of the backends mlx, torch can be used; pip install 'dflash-lab[mlx]'"
    assert {check.name: check.detail for check in doctor._environment("auto")}["backend"] == wanted
    install(monkeypatch, TORCH, ("Darwin", "x86_64"))
    checks = {check.name: check.detail for check in doctor._environment("mlx")}
    assert checks["backend mlx"] == "not needed beside torch: it is for Apple silicon and Linux, not for macOS x86_64"
    assert checks["backend"] == "the backend mlx cannot be used; torch can"
    monkeypatch.setattr(backends, "entry_points", lambda group: [])
    (check,) = doctor._environment("auto")
    assert (check.status, check.detail) == ("fail", "no backend is installed; pip install 'dflash-lab[torch]'")


@pytest.mark.parametrize(
    ("part", "platform", "status", "detail"),
    [
        ("mlx-metal", ("Darwin", "arm64"), "ok", "mlx 0.32.4, mlx-lm 0.32.2, transformers 5.12.1, on Metal"),
        ("mlx-cpu", ("Linux", "aarch64"), "ok", "mlx 0.32.4, mlx-lm 0.32.2, transformers 5.12.1, on CPU"),
        ("nothing", ("Linux", "x86_64"), "fail", "without the part that does the work; pip install 'dflash-lab[mlx]'"),
        ("mlx-cpu", ("Windows", "AMD64"), "warn", "it is for Apple silicon and Linux, not for Windows AMD64"),
    ],
)
def test_the_mlx_backend_and_its_device_are_checked(
    part: str, platform: tuple[str, str], status: str, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, MLX | {part: "0.32.4"}, platform)
    found = {check.name: check for check in doctor._environment("auto")}["backend mlx"]
    assert found.status == status
    assert detail in found.detail


def test_a_target_quantised_for_mlx_needs_the_mlx_backend(
    target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = target_dict(quantization={"group_size": 64, "bits": 4}, quantization_config={"group_size": 64, "bits": 4})
    (target / "config.json").write_text(json.dumps(raw))
    install(monkeypatch, MLX | {"mlx-metal": "0.32.4"}, ("Darwin", "arm64"))
    found = results(target, draft)["target dtype"]
    assert found.status == "warn"
    assert found.detail.startswith("quantised for MLX, 4 bits in groups of 64; drafters are trained for")
    install(monkeypatch, TORCH, ("Linux", "x86_64"))
    found = results(target, draft)["target dtype"]
    assert found.status == "fail"
    assert "only the mlx backend reads; give the unquantised model" in found.detail


def test_the_tokenizers_end_token_ends_a_text_too(target: Path, draft: Path) -> None:
    for end in ("<1>", {"content": "<1>", "special": True}):
        (target / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
        assert results(target, draft)["stop ids"].detail == "1 <1>, 2 <2>"
    (target / "config.json").write_text(json.dumps(target_dict(eos_token_id=None)))
    assert results(target, draft)["stop ids"] == Check("stop ids", "ok", "1 <1>")


def command(*words: str) -> int:
    from dflash.cli import doctor as doctor_command

    parser = argparse.ArgumentParser()
    doctor_command.add_arguments(parser)
    return doctor_command.run(parser.parse_args(words))


def test_the_command_prints_every_check_and_tells_by_its_exit_code(target: Path, draft: Path, capsys: Any) -> None:
    assert command("--target", str(target), "--draft", str(draft)) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert all(name in shown for name in doctor._CHECKS)
    (draft / "config.json").write_text(json.dumps(draft_dict(hidden_size=32)))
    assert command("--target", str(target), "--draft", str(draft), "--json") == 1
    (line,) = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert (report["target"], report["draft"], report["ok"]) == (str(target), str(draft), False)
    assert {"name": "hidden size", "status": "fail"}.items() <= next(
        check for check in report["checks"] if check["name"] == "hidden size"
    ).items()


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["nothing"], ModelNotFoundError, "'nothing' is no pair.*pairs are smollm2-135m"),
        (["--draft", "somewhere"], UsageError, "needs a target"),
        (["--target", "some/where"], UsageError, "name one as draft"),
        (["smollm2-135m", "--target", "x"], UsageError, "give either"),
    ],
)
def test_the_command_refuses_half_a_pair(words: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        command(*words)


def test_doctor_needs_no_tensor_library(target: Path, draft: Path) -> None:
    code = (
        "import sys; from dflash.doctor import examine; "
        f"checks = examine({str(target)!r}, {str(draft)!r}); assert len(checks) > 15, checks; "
        "assert not {'torch', 'transformers', 'mlx'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
