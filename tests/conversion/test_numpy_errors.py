"""Who looks for NaN lets numpy raise: numbers that vanish or leave a 16-bit type are a conversion's own business."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from tests.fuzz.models import models


@pytest.mark.parametrize("keywords", [{}, {"mode": "auto"}, {"dtype": "bfloat16"}, {"check": True}])
@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_a_conversion_where_numpy_raises(name: str, keywords: dict[str, Any]) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(models()[name])
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        if array.ndim == 2 and array.dtype == np.float32:
            array = array * np.float32(1e-5)
            array.flat[0] = 1e-38
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    expected = amp.convert(model, **keywords).to_onnx()
    with np.errstate(all="raise"):
        assert amp.convert(model, **keywords).to_onnx() == expected
