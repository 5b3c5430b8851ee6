"""The converter's assignment: lists and constraints bind, and of the rest no other choice moves fewer bytes."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.partition.assign_precision import Assignment, assign
from amp_transpiler.passes.view.constants import is_constant
from amp_transpiler.passes.view.counted_shapes import counted

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
FLOATS = {"float16": 2, "float32": 4}
VIEWS = ("Reshape", "Identity")


def program_of(text: str) -> amp.Program:
    program = amp.Program.from_onnx(onnx.parser.parse_model(HEAD + text))
    for parameter in program.parameters:
        parameter.persistable = parameter.trainable = False
    return program


def assigned(
    text: str, mode: str = "auto", constraints: Constraints | None = None, **lists: list[str]
) -> tuple[amp.Program, Assignment]:
    program = program_of(text)
    return program, assign(program, amp.AutoMixedPrecisionLists(**lists), mode, constraints or Constraints())


def precisions(program: amp.Program) -> dict[str, str]:
    return {op.type: op.precision for op in program.walk() if not op.inserted}


def casts(program: amp.Program) -> list[str]:
    return [op.outputs[0].name for op in program.walk() if op.inserted and op.outputs[0] is not None]


def moved(program: amp.Program) -> int:
    """Bytes that the operators and inserted casts of a converted program read and write, constants and views apart."""
    total = 0
    for op in program.walk():
        if op.type in VIEWS:
            continue
        tensors = [v for v in (*op.inputs, *op.outputs) if v is not None and v.dtype in FLOATS and not is_constant(v)]
        total += sum(math.prod(counted(v.shape)) * FLOATS[str(v.dtype)] for v in tensors)
    return total


def random_program(seed: int) -> str:
    """Up to six operators on tensors of very different sizes, some of them bound to fp32."""
    rng = random.Random(seed)
    lines, tensors, outputs = [], {"x": (4, 64)}, []
    for number in range(rng.randint(2, 6)):
        name, shape = rng.choice(list(tensors.items()))
        other = rng.choice([n for n, s in tensors.items() if s == shape])
        kind = rng.choice(["Relu", "Neg", "Add", "Mul", "ReduceMean", "ReduceMax", "Identity", "Exp"])
        made = f"t{number}"
        if kind in ("Add", "Mul"):
            lines.append(f"{made} = {kind}({name}, {other})")
        elif kind.startswith("Reduce"):
            lines.append(f"{made} = {kind}<keepdims=1>({name}, axes)")
            shape = (*shape[:-1], 1)
        else:
            lines.append(f"{made} = {kind}({name})")
        tensors[made] = shape
    used = {word.strip("(),") for line in lines for word in line.split("=", 1)[1].replace("(", " ").split()}
    outputs = [n for n in tensors if n.startswith("t") and n not in used]
    declared = ", ".join(f"float[{','.join(map(str, tensors[n]))}] {n}" for n in outputs)
    return f"m (float[4,64] x) => ({declared}) <int64[1] axes = {{-1}}> {{ {' '.join(lines)} }}"


@pytest.mark.parametrize("seed", range(40))
def test_no_other_assignment_moves_fewer_bytes(seed: int) -> None:
    text = random_program(seed)
    program, assignment = assigned(text, custom_black_list=["Exp"])
    program.verify()
    names = [op.outputs[0].name for op in program_of(text).operators if op.type != "Exp" and op.outputs[0] is not None]
    totals = []
    for chosen in itertools.product([True, False], repeat=len(names)):
        kept = {name for name, half in zip(names, chosen, strict=True) if not half}
        other = program_of(text)
        every = [op for op in other.operators if op.outputs[0] is not None and op.outputs[0].name not in kept]
        lists = amp.AutoMixedPrecisionLists(
            custom_black_list=["Exp"], custom_white_list=sorted({op.type for op in every} - {"Exp"})
        )
        assign(
            other,
            lists,
            "auto",
            Constraints(),
            outside=lambda op, kept=kept: Reason(Kind.OUTSIDE_ONLY) if op.output(0).name in kept else None,
        )
        totals.append(moved(other))
    assert moved(program) == min(totals), text
    assert assignment.cut.value <= min(assignment.all_half, assignment.all_full)


def test_an_operator_between_fp32_ones_stays_fp32() -> None:
    text = "m (float[8,8] x) => (float[8,8] y) { a = Exp(x) b = Relu(a) y = Exp(b) }"
    program, assignment = assigned(text, "pure", custom_black_list=["Exp"])
    assert precisions(program) == {"Exp": "float32", "Relu": "float32"} and casts(program) == []
    assert {op.type: op.reason for op in program.operators}[
        "Relu"
    ] == "fp32: not profitable: casts to 16 bit and back would move more bytes"
    assert assignment.cut.value == 8 * 64 and assignment.all_half == 4 * 64 + 2 * 6 * 64


def test_a_long_chain_between_fp32_ones_is_worth_the_casts() -> None:
    chain = " ".join(f"t{i + 1} = Neg(t{i})" for i in range(4))
    text = f"m (float[8,8] x) => (float[8,8] y) {{ t0 = Exp(x) {chain} y = Exp(t4) }}"
    program, _ = assigned(text, "pure", custom_black_list=["Exp"])
    assert precisions(program)["Neg"] == "float16" and len(casts(program)) == 2


def test_pure_16_bit_takes_casts_at_inputs_and_outputs_as_given() -> None:
    text = "m (float[2] x) => (float[2] y) { y = Relu(x) }"
    assert precisions(assigned(text, "pure")[0]) == {"Relu": "float16"}
    assert precisions(assigned(text, "auto")[0]) == {"Relu": "float32"}


def test_one_cast_for_many_readers() -> None:
    text = """m (float[8,8] x) => (float[8,8] y, float[8,8] z, float[8,8] u) <float[8,8] w = {WEIGHTS}>
        { a = Exp(x) y0 = MatMul(a, w) y = Exp(y0) z0 = MatMul(w, a) z = Exp(z0) u0 = MatMul(a, a) u = Exp(u0) }"""
    program, _ = assigned(text.replace("WEIGHTS", ", ".join(["1"] * 64)), "pure", custom_black_list=["Exp"])
    assert sorted(casts(program)) == ["a.cast_fp16", "u0.cast_fp32", "y0.cast_fp32", "z0.cast_fp32"]
    assert program.var("w").dtype == "float16", "a constant is converted, not cast"


def test_mixed_leaves_gray_operators_without_16_bit_neighbours_alone() -> None:
    chain = " ".join(f"t{i + 1} = Neg(t{i})" for i in range(5))
    text = f"m (float[8,8] x) => (float[8,8] y) {{ t0 = Exp(x) {chain} y = Exp(t5) }}"
    program, _ = assigned(text, "mixed")
    assert precisions(program) == {"Exp": "float32", "Neg": "float32"} and not casts(program)
    assert "no 16-bit neighbour" in {op.reason.split(": ")[1] for op in program.operators}


def test_mixed_binds_white_and_black() -> None:
    text = """m (float[8,8] x) => (float[8,8] y) <float[8,8] w = {WEIGHTS}>
        { a = MatMul(x, w) b = Relu(a) c = MatMul(b, w) y = Softmax(c) }"""
    program, _ = assigned(text.replace("WEIGHTS", ", ".join(["1"] * 64)), "mixed")
    assert precisions(program) == {"MatMul": "float16", "Relu": "float16", "Softmax": "float32"}


@pytest.mark.parametrize("white, expected", [(None, "float32"), (["ReduceSum"], "float16")])
def test_constraints_bind_unless_the_user_lists_the_operator(white: list[str] | None, expected: str) -> None:
    text = "m (float[8,8] x) => (float[8,8] y) { a = Relu(x) y = ReduceSum<keepdims=1>(a) }"
    program = program_of(text)
    constraints = Constraints()
    constraints.keep(program.operators[1], Reason(Kind.SUMS, detail=("512",)))
    assign(program, amp.AutoMixedPrecisionLists(custom_white_list=white), "pure", constraints)
    assert precisions(program)["ReduceSum"] == expected


def test_a_tensor_that_may_not_be_stored_binds_its_maker_and_its_readers() -> None:
    program = program_of("m (float[8,8] x) => (float[8,8] y) { a = Neg(x) b = Neg(a) c = Neg(b) y = Relu(c) }")
    constraints = Constraints()
    constraints.keep_tensor(program.var("b"), Reason(Kind.TEXT, detail=("too wide",)))
    assign(program, amp.AutoMixedPrecisionLists(), "pure", constraints)
    kept = {
        op.outputs[0].name for op in program.operators if op.reason == "fp32: too wide" and op.outputs[0] is not None
    }
    assert kept == {"b", "c"} and program.var("b").dtype == "float32"


@pytest.mark.parametrize(
    ("dtype", "source", "target"),
    [
        ("float16", "int64", "float16"),
        ("float16", "double", "float16"),
        ("bfloat16", "double", "bfloat16"),
        ("bfloat16", "bool", "bfloat16"),
        ("bfloat16", "int64", "float32"),
    ],
)
def test_casts_to_float32_are_straight_to_16_bit_where_that_is_the_same(dtype: str, source: str, target: str) -> None:
    text = f"""m ({source}[8] i, float[8,8] x) => (float[8,8] y) <float[8,8] w = {{{", ".join(["1"] * 64)}}}>
        {{ m = Cast<to=1>(i) a = MatMul(x, w) y = Mul(a, m) }}"""
    program = program_of(text)
    assign(program, amp.AutoMixedPrecisionLists(dtype=dtype), "pure", Constraints())
    own = next(op for op in program.walk() if op.type == "Cast" and not op.inserted)
    assert own.outputs[0] is not None and own.outputs[0].dtype == target
    onnx.checker.check_model(program.to_onnx(), full_check=True)
    again = amp.Program.from_onnx(program.to_onnx())
    assign(again, amp.AutoMixedPrecisionLists(dtype=dtype), "pure", Constraints())
    assert again.to_onnx().SerializeToString() == program.to_onnx().SerializeToString()


IF = """m (bool c, float[8,8] x) => (float[8,8] y) <float[8,8] w = {WEIGHTS}>
{ a = MatMul(x, w)
  b = If(c) <then_branch = t () => (float[8,8] u) { u = Relu(a) }, else_branch = e () => (float[8,8] v) { v = Neg(a) }>
  y = MatMul(b, w) }""".replace("WEIGHTS", ", ".join(["0.1"] * 64))


@pytest.mark.parametrize("c", [True, False])
def test_what_an_if_gives_is_16_bit_on_both_sides(c: bool) -> None:
    program, _ = assigned(IF, "pure")
    assert casts(program) == ["x.cast_fp16", "y"]
    assert program.var("b").dtype == "float16"
    onnx.checker.check_model(program.to_onnx(), full_check=True)
    x = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    feed = {"c": np.array(c), "x": x}
    half, full = (
        amp.Executor(amp.CPUPlace()).run(p, feed=feed, fetch_list=["y"])[0] for p in (program, program_of(IF))
    )
    np.testing.assert_allclose(half, full, atol=5e-3)


@pytest.mark.parametrize("held", ["<float[8,8] u = {NUMBERS}> { }", "{ u = Constant<value = float[8,8] {NUMBERS}>() }"])
def test_a_constant_that_a_branch_gives_is_16_bit_with_the_others(held: str) -> None:
    """As tables of angles that the length of a text chooses, and the cache that a merged decoder hands on."""
    branch = f"t () => (float[8,8] u) {held}".replace("NUMBERS", ", ".join(["0.3"] * 64))
    text = IF.replace("t () => (float[8,8] u) { u = Relu(a) }", branch)
    program, _ = assigned(text, "pure")
    assert casts(program) == ["x.cast_fp16", "y"] and program.var("b").dtype == "float16"
    model = program.to_onnx()
    onnx.checker.check_model(model, full_check=True)
    assert amp.convert(model).to_onnx() == amp.convert(amp.convert(model).to_onnx()).to_onnx()
    feed = {"c": np.array(True), "x": np.ones((8, 8), np.float32)}
    (y,) = amp.Executor(amp.CPUPlace()).run(program, feed=feed, fetch_list=["y"])
    np.testing.assert_allclose(y, 0.24, rtol=1e-3)


@pytest.mark.parametrize("number", ["1e6", "1e-9"])
def test_a_constant_of_a_branch_that_16_bit_does_not_hold_stays(number: str) -> None:
    branch = "t () => (float[8,8] u) <float[8,8] u = {NUMBERS}> { }".replace("NUMBERS", ", ".join([number] * 64))
    model = program_of(IF.replace("t () => (float[8,8] u) { u = Relu(a) }", branch)).to_onnx()
    program = amp.convert(model, keep_io=False)
    assert program.var("b").dtype == "float32" and precisions(program)["MatMul"] == "float32"


def test_a_branch_that_computes_in_fp32_is_cast_inside() -> None:
    program, _ = assigned(IF.replace("Neg(a)", "Exp(a)"), "pure", custom_black_list=["Exp"])
    program.verify()
    onnx.checker.check_model(program.to_onnx(), full_check=True)
    nested = {op.type: op.precision for op in program.walk() if op.program.parent is not None and not op.inserted}
    assert nested == {"Relu": "float16", "Exp": "float32"}


def test_state_of_a_loop_keeps_its_type_and_what_it_stacks_does_not() -> None:
    text = """m (int64 n, bool c, float[8,8] x) => (float[8,8] y, float[N,8,8] z) <float[8,8] w = {WEIGHTS}>
    { y, s = Loop(n, c, x) <body = b (int64 i, bool ci, float[8,8] h) => (bool co, float[8,8] ho, float[8,8] o)
        { co = Identity(ci) ho = MatMul(h, w) o = Relu(ho) }>
      z = Neg(s) }"""
    program, _ = assigned(text.replace("WEIGHTS", ", ".join(["0.1"] * 64)), "pure")
    program.verify()
    body = next(op for op in program.operators if op.type == "Loop").attrs.programs[0]
    assert [v.dtype for v in body.inputs] == ["int64", "bool", "float32"]
    assert [v.dtype for v in body.outputs] == ["bool", "float32", "float16"] and program.var("s").dtype == "float16"
    onnx.checker.check_model(program.to_onnx(), full_check=True)


def test_a_constant_read_in_both_precisions_has_a_twin() -> None:
    text = """m (float[8,8] x) => (float[8,8] y, float[8,8] z) <float[8,8] w = {WEIGHTS}>
        { y = MatMul(x, w) z = Exp(w) }""".replace("WEIGHTS", ", ".join(["0.1"] * 64))
    program, _ = assigned(text, "pure", custom_black_list=["Exp"])
    assert program.var("w").dtype == "float32" and program.var("w.cast_fp16").dtype == "float16"
    assert casts(program) == ["x.cast_fp16", "y"]


@pytest.mark.parametrize("lookup", ["Gather(w, i)", "GatherND(w, i)"])
@pytest.mark.parametrize("again", [False, True], ids=["once", "again"])
def test_rows_of_a_large_table_are_cast_and_not_the_table(lookup: str, again: bool) -> None:
    """As a search gives the rows that it finds: the table stood in the file twice."""
    rows = "float[3,2,256]" if lookup.startswith("Gather(") else "float[3,256]"
    model = onnx.parser.parse_model(
        HEAD + f"m (float[8,256] x, int64[3,1] i) => (float[8,256] y, {rows} z) {{ y = MatMul(x, w) z = {lookup} }}"
    )
    model.graph.output[1].type.tensor_type.shape.ClearField("dim")
    table = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(table, "w"))
    done = amp.convert(model, mode="mixed")
    found = amp.convert(done.to_onnx(), mode="mixed") if again else done
    assert [v.dtype for v in found.variables if v.shape == (256, 256)] == ["float16"]
    assert str(found.to_onnx()) == str(done.to_onnx())
    apart = amp.convert(model, mode="mixed", black_list=[lookup[: lookup.index("(")]])
    assert sorted(str(v.dtype) for v in apart.variables if v.shape == (256, 256)) == ["float16", "float32"]


def test_masks_are_saturated_in_the_program() -> None:
    program = program_of(
        "m (bool[8] c, float[8] x) => (float[8] y) <float low = {-3.4e38}> { a = Where(c, x, low) y = Softmax(a) }"
    )
    constraints = Constraints(replaced={program.var("low"): -65504.0})
    assign(program, amp.AutoMixedPrecisionLists(), "pure", constraints)
    assert float(np.asarray(onnx.numpy_helper.to_array(program.to_onnx().graph.initializer[0]))) == -65504.0


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("m (float[9,4] x) => (float[4,9] y) { t = Transpose(x) y = Identity(t) }", ["Transpose", "Identity"]),
        ("m (float[4] x, float[4] z) => (float[8] y) { e = Exp(x) y = Concat<axis=0>(e, z) }", ["Exp", "Concat"]),
        ("m (float[4] x, float[4] z) => (float[8] y) { e = Relu(x) y = Concat<axis=0>(e, z) }", []),
        ("m (float[4] x, int64[2] i) => (float[2] y, float[4] r) { y = Gather(x, i) r = Relu(x) }", ["Gather"]),
        ("m (int64[2] i) => (float[2,2] y) <float[2,2] w = {1, 2, 3, 4}> { y = Gather(w, i) }", []),
    ],
    ids=["alone", "behind what is fp32", "beside what computes", "of an input that others read", "of a table"],
)
def test_pure_16_bit_leaves_alone_what_only_hands_numbers_on(text: str, kept: list[str]) -> None:
    """Two casts would bring nothing but a rounding."""
    program, _ = assigned(text, "pure", custom_black_list=["Exp"])
    full = [op.type for op in program.operators if op.precision == "float32" and not op.inserted]
    assert full == kept


def test_what_hands_16_bit_on_stays_in_it() -> None:
    program = program_of(
        "m (float[9,4] x, float[9,4] z) => (float[4,9] y, float[9,4] i) { y = Transpose(x) i = Identity(z) }"
    )
    assign(program, amp.AutoMixedPrecisionLists(), "pure", Constraints(), narrow_io=frozenset({"x", "y"}))
    assert precisions(program) == {"Transpose": "float16", "Identity": "float32"}
