"""Operators of ai.onnx.ml: what ONNX does not infer of them, beside what onnxruntime makes."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import amp_transpiler as amp
from amp_transpiler.ir.infer import Shapes

_TREE = """nodes_falsenodeids = [2, 0, 0], nodes_featureids = [0, 0, 0], nodes_hitrates = [1.0, 1.0, 1.0],
  nodes_missing_value_tracks_true = [0, 0, 0], nodes_modes = ["BRANCH_LEQ", "LEAF", "LEAF"], nodes_nodeids = [0, 1, 2],
  nodes_treeids = [0, 0, 0], nodes_truenodeids = [1, 0, 0], nodes_values = [0.5, 0.0, 0.0]"""
_LEAVES = "_nodeids = [1, 2], {0}_treeids = [0, 0], {0}_weights = [0.25, 0.75]"
OPERATORS = {
    "Scaler": "y = ai.onnx.ml.Scaler <offset = [0.5], scale = [2.0]> (x)",
    "Normalizer": 'y = ai.onnx.ml.Normalizer <norm = "L1"> (x)',
    "Imputer": "y = ai.onnx.ml.Imputer <imputed_value_floats = [1.0, 2.0, 3.0]> (x)",
    "LinearRegressor": "y = ai.onnx.ml.LinearRegressor <coefficients = [1.0, 2.0, 3.0]> (x)",
    "two targets": "y = ai.onnx.ml.LinearRegressor <coefficients = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], targets = 2> (x)",
    "TreeEnsembleRegressor": f"""y = ai.onnx.ml.TreeEnsembleRegressor <n_targets = 2, {_TREE}, target_ids = [0, 1],
      target{_LEAVES.format("target")}> (x)""",
    "TreeEnsembleClassifier": f"""label, y = ai.onnx.ml.TreeEnsembleClassifier <classlabels_int64s = [3, 5, 7], {_TREE},
      class_ids = [0, 1], class{_LEAVES.format("class")}> (x)""",
    "classes with names": f"""label, y = ai.onnx.ml.TreeEnsembleClassifier <classlabels_strings = ["a", "b"], {_TREE},
      class_ids = [0, 1], class{_LEAVES.format("class")}> (x)""",
}


@pytest.mark.parametrize("name", OPERATORS)
def test_types_and_shapes_are_those_of_what_onnxruntime_makes(name: str) -> None:
    text = OPERATORS[name]
    labels = ", {} label".format("string[M]" if "strings" in text else "int64[M]") if "label, y" in text else ""
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 1]>
    net (float[N,3] x) => (float[M,K] y{labels}) {{ {text} }}""")
    x = np.random.default_rng(0).random((4, 3)).astype(np.float32)
    made = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})
    program = amp.Program.from_onnx(model)
    shapes = Shapes(program, {"x": x.shape})
    for variable, array in zip(program.outputs, made, strict=True):
        dtype, shape = shapes[variable]
        assert shape == array.shape and (dtype == array.dtype.name or dtype == "string")


def test_a_network_behind_a_scaler_trains() -> None:
    """As scikit-learn's pipelines are: the shape of what a scaler makes is that of what it reads."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 1]>
    net (float[N,3] x) => (float[N,1] y) <float[3,1] w = {0.1, -0.2, 0.3}> {
      scaled = ai.onnx.ml.Scaler <offset = [0.5, 0.5, 0.5], scale = [2.0, 1.0, 4.0]> (x)
      y = MatMul(scaled, w)
    }""")
    program = amp.Program.from_onnx(model)
    told = amp.prepare_training(program)
    assert told.trainable == ("w",)
    with amp.program_guard(program, program.startup):
        loss = amp.nn.functional.mse_loss(program.outputs[0], amp.data("t", ["N", 1], "float32"))
        ((_, gradient),) = amp.append_backward(loss)
    scope, executor = amp.Scope(), amp.Executor(threads=1)
    executor.run(program.startup, scope=scope)
    x, t = np.random.default_rng(0).random((2, 8, 3)).astype(np.float32), np.ones((8, 1), np.float32)
    (found,) = executor.run(program, feed={"x": x[0], "t": t}, fetch_list=[gradient], scope=scope)
    scaled = (x[0].astype(np.float64) - 0.5) * [2, 1, 4]
    wanted = scaled.T @ (scaled @ [[0.1], [-0.2], [0.3]] - t) * 2 / 8
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_what_is_beyond_float16_is_so_where_missing_numbers_were_put_in() -> None:
    """As in scikit-learn's PowerTransformer, which multiplies what it does not choose by 0: that was infinite."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 1]>
    net (float[N,4] x, bool[N,4] taken) => (float[N,4] y)
      <float four = {4}, float[4,4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}> {
      p = Pow(x, four)  whole = ai.onnx.ml.Imputer <imputed_value_floats = [0.0]> (p)
      t = Cast<to = 1>(taken)  chosen = Mul(whole, t)  y = MatMul(chosen, w)
    }""")
    feeds = {"x": np.full((2, 4), 20, np.float32), "taken": np.zeros((2, 4), bool)}
    (y,) = amp.Executor(amp.CPUPlace(), threads=1).run(amp.convert(model), feed=feeds, fetch_list=["y"])
    np.testing.assert_array_equal(y, 0)
