"""Mask constants of exported models (-3.4e38) train in 16 bit without infinities or NaN."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.numerics.mask_constants import saturate_masks

HEAD = """<ir_version: 8, opset_import: ["" : 17]>
net (float[3,6,4] x, int64[3,6] mask) => (float[3,6,4] y)
  <float[4,4] w = {W}, float lowest = {-3.4028235e38}, float zero = {0}, float one = {1}, int64[1] axis = {1}>
{
  q = MatMul(x, w)
  k = Transpose <perm = [0, 2, 1]> (q)
  scores = MatMul(q, k)
  places = Unsqueeze(mask, axis)
"""
TAIL = """
  weights = Softmax <axis = -1> (masked)
  y = MatMul(weights, q)
}"""
#: The ways in which exporters write a mask.
MASKS = {
    "where": "seen = Cast <to = 9> (places)  added = Where(seen, zero, lowest)  masked = Add(scores, added)",
    "product": """f = Cast <to = 1> (places)  off = Sub(one, f)  added = Mul(off, lowest)
                  masked = Add(scores, added)""",
    "filled": "seen = Cast <to = 9> (places)  masked = Where(seen, scores, lowest)",
    "twice": """seen = Cast <to = 9> (places)  added = Where(seen, zero, lowest)  once = Add(scores, added)
                masked = Add(once, added)""",
}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_is_fetched_later_is_no_mask(level: str) -> None:
    """A built program has no outputs: what nothing reads, its loss above all, is what it is for."""
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.data("x", [None, 4])
        hidden = amp.nn.fc(amp.data("z", [None, 4]), 1, bias_attr=False)
        loss = F.mean(F.cast(hidden * 0.0, "float32")) + F.full([1], 1e5)
        large, scores = F.minimum(x, F.full([1], 1e5)), F.full([2, 3], 70000.0)
        lists = amp.AutoMixedPrecisionLists(custom_black_list=["Add", "Expand", "Min"])
        optimizer = amp.decorate(amp.optimizer.SGD(0.1, multi_precision=True), lists, level=level)
        optimizer.minimize(loss)
    executor, scope = amp.Executor(), amp.Scope()
    executor.run(startup, scope=scope)
    optimizer.amp_init(amp.CPUPlace(), scope=scope)
    feed = {"x": np.full((1, 4), 1e6, np.float32), "z": np.ones((1, 4), np.float32)}
    found = executor.run(main, feed, [loss, large, scores], scope=scope)
    np.testing.assert_array_equal(found[1], np.minimum(feed["x"], 1e5))
    np.testing.assert_array_equal(found[2], np.full((2, 3), 70000.0))
    np.testing.assert_array_equal(found[0], [1e5])


def exported(mask: str) -> amp.Program:
    weights = ", ".join(f"{v:.3f}" for v in np.random.default_rng(0).standard_normal(16))
    return amp.Program.from_onnx(onnx.parser.parse_model(HEAD.replace("{W}", "{" + weights + "}") + MASKS[mask] + TAIL))


def trained(program: amp.Program, mode: str, dtype: str, padded: bool) -> tuple[np.ndarray, int, np.ndarray]:
    """Losses of twelve steps, the number of skipped ones, and the trained weight; ``padded``: a row all masked."""
    y, pure = program.outputs[0], mode == "pure-fp16"
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        loss = F.mse_loss(y, amp.data("target", [3, 6, 4], "float32"))
        optimizer = amp.optimizer.Adam(0.05, multi_precision=pure)
        if mode != "fp32":
            optimizer = amp.decorate(
                optimizer,
                amp.AutoMixedPrecisionLists(preset="bert_pure" if pure else "bert", dtype=dtype),
                use_pure_fp16=pure,
                use_fp16_guard=False,
                dtype=dtype,
                init_loss_scaling=64.0,
            )
        optimizer.minimize(loss)
    executor, scope = amp.Executor(), amp.Scope()
    executor.run(program.startup, scope=scope)
    fetches = [loss]
    if mode != "fp32":
        optimizer.amp_init(amp.CPUPlace(), scope=scope)
        fetches.append(optimizer.get_found_inf())
    rng = np.random.default_rng(1)
    mask = np.ones((3, 6), np.int64)
    mask[1, 3:] = mask[2, 0 if padded else 1 :] = 0
    feed = {"x": rng.standard_normal((3, 6, 4)).astype(np.float32), "mask": mask}
    feed["target"] = rng.standard_normal((3, 6, 4)).astype(np.float32)
    values = [executor.run(program, feed=feed, fetch_list=fetches, scope=scope) for _ in range(12)]
    losses = np.array([float(np.ravel(v[0])[0]) for v in values])
    skipped = sum(bool(np.ravel(v[1])[0]) for v in values if len(v) > 1)
    return losses, skipped, scope.find_var("w_fp32_master_0" if pure else "w")


IN_16_BIT = pytest.mark.parametrize(
    "mode, dtype", [("amp", "float16"), ("pure-fp16", "float16"), ("pure-fp16", "bfloat16")]
)


@pytest.mark.parametrize("mask", MASKS)
@IN_16_BIT
def test_a_mask_of_fp32_trains_as_in_fp32(mask: str, mode: str, dtype: str) -> None:
    reference, _, weight = trained(exported(mask), "fp32", dtype, padded=False)
    losses, skipped, rounded = trained(exported(mask), mode, dtype, padded=False)
    assert skipped == 0 and losses[-1] < losses[0]
    tolerance = 0.003 if dtype == "float16" else 0.02
    np.testing.assert_allclose(losses, reference, rtol=tolerance)
    np.testing.assert_allclose(rounded, weight, atol=tolerance)


@pytest.mark.parametrize("mask", MASKS)
@IN_16_BIT
def test_a_row_of_padding_costs_no_step(mask: str, mode: str, dtype: str) -> None:
    losses, skipped, _ = trained(exported(mask), mode, dtype, padded=True)
    assert skipped == 0 and np.isfinite(losses).all() and losses[-1] < losses[0]


def test_only_masks_are_changed() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    net (float[2,4] x, bool[2,4] seen) => (float[2,4] p, float[2,4] y)
      <float mask = {-3.4e38}, float low = {-1e5}, float[4] minus = {-inf, 0, -2, -3}>
    {
      s = Where(seen, x, mask)
      t = Add(s, minus)
      p = Softmax(t)
      y = Where(seen, x, low)
    }"""
    program = amp.Program.from_onnx(onnx.parser.parse_model(text))
    assert [v.name for v in saturate_masks(program, "float16")] == ["mask"]
    read = {name: np.ravel(as_array(program.var(name).data)) for name in ("mask", "low", "minus")}
    assert read["mask"] == [-32752] and read["low"] == np.float32(-1e5)
    assert read["minus"].tolist() == [-np.inf, 0, -2, -3]
    before = program.to_onnx().SerializeToString()
    assert not saturate_masks(program, "float16")
    assert program.to_onnx().SerializeToString() == before


@pytest.mark.parametrize("fp32", [True, False])
def test_a_mask_that_stays_fp32_keeps_its_number(fp32: bool) -> None:
    """A row of which every place is masked is their mean: scores of fp32 vanish beside -3.4e38, but not -32752."""
    program = exported("where")
    lists = amp.AutoMixedPrecisionLists(custom_black_list=["Add"] if fp32 else None)
    reference = executed(exported("where"))
    amp.rewrite_program(program, lists)
    (added,) = (op for op in program.operators if op.type == "Add")
    assert {v.dtype for v in added.inputs if v is not None} == {"float32" if fp32 else "float16"}
    low = min(v for op in program.operators if op.type == "Where" for v in numbers(op))
    assert low == np.float32(-3.4028235e38 if fp32 else -32752)
    np.testing.assert_allclose(executed(program), reference, rtol=5e-3, atol=5e-3)


def numbers(op: amp.Operator) -> list[float]:
    return [float(as_array(v.data)) for v in op.inputs if v is not None and v.data is not None]


def executed(program: amp.Program) -> np.ndarray:
    """What it makes of a sample, where all is masked in a row."""
    mask = np.ones((3, 6), np.int64)
    mask[0] = 0
    feed = {"x": np.random.default_rng(2).normal(0, 0.4, (3, 6, 4)).astype(np.float32), "mask": mask}
    executor, scope = amp.Executor(), amp.Scope()
    executor.run(program.startup, scope=scope)
    return np.asarray(executor.run(program, feed, [program.outputs[0]], scope)[0])


def folded(combined: np.ndarray) -> amp.Program:
    """Attention of an exported decoder: mask and position bias were folded into one constant [1, heads, rows, rows]."""
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
    net (float[3,6,4] x, int64[3,6] mask) => (float[3,6,4] y) {
      one = Constant <value_ints = [1]> ()
      heads = Unsqueeze(x, one)
      q = MatMul(heads, w)
      k = Transpose <perm = [0, 1, 3, 2]> (q)
      scores = MatMul(q, k)
      masked = Add(scores, clone_1)
      weights = Softmax <axis = -1> (masked)
      mixed = MatMul(weights, q)
      y = ReduceMean <axes = [1], keepdims = 0> (mixed)
    }""")
    for name, array in (("w", rng.normal(0, 0.5, (2, 4, 4))), ("clone_1", combined)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    return amp.Program.from_onnx(model)


@IN_16_BIT
@pytest.mark.parametrize("lowest", [-3.4028235e38, -1e4])
def test_a_mask_folded_with_biases_is_a_constant_and_clamped(lowest: float, mode: str, dtype: str) -> None:
    bias = np.random.default_rng(1).normal(0, 2, (1, 2, 6, 6))
    combined = np.where(np.tri(6, dtype=bool), 0, lowest) + bias
    reference = folded(combined)
    amp.prepare_training(reference)
    assert [v.name for v in reference.parameters] == ["w"]
    exact, _, weight = trained(reference, "fp32", dtype, padded=False)
    program = folded(combined)
    amp.prepare_training(program)
    losses, skipped, rounded = trained(program, mode, dtype, padded=False)
    assert skipped == 0 and losses[-1] < losses[0]
    tolerance = 0.003 if dtype == "float16" else 0.02
    np.testing.assert_allclose(losses, exact, rtol=tolerance)
    np.testing.assert_allclose(rounded, weight, atol=tolerance)
    if dtype == "float16" and lowest < -1e5:
        stored = [
            np.asarray(as_array(v.data), np.float32)
            for v in program.variables
            if v.shape == (1, 2, 6, 6) and v.data is not None
        ]
        assert [array.min() for array in stored] == [-32752]
        np.testing.assert_allclose(
            stored[0][np.tri(6, dtype=bool)[None, None].repeat(2, 1)],
            bias[np.tri(6, dtype=bool)[None, None].repeat(2, 1)],
            rtol=1e-3,
        )


@pytest.mark.parametrize("content", [-20.0, -3e4])
def test_trained_biases_stay_parameters(content: float) -> None:
    """Position biases alone; and numbers that are no mask, for they lie on both sides of it."""
    program = folded(np.linspace(content, 0, 72).reshape(1, 2, 6, 6))
    assert "clone_1" in [v.name for v in program.parameters]
