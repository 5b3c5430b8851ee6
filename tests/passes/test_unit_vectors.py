"""Vectors divided by their lengths: one norm in 16 bit for what exporters write out, and the same numbers."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.canonicalize.roots import write_roots
from amp_transpiler.passes.canonicalize.unit_vectors import write_unit_vectors
from tests.helpers.sessions import run

CONSTANTS = """int64[1] last = {-1}, int64[1] places = {2}, float eps = {1e-12}, float root = {0.5}, float two = {2},
    float wide = {0.25}, float tiny = {1e-20}, float some = {1e-6}, float gain = {2.828427}, int64[3] shape = {2, 5, 8}, float one = {1}"""
FORMS = {
    "a norm": "l = ReduceL2(x, last)  y = Div(x, l)",
    "normalize": "l = ReduceL2(x, last)  c = Clip(l, eps)  e = Expand(c, shape)  y = Div(x, e)",
    "a floor": "l = ReduceL2(x, last)  c = Max(eps, l)  y = Div(x, c)",
    "a floor that counts": "l = ReduceL2(x, last)  c = Max(l, wide)  y = Div(x, c)",
    "powers": "q = Pow(x, two)  s = ReduceSum(q, last)  l = Pow(s, root)  y = Div(x, l)",
    "a product": "q = Mul(x, x)  s = ReduceSum(q, places)  l = Sqrt(s)  c = Clip(l, eps)  y = Div(x, c)",
    "a power of a sum of squares": "s = ReduceSumSquare(x, last)  l = Pow(s, root)  y = Div(x, l)",
    "a sum of squares": "s = ReduceSumSquare(x, last)  l = Sqrt(s)  y = Div(x, l)",
    "a floor under the root": """q = Mul(x, x)  s = ReduceSum(q, last)  c = Max(s, eps)  l = Sqrt(c)  r = Reciprocal(l)
        y = Mul(x, r)""",
    "an epsilon that is added": """q = Mul(x, x)  s = ReduceSum(q, last)  c = Add(s, tiny)  l = Sqrt(c)  r = Reciprocal(l)
        y = Mul(r, x)""",
    "an inverse, with a gain": """l = ReduceL2(x, last)  c = Max(l, eps)  r = Reciprocal(c)  g = Mul(r, gain)
        y = Mul(x, g)""",
    "shares of it": "l = ReduceL2(x, last)  m = ReduceMax(x, last)  s = Div(m, l)  y = Mul(x, s)",
    "a number over it": "l = ReduceL2(x, last)  c = Max(l, eps)  s = Div(gain, c)  y = Mul(s, x)",
    "an inverse": "l = ReduceL2(x, last)  c = Max(l, eps)  r = Reciprocal(c)  y = Mul(r, x)",
}
RNG = np.random.default_rng(0)
X = (RNG.standard_normal((2, 5, 8)) * np.float32([1, 1e3, 2e4, 1e-2, 0.03])[:, None]).astype(np.float32)


def net(text: str, opset: int = 18) -> onnx.ModelProto:
    head = f'<ir_version: 8, opset_import: ["" : {opset}]> net (float[2,5,8] x) => (float[2,5,8] y)'
    return onnx.parser.parse_model(f"{head} <{CONSTANTS}> {{ {text} }}")


def written(text: str) -> amp.Program:
    program = amp.Program.from_onnx(net(text))
    write_roots(program)
    write_unit_vectors(program, frozenset(), frozenset())
    return program


@pytest.mark.parametrize("form", FORMS)
def test_a_vector_by_its_length_is_16_bit(form: str) -> None:
    model, x = net(FORMS[form]), X.copy()
    if any(floor in FORMS[form] for floor in ("wide", "eps", "tiny")):
        x[1, 4] = 0
    expected = run(model, {"x": x})[0]
    assert np.allclose(run(written(FORMS[form]).to_onnx(), {"x": x})[0], expected, rtol=1e-6, atol=1e-7)
    converted = amp.convert(model)
    assert [op.type for op in converted.operators if op.type == "ReduceL2"] == ["ReduceL2"]
    assert {op.precision for op in converted.operators if op.type != "Cast"} == {"float16"}
    got = run(converted.to_onnx(), {"x": x})[0]
    assert np.isfinite(got).all() and np.allclose(got, expected, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("opset", [9, 11, 13])
def test_before_the_axes_were_an_input(opset: int) -> None:
    bound = "Clip <min = 1e-12> (l)" if opset < 11 else "Clip (l, eps)"
    text = f"l = ReduceL2 <axes = [-1]> (x)  c = {bound}  y = Div(x, c)"
    expected = run(net(text, opset), {"x": X})[0]
    converted = amp.convert(net(text, opset))
    assert {op.precision for op in converted.operators if op.type != "Cast"} == {"float16"}
    assert np.allclose(run(converted.to_onnx(), {"x": X})[0], expected, rtol=2e-3, atol=1e-6)


OTHERS = {
    "another tensor": "n = Neg(x)  l = ReduceL2(n, last)  y = Div(x, l)",
    "the other way": "l = ReduceL2(x, last)  y = Div(l, x)",
    "no place for it": "l = ReduceL2 <keepdims = 0> (x, last)  u = Unsqueeze(l, last)  y = Div(x, u)",
    "read twice": "l = ReduceL2(x, last)  d = Div(x, l)  y = Mul(d, l)",
    "no root": "q = Mul(x, x)  s = ReduceSum(q, last)  y = Div(x, s)",
    "a floor among three": "n = Neg(x)  l = ReduceL2(x, last)  c = Max(l, eps, n)  y = Div(x, c)",
    "two roots": "l = ReduceL2(x, last)  r = Sqrt(l)  y = Div(x, r)",
    "a product of two": "n = Neg(x)  q = Mul(x, n)  s = ReduceSum(q, last)  a = Abs(s)  l = Sqrt(a)  y = Div(x, l)",
    "an epsilon that counts": "q = Mul(x, x)  s = ReduceSum(q, last)  c = Add(s, some)  l = Sqrt(c)  y = Div(x, l)",
    "an epsilon behind the root": "l = ReduceL2(x, last)  c = Add(l, tiny)  y = Div(x, c)",
    "a ceiling": "l = ReduceL2(x, last)  c = Clip(l, eps, one)  y = Div(x, c)",
    "every element": "l = ReduceL2 <keepdims = 1> (x)  y = Div(x, l)",
}


@pytest.mark.parametrize("form", OTHERS)
def test_what_is_anything_else_stays(form: str) -> None:
    before = amp.Program.from_onnx(net(OTHERS[form]))
    assert write_unit_vectors(before, frozenset(), frozenset()) == 0
    model, expected = net(OTHERS[form]), run(net(OTHERS[form]), {"x": X})[0]
    got = run(amp.convert(model).to_onnx(), {"x": X})[0]
    assert np.allclose(got, expected, rtol=4e-3, atol=4e-3 * np.abs(expected).max())


def test_what_the_user_names_stays() -> None:
    model = net(FORMS["normalize"])
    model.graph.node[0].name = "mine"
    for more in ({"black_varnames": ["l"]}, {"exclude": ["mine"]}):
        converted = amp.convert(model, **more)
        assert "Clip" in [op.type for op in converted.operators]
        assert any(op.precision == "float32" for op in converted.operators if op.type == "ReduceL2")


def test_in_bfloat16_it_stays_what_it_is() -> None:
    assert "Expand" in [op.type for op in amp.convert(net(FORMS["normalize"]), dtype="bfloat16").operators]


def trained(dtype: str = "float16", lists: dict[str, object] | None = None, pure: bool = True) -> amp.Program:
    """``F.normalize`` of what a layer makes, as torch exports it, in a program that is trained."""
    weights = ", ".join(f"{value:.3f}" for value in np.random.default_rng(1).normal(size=64))
    head = f'<ir_version: 8, opset_import: ["" : 18]> net (float[2,5,8] x) => (float[2,5,8] y) <float[8,8] w = {{{weights}}}, '
    text = f"{head}{CONSTANTS}> {{ h = MatMul(x, w) {FORMS['normalize'].replace('(x,', '(h,')} }}"
    program = amp.Program.from_onnx(onnx.parser.parse_model(text))
    amp.prepare_training(program)
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        loss = F.mean(F.square(F.cast(program.outputs[0], "float32") - 0.25))
        chosen = amp.AutoMixedPrecisionLists(dtype=dtype, **(lists or {}))
        optimizer = amp.optimizer.SGD(5.0, multi_precision=True)
        optimizer = amp.decorate(optimizer, chosen, 128.0, use_pure_fp16=pure, use_fp16_guard=False, dtype=dtype)
        optimizer.minimize(loss)
    scope, exe = amp.Scope(), amp.Executor(threads=1)
    exe.run(program.startup, scope=scope)
    if pure:
        optimizer.amp_init(amp.CPUPlace(), scope)
    feed = {"x": np.random.default_rng(2).normal(size=(2, 5, 8)).astype(np.float32)}
    losses = [float(exe.run(program, feed, [loss], scope)[0]) for _ in range(20)]
    assert np.isfinite(losses).all() and losses[-1] < 0.9 * losses[0]
    return program


def kinds(program: amp.Program) -> list[str]:
    return [op.type for op in program.operators if op.role == "forward" and op.type not in ("Constant", "MatMul")]


def test_in_training_it_is_float16_without_casts() -> None:
    program = trained()
    names = [
        v.name for op in program.operators if op.type in ("ReduceL2", "Max", "Div") for v in op.outputs if v is not None
    ]
    assert {program.var(name).dtype for name in names if "GRAD" not in name} == {"float16"} and len(names) >= 3
    assert kinds(program)[:4] == ["Cast", "ReduceL2", "Max", "Div"]  # the cast of the input


def test_a_weight_norm_trains_whatever_the_length_of_its_weights() -> None:
    """As torch exports it: what is multiplied with weights of 1000 is 1000 times less, and its gradient so much more."""
    weights = ", ".join(f"{value:.1f}" for value in np.random.default_rng(1).normal(size=256) * 1000)
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 18]> net (float[4,16] x) => (float[4,16] y)
        <float[16,16] v = {{{weights}}}, float[16,1] g = {{{", ".join(["1"] * 16)}}}, int64[1] last = {{-1}}>
        {{ l = ReduceL2(v, last)  s = Div(g, l)  w = Mul(v, s)  t = Transpose(w)  y = MatMul(x, t) }}"""
    )
    grads, x = [], np.random.default_rng(2).normal(size=(4, 16)).astype(np.float32)
    for pure in (False, True):
        program = amp.Program.from_onnx(model)
        amp.prepare_training(program)
        with amp.program_guard(program, program.startup):
            loss = F.sum(F.square(F.cast(program.outputs[0], "float32")))
            optimizer = amp.optimizer.SGD(0.0, multi_precision=True)
            if pure:
                optimizer = amp.decorate(optimizer, init_loss_scaling=128.0, use_pure_fp16=True, use_fp16_guard=False)
            pairs = optimizer.backward(loss)
        scope, exe = amp.Scope(), amp.Executor(threads=1)
        exe.run(program.startup, scope=scope)
        if pure:
            optimizer.amp_init(amp.CPUPlace(), scope)
        found = dict(
            zip([p.name for p, _ in pairs], exe.run(program, {"x": x}, [g for _, g in pairs], scope), strict=True)
        )
        grads.append(found["g"].astype(np.float64).ravel() / (128 if pure else 1))
    assert np.linalg.norm(grads[1] - grads[0]) < 2e-3 * np.linalg.norm(grads[0])


@pytest.mark.parametrize(
    ("dtype", "lists", "pure"),
    [
        ("bfloat16", {}, True),
        ("float16", {}, False),
        ("float16", {"custom_black_list": {"Div"}}, True),
        ("float16", {"custom_black_list": {"Clip"}}, True),
        ("float16", {"custom_black_varnames": ["c"]}, True),
    ],
)
def test_in_training_it_stays_where_not_all_of_it_is_float16(dtype: str, lists: dict[str, object], pure: bool) -> None:
    found = kinds(trained(dtype, lists, pure))
    assert [kind for kind in found if kind in ("ReduceL2", "Clip", "Max", "Expand", "Div")] == [
        "ReduceL2",
        "Clip",
        "Expand",
        "Div",
    ]


def test_cast_again_it_is_the_same() -> None:
    program = amp.Program.from_onnx(net(FORMS["normalize"]))
    amp.cast_model_to_fp16(program, use_fp16_guard=False, numeric_guards=True)
    before = [(op.type, op.name, [v.name for v in op.outputs if v is not None]) for op in program.operators]
    assert "ReduceL2" in {kind for kind, *_ in before}
    amp.cast_model_to_fp16(program, use_fp16_guard=False, numeric_guards=True)
    assert [(op.type, op.name, [v.name for v in op.outputs if v is not None]) for op in program.operators] == before
