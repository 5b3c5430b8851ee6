"""A model in one 16-bit type converts to the other, whole."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest

import amp_transpiler as amp

TYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def model(dtype: str, cast: str = "") -> onnx.ModelProto:
    kind = "float" if dtype == "float32" else dtype
    body = "h = MatMul (x, w) r = Relu (h) y = MatMul (r, w)"
    if cast:
        body = f"c = Cast <to = {getattr(onnx.TensorProto, cast.upper())}> (x) g = CastLike (c, x) " + body.replace(
            "x", "g"
        )
    text = f'<ir_version: 9, opset_import: ["" : 20]> net ({kind}[2,16] x) => ({kind}[2,16] y) {{ {body} }}'
    made = onnx.parser.parse_model(text)
    weight = np.random.default_rng(0).normal(size=(16, 16)).astype(TYPES.get(dtype, np.float32))
    made.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    return made


def held(program: amp.Program) -> set[str]:
    return {str(v.dtype) for op in program.operators for v in (*op.inputs, *op.outputs) if "float" in str(v.dtype)}


@pytest.mark.parametrize("mode", ["pure", "mixed", "auto"])
@pytest.mark.parametrize(("has", "asked"), [("bfloat16", "float16"), ("float16", "bfloat16")])
def test_a_model_in_the_other_type_becomes_one_of_the_type_asked_for(has: str, asked: str, mode: str) -> None:
    program = amp.convert(model(has), dtype=asked, mode=mode, keep_io=False, check=True)
    assert program.inputs[0].dtype == program.outputs[0].dtype == asked
    assert {op.precision for op in program.operators if op.type == "MatMul"} == {asked}
    assert held(program) <= {asked, "float32"}
    assert any(f"{has} weights are fp32 now" in note for note in program.conversion.notes)
    assert program.conversion.verdict is not None and program.conversion.verdict.met


def test_inputs_and_outputs_keep_their_type_where_they_shall() -> None:
    program = amp.convert(model("bfloat16"), dtype="float16")
    assert program.inputs[0].dtype == program.outputs[0].dtype == "bfloat16"
    assert program.var("w").dtype == "float16"


@pytest.mark.parametrize(("has", "cast"), [("float16", ""), ("float32", "bfloat16")])
def test_a_model_that_is_not_of_the_other_type_keeps_its_casts(has: str, cast: str) -> None:
    program = amp.convert(model(has, cast), dtype="float16")
    assert not any("fp32 now" in note for note in program.conversion.notes)
    assert ("bfloat16" in held(program)) == bool(cast)
