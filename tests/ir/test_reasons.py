"""Reasons: data in, text out, and back from the metadata of a file."""

from __future__ import annotations

import itertools
import json
import re

import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.ir.reasons import Kind, Reason, pack, parse, unpack
from amp_transpiler.passes.partition.assign_precision import assign

#: Names that look like parts of other texts.
NAMES = [
    "x",
    "a/b -> c",
    "it's",
    "f, where the program itself goes to float32",
    "a to b: fp32: after c: d",
    "cast: x",
    "two\nlines",
    "' is in the preset",
    "…",
    "after a: after b: c",
]


def reason_of(kind: Kind, name: str, detail: str = "17", runs: str = "fp32") -> Reason:
    """A reason with every field that the kind's text shows."""
    fields = re.findall(r"\{(\w+)\}", kind.value)
    cause = Reason(Kind.CONSTANT_BEYOND, name, (detail, "fp16")) if "cause" in fields else None
    return Reason(kind, name if "subject" in fields else "", (detail,) * fields.count("detail"), cause, runs)


@pytest.mark.parametrize("kind", Kind)
def test_a_reason_comes_back_from_its_text_and_its_data(kind: Kind) -> None:
    for name, runs in itertools.product(NAMES, ("", "fp32", "untouched")):
        reason = reason_of(kind, name, runs=runs)
        assert unpack(str(reason), pack(reason)) == reason
        assert str(parse(str(reason))) == str(reason), "a file of another version shows the text that it holds"
    assert pack(reason_of(kind, "x")) == "", "for a plain name the text says it all"


def test_a_plain_text_is_of_its_kind_and_any_other_of_kind_text() -> None:
    assert parse("fp16: white list") == Reason(Kind.WHITE_LIST, runs="fp16")
    assert parse("fp32: follows conv1") == Reason(Kind.FOLLOWS, "conv1", runs="fp32")
    assert parse("fp32: the boss said so") == Reason(Kind.TEXT, detail=("the boss said so",), runs="fp32")


@pytest.mark.parametrize(
    "text", ["asked", "fp32: fp32: x", "fp32: ", ": ", "after a: " * 500 + "b", "sums squares: " * 50 + "x*x"]
)
def test_any_other_text_comes_back(text: str) -> None:
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    "former, reason",
    [
        ("fp16: nothing measured or known speaks against it", Reason(Kind.FREE, runs="fp16")),
        ("fp32: moves fewer bytes than casting to 16 bit and back", Reason(Kind.CHEAPER, runs="fp32")),
        (
            "fp32: after a: counts: it computes with the integers of 'x'",
            Reason(Kind.AFTER, "a", cause=Reason(Kind.COUNTS, "x"), runs="fp32"),
        ),
    ],
)
def test_wordings_of_earlier_versions_are_read(former: str, reason: Reason) -> None:
    assert parse(former) == unpack(former, "") == unpack(former, pack(reason)) == reason


@pytest.mark.parametrize(
    "packed",
    [
        "{",
        "[]",
        "7",
        '["NOBODY","","",null,""]',
        '["WHITE_LIST","",[],null]',
        '["WHITE_LIST","",[1],null,"fp16"]',
        '["WHITE_LIST","",["a"],null,"fp16"]',
        '["AFTER","",[],null,"fp16"]',
        '["BLACK_LIST","",[],null,"fp16"]',
        "[" * 5000,
    ],
)
def test_data_that_are_not_the_texts_own_give_way_to_the_text(packed: str) -> None:
    assert unpack("fp16: white list", packed) == Reason(Kind.WHITE_LIST, runs="fp16")
    assert unpack("", packed) is None


def test_a_text_from_a_file_is_read_in_time() -> None:
    hostile = "measured: '" + "' reaches , and float16 ends at " * 2000
    assert parse(hostile) == Reason(Kind.TEXT, detail=(hostile,))


def program_of(text: str) -> amp.Program:
    return amp.Program.from_onnx(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}'))


def test_a_file_carries_reasons_and_what_was_inserted() -> None:
    program = program_of("m (float[4,4] x, float[4,4] w) => (float[4,4] y) { h = MatMul(x, w) y = Softmax(h) }")
    program.operators[0].why = Reason(Kind.FOLLOWS, "f, where the program itself goes to float32", runs="fp16")
    copy = amp.Program.from_onnx(program.to_onnx())
    assert copy.operators[0].why == program.operators[0].why
    assign(program, amp.AutoMixedPrecisionLists(), "mixed", None)
    casts = [op for op in program.walk() if op.inserted]
    assert len(casts) == 3 and all(op.type == "Cast" for op in casts)
    back = amp.Program.from_onnx(program.to_onnx())
    assert [(op.why, op.inserted) for op in back.walk()] == [(op.why, op.inserted) for op in program.walk()]
    assert [op.inserted for op in program.clone().walk()] == [op.inserted for op in program.walk()]


def test_a_name_does_not_steer() -> None:
    """A text that reads like an inserted cast's or a follower's is no such thing."""
    program = program_of("m (float[4] x) => (float[4] y) { h = Cast<to=10>(x) y = Cast<to=1>(h) }")
    program.operators[0].reason = "cast: x to float16"
    assert not program.operators[0].inserted
    why = Reason(Kind.BLACK_NAME, "a: follows b", runs="fp32")
    assert parse(str(why)).kind is Kind.BLACK_NAME and why.group() == "fp32: '…' is in custom_black_varnames"


def test_every_lack_of_a_kernel_is_noted() -> None:
    text = "m (float[1,1,2,2] x, int64[1,1,2,2] i) => (float[1,1,4,4] y) { y = MaxUnpool<kernel_shape=[2,2], strides=[2,2]>(x, i) }"
    model = program_of(text).to_onnx()
    program = amp.convert(model, mode="pure", dtype="float16")
    op = next(op for op in program.walk() if op.type == "MaxUnpool")
    assert op.why is not None and op.why.kind is Kind.NO_KERNEL and op.why.runs == "fp32"
    assert any("MaxUnpool (1)" in note for note in program.conversion.notes)


def test_data_take_no_room_where_names_are_plain() -> None:
    program = program_of("m (float[4,4] x, float[4,4] w) => (float[4,4] y) { h = MatMul(x, w) y = Softmax(h) }")
    assign(program, amp.AutoMixedPrecisionLists(), "mixed", None)
    keys = {entry.key for node in program.to_onnx().graph.node for entry in node.metadata_props}
    assert "amp_transpiler.reason" in keys and "amp_transpiler.why" not in keys
    assert json.loads(pack(Reason(Kind.FOLLOWS, NAMES[3])))[0] == "FOLLOWS"
