"""``dflash bench --suite rounds`` and ``kernels`` on tiny pairs: what is held, what is refused, what is recorded."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from types import ModuleType

import pytest
import torch
from tiny_models import make_config, make_drafter, make_target, save_pair
from torch_dflash import measure, shapes

from dflash.cli.main import main
from dflash.errors import BackendError, UsageError
from dflash.prompts import EvalPrompt, PromptSet
from dflash.suites.rounds import PLAIN, WARM_ROUNDS, context_ids, fitting_contexts, measure_rounds
from dflash.suites.shapes import SHAPES, PairShape

IDS = [(7 * at) % 290 + 2 for at in range(80)]
TINY = PairShape(
    "tiny",
    {
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 300,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
    },
    draft_layers=2,
    block_size=8,
    mask_token_id=299,
    taps=3,
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    config = make_config()
    target, draft = save_pair(tmp_path_factory.mktemp("pair"), make_target(), config, make_drafter(config))
    prompts = target.parent / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "one", "prompt": [5, 6, 7, 8]}) + "\n")
    return ["--target", str(target), "--draft", str(draft), "--device", "cpu", "--prompts", str(prompts)]


def call(capsys, *argv):
    code = None
    with contextlib.suppress(SystemExit):
        code = main(["bench", *argv])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


# Rounds ----------------------------------------------------------------------------------------------------------


def test_every_round_is_held_at_its_context_and_is_the_engine_s_own(tiny, monkeypatch):
    """The target's and the drafter's lengths at each verification, and what a held round says beside a real one."""
    engine = tiny.engine(tiny.scripted(IDS[:20], wrong_at=(3,)))
    seen, forward = [], engine.target.forward

    def watched(tokens, **options):
        seen.append((len(tokens), engine.target.length, engine.drafter.length, engine.target.tapping))
        return forward(tokens, **options)

    monkeypatch.setattr(engine.target, "forward", watched)
    measured = measure_rounds(engine, IDS, [20], [1, 3, 5], repeats=1, rounds=4)
    (sample,) = measured.samples
    prefill, held, real = seen[0], seen[1 : 1 + 3 * (WARM_ROUNDS + 4)], seen[1 + 3 * (WARM_ROUNDS + 4) :]
    assert prefill == (20, 0, 0, True)
    assert {entry[1:3] for entry in held} == {(20, 20)}
    assert [rows for rows, *_ in held[:9]] == [1, 3, 5, 3, 5, 1, 5, 1, 3]  # another block size first each time
    assert all(tapping == (rows > PLAIN) for rows, _, _, tapping in held)
    assert {size: len(events) for size, events in sample.held.items()} == {1: 4, 3: 4, 5: 4}
    assert all(event.kind == "round" and event.accepted == 2 for event in sample.held[5])
    assert all(event.kind == "plain" and len(event.committed) == 1 for event in sample.held[1])
    assert [length for _, length, *_ in real] == [20 + 3 * at for at in range(WARM_ROUNDS + 4)]  # these do go on
    assert [event.accepted for _, event in sample.real] == [2] * 4
    assert all(wall > event.draft_seconds + event.verify_seconds > 0 for wall, event in sample.real)
    record = measured.to_dict()
    assert not record["partial"] and 0 < record["real"][0]["overhead_share"]["median"] < 1


def test_an_engine_decodes_as_before_after_its_rounds_were_measured(tiny):
    engine = tiny.engine()
    before = engine.generate(IDS[:9], max_new_tokens=20).token_ids
    measure_rounds(engine, IDS, [9, 30], [1, 4], repeats=1, rounds=2)
    assert engine.generate(IDS[:9], max_new_tokens=20).token_ids == before == tiny.oracle(IDS[:9], 20)


def test_what_cannot_be_measured_is_refused_before_anything_is(tiny):
    engine = tiny.engine()
    for contexts, sizes, options, sentence in (
        ([510], [4], {}, "a context of 510 tokens and a block do not fit into the target's 512 positions"),
        ([10], [0, 4], {}, "a block size is 0"),
        ([], [4], {}, "a context length is missing"),
        ([10], [4], {"repeats": 0}, "repeats is 0"),
        ([10], [4], {"rounds": 0}, "rounds is 0"),
    ):
        with pytest.raises(UsageError, match=sentence):
            measure_rounds(engine, IDS, contexts, sizes, **options)
    assert fitting_contexts(engine, (256, 504, 1024), (1, 8)) == (256, 504)


def test_a_context_is_filled_with_the_prompts_or_with_random_ids(tiny):
    prompts = PromptSet("two", (EvalPrompt([3, 4]), EvalPrompt([5])))
    assert context_ids(tiny.engine(), prompts, 5) == ([3, 4, 5, 3, 4], "the prompts of two, over and over")
    texts = PromptSet("text", (EvalPrompt("hello"),))
    ids, source = context_ids(tiny.engine(), texts, 50)
    assert source == "random ids from a fixed seed" and ids == context_ids(tiny.engine(), texts, 50)[0]
    assert len(set(ids)) > 20 and all(0 <= token < 300 for token in ids)


def test_the_rounds_command_records_every_cell(capsys, pair, tmp_path):
    output = tmp_path / "results.jsonl"
    argv = ("--suite", "rounds", *pair, "--contexts", "40,16", "--block-sizes", "1,4,8", "--rounds", "3")
    code, out, err = call(capsys, *argv, "--repeats", "2", "--json", "--output", str(output))
    record = json.loads(out)
    assert code == 0 and json.loads(output.read_text()) == record and record["kind"] == "bench-rounds"
    cells = {(cell["context"], cell["block_size"]): cell for cell in record["cells"]}
    assert list(cells) == [(16, 1), (16, 4), (16, 8), (40, 1), (40, 4), (40, 8)]
    for cell in cells.values():
        assert cell["seconds"]["median"] > 0 and cell["over_shortest_context"]["median"] > 0
        assert cell["verify_over_one_row"]["min"] > 0 and 0 < cell["overhead_share"]["max"] < 1
    assert record["repeats"] == 2 and record["rounds"] == 3 and not record["partial"]
    assert record["context_tokens"] == "the prompts of prompts.jsonl, over and over"
    assert len(record["prompt_set"]["sha256"]) == 64 and record["models"]["draft"]["fingerprint"]
    assert record["notes"] == [
        "block size 8 is above the 5 this drafter was made for: its time counts, its guesses do not"
    ]
    assert record["threads"] == torch.get_num_threads() and record["hardware"]["cores"]
    assert "verify ÷ one row" in err and "streamed     context 16" in err and "contexts: 4 of 4" in err


def test_usual_contexts_that_do_not_fit_are_left_out(capsys, pair):
    argv = ("--suite", "rounds", *pair, "--block-sizes", "1,4", "--rounds", "1", "--repeats", "1", "--json")
    record = json.loads(call(capsys, *argv)[1])
    assert {cell["context"] for cell in record["cells"]} == {256}  # of a target of 512 positions


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--suite", "rounds", "--contexts", "16,x"], "--contexts is '16,x'; it must be whole numbers from 1"),
        (["--suite", "rounds", "--block-sizes", "0"], "--block-sizes is '0'"),
        (["--suite", "rounds", "--rounds", "0"], "--rounds is 0"),
        (["--suite", "rounds", "--layers", "4"], "--layers goes with --shape"),
        (["--suite", "rounds", "--shape", "round"], "--shape is 'round'; there is qwen3-8b, smollm2-135m"),
        (["--suite", "rounds", "--shape", "qwen3-8b"], "leave --target, --draft and --backend out"),
        (["--suite", "rounds", "--temperature", "1"], "--temperature means nothing to --suite rounds; it is for acc"),
        (["--suite", "rounds", "--contexts", "4000"], "do not fit into the target's 512 positions"),
        (["--contexts", "16"], "--contexts means nothing to --suite acceptance; it is for rounds"),
        (["--suite", "kernels", "--limit", "2"], "--limit means nothing to --suite kernels"),
        (["--suite", "end-to-end", "--top-p", "0.5"], "--top-p means nothing to --suite end-to-end"),
        (["--suite", "end-to-end", "--max-new-tokens", "0"], "nothing to measure without a token"),
        (["--suite", "end-to-end", "--official", "/no/python"], "--official is /no/python, which is no program"),
        (["--suite", "end-to-end", "--max-new-tokens", "510"], "longer than the target's context of 512"),
        (["--suite", "rounds", "--repeats", "0"], "--repeats is 0"),
    ],
)
def test_a_suite_that_cannot_be_is_one_sentence(capsys, pair, argv, sentence):
    pair = pair if "kernels" not in argv else pair[:-2]
    code, out, err = call(capsys, *pair, *argv)
    (line,) = [line for line in err.splitlines() if line.strip()]
    assert code == 2 and out == "" and line.startswith("dflash: error: ") and sentence in line


def interrupt(monkeypatch, *, at):
    """Ctrl-C arrives while the drafter is busy for the ``at``-th time."""
    from torch_dflash.drafter import TorchDrafter

    propose, calls = TorchDrafter.propose, []

    def watched(self, *args, **options):
        calls.append(args)
        if len(calls) == at:
            signal.raise_signal(signal.SIGINT)
        return propose(self, *args, **options)

    monkeypatch.setattr(TorchDrafter, "propose", watched)


def test_interrupted_rounds_report_what_was_measured(capsys, pair, monkeypatch):
    argv = ("--suite", "rounds", *pair, "--contexts", "16,40", "--block-sizes", "1,4", "--rounds", "2", "--json")
    interrupt(monkeypatch, at=12)  # eight a context: four held, four real
    code, out, err = call(capsys, *argv)
    record = json.loads(out)
    assert code == 130 and record["partial"] and {cell["context"] for cell in record["cells"]} == {16}
    assert "partial: interrupted" in err
    interrupt(monkeypatch, at=2)
    code, out, err = call(capsys, *argv)
    assert code == 130 and out == "" and "interrupted before anything was measured" in err


# Shapes ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_shape(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", TINY)


@pytest.mark.parametrize(("dtype", "layers"), [("auto", None), ("float32", 4)])
def test_a_shape_is_served_with_random_weights(capsys, tiny_shape, dtype, layers):
    argv = ["--suite", "rounds", "--shape", "tiny", "--contexts", "16", "--block-sizes", "1,8", "--rounds", "2"]
    argv += ["--repeats", "1", "--json", "--dtype", dtype, *(["--layers", str(layers)] if layers else [])]
    code, out, _ = call(capsys, *argv)
    record = json.loads(out)
    assert code == 0 and record["shape"] == "tiny" and record["layers"] == (layers or 6)
    assert record["models"]["target"]["name"] == f"random weights in tiny's shape, {layers or 6} of 6 layers"
    assert record["dtype"] == {"auto": "bfloat16"}.get(dtype, dtype)
    assert record["context_tokens"] == "random ids from a fixed seed" and record["prompt_set"] is None
    assert all(cell["verify_seconds"]["median"] > 0 for cell in record["cells"])


def test_a_shape_s_engine_computes_what_transformers_does_with_its_weights():
    """The weights are spread, differ from row to row, and every buffer that is no weight is right."""
    engine = shapes.shape_engine(TINY, dtype="float32", device="cpu", longest=64)
    model = engine.target.model
    output = engine.generate(IDS[:9], max_new_tokens=12, ignore_eos=True).token_ids
    ids = torch.tensor([IDS[:9] + output])
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[0, 8:-1].argmax(-1).tolist()
    assert output == expected and len(set(output)) > 2
    weight = model.model.layers[0].mlp.down_proj.weight
    assert len(torch.unique(weight, dim=0)) == len(weight) and weight.std() > 0
    assert torch.equal(weight, weight.bfloat16().float())
    assert engine.drafter.config.target_layer_ids == (1, 2, 3) and engine.drafter.config.num_target_layers == 6


def test_full_size_shapes_are_those_of_the_published_pairs():
    config = SHAPES["qwen3-8b"].draft_config(36)
    assert config.target_layer_ids == (1, 9, 17, 25, 33) and config.block_size == 16
    assert SHAPES["smollm2-135m"].draft_config(30).target_layer_ids == (1, 8, 14, 20, 27)
    assert SHAPES["qwen3-8b"].draft_config(5).target_layer_ids == (0, 1, 2, 3, 4)
    for layers in (4, 37, 0):
        with pytest.raises(UsageError, match=f"layers is {layers}; qwen3-8b has 36, and its 5 taps need as many"):
            SHAPES["qwen3-8b"].layers(layers)


def test_a_shape_larger_than_memory_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setattr(shapes, "free_bytes", lambda device: 4 * 10**9)
    with pytest.raises(BackendError, match=r"36 layers need 2\d\.\d GB with their caches, and 4\.0 GB are free on cpu"):
        shapes.shape_engine(SHAPES["qwen3-8b"], longest=4096, device="cpu")
    monkeypatch.undo()
    free = shapes.free_bytes(torch.device("cpu"))
    assert free is None or 10**6 < free < 10**14


# Kernels ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(measure, "WORKING_SET", 1 << 14)
    monkeypatch.setattr(measure, "BUFFER", 1 << 20)
    monkeypatch.setattr(measure, "TIMES", 1)


def test_the_kernels_command_measures_the_cpu_s_products(capsys, pair, small):
    argv = ("--suite", "kernels", *pair[:-2], "--rows", "1,8", "--repeats", "2", "--json")
    code, out, err = call(capsys, *argv)
    record = json.loads(out)
    assert code == 0 and record["kind"] == "bench-kernels" and not record["partial"] and record["threads"]
    sizes = {(part["name"], part["outputs"], part["columns"]): part for part in record["products"]}
    assert sizes["queries, keys, values", 64, 32]["target"] == 4 and sizes["down", 32, 48]["draft"] == 0
    assert sizes["head", 300, 32]["draft"] == 1
    assert {(part["model"], part["rows"]) for part in record["passes"]} == {
        (model, rows) for model in ("target", "draft") for rows in (1, 8)
    }
    fastest = max(record["roofline"][name]["max"] for name in ("sum", "matrix times vector", "copy"))
    assert record["roofline"]["bytes_per_second"] == fastest > 0
    assert record["backend_products"] in ("cpu_dflash", "PyTorch")
    assert "no CUDA device" in err and "of roofline" in err


def test_interrupted_kernels_report_whole_products(capsys, pair, small, monkeypatch):
    seconds, calls = measure._seconds, []

    def watched(call):
        calls.append(call)
        if len(calls) == 30:
            signal.raise_signal(signal.SIGINT)
        return seconds(call)

    monkeypatch.setattr(measure, "_seconds", watched)
    code, out, _ = call(capsys, "--suite", "kernels", *pair[:-2], "--rows", "1", "--repeats", "1", "--json")
    record = json.loads(out)
    assert code == 130 and record["partial"] and 0 < len(record["products"]) < 7


def test_products_of_another_device_are_refused(tiny, small, monkeypatch):
    engine = tiny.engine()
    with pytest.raises(UsageError, match="all must be at least 1"):
        measure.measure_products(engine, [])
    monkeypatch.setattr(type(engine.backend), "name", "mlx")
    with pytest.raises(BackendError, match=r"PyTorch's products on a CPU; the engine is mlx's"):
        measure.measure_products(engine, [1])


def test_the_triton_kernels_report_is_taken_over(capsys, monkeypatch):
    bench = ModuleType("triton_dflash.bench")

    def run(arguments):
        print("a table", file=sys.stderr)
        print(
            json.dumps({"device": "a GPU", "dtype": "bfloat16", "copy_bytes_per_second": 9, "kernels": [{"name": "k"}]})
        )
        return 0

    bench.main = run
    monkeypatch.setitem(sys.modules, "triton_dflash", ModuleType("triton_dflash"))
    monkeypatch.setitem(sys.modules, "triton_dflash.bench", bench)
    monkeypatch.setattr(sys.modules["triton_dflash"], "bench", bench, raising=False)
    assert measure.measure_triton() == {
        "kernels": [{"name": "k"}],
        "copy_bytes_per_second": 9,
        "options": {"device": "a GPU", "dtype": "bfloat16"},
    }
    assert capsys.readouterr().out == ""
    bench.main = lambda arguments: 2
    with pytest.raises(BackendError, match="did not end well"):
        measure.measure_triton()
    monkeypatch.setitem(sys.modules, "triton_dflash", None)
    with pytest.raises(BackendError, match=r"pip install 'dflash-lab\[kernels\]'"):
        measure.measure_triton()
