"""Says whether onnxruntime can really use a CUDA device here: ``python -m tests.tools.gpu_device``. Exit status 0: it can; 1: it cannot, and why is printed.

The provider's name in ``get_available_providers()`` is no answer: the stock GPU wheel lists CUDA on every machine and
falls back to the CPU when its libraries do not load. So one session is created and asked where it runs.
"""

import ctypes
import sys


def driver_missing() -> str | None:
    """Why there is no NVIDIA driver, or None when there is one."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        ctypes.CDLL(name)
    except OSError:
        return f"no NVIDIA driver on this machine ({name} does not load)"
    return None


def device_missing() -> str | None:
    """Why onnxruntime has no usable CUDA device, or None when it has one."""
    import numpy as np
    import onnxruntime as ort
    from onnx import parser

    if "CUDAExecutionProvider" not in ort.get_available_providers():
        return "the installed onnxruntime was built without CUDA"
    if hasattr(ort, "preload_dlls"):
        ort.preload_dlls()
    text = '<ir_version: 10, opset_import: ["" : 21]> g (float[2] x) => (float[2] y) { y = Add(x, x) }'
    model = parser.parse_model(text)
    try:
        session = ort.InferenceSession(model.SerializeToString(), providers=["CUDAExecutionProvider"])
        if session.get_providers()[0] != "CUDAExecutionProvider":
            return "onnxruntime could not load its CUDA provider and fell back to the CPU"
        session.run(None, {"x": np.ones(2, np.float32)})
    except Exception as error:
        return f"onnxruntime could not use the CUDA device: {error}"
    return None


if __name__ == "__main__":
    missing = driver_missing() or (None if "--driver" in sys.argv[1:] else device_missing())
    if missing:
        print(f"GPU tests not run: {missing}.")
        sys.exit(1)
