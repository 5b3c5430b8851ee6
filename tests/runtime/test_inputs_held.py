"""Kernels that write over an input before they have read it: onnxruntime's MoE on CPU, before 1.32."""

from __future__ import annotations

import numpy as np
import onnx

import amp_transpiler as amp

_RNG = np.random.default_rng(0)
ROUTER, UP, DOWN = (_RNG.normal(0, 0.3, shape).astype(np.float32) for shape in ((16, 4), (4, 32, 16), (4, 16, 32)))
X = {"x": _RNG.normal(0, 1, (8, 16)).astype(np.float32)}


def experts(behind: str = "Neg(m)") -> onnx.ModelProto:
    """What the router reads is read by the experts last, as behind a norm in a language model."""
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
      m (float[8,16] x) => (float[8,16] y) <float[16,4] r, float[4,32,16] u, float[4,16,32] d> {{
        t = Tanh(x)  l = MatMul(t, r)  m = com.microsoft.MoE<k = 4, activation_type = "relu">(t, l, u, , d)
        y = {behind} }}""")
    del model.graph.value_info[:]
    for name, array in (("r", ROUTER), ("u", UP), ("d", DOWN)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def wanted() -> np.ndarray:
    """All four experts, by what the router gives each."""
    t = np.tanh(X["x"])
    scores = np.exp(t @ ROUTER)
    each = np.maximum(t @ UP.transpose(0, 2, 1), 0) @ DOWN.transpose(0, 2, 1)
    return -np.einsum("te,eto->to", scores / scores.sum(1, keepdims=True), each)


def test_experts_compute_what_they_mean() -> None:
    main, executor = amp.Program.from_onnx(experts()), amp.Executor(amp.CPUPlace())
    executor.run(main.startup)
    (found,) = executor.run(main, feed=X, fetch_list=["y"])
    np.testing.assert_allclose(found, wanted(), rtol=1e-4, atol=1e-5)


def test_a_conversion_is_measured_against_what_they_mean() -> None:
    """Not against zeros, of which zeros are not off."""
    verdict = amp.convert(experts(), calibration=X, check=True).conversion.verdict
    assert verdict is not None and verdict.met and verdict.worst[1] > 1e-5


def test_a_check_says_where_the_kernel_fails() -> None:
    converted, at_home = amp.convert(experts()).to_onnx(), amp.convert(experts("Add(m, t)")).to_onnx()
    (what,) = amp.check_model(converted, "cpu", data=X).faults.values()
    assert what == "an input that nobody reads after it: gives zeros before onnxruntime 1.32"
    assert not amp.check_model(at_home, "cpu", data=X).faults and not amp.check_model(converted, data=X).faults
