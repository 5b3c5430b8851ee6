"""What is read at known places of a tensor that is split, of sizes that nobody knows before the run."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.passes.canonicalize.sequences import expand_sequences
from tests.helpers.sessions import run
from tests.helpers.slopes import assert_stays, slope

X = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
SIZES = "size = Shape <start = 1> (x)  rest = Sub (size, two)  sizes = Concat <axis = 0> (two, rest)"
#: What splits, where it is read, and the columns that are there.
FORMS = {
    "sizes of the run": (SIZES + "  s = SplitToSequence <axis = 1> (x, sizes)", -1, slice(2, 5)),
    "known sizes": (
        "sizes = Constant <value_ints = [2, 3]> ()  s = SplitToSequence <axis = -1> (x, sizes)",
        0,
        slice(0, 2),
    ),
    "one size": ("each = Constant <value_int = 2> ()  s = SplitToSequence <axis = 1> (x, each)", 1, slice(2, 4)),
    "one size, the first": (
        "each = Constant <value_int = 2> ()  s = SplitToSequence <axis = 1> (x, each)",
        0,
        slice(0, 2),
    ),
    "one size, the rest": (
        "each = Constant <value_int = 2> ()  s = SplitToSequence <axis = 1> (x, each)",
        2,
        slice(4, 5),
    ),
    "one size of the run": (
        "size = Shape <start = 1> (x)  half = Div (size, two)  each = Squeeze (half)  s = SplitToSequence <axis = 1> (x, each)",
        1,
        slice(2, 4),
    ),
    "single ones": ("s = SplitToSequence <axis = 1> (x)", -1, slice(4, 5)),
    "single ones, taken out": ("s = SplitToSequence <axis = 1, keepdims = 0> (x)", -2, 3),
}


def program(split: str, place: str) -> tuple[amp.Program, onnx.ModelProto]:
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 20]>
    net (float[n,l] x) => (float y) <int64[1] two = {{2}}>
    {{ {split}  place = {place}  y = SequenceAt (s, place) }}"""
    )
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return amp.Program.from_onnx(model), model


@pytest.mark.parametrize("form", FORMS)
def test_a_piece_of_a_tensor_is_read_of_it(form: str) -> None:
    split, place, columns = FORMS[form]
    found, model = program(split, f"Constant <value_int = {place}> ()")
    assert expand_sequences(found)
    assert "SequenceAt" not in [op.type for op in found.operators]
    y, gradient = slope(found, X)
    np.testing.assert_array_equal(y, run(model, {"x": X})[0])
    expected = np.zeros_like(X)
    expected[:, columns] = 2 * X[:, columns]
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


@pytest.mark.parametrize("place", ["Constant <value_int = -1> ()", "Squeeze (two)"])
def test_a_place_that_hangs_on_the_run_stays(place: str) -> None:
    """Counted from the end too, where the last piece may be smaller."""
    found, _ = program(FORMS["one size"][0], place)
    assert_stays(found, lambda each: ["there was one"] * expand_sequences(each))
