"""What is saved of a prepared program once it has been trained a little."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

import amp_transpiler as amp
from amp_transpiler.nn import functional as F


def trained_and_saved(main: amp.Program, x: np.ndarray, mode: str, folder: Path) -> onnx.ModelProto:
    """The saved model of a program of one input and output, in operators of ONNX alone; it gives what the program gives."""
    optimizer = amp.optimizer.Adam(0.01, multi_precision=mode != "fp32")
    if mode != "fp32":
        pure = mode == "pure"
        optimizer = amp.decorate(optimizer, use_pure_fp16=pure, use_fp16_guard=False, init_loss_scaling=8.0)
    with amp.program_guard(main, main.startup):
        y = main.outputs[0]
        optimizer.minimize(F.mean(F.cast(y * y, "float32")), main.startup)
    for place in (amp.CPUPlace(), amp.CUDAPlace(0)):
        assert main.memory_estimate({"x": x.shape}, place).peak
    with amp.scope_guard(amp.Scope()):
        executor = amp.Executor(amp.CPUPlace())
        executor.run(main.startup)
        if mode == "pure":
            optimizer.amp_init(amp.CPUPlace())
        for _ in range(3):
            executor.run(main, {"x": x}, [])
        (expected,) = executor.run(main.clone(for_test=True), {"x": x}, [y.name])
        amp.save_inference_model(str(folder / "m"), [main.inputs[0]], [y], executor, program=main)
    file = next(path for path in folder.rglob("*") if path.is_file() and path.suffix in (".onnx", ""))
    model = onnx.load(file)
    onnx.checker.check_model(model, full_check=True)
    assert {node.domain for node in model.graph.node} == {""}
    running = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (given,) = running.get_inputs()
    feed = x.astype(np.float16 if given.type == "tensor(float16)" else np.float32)
    (served,) = running.run(None, {given.name: feed})
    np.testing.assert_allclose(served.astype(np.float32), expected, rtol=2e-2, atol=2e-2)
    return model
