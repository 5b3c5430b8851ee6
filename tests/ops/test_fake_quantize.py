"""The gradient of pairs that quantise and bring back: torch's at the borders, the formula in float64 elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import amp_transpiler as amp
from amp_transpiler.errors import GradientError
from amp_transpiler.nn import functional as F
from tests.helpers.where import RECORDED

Array = np.ndarray[Any, Any]
ORACLE = np.load(RECORDED / "fake_quantize_torch.npz")
BORDERS = sorted(key.removesuffix("|dx") for key in ORACLE.files if key.endswith("|dx"))
#: An order in which they do not look like places, which are no weights.
RNG = np.random.default_rng(0)
MIXED = RNG.permutation(34)
TEXT = """<ir_version: 10, opset_import: ["" : 21]> m (float[{shape}] g) => (y)
    <float[{scales}] s, {type}[{scales}] z> {{ {before} q = QuantizeLinear <{attrs}> (x, s, z) {between}
    d = DequantizeLinear <{attrs}> ({read}, s, z) y = Mul(d, g) }}"""


def program(x: Array, scale: Array, zero: Array, between: str = "", before: str = "", **attrs: int) -> amp.Program:
    """Of a parameter x (w, where something comes before), through a pair, times g."""
    text = TEXT.format(
        shape=",".join(map(str, x.shape)),
        scales=",".join(map(str, scale.shape)),
        type=zero.dtype.name,
        before=before,
        between=between,
        read="c" if between else "q",
        attrs=", ".join(f"{name} = {value}" for name, value in attrs.items()),
    )
    model = onnx.parser.parse_model(text.replace("[]", "").replace(" <>", ""))
    values = {"w" if before else "x": x, "s": scale, "z": zero}
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in values.items())
    model.graph.output[0].type.tensor_type.elem_type = 1
    return amp.Program.from_onnx(model)


def run(main: amp.Program, g: Array) -> tuple[Array, Array]:
    """What the program makes, and the gradient of its sum."""
    with amp.program_guard(main, main.startup):
        ((_, gradient),) = amp.append_backward(F.sum(main.outputs[0]))
    executor, scope = amp.Executor(), amp.Scope()
    executor.run(main.startup, scope=scope)
    y, dx = executor.run(main, {"g": g}, [main.outputs[0], gradient], scope)
    return y, dx


def typed(number: int, name: str) -> Array:
    return np.array(number, onnx.helper.tensor_dtype_to_np_dtype(getattr(onnx.TensorProto, name.upper())))


@pytest.mark.parametrize("case", BORDERS)
def test_at_the_borders_of_each_type_it_is_torch_s(case: str) -> None:
    name, zero = case.split("|")
    x, y, dx = (ORACLE[f"{case}|{what}"][MIXED] for what in ("x", "y", "dx"))
    made, found = run(program(x, np.float32(0.25).reshape(()), typed(int(zero), name)), np.ones_like(x))
    assert 0 < dx.sum() < dx.size
    np.testing.assert_array_equal(found, dx)
    np.testing.assert_array_equal(made, y)


def expected(x: Array, scale: Array, zero: Array, ends: tuple[int, int]) -> tuple[Array, Array]:
    """Forwards and the slope, in float64."""
    scale, number = scale.astype(float), np.rint(x.astype(float) / scale) + zero
    return (np.clip(number, *ends) - zero) * scale, (number >= ends[0]) & (number <= ends[1])


@pytest.mark.parametrize("shift", [0, 17])
@pytest.mark.parametrize(
    ("axis", "block", "channels"),
    [(1, 0, 3), (-1, 0, 300), (0, 0, 1), (1, 4, 3)],
    ids=["axis", "many", "one", "blocks"],
)
def test_scales_by_channel_and_by_block(axis: int, block: int, channels: int, shift: int) -> None:
    rng = np.random.default_rng(channels + shift)
    shape = (2, 10) if block else (4, 3, channels) if axis == -1 else (4, channels, 5)
    sizes = (2, channels) if block else (channels,) if channels > 1 else ()
    x, g = rng.normal(size=shape).astype(np.float32), rng.normal(size=shape).astype(np.float32)
    scale = rng.uniform(0.004, 0.01, sizes).astype(np.float32)
    zero = np.asarray(shift + rng.integers(0, 2 if shift else 1, sizes), np.int8)
    y, dx = run(program(x, scale, zero, axis=axis, **({"block_size": block} if block else {})), g)
    whole = [np.asarray(a.astype(float)) for a in (scale, zero)]
    if block:
        whole = [a.repeat(block, 1)[:, : shape[1]] for a in whole]
    elif sizes:
        whole = [a.reshape([channels if at == axis % 3 else 1 for at in range(3)]) for a in whole]
    value, slope = expected(x, whole[0], whole[1], (-128, 127))
    assert 0.1 < slope.mean() < 1
    np.testing.assert_allclose(y, value * g, rtol=1e-6)
    np.testing.assert_array_equal(dx, np.where(slope, g, 0))


def test_a_clip_between_narrows_it_and_numbers_that_are_none_have_no_slope() -> None:
    x = np.array([-1, 0, 0.6, 0.7, np.nan, np.inf], np.float32)
    clip = "low = Constant <value = int8 {-64}> () high = Constant <value = int8 {63}> () c = Clip(q, low, high)"
    main = program(x, np.float32(0.01).reshape(()), np.int8(0).reshape(()), clip)
    assert run(main, np.ones_like(x))[1].tolist() == [0, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(("dtype", "ends"), [("float16", (-128, 127)), ("bfloat16", (-8, 7))])
@pytest.mark.parametrize("guards", [True, False])
def test_in_pure_16_bit_its_scale_is_its_own(dtype: str, ends: tuple[int, int], guards: bool) -> None:
    name = "int8" if ends[1] > 8 else "int4"
    near = np.concatenate([end + np.arange(-8, 9) / 4 for end in ends]).astype(np.float32)[MIXED]
    main = program(0.25 * near, np.float32(0.25).reshape(()), typed(0, name), before="x = Mul(w, g)")
    lists = amp.AutoMixedPrecisionLists(custom_white_list=["Mul"], dtype=dtype)
    with amp.program_guard(main, main.startup):
        optimizer = amp.decorate(
            amp.optimizer.SGD(1.0, multi_precision=True),
            lists,
            use_pure_fp16=True,
            use_fp16_guard=False,
            init_loss_scaling=1.0,
            numeric_guards=guards,
            dtype=dtype,
        )
        _, ((_, gradient),) = optimizer.minimize(F.sum(F.cast(main.outputs[0], "float32")))
    executor, scope = amp.Executor(), amp.Scope()
    executor.run(main.startup, scope=scope)
    optimizer.amp_init(amp.CPUPlace(), scope)
    (found,) = executor.run(main, {"g": np.ones_like(near)}, [gradient], scope)
    np.testing.assert_array_equal(np.asarray(found, float), expected(0.25 * near, np.float64(0.25), 0, ends)[1])
    scales = {op.inputs[1].dtype for op in main.operators if op.type in ("QuantizeLinear", "DequantizeLinear")}
    assert scales == ({"float32"} if guards or dtype == "bfloat16" else {dtype})  # there are no kernels in bfloat16


UNLIKE = {
    "its scale is not that of 'q'": "<axis = 0> (q, t, z)",
    "its zero point is not that of 'q'": "<axis = 0> (q, s, o)",
    "its axis is not that of 'q'": "<axis = 1> (q, s, z)",
}


@pytest.mark.parametrize("why", UNLIKE)
def test_what_is_brought_back_otherwise_is_an_error(why: str) -> None:
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        m (float[2, 2] g) => (float[2, 2] y) <float[2, 2] x = {{1, 2, 3, 4}}, float[2] s = {{0.5, 0.25}},
        float[2] t = {{0.5, 0.2}}, int8[2] z = {{0, 0}}, int8[2] o = {{0, 1}}>
        {{ [q] q = QuantizeLinear <axis = 0> (x, s, z) d = DequantizeLinear {UNLIKE[why]} y = Mul(d, g) }}""")
    main = amp.Program.from_onnx(model)
    with pytest.raises(GradientError, match=rf"{why}.*Freeze what lies before it"):
        run(main, np.ones((2, 2), np.float32))


def test_a_scale_that_is_computed_of_what_is_trained_is_an_error() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]> m (float[4] g) => (float[4] y)
        <float[4] x = {1, 2, 3, 4}, int8 z = {0}, float n = {127}> { a = Abs(x) b = ReduceMax <keepdims = 0> (a)
        s = Div(b, n) q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) y = Mul(d, g) }""")
    with pytest.raises(GradientError, match="no gradient for its input 1 \\('s'\\)"):
        run(amp.Program.from_onnx(model), np.ones(4, np.float32))


def test_a_scale_that_is_to_be_trained_is_an_error() -> None:
    main = program(np.float32([[0.1, 2], [3, 4]]), np.float32(0.25).reshape(()), np.int8(0).reshape(()))
    amp.prepare_training(main, trainable=["*", "s"])
    with pytest.raises(GradientError, match="its scale 's.*' is to be trained, and that of a pair is a constant"):
        run(main, np.ones((2, 2), np.float32))


def test_scales_and_zero_points_of_equal_numbers_are_alike() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]> m (float[300] g) => (float[300] y)
        <float[300] s, float[300] t, float[300] x, uint8[300] z>
        { q = QuantizeLinear <axis = 0> (x, s) d = DequantizeLinear <axis = 0> (q, t, z) y = Mul(d, g) }"""
    model = onnx.parser.parse_model(text)
    numbers = RNG.uniform(0.1, 0.2, 300).astype(np.float32)
    values = {"s": numbers, "t": numbers, "x": RNG.normal(size=300).astype(np.float32), "z": np.zeros(300, np.uint8)}
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in values.items())
    _, dx = run(amp.Program.from_onnx(model), np.ones(300, np.float32))
    np.testing.assert_array_equal(dx, np.rint(values["x"] / numbers) >= 0)
