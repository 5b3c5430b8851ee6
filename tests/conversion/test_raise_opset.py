"""bfloat16 came to ONNX an operator at a time: the opset is raised where that pays, and never at a kernel's cost."""

from __future__ import annotations

import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.conversion.raise_opset import raise_for
from amp_transpiler.lists import has_kernel
from tests.helpers.converting import filled

K = ", ".join(["0.1"] * 9)
CONV = f"m (float[1,1,8,8] x) => (float[1,1,B,B] y) <float[1,1,3,3] k = {{{K}}}, float[1] one = {{1}}> {{ a = Conv(x, k) b = Relu(a) y = TAIL }}"
CUDA = "CUDAExecutionProvider"


def program_of(text: str, opset: int) -> amp.Program:
    program = amp.Program.from_onnx(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]>\n{text}'))
    for parameter in program.parameters:
        parameter.persistable = parameter.trainable = False
    return program


@pytest.mark.parametrize(
    ("tail", "opset", "expected"),
    [
        ("Neg(b)", 9, 22),  # Conv takes bfloat16 from 22 on, and nothing loses its kernel
        ("Neg(b)", 17, 22),
        ("Elu(b)", 9, 13),  # at 22 Elu would leave CUDA; Relu gains at 13
        ("Elu(b)", 17, 17),  # nothing to gain below 22
        ("MaxPool<kernel_shape=[2,2], strides=[2,2]>(b)", 17, 22),  # which others stand for
        ("InstanceNormalization(b, one, one)", 17, 22),
        ("MaxPool<kernel_shape=[5,5], pads=[2,2,2,2]>(b)", 17, 17),  # of small tensors made of smaller ones
        ("Neg(b)", 22, 22),
    ],
)
def test_the_opset_at_which_most_can_run(tail: str, opset: int, expected: int) -> None:
    program = program_of(CONV.replace("TAIL", tail), opset)
    told = raise_for(program, "bfloat16")
    assert program.opset() == expected and ("raised" in told) == (expected != opset)
    assert ("for Elu there" in told) == ("Elu" in tail)
    assert ("written in other" in told) == (expected == 22 and tail.startswith(("MaxPool", "Instance")))
    assert ("moves more bytes" in told) == ("pads" in tail)
    for op in program.operators:
        assert has_kernel(CUDA, op.type, "float32", program.opset())
    onnx.checker.check_model(program.to_onnx(), full_check=True)


@pytest.mark.parametrize("sizes", ["64,64", "H,W"])
@pytest.mark.parametrize(("behind", "expected"), [(True, 22), (False, 17)])
def test_open_sizes_weigh_by_what_strides_leave(sizes: str, behind: bool, expected: int) -> None:
    """Slices that stand for a pool cost little behind strides, and much before, in sizes that are open too."""
    pool = "MaxPool<kernel_shape=[3,3], pads=[1,1,1,1]>"
    text = f"""m (float[1,8,{sizes}] x) => (float[1,8,B,C] y) <float[8,8,3,3] k>
        {{ a = {"Relu" if behind else pool}(x) b = Conv<pads=[1,1,1,1], strides=[2,2]>(a, k)
        c = Conv<pads=[1,1,1,1], strides=[2,2]>(b, k) y = {pool if behind else "Relu"}(c) }}"""
    program = amp.Program.from_onnx(filled(f'<ir_version: 8, opset_import: ["" : 17]>\n{text}'))
    raise_for(program, "bfloat16")
    assert program.opset() == expected


def test_what_is_written_in_others_counts_as_these() -> None:
    """A decoder of transposed convolutions and instance norms: both have forms where convolutions take bfloat16."""
    text = """m (float[1,8,H,W] x) => (float[1,8,B,C] y) <float[8,8,3,3] k, float[8,8,2,2] u, float[8] s, float[8] b>
        { a = Conv<pads=[1,1,1,1]>(x, k) n = InstanceNormalization(a, s, b) c = ConvTranspose<strides=[2,2]>(n, u)
        m = InstanceNormalization(c, s, b) y = ConvTranspose<strides=[2,2]>(m, u) }"""
    program = amp.Program.from_onnx(filled(f'<ir_version: 10, opset_import: ["" : 17]>\n{text}'))
    raise_for(program, "bfloat16")
    assert program.opset() == 22


def test_float16_stays_where_it_is() -> None:
    program = program_of(CONV.replace("TAIL", "Neg(b)"), 9)
    assert raise_for(program, "float16") == "" and program.opset() == 9


def test_what_cannot_be_expressed_later_stays() -> None:
    text = 'm (float[1,4] x) => (float[1,4] y) { a = Upsample<mode="nearest", scales=[1.0, 1.0]>(x) y = Tanh(a) }'
    program = program_of(text, 7)
    told = raise_for(program, "bfloat16")
    assert (program.opset() == 7) == (told == "")
    onnx.checker.check_model(program.to_onnx(), full_check=True)


def test_the_note_says_so() -> None:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]>\n{CONV.replace("TAIL", "Neg(b)")}')
    program = amp.convert(model, dtype="bfloat16")
    assert program.conversion.notes == ("opset 17 raised to 22, at which 1 more operator can run in bfloat16",)
    assert {op.type: op.precision for op in program.operators if op.type != "Cast"} == dict.fromkeys(
        ("Conv", "Relu", "Neg"), "bfloat16"
    )
    assert amp.convert(program.to_onnx(), dtype="bfloat16").conversion.notes == ()


@pytest.mark.parametrize(
    ("mode", "tail", "opset"), [("mixed", "Relu(b)", 13), ("mixed", "MatMul(b, w)", 19), ("pure", "Relu(b)", 19)]
)
def test_nothing_is_raised_where_gray_operators_have_none_to_follow(mode: str, tail: str, opset: int) -> None:
    text = f"""<ir_version: 8, opset_import: ["" : 13]>
        m (float[2,2] x) => (float[2,2] y) <float s = {{0.1}}, uint8 z = {{128}}, float[2,2] w = {{1, 2, 3, 4}}>
        {{ a = QuantizeLinear(x, s, z) b = DequantizeLinear(a, s, z) y = {tail} }}"""
    program = amp.convert(onnx.parser.parse_model(text), mode=mode)
    assert program.opset() == opset and any("raised" in note for note in program.conversion.notes) == (opset > 13)
    assert any(op.precision == "float16" for op in program.operators) == (opset > 13)


@pytest.mark.parametrize(
    ("imported", "body", "dtype", "expected"),
    [
        ('"" : 11', "Selu(x)", "bfloat16", ("", 13)),  # nothing but the casts of inputs and outputs needs it
        ('"" : 11', "Selu(x)", "float16", ("", 11)),
        ('"ai.onnx.ml" : 3', "ai.onnx.ml.Binarizer(x)", "bfloat16", ("", 13)),
        ('"ai.onnx.ml" : 3', "ai.onnx.ml.Binarizer(x)", "float16", ("", 7)),
    ],
)
def test_inputs_that_become_16_bit_have_casts(imported: str, body: str, dtype: str, expected: tuple[str, int]) -> None:
    text = f"<ir_version: 8, opset_import: [{imported}]> m (float[2] x) => (float[2] y) {{ y = {body} }}"
    model = amp.convert(onnx.parser.parse_model(text), dtype=dtype, keep_io=False).to_onnx()
    onnx.checker.check_model(model, full_check=True)
    assert expected in [(each.domain, each.version) for each in model.opset_import]
