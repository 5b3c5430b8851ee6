"""onnxruntime by itself: on CPU, with one thread, silent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort


def session(model: onnx.ModelProto | str | Path, level: str = "ENABLE_ALL", written: Path | None = None) -> Any:
    """A session; ``level`` of graph optimization, as onnxruntime spells it; ``written``: where the optimized model goes."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_{level}")
    if written is not None:
        options.optimized_model_filepath = str(written)
    content = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def run(
    model: onnx.ModelProto | str | Path, feeds: dict[str, np.ndarray[Any, Any]], level: str = "ENABLE_ALL"
) -> list[Any]:
    """Every output."""
    return list(session(model, level).run(None, feeds))
