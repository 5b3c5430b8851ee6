"""``x[mask] = v`` is a selection: the same numbers and slopes, whatever the mask picks."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.canonicalize.masked_writes import select_by_masks
from tests.helpers.sessions import run
from tests.helpers.slopes import assert_stays

HEAD = '<ir_version: 8, opset_import: ["" : 18]> g (float[2, 3, 4] x, bool[2, 3] at) => (float[2, 3, 4] y) '
HEAD += "<float[4] v = {1, 2, 3, 4}, float[1] one = {7}, float[4, 1] column = {1, 2, 3, 4}, int64[1] last = {-1}, "
HEAD += "int64[3] whole = {2, 3, 4}, int64[1] four = {4}, int64[1] begin = {0}> { "
#: As torch.onnx writes it: the mask as wide as x, its places, and as many copies of the value.
WIDE = "u = Unsqueeze(at, last)  m = Expand(u, whole)  n = NonZero(m)  p = Transpose <perm = [1, 0]> (n)  "
NARROW = "n = NonZero(at)  p = Transpose <perm = [1, 0]> (n)  "
COUNT = "f = Reshape(at, last)  i = Cast <to = 7> (f)  c = ReduceSum <keepdims = 1> (i)  "
WRITTEN = {
    "a row, by a mask as wide": WIDE
    + COUNT
    + "s = Concat <axis = 0> (c, four)  e = Expand(v, s)  d = Reshape(e, last)  y = ScatterND(x, p, d)",
    "a row, by a mask of rows": NARROW
    + COUNT
    + "s = Concat <axis = 0> (c, four)  e = Expand(v, s)  y = ScatterND(x, p, e)",
    "a number": WIDE + "s = Shape <start = 1> (n)  e = Expand(one, s)  y = ScatterND(x, p, e)",
}
STAYS = {
    "one for each": WIDE + COUNT + "s = Shape <start = 1> (n)  r = Reshape(x, last)  k = Slice(r, begin, s)  y = ScatterND(x, p, k)",
    "added": WRITTEN["a row, by a mask of rows"].replace("ScatterND(", 'ScatterND <reduction = "add"> ('),
    "a mask of more than rows": "w = Greater(x, one)  n = NonZero(w)  p = Transpose <perm = [1, 0]> (n)  " + COUNT
    + "s = Concat <axis = 0> (c, four)  e = Expand(v, s)  d = Reshape(e, last)  y = ScatterND(x, p, d)",
    "turned": WIDE + COUNT + "s = Concat <axis = 0> (four, c)  e = Expand(column, s)  d = Reshape(e, last)  y = ScatterND(x, p, d)",
}  # fmt: skip
RNG = np.random.default_rng(0)
MASKS = {"some": RNG.random((2, 3)) < 0.5, "none": np.zeros((2, 3), bool), "all": np.ones((2, 3), bool)}
X = RNG.normal(size=(2, 3, 4)).astype(np.float32)


def model(body: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"{HEAD}{body} }}")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", WRITTEN)
def test_it_is_selected(name: str, mask: str) -> None:
    feeds = {"x": X, "at": MASKS[mask]}
    program = amp.Program.from_onnx(model(WRITTEN[name]))
    assert select_by_masks(program) == ["1 values that are written where a mask is true are selected by it"]
    kinds = {op.type for op in program.operators}
    assert "Where" in kinds and not kinds & {"ScatterND", "NonZero"}
    expected = run(model(WRITTEN[name]), feeds)[0]
    np.testing.assert_array_equal(run(program.to_onnx(), feeds)[0], expected)


@pytest.mark.parametrize("name", STAYS)
def test_what_is_another_write_stays(name: str) -> None:
    assert_stays(amp.Program.from_onnx(model(STAYS[name])), select_by_masks)


def test_a_mask_that_may_be_shorter_stays() -> None:
    """Sizes without a name are not the same size: this mask picks one of two rows."""
    program = model(WRITTEN["a row, by a mask of rows"])
    for info in (*program.graph.input, *program.graph.output):
        for dim in info.type.tensor_type.shape.dim[:2]:
            dim.Clear()
    assert_stays(amp.Program.from_onnx(program), select_by_masks)


def test_what_is_written_is_trained() -> None:
    """A row that stands for masked tokens gets the gradient of all of them; what it replaces gets none."""
    body = (
        WRITTEN["a row, by a mask as wide"]
        .replace("ScatterND(x,", "ScatterND(h,")
        .replace("u = ", "h = MatMul(x, w)  u = ")
    )
    numbers = ", ".join(f"{value:.3f}" for value in RNG.normal(size=16))
    text = (HEAD + body + " }").replace("<float[4] v", f"<float[4, 4] w = {{{numbers}}}, float[4] v")
    program = amp.Program.from_onnx(onnx.parser.parse_model(text))
    amp.prepare_training(program)
    with amp.program_guard(program), amp.unique_name.guard():
        pairs = amp.append_backward(F.sum(program.outputs[0]))
    executor, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
    executor.run(program.startup, scope=scope)
    feeds = {"x": X, "at": MASKS["some"]}
    found = dict(
        zip([p.name for p, _ in pairs], executor.run(program, feeds, [g for _, g in pairs], scope), strict=True)
    )
    np.testing.assert_allclose(found["v"], np.full(4, MASKS["some"].sum()))
    np.testing.assert_allclose(found["w"], X[~MASKS["some"]].sum(0)[:, None] * np.ones(4), rtol=1e-5)
