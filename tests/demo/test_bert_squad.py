"""The question answering demo: its scores against the official script's cases, its tokeniser, and a few steps."""

from __future__ import annotations

import json
import lzma
import sys

import bert_squad
import encoder
import numpy as np
import onnx
import pytest
import squad

import amp_transpiler as amp
from tests.helpers.placement import needs_placement_tool, place
from tests.helpers.where import DATA, NO_DATA


def question(text: str, context: str, answers: list[str], start: int = -1) -> squad.Question:
    return squad.Question(text, context, answers, context.index(answers[0]) if start < 0 else start, answers[0])


# -- scores ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "answer, gold, match, f1",
    [
        ("Denver Broncos", "the Denver Broncos", 1, 1),
        ("The  Denver-Broncos!", "denverbroncos", 1, 1),  # punctuation goes without leaving a space
        ("Denver", "Denver Broncos", 0, 2 / 3),
        ("Carolina", "Denver Broncos", 0, 0),
        ("a theme", "theme", 1, 1),  # articles are whole words
        ("to to be", "to be be", 0, 2 / 3),  # bags: each word counts as often as both have it
        ("the", "an", 1, 0),  # nothing is left of either: equal, but without a common word
        ("", "x", 0, 0),
    ],
)
def test_scores_are_the_official_ones(answer: str, gold: str, match: float, f1: float) -> None:
    assert squad.exact_match(answer, gold) == match
    assert squad.f1(answer, gold) == pytest.approx(f1)


def test_a_score_takes_the_best_gold_and_counts_missing_answers() -> None:
    asked = [question("q", "in 1998 or 1999", ["1998", "in 1998"]), question("q", "blue", ["blue"])]
    assert squad.score({0: "in 1998", 1: "red"}, asked) == (50, 50)
    assert squad.score({0: "in 1998"}, asked) == (50, 50)
    match, f1 = squad.score({0: "1998 or", 1: "blue"}, asked)
    assert match == 50 and f1 == pytest.approx(100 * (2 / 3 + 1) / 2)


# -- windows -----------------------------------------------------------------------------------------
def test_windows_cover_the_paragraph_and_find_the_answer() -> None:
    asked, pieces = squad.synthetic(20, 3)
    data = squad.windows(asked, pieces, 16, 4)
    for number, each in enumerate(asked):
        own = data.pick(data.question == number)
        words = {(int(a), int(b)) for a, b in own.spans.reshape(-1, 2) if a >= 0}
        assert len(words) == len(each.context.split()), "every piece of the paragraph is in some window"
        for row in np.flatnonzero(own.start >= 0):
            first, last = own.spans[row, own.start[row], 0], own.spans[row, own.end[row], 1]
            assert each.context[first:last] == each.text
        assert (own.start >= 0).any()
    assert ((data.ids != pieces.pad) == (data.mask == 1)).all() and (data.segments[data.mask == 0] == 0).all()


@pytest.mark.parametrize("stride", [9, 12, 64])
def test_a_stride_beyond_the_room_skips_no_word(stride: int) -> None:
    asked, pieces = squad.synthetic(20, 3)
    data = squad.windows(asked, pieces, 16, stride)
    for number, each in enumerate(asked):
        spans = data.pick(data.question == number).spans.reshape(-1, 2)
        covered = {place for a, b in spans for place in range(int(a), int(b)) if a >= 0}
        assert covered == {i for i, letter in enumerate(each.context) if not letter.isspace()}


def test_a_question_without_room_is_refused() -> None:
    asked, pieces = squad.synthetic(1, 0)
    with pytest.raises(SystemExit, match="--seq-len 8 leaves no room beside a question of 5 pieces"):
        squad.windows(asked, pieces, 8, 4)


def test_the_best_span_lies_in_one_window_and_in_the_paragraph() -> None:
    asked, pieces = squad.synthetic(2, 0)
    data = squad.windows(asked, pieces, 16, 4)
    start, end = np.zeros((2, len(data), 16))
    start[:, 1] = end[:, 2] = 99  # the question's own words never count
    own = np.flatnonzero(data.question == 1)
    row, place = own[1], int(np.flatnonzero(data.spans[own[1], :, 0] >= 0)[1])
    start[row, place], end[row, place + 1] = 5, 5
    start[row, place - 1], end[row, place - 1] = -99, 50  # an end before the start is no span
    found = squad.best_spans(data, start, end, asked)
    first, last = data.spans[row, place, 0], data.spans[row, place + 1, 1]
    assert found[1] == asked[1].context[first:last] and found.keys() == {0, 1}
    short = squad.best_spans(data, start, end, asked, longest=1)
    assert all(len(answer.split()) == 1 for answer in short.values())


def test_wordpiece_is_berts() -> None:
    reference = DATA / "bert_vocab" / "squad_questions_wordpiece_ref.jsonl.xz"
    pytest.importorskip("tokenizers")
    if not reference.exists():
        pytest.skip(NO_DATA)
    with lzma.open(reference, "rt", encoding="utf8") as file:
        expected = [json.loads(line) for line in file]
    pieces = squad.wordpiece(reference.parent)
    encoded = pieces.encode([each["text"] for each in expected])
    assert len(encoded) == 10570 and [ids for ids, _ in encoded] == [each["ids"] for each in expected]


def test_real_answers_are_found_again() -> None:
    pytest.importorskip("tokenizers")
    if not (DATA / "squad_v1_dev").is_dir():
        pytest.skip(NO_DATA)
    asked = squad.read_questions(DATA / "squad_v1_dev", "dev")
    assert len(asked) == 1286
    data = squad.windows(asked, squad.wordpiece(DATA / "bert_vocab"), 128, 64)
    assert set(data.question) == set(range(1286))
    data = data.pick(data.start >= 0)
    start, end = (np.eye(128)[place] for place in (data.start, data.end))
    answers = squad.best_spans(data, start, end, asked)
    match, f1 = squad.score(answers, asked)
    assert match > 99 and f1 > 99


# -- the program -------------------------------------------------------------------------------------
SMALL = ["--synthetic", "--seq-len", "40", "--hidden", "32", "--batch", "8", "--threads", "1"]


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["bert_squad.py", *SMALL, *options])
    return bert_squad.main()


def test_every_mode_trains_and_says_what_stayed_fp32(monkeypatch, capsys) -> None:
    assert run(monkeypatch, "--steps", "12", "--limit", "100") == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.startswith(bert_squad.MODES)}
    assert rows.keys() == set(bert_squad.MODES) | {"recipe:", "pure:"}
    for mode in bert_squad.MODES:
        match, f1, loss, scale, skipped, steps, speed = map(float, rows[mode])
        assert 0 <= match <= f1 <= 100 and 0 < loss < 6 and scale >= 1 and skipped < 12 and steps == 12 and speed > 0
    recipe, pure = out.split("recipe: what stayed in fp32\n")[1].split("pure: what stayed in fp32\n")
    for type_ in ("Gelu", "LayerNormalization", "Softmax"):
        assert f"{type_:<26} black list" in recipe and type_ + " " not in pure.split("mode ")[0]
    for each in (recipe, pure):
        assert "Gather on the trainable table 'embeddings.word.w_0'" in each
        assert f"{'MatMul':<26} '*logits*' is in the preset" in each


@pytest.mark.parametrize("mode", ["recipe", "pure"])
@needs_placement_tool
def test_the_step_is_on_cuda_entirely(mode: str, tmp_path) -> None:
    arguments = bert_squad.arguments().parse_args([*SMALL, "--layers", "1", "--dropout", "0.1"])
    prepared = bert_squad.prepare(mode, bert_squad.checked(arguments), squad.synthetic(1, 0)[1])
    shapes = {name: (8, 40) for name in ("ids", "segments", "mask", "inside")} | {"start": (8,), "end": (8,)}
    lowered = prepared.model.main.lower(amp.CUDAPlace(0), feed_shapes=shapes)
    done = place(lowered.model, tmp_path / "step.onnx")
    assert done.status == 0 and " 0 on CPU, 0 copies" in done.said, done.said


@pytest.mark.parametrize(
    "options", [("--mode", "recipe", "--dtype", "bf16"), ("--mode", "pure", "--loss-scale", "512")]
)
def test_overfits_a_few_windows(options, monkeypatch, capsys) -> None:
    assert run(monkeypatch, *options, "--overfit", "8", "--lr", "3e-3") == 0
    assert "% right after" in capsys.readouterr().out


def test_overfits_fewer_windows_than_a_batch_at_a_length_below_the_stride(monkeypatch, capsys) -> None:
    given = ("--mode", "fp32", "--overfit", "4", "--seq-len", "16", "--doc-stride", "64", "--lr", "3e-3")
    assert run(monkeypatch, *given) == 0
    assert "% right after" in capsys.readouterr().out


def test_an_exported_encoder_is_fine_tuned(monkeypatch, capsys, tmp_path) -> None:
    _, pieces = squad.synthetic(4, 0)
    options = bert_squad.arguments().parse_args(["--batch", "8", "--seq-len", "40", "--hidden", "32"])
    model = encoder.built(options, pieces.size)
    executor, scope = amp.Executor(), amp.Scope()
    executor.run(model.startup, scope=scope)
    hidden = next(op for op in model.test.operators if "span_logits.w_0" in [v.name for v in op.inputs]).inputs[0]
    inputs = [model.test.var(name) for name in ("ids", "segments", "mask")]
    amp.save_inference_model(str(tmp_path / "e.onnx"), inputs, [hidden], executor, model.test, scope=scope)
    assert run(monkeypatch, "--model", str(tmp_path / "e.onnx"), "--mode", "pure", "--overfit", "8") == 0
    out = capsys.readouterr().out
    assert "% right after" in out and "'embeddings.word.w_0'" in out
    with pytest.raises(SystemExit, match="the first output of .*mnist.onnx"):
        scores = onnx.parser.parse_model(
            "<ir_version: 8, opset_import: ['' : 17]> g (float[8,40] ids) => (float[8,40] y) { y = Relu(ids) }".replace(
                "'", '"'
            )
        )
        onnx.save(scores, tmp_path / "mnist.onnx")
        run(monkeypatch, "--model", str(tmp_path / "mnist.onnx"), "--mode", "fp32")


def test_wrong_options_are_refused(monkeypatch, tmp_path) -> None:
    with pytest.raises(SystemExit, match="--loss-scale is 'dynamic' or a number, not 'much'"):
        run(monkeypatch, "--loss-scale", "much")
    with pytest.raises(SystemExit, match="--heads must be at least 1"):
        run(monkeypatch, "--heads", "0")
    monkeypatch.setattr(sys, "argv", ["bert_squad.py", "--data", str(tmp_path), "--vocab", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"squad11_train.jsonl\[.xz\]. Put SQuAD's .* Or pass --synthetic"):
        bert_squad.main()
