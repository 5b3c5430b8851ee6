"""Types and shapes of the operators of ai.onnx.ml that ONNX does not infer: scalers, trees and linear models.

Each reads rows of features; a vector is one row. https://onnx.ai/onnx/operators/index_ml.html
"""

from __future__ import annotations

from amp_transpiler.ir.nodes import Operator, Shape, Types
from amp_transpiler.ir.opdef import entry, traits

_ML = "ai.onnx.ml::"


def _like_data(op: Operator) -> Types:
    """Every number becomes another: a float, but where numbers that are missing are put in."""
    read = op.inputs[0]
    assert read is not None
    return [(read.dtype if op.type == "Imputer" else "float32", read.shape)]


def _regressor(op: Operator) -> Types:
    count = op.attrs.get("n_targets", op.attrs.get("targets", 1))
    return [("float32", _of_rows(op, int(count)))]


def _classifier(op: Operator) -> Types:
    """The label of each row, and its score for each class."""
    integers, texts = (op.attrs.get(f"classlabels_{kind}") for kind in ("int64s", "strings"))
    labels: Types = [("string" if texts else "int64", _of_rows(op))]
    return [*labels, ("float32", _of_rows(op, len(texts or integers or ())))][: len(op.outputs)]


def _of_rows(op: Operator, *columns: int) -> Shape | None:
    shape = None if op.inputs[0] is None else op.inputs[0].shape
    return None if shape is None else (*(shape[:1] if len(shape) > 1 else (1,)), *columns)


for _type in ("Scaler", "Normalizer", "Imputer"):
    entry(_ML + _type).infer = _like_data
traits(_ML + "Scaler", elementwise=True)
traits(_ML + "Imputer", elementwise=True, carries_large=True)
for _type in ("LinearRegressor", "SVMRegressor", "TreeEnsembleRegressor"):
    entry(_ML + _type).infer = _regressor
entry(_ML + "TreeEnsembleClassifier").infer = _classifier
