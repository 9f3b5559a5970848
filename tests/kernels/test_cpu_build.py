"""The library is compiled once a machine, anew where it has to be, and where it cannot be the log says why, once."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cpu_dflash
import pytest
import torch
import torch.nn.functional as F
from cpu_cases import SIGHTS, Kind, assert_near, assert_same_bits, fill, needs_compiled, threads
from cpu_dflash import Unavailable, build, choose, description, forced, reason_against, use_compiled
from cpu_dflash.build import library
from cpu_dflash.structures import Linear, sized
from torch_dflash.cpu_stack import Chooser, CpuStack
from torch_dflash.products import product
from torch_dflash.stack import PlainStack
from torch_dflash.stacks import make_stack

CPU = torch.device("cpu")
KIND = Kind((3, 1, 8), SIGHTS["causal"])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own, and no memory of what was loaded before or in it."""
    for name in ("CXX", choose.SWITCH):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache"
    forget()


def forget() -> None:
    library.cache_clear()
    reason_against.cache_clear()


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What has been run, each command once it has begun."""
    seen: list[list[str]] = []
    run = subprocess.run

    def recorded(command: list[str], **options: Any) -> Any:
        seen.append(command)
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", recorded)
    return seen


@pytest.fixture(scope="module")
def ready() -> Path:
    """A library that was compiled before these tests, for compilers that only copy."""
    return Path(library()._name)


Script = Callable[[str], Path]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Makes a shell script the compiler: ``$out`` is what it is to write."""

    def script(body: str) -> Path:
        path = tmp_path / "compiler"
        path.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && echo "compiler 1" && exit 0\nfor out; do :; done\n{body}\n'
        )
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return path

    return script


def copying(ready: Path) -> str:
    return f'case "$1" in -shared) cp {ready} "$out" ;; *) : > "$out" ;; esac'


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "kernels").iterdir())


# Where it can be compiled ------------------------------------------------------------------------------------


@needs_compiled
def test_it_is_compiled_once(cache: Path, commands: list[list[str]]) -> None:
    first = library()
    assert len(commands) == 3 and commands[0][1:] == ["--version"], commands  # its version, compiled, linked
    (name,) = left_in(cache)
    assert name.startswith("passes-") and name.endswith(".so")
    x, weight = torch.randn(3, 24), torch.randn(7, 24)
    assert_near(cpu_dflash.product(x, weight), F.linear(x, weight))
    assert library() is first and len(commands) == 3

    commands.clear()
    forget()  # another process
    assert library()._name == str(cache / "kernels" / name)
    assert [command[1:] for command in commands] == [["--version"]]


@needs_compiled
def test_it_is_compiled_anew_for_another_folder_compiler_source_or_processor(
    cache: Path,
    tmp_path: Path,
    ready: Path,
    compiler: Script,
    commands: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script, source, flags = compiler(copying(ready)), tmp_path / "passes.cpp", build.processor_flags()
    source.write_text(build.SOURCE.read_text() + "// newer\n")
    changes: list[Callable[[], None]] = [
        lambda: None,
        lambda: monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "another")),
        lambda: monkeypatch.setattr(build, "SOURCE", source),
        lambda: script.write_text(script.read_text().replace("compiler 1", "compiler 2")) and None,
        lambda: monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g")),
        lambda: monkeypatch.setattr(build, "processor_flags", lambda: {*flags, "newer"}),
    ]
    paths = []
    for change in changes:
        change()
        for ran in (3, 1):
            commands.clear()
            forget()
            paths.append(library()._name)
            assert len(commands) == ran
    assert paths[::2] == paths[1::2] and len(set(paths)) == len(changes)
    assert len(left_in(cache)) == 1 and len(left_in(tmp_path / "another")) == len(changes) - 1


def compile_and_load(results: Any) -> None:
    forget()
    results.put((library()._name, library().size_of_linear()))


@needs_compiled
def test_two_processes_that_compile_at_once(cache: Path, tmp_path: Path, ready: Path, compiler: Script) -> None:
    """Each is in the middle of it before either ends, and nobody can load half a library: a whole one is renamed."""
    arrived = tmp_path / "arrived"
    arrived.mkdir()
    compiler(f"""{copying(ready)}
        case "$1" in -shared) stat -c %i "$out" >> {tmp_path}/inodes ;; *) exit 0 ;; esac
        : > {arrived}/$$
        for wait in $(seq 1200); do [ $(ls {arrived} | wc -l) -ge 2 ] && exit 0; sleep 0.05; done
        echo "error: alone" >&2; exit 1""")
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    processes = [context.Process(target=compile_and_load, args=(results,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    (name,) = left_in(cache)
    expected = (str(cache / "kernels" / name), ctypes.sizeof(Linear))
    assert [results.get(), results.get()] == [expected, expected] and len(list(arrived.iterdir())) == 2
    assert (cache / "kernels" / name).stat().st_ino in map(int, (tmp_path / "inodes").read_text().split())


@pytest.fixture(scope="module")
def avx2(ready: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that a processor without AVX-512 gets."""
    folder = tmp_path_factory.mktemp("avx2")
    unlinked, linked = str(folder / "passes.o"), folder / "passes.so"
    compiler = build._compiler()
    build._run([compiler, *build.FLAGS, "-mno-avx512f", str(build.SOURCE), "-o", unlinked])
    build._run([compiler, "-shared", unlinked, "-o", str(linked)])
    return linked


@needs_compiled
def test_the_code_for_avx2_computes_the_same(avx2: Path, compiler: Script) -> None:
    compiler(copying(avx2))
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.randn(64, 257), torch.randn(97, 257).to(dtype)
        assert_near(cpu_dflash.product(x, weight), F.linear(x, weight.float()))
    head, norm, states = torch.randn(1025, 97), torch.ones(97), torch.randn(9, 97)
    expected = F.linear(F.rms_norm(states, (97,)), head).argmax(-1)
    for count in (1, 2, 3):
        with threads(count):
            assert torch.equal(Chooser(head, norm, 1e-6).choose(states), expected)
    for size in ((4, 2, 16), (3, 1, 8), (5, 5, 20)):
        kind = Kind(size, SIGHTS["mixed"], hidden=97)
        given, x = (kind.layers(), kind.stack_size, kind.sights), torch.randn(16, 97)
        found = []
        for stack in (PlainStack(*given, kind.rotary()), CpuStack(*given, kind.rotary())):
            fill(stack, 250, 266)
            with torch.inference_mode():
                found.append(stack.run(x, 250, {4})[4])
        assert_near(found[1], found[0])


@needs_compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_row_is_the_same_bits_whatever_comes_with_it_on_avx2(
    dtype: torch.dtype, avx2: Path, compiler: Script
) -> None:
    compiler(copying(avx2))
    x, weight = torch.randn(64, 257), torch.randn(97, 257).to(dtype)
    whole = cpu_dflash.product(x, weight)
    for step in (1, 2, 3, 7):
        parts = [cpu_dflash.product(part, weight) for part in x.split(step)]
        assert_same_bits(torch.cat(parts), whole, f"{step} rows at a time")
    assert_same_bits(cpu_dflash.product(x, weight.float()), whole, "the widened weights")


@needs_compiled
def test_a_stacks_rows_one_by_one_are_the_blocks_bits_on_avx2(avx2: Path, compiler: Script) -> None:
    compiler(copying(avx2))
    kind = Kind((4, 2, 16), SIGHTS["causal"], hidden=97)
    stack = CpuStack(kind.layers(), kind.stack_size, kind.sights, kind.rotary())
    fill(stack, 250, 266)
    x = torch.randn(16, 97)
    with torch.inference_mode():
        whole = stack.run(x, 250, {1})[1]
        parts = [stack.run(x[at : at + 1], 250 + at, {1})[1] for at in range(16)]
    assert_same_bits(torch.cat(parts), whole)


# Where it cannot ---------------------------------------------------------------------------------------------


def falls_to_plain(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """Models and products do without it, and the log has ``reason``, once."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "cpu_dflash"), torch.inference_mode():
        for _ in range(2):
            stack = make_stack(KIND.layers(), KIND.stack_size, KIND.sights, KIND.rotary())
            assert type(stack) is PlainStack
            x, weight = torch.randn(3, 24), torch.randn(7, 24)
            assert_near(product(x, weight), F.linear(x, weight))
    assert [record.getMessage() for record in caplog.records] == [f"plain PyTorch instead of compiled passes: {reason}"]
    assert description() == f"plain: {reason}"


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = "there is no C++ compiler; g++ 12 or newer is one"
    with pytest.raises(Unavailable) as caught:
        library()
    assert str(caught.value) == reason
    falls_to_plain(reason, caplog)
    with pytest.raises(Unavailable, match="no C\\+\\+ compiler"), forced(True):
        raise AssertionError("forced(True) without a library")


FAILURES = {
    "compiling fails": (
        'echo "note: hm" >&2; echo "passes.cpp:3: error: no lanes" >&2; echo "error: 2" >&2; exit 1',
        "passes.cpp:3: error: no lanes",
    ),
    "no line says error": ('echo "  Killed" >&2; exit 137', "Killed"),
    "nothing is said": ("exit 1", ""),
    "linking fails": (
        'case "$1" in -shared) echo "ld: error: no space" >&2; exit 1 ;; *) : > "$out" ;; esac',
        "ld: error: no space",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_compiler_that_fails(name: str, compiler: Script, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    body, line = FAILURES[name]
    script = compiler(body)
    with pytest.raises(Unavailable) as caught:
        library()
    assert str(caught.value).rstrip() == f"{script} cannot compile them: {line}".rstrip()
    assert left_in(cache) == []
    falls_to_plain(str(caught.value), caplog)


def test_a_compiler_that_cannot_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(Unavailable, match=r"broken cannot compile them: .*Exec format error"):
        library()


def test_a_compiler_that_takes_too_long(
    compiler: Script, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler("exec sleep 30")
    monkeypatch.setattr(build, "PATIENCE", 1)
    with pytest.raises(Unavailable, match=r"cannot compile them: .*timed out after"):
        library()
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_a_library_that_cannot_be_loaded(compiler: Script, caplog: pytest.LogCaptureFixture) -> None:
    compiler(': > "$out"')
    with pytest.raises(Unavailable, match=r"passes-[0-9a-f]+\.so cannot be loaded: .*file too short") as caught:
        library()
    falls_to_plain(str(caught.value), caplog)


@pytest.mark.parametrize("where", ["beneath a file", "a file", "nowhere"])
def test_a_cache_that_cannot_be_written(
    where: str, tmp_path: Path, compiler: Script, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.touch()
    folder = {"beneath a file": file / "cache", "a file": file, "nowhere": Path("/proc/nowhere")}[where]
    compiler(': > "$out"')
    monkeypatch.setenv("DFLASH_CACHE", str(folder))
    with pytest.raises(Unavailable) as caught:
        library()
    assert str(caught.value).startswith(f"{folder}/kernels cannot be written: ")
    falls_to_plain(str(caught.value), caplog)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_without_permission(tmp_path: Path, compiler: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    compiler(': > "$out"')
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "locked"))
    with pytest.raises(Unavailable, match="kernels cannot be written: Permission denied"):
        library()


@pytest.mark.parametrize("change", ["system", "machine", "flags", "fma"])
def test_other_machines(change: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    if change in ("system", "machine"):
        monkeypatch.setattr(platform, change, lambda: {"system": "Darwin", "machine": "aarch64"}[change])
    else:
        monkeypatch.setattr(build, "processor_flags", lambda: set() if change == "flags" else {"sse2", "avx2"})
    falls_to_plain("they are written for Linux on x86-64 with AVX2", caplog)


# What is chosen ----------------------------------------------------------------------------------------------


def test_switched_off_nothing_is_compiled(
    cache: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(choose.SWITCH, "0")
    assert description() == "not asked for"
    falls_to_plain("DFLASH_CPU_KERNELS is 0", caplog)
    assert commands == [] and not cache.exists()


@needs_compiled
def test_forced_holds_within_and_no_longer(ready: Path, compiler: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(copying(ready))
    assert use_compiled(CPU, torch.float32)
    assert description() in ("compiled, AVX-512", "compiled, AVX2")
    with forced(False):
        assert not use_compiled(CPU, torch.float32)
        with forced(True):
            assert use_compiled(CPU, torch.float32)
            assert not use_compiled(CPU, torch.bfloat16) and not use_compiled(torch.device("meta"), torch.float32)
        assert not use_compiled(CPU, torch.float32)
    with pytest.raises(KeyError), forced(False):
        raise KeyError
    assert use_compiled(CPU, torch.float32)
    monkeypatch.setenv(choose.SWITCH, "0")
    assert not use_compiled(CPU, torch.float32)
    with forced(True):
        assert use_compiled(CPU, torch.float32)


@needs_compiled
def test_structures_are_the_librarys(ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Longer(Linear):
        _fields_ = (("more", ctypes.c_int64),)

    monkeypatch.setitem(cpu_dflash.structures._STRUCTURES, "linear", Longer)
    sized.cache_clear()
    with pytest.raises(AssertionError, match="linear takes 40 bytes in the library and 48 here"):
        sized(ctypes.CDLL(str(ready)))
