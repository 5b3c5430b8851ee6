"""Which operators take most of a step, by onnxruntime's profile."""

from __future__ import annotations

import collections
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

import amp_transpiler as amp
from amp_transpiler.ir.control import CONTROL
from tests.helpers.ports import fed


def largest_costs(
    program: amp.Program, loss: amp.Variable, feed: dict[str, np.ndarray], scope: amp.Scope, place: Any, steps: int = 3
) -> list[str]:
    """The three operators that take most time, with their shares.

    On CUDA the profile has the time in which kernels are launched: it is that of the kernels where the process was
    started with CUDA_LAUNCH_BLOCKING=1.
    """
    lowered = program.lower(place, feed_shapes={n: v.shape for n, v in feed.items()}, fetches=[loss])
    values = fed(lowered.states, scope.find_var)
    values |= {port.tensor: feed[port.variable] for port in lowered.feeds}
    values |= {name: np.zeros((), np.float32) for name in lowered.scalars}
    options = ort.SessionOptions()
    options.enable_profiling, options.intra_op_num_threads, options.log_severity_level = True, 1, 3
    cuda = place.kind == "cuda"
    providers = [("CUDAExecutionProvider", {"device_id": str(place.device_id)})] if cuda else ["CPUExecutionProvider"]
    with tempfile.TemporaryDirectory() as folder:
        options.profile_file_prefix = f"{folder}/profile"
        session = ort.InferenceSession(
            lowered.model.SerializeToString(), options, providers=providers, enable_fallback=0
        )
        binding = session.io_binding()
        for name, value in values.items():
            binding.bind_ortvalue_input(name, amp.runtime.device_tensors.from_array(value, place))
        for output in session.get_outputs():
            binding.bind_output(output.name, place.kind, place.device_id)
        for _ in range(steps):
            session.run_with_iobinding(binding)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    spent: collections.Counter[str] = collections.Counter()
    for event in events:
        timed = event.get("cat") == "Node" and event["name"].endswith("_kernel_time")
        if timed and event["args"]["op_name"] not in CONTROL:  # the nodes inside are events of their own
            spent[event["args"]["op_name"]] += event["dur"]
    total = max(1, sum(spent.values()))
    return [f"{name} {100 * time / total:.0f} %" for name, time in spent.most_common(3)]
