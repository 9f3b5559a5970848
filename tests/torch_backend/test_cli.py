"""The commands a person uses: generate, chat and bench on a tiny pair saved as folders."""

import contextlib
import io
import itertools
import json
import os
import signal
import subprocess
import sys

import pytest
from saved_tokenizer import save_byte_tokenizer
from tiny_models import make_config, make_drafter, make_target, save_pair
from torch_dflash.backend import CpuClock
from torch_dflash.drafter import TorchDrafter

from dflash.cli.main import main
from dflash.tokenizer import Tokenizer
from dflash.trace import Trace


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Model flags of a random pair with the byte tokenizer."""
    config = make_config()
    target, draft = save_pair(tmp_path_factory.mktemp("pair"), make_target(), config, make_drafter(config))
    save_byte_tokenizer(target)
    return ["--target", str(target), "--draft", str(draft), "--device", "cpu"]


@pytest.fixture
def scripted(tiny, tmp_path, monkeypatch):
    """``dflash.load`` gives an engine whose drafter is wrong at the third slot only: two accepted a round."""
    tokenizer = Tokenizer.load(save_byte_tokenizer(tmp_path / "tokenizer"))
    engine = tiny.engine(tiny.scripted(tokenizer.encode("hi"), wrong_at=(3,)), tokenizer=tokenizer)
    monkeypatch.setattr("dflash.loading.load", lambda **_: engine)
    return engine


def call(capsys, *argv):
    """(exit code, stdout, stderr) of one command; no traceback, whatever happens."""
    try:
        code = main(argv)
    except SystemExit as leaving:
        code = leaving.code
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


def refused(capsys, *argv):
    """(exit code, message) of a command that must refuse in one sentence and print no text."""
    code, out, err = call(capsys, *argv)
    assert out == ""
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("dflash: error: "), err
    return code, lines[0]


# generate --------------------------------------------------------------------------------------------------------


def test_text_is_on_stdout_and_figures_on_stderr(capsys, scripted):
    code, out, err = call(capsys, "generate", "hi", "--max-new-tokens", "10")
    assert code == 0
    assert out == scripted.generate("hi", max_new_tokens=10).text + "\n"
    assert "τ 3.00 (9 tokens ÷ 3 rounds)" in err and "6/" in err and "finish      length" in err


def test_rounds_come_before_the_text(capsys, scripted):
    code, out, _ = call(capsys, "generate", "hi", "--max-new-tokens", "10", "--show", "rounds")
    text = scripted.generate("hi", max_new_tokens=10).text
    assert code == 0 and out.endswith(f"\n\n{text}\n")
    legend, prefill, *rounds = out.removesuffix(f"\n\n{text}\n").split("\n")
    assert legend.count("✓ accepted") == 1 and "★ bonus" in legend
    assert "prefill of 5 tokens" in prefill
    assert len(rounds) == 3
    assert [line.split()[1] for line in rounds] == ["2/4", "2/4", "2/3"]
    assert all(line.count("✓") == 2 and line.count("✗") == 1 and line.count("→") == 1 for line in rounds)


def test_json_rounds_are_the_engine_s_events_and_end_with_the_result(capsys, scripted):
    code, out, _ = call(capsys, "generate", "hi", "--max-new-tokens", "10", "--show", "json")
    *steps, result = map(json.loads, out.splitlines())
    assert code == 0 and [step["kind"] for step in steps] == ["prefill", "round", "round", "round"]
    assert [token for step in steps for token in step["committed"]] == result["token_ids"]
    assert result["finish_reason"] == "length" and result["metrics"]["mean_acceptance_length"] == 3.0
    assert set(result) == {"text", "token_ids", "finish_reason", "metrics", "notes", "facts"}


@pytest.mark.parametrize("show", ["text", "rounds"])
def test_json_is_the_last_line_in_every_mode(capsys, scripted, show):
    _, out, _ = call(capsys, "generate", "hi", "--max-new-tokens", "4", "--show", show, "--json", "--compare")
    result = json.loads(out.splitlines()[-1])
    assert len(result["token_ids"]) == 4 and result["compare"]["identical"] is True
    assert result["compare"]["plain"]["num_plain_steps"] == 3


def test_compare_says_that_the_tokens_are_identical(capsys, pair):
    code, _, err = call(capsys, "generate", "hello", *pair, "--max-new-tokens", "8", "--compare")
    assert code == 0 and "identical to plain decoding: yes\n" in err
    assert "speedup" in err and "break-even  τ" in err


def test_compare_finds_a_wrong_token(capsys, scripted, monkeypatch):
    from dflash.engine import Engine

    stream = Engine.stream

    def shifted(self, prompt, **options):
        return stream(self, "ho" if options.get("speculate") is False else prompt, **options)

    monkeypatch.setattr(Engine, "stream", shifted)
    _, _, err = call(capsys, "generate", "hi", "--max-new-tokens", "8", "--compare")
    assert "identical to plain decoding: no (first difference at token" in err


def test_compare_holds_with_sampling_and_without_a_seed(capsys, pair):
    _, _, err = call(capsys, "generate", "x", *pair, "--max-new-tokens", "12", "--temperature", "1", "--compare")
    assert "identical to plain decoding: yes\n" in err


def test_a_stop_text_ends_the_output_and_may_be_repeated(capsys, scripted):
    whole = scripted.generate("hi", max_new_tokens=10).text
    at = next(at for at in range(1, len(whole)) if whole[at] not in whole[:at] and whole[at] != "\ufffd")
    _, out, err = call(capsys, "generate", "hi", "--max-new-tokens", "10", "--stop", "never", "--stop", whole[at])
    assert out == whole[:at] + "\n" and "finish      stop" in err


def test_the_prompt_comes_from_a_file_or_from_stdin(capsys, scripted, tmp_path, monkeypatch):
    (tmp_path / "prompt.txt").write_text("hi", encoding="utf-8")
    _, by_file, _ = call(capsys, "generate", "--prompt-file", str(tmp_path / "prompt.txt"), "--max-new-tokens", "5")
    for argv in ((), ("--prompt-file", "-")):
        monkeypatch.setattr("sys.stdin", io.StringIO("hi"))
        _, by_stdin, _ = call(capsys, "generate", *argv, "--max-new-tokens", "5")
        assert by_stdin == by_file != "\n"


def test_a_trace_holds_every_step(capsys, scripted, tmp_path):
    file = tmp_path / "trace.jsonl.gz"
    _, out, _ = call(capsys, "generate", "hi", "--max-new-tokens", "10", "--json", "--trace", str(file))
    trace, result = Trace.load(file), json.loads(out.splitlines()[-1])
    assert len(trace.steps) == 4 and trace.tail["token_ids"] == result["token_ids"]
    assert trace.head["verify"] == "greedy" and trace.head["block_size"] == 5
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [file.name]


def test_a_fallback_is_told(capsys, pair, monkeypatch):
    spent, propose = itertools.count(0.0), TorchDrafter.propose

    def costly(self, *args, **options):
        for _ in range(9):
            next(spent)
        return propose(self, *args, **options)

    monkeypatch.setattr(TorchDrafter, "propose", costly)
    monkeypatch.setattr(CpuClock, "now", lambda self: next(spent))
    monkeypatch.setattr(CpuClock, "mark", lambda self: next(spent))
    argv = ("generate", "hello", *pair, "--max-new-tokens", "60", "--ignore-eos", "--fallback")
    _, _, err = call(capsys, *argv)
    assert "note: went on without the drafter" in err and "plain steps" in err


def test_an_oversized_block_is_a_note(capsys, pair):
    code, _, err = call(capsys, "generate", "hello", *pair, "--max-new-tokens", "3", "--block-size", "9")
    assert code == 0 and "note: block_size 9 is above the 5" in err


# Bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["hi", "--max-new-tokens", "-1"], "--max-new-tokens is -1"),
        (["hi", "--max-new-tokens", "many"], "invalid int value"),
        (["hi", "--temperature", "-0.5"], "temperature is -0.5"),
        (["hi", "--temperature", "nan"], "temperature is nan"),
        (["hi", "--top-p", "0"], "top_p is 0.0"),
        (["hi", "--top-p", "1.01"], "top_p is 1.01"),
        (["hi", "--top-k", "-2"], "top_k is -2"),
        (["hi", "--seed", "-1"], "seed is -1"),
        (["hi", "--block-size", "1"], "--block-size is '1'"),
        (["hi", "--block-size", "wide"], "--block-size is 'wide'"),
        (["hi", "--show", "colours"], "invalid choice"),
        (["hi", "--nonsense"], "unrecognized arguments"),
        ([""], "the prompt is empty"),
        ([" \n "], "the prompt is empty"),
        (["caf\udce9"], "not UTF-8"),
        (["hi", "--prompt-file", "x"], "not both"),
        (["--prompt-file", "/no/such/file"], "/no/such/file cannot be read"),
        (["--prompt-file", "/"], "cannot be read"),
        (["hi", "--verify", "hope"], "verify is 'hope'"),
        (["hi", "--temperature", "1", "--verify", "greedy"], "needs temperature 0"),
        (["x" * 600], "the prompt has 60"),
    ],
)
def test_a_request_that_can_never_work_is_one_sentence_and_exit_2(capsys, pair, argv, sentence):
    code, message = refused(capsys, "generate", *pair, *argv)
    assert code == 2 and sentence in message


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--target", "nowhere"], "nowhere"),
        (["--target", "no/such-model", "--draft", "no/such-drafter"], "no/such-model"),
        (["--backend", "abacus"], "there is no backend 'abacus'"),
        (["--device", "abacus"], "device 'abacus' cannot be used"),
        (["--dtype", "int3"], "dtype is 'int3'"),
        (["--trace", "/no/such/folder/trace"], "there is no folder /no/such/folder"),
        (["--trace", "/"], "no regular file"),
    ],
)
def test_what_is_missing_here_is_one_sentence_and_exit_1(capsys, pair, argv, sentence):
    code, message = refused(capsys, "generate", "hi", *pair, *argv)
    assert code == 1 and sentence in message


def test_a_target_without_a_known_drafter_asks_for_one(capsys, pair):
    code, message = refused(capsys, "generate", "hi", "--target", pair[1])
    assert code == 2 and "no drafter is known" in message


@pytest.mark.parametrize("fault", ["cut", "garbage", "missing", "config"])
def test_a_broken_drafter_is_one_sentence(capsys, pair, tmp_path, fault):
    config = make_config()
    _, draft = save_pair(tmp_path, make_target(), config, make_drafter(config))
    weights = draft / "model.safetensors"
    if fault == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif fault == "garbage":
        weights.write_bytes(b"nonsense" * 100)
    elif fault == "missing":
        weights.unlink()
    else:
        (draft / "config.json").write_text("{")
    code, message = refused(capsys, "generate", "hi", *pair[:2], "--draft", str(draft))
    assert code == 1 and str(draft) in message


def test_a_drafter_for_another_target_is_one_sentence(capsys, pair, tmp_path):
    config = make_config(vocab_size=200, mask_token_id=199)
    _, draft = save_pair(tmp_path, make_target(vocab_size=200), config, make_drafter(config))
    code, message = refused(capsys, "generate", "hi", *pair[:2], "--draft", str(draft))
    assert code == 1 and "200" in message and "300" in message


def test_a_truncated_target_is_one_sentence(capsys, tmp_path):
    config = make_config()
    target, draft = save_pair(tmp_path, make_target(), config, make_drafter(config))
    weights = target / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    code, message = refused(capsys, "generate", "hi", "--target", str(target), "--draft", str(draft))
    assert code == 1 and str(target) in message


# chat ------------------------------------------------------------------------------------------------------------


def chat(capsys, monkeypatch, text, *argv):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return call(capsys, "chat", *argv)


def test_every_line_of_stdin_is_a_turn_of_one_conversation(capsys, scripted, monkeypatch):
    code, out, err = chat(capsys, monkeypatch, "hi\n\nand then?\n", "--max-new-tokens", "4", "--system", "be brief")
    system = [{"role": "system", "content": "be brief"}]
    turns = [*system, {"role": "user", "content": "hi"}]
    first = scripted.generate(turns, max_new_tokens=4).text
    turns += [{"role": "assistant", "content": first}, {"role": "user", "content": "and then?"}]
    assert code == 0 and out == f"{first}\n{scripted.generate(turns, max_new_tokens=4).text}\n"
    assert err.count("tok/s decode]") == 2


def test_chat_commands(capsys, scripted, monkeypatch):
    lines = "/stats\nhi\n/stats\n/reset\nhi\n/help\n/nonsense\n/quit\nnever\n"
    code, out, err = chat(capsys, monkeypatch, lines, "--max-new-tokens", "4")
    answer = scripted.generate("hi", max_new_tokens=4).text
    assert code == 0 and out == f"{answer}\n" * 2  # forgotten in between, so the same answer; nothing after /quit
    assert "there is no answer yet" in err and "all answers 4 tokens" in err
    assert "there is no command /nonsense" in err


def test_the_oldest_turns_make_room_and_it_is_said(capsys, scripted, monkeypatch):
    lines = f"{'a' * 200}\n{'b' * 200}\n{'c' * 100}\n"
    code, _, err = chat(capsys, monkeypatch, lines, "--max-new-tokens", "20")
    assert code == 0 and err.count("no longer sees the oldest turn") == 1


def test_a_turn_that_can_never_fit_is_one_sentence(capsys, scripted, monkeypatch):
    code, out, err = chat(capsys, monkeypatch, "a" * 600, "--max-new-tokens", "20")
    assert (code, out) == (2, "") and "the target's context holds 512" in err


def test_chat_needs_a_chat_template(capsys, scripted, monkeypatch, tmp_path):
    scripted.tokenizer = Tokenizer.load(save_byte_tokenizer(tmp_path / "bare", template=None))
    code, _, err = chat(capsys, monkeypatch, "hi\n")
    assert code == 2 and "no chat template" in err


# bench -----------------------------------------------------------------------------------------------------------

PROMPTS = [
    {"id": "one", "domain": "math", "prompt": "1+1"},
    {"domain": "chat", "messages": [{"role": "user", "content": "hi"}]},
]


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return file


def test_bench_ends_with_one_json_line_and_appends_the_same(capsys, pair, prompts, tmp_path):
    output = tmp_path / "results.jsonl"
    argv = ("bench", *pair, "--prompts", str(prompts), "--repeats", "2", "--max-new-tokens", "6", "--ou", str(output))
    for _ in range(2):
        code, out, err = call(capsys, *argv, "--json")
        assert code == 0 and len(out.splitlines()) == 1
    record = json.loads(out)
    assert [json.loads(line)["kind"] for line in output.read_text().splitlines()] == ["bench", "bench"]
    assert json.loads(output.read_text().splitlines()[1]) == record
    assert record["mean_acceptance_length"] >= 1 and len(record["acceptance_rate_per_position"]) == 4
    for arm in ("plain", "dflash"):
        assert record[arm]["decode_tokens_per_second"]["median"] > 0
        assert record[arm]["end_to_end_tokens_per_second"]["median"] > 0
    assert record["identical_prompts"] == 2 and set(record["domains"]) == {"math", "chat"}
    assert len(record["prompt_set"]["sha256"]) == 64 and record["models"]["draft"]["fingerprint"]
    assert record["verify"] == "greedy" and record["block_size"] == 5 and record["dtype"] == "float32"
    assert "speedup" in err and "2/2" in err and "prompts: 4 of 4" in err


def test_bench_takes_part_of_the_shipped_prompts(capsys, pair):
    argv = (
        "bench",
        *pair,
        "--domains",
        "code,chat",
        "--limit",
        "2",
        "--repeats",
        "1",
        "--max-new-tokens",
        "3",
        "--json",
    )
    record = json.loads(call(capsys, *argv)[1])
    assert record["prompt_set"]["name"] == "mini" and set(record["domains"]) == {"code", "chat"}


@pytest.mark.parametrize(
    ("argv", "code", "sentence"),
    [
        (["--repeats", "0"], 2, "--repeats is 0"),
        (["--limit", "0"], 2, "limit is 0"),
        (["--max-new-tokens", "0"], 2, "nothing to measure"),
        (["--domains", "poetry"], 2, "domain 'poetry' is not in mini; there are math, code, chat"),
        (["--prompts", "/no/such.jsonl"], 2, "/no/such.jsonl cannot be read"),
        (["--prompts", "hf:nothing"], 2, "is no data set"),
        (["--output", "/no/such/folder/x"], 1, "there is no folder"),
    ],
)
def test_a_bench_that_cannot_be_is_one_sentence(capsys, pair, argv, code, sentence):
    found, message = refused(capsys, "bench", *pair, *argv)
    assert found == code and sentence in message


def test_a_bad_prompt_line_is_named(capsys, pair, prompts):
    with prompts.open("a") as stream:
        stream.write("{\n")
    code, message = refused(capsys, "bench", *pair, "--prompts", str(prompts))
    assert code == 2 and "prompts.jsonl, line 3, is not JSON" in message


# The world around ------------------------------------------------------------------------------------------------


def test_help_imports_nothing_heavy():
    code = "import sys; from dflash.cli.main import main\n"
    code += "try: main(['generate', '--help'])\nexcept SystemExit: pass\n"
    code += "print([name for name in ('torch', 'transformers', 'numpy', 'rich') if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.rstrip().endswith("[]") and "--show" in out


def press_ctrl_c(engine, monkeypatch, *, at):
    """Ctrl-C arrives while the drafter is busy for the ``at``-th time."""
    propose, calls = engine.drafter.propose, []

    def watched(*args, **options):
        calls.append(args)
        if len(calls) == at:
            signal.raise_signal(signal.SIGINT)
        return propose(*args, **options)

    monkeypatch.setattr(engine.drafter, "propose", watched)


@pytest.mark.parametrize("show", ["text", "rounds", "json"])
def test_ctrl_c_stops_at_a_round_with_the_text_so_far(capsys, scripted, monkeypatch, show):
    before = signal.getsignal(signal.SIGINT)
    whole = scripted.generate("hi", max_new_tokens=40)
    press_ctrl_c(scripted, monkeypatch, at=3)
    code, out, err = call(capsys, "generate", "hi", "--max-new-tokens", "40", "--show", show, "--json")
    result = json.loads(out.splitlines()[-1])
    assert code == 130 and result["finish_reason"] == "cancelled"
    assert result["token_ids"] == whole.token_ids[:10]  # the prefill's token, and three rounds of three
    assert show == "json" or result["text"] in out
    assert "finish      cancelled" in err and "(9 tokens ÷ 3 rounds)" in err
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_ends_an_answer_and_keeps_the_turn(capsys, scripted, monkeypatch):
    press_ctrl_c(scripted, monkeypatch, at=2)
    code, out, err = chat(capsys, monkeypatch, "hi\ngo on\n", "--max-new-tokens", "30")
    first, _, second = out.partition("\n")
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": first}]
    turns.append({"role": "user", "content": "go on"})
    assert code == 0 and err.count("· stopped]") == 1
    assert second == scripted.generate(turns, max_new_tokens=30).text + "\n"


def test_an_interrupted_bench_reports_what_it_measured(capsys, scripted, prompts, monkeypatch):
    press_ctrl_c(scripted, monkeypatch, at=40)
    argv = ("bench", "--prompts", str(prompts), "--repeats", "50", "--max-new-tokens", "8", "--json")
    code, out, err = call(capsys, *argv)
    record = json.loads(out)
    assert code == 130 and record["partial"] and record["prompts"] == 2
    assert record["repeats"] < 50 and "partial: interrupted" in err


def test_output_that_a_terminal_cannot_show_is_replaced_and_not_a_crash(scripted, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["generate", "hi", "--max-new-tokens", "12", "--show", "rounds"]) == 0
    out = raw.getvalue()
    assert out.isascii() and b"+ accepted draft token" in out and b"> correction" in out and b"?" in out


@pytest.mark.skipif(os.name == "nt", reason="pipes as POSIX has them")
def test_a_reader_that_goes_away_is_no_error(scripted, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with io.TextIOWrapper(os.fdopen(writer, "wb"), encoding="utf-8") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        assert main(["generate", "hi", "--max-new-tokens", "12"]) == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_behind_stdout_is_one_sentence(capsys, scripted, monkeypatch):
    full = open("/dev/full", "w")  # noqa: SIM115 (closing it fails, too)
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", full)
        assert main(["generate", "hi", "--max-new-tokens", "4"]) == 1
    with contextlib.suppress(OSError):
        full.close()
    assert capsys.readouterr().err.splitlines()[-1] == "dflash: error: No space left on device"


def test_colour_is_for_terminals(capsys, scripted, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    _, out, _ = call(capsys, "generate", "hi", "--max-new-tokens", "9", "--show", "rounds")
    assert "\x1b" not in out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    _, out, _ = call(capsys, "generate", "hi", "--max-new-tokens", "9", "--show", "rounds")
    assert "\x1b[38;5;" in out
    monkeypatch.setenv("NO_COLOR", "1")
    _, out, _ = call(capsys, "generate", "hi", "--max-new-tokens", "9", "--show", "rounds")
    assert "\x1b[38;5;" not in out
