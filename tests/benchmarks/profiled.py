"""Which operators take most of a step, by onnxruntime's profile."""

from __future__ import annotations

import collections
import json
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnxruntime as ort

import amp_transpiler as amp
from amp_transpiler.ir.control import CONTROL
from amp_transpiler.ir.kernel_cost import launches
from amp_transpiler.ir.opdef import traits_of


def largest_costs(
    program: amp.Program, loss: amp.Variable, feed: dict[str, np.ndarray], scope: amp.Scope, place: Any, steps: int = 4
) -> list[str]:
    """The three operators that take most time, and then all products and convolutions, with their shares.

    Those of an executor's own sessions, with its state bound as it is, after the first step. On CUDA the profile has the
    time in which kernels are launched: it is that of the kernels where the process was started with
    CUDA_LAUNCH_BLOCKING=1.
    """
    spent: collections.Counter[str] = collections.Counter()
    sessions: list[Any] = []
    create = ort.InferenceSession
    with tempfile.TemporaryDirectory() as folder:

        def profiled(model: Any, options: Any, **others: Any) -> Any:
            options.enable_profiling, options.profile_file_prefix = True, f"{folder}/{len(sessions)}"
            sessions.append(create(model, options, **others))
            return sessions[-1]

        with mock.patch.object(ort, "InferenceSession", profiled), closing(amp.Executor(place, threads=1)) as executor:
            for _ in range(steps):
                executor.run(program, feed=feed, fetch_list=[loss], scope=scope)
        for session in sessions:
            _add_costs(json.loads(Path(session.end_profiling()).read_text(encoding="utf-8")), spent)
    total = max(1, sum(spent.values()))
    products = sum(time for name, time in spent.items() if _is_product(name))
    shares = [*spent.most_common(3), ("all products", products)]
    return [f"{name} {100 * time / total:.0f} %" for name, time in shares]


def _add_costs(events: list[dict[str, Any]], spent: collections.Counter[str]) -> None:
    """Add the microseconds of each type of operator in all runs but the first."""
    later = sorted(event["ts"] for event in events if event["name"] == "model_run")[1:]
    for event in events:
        timed = (
            event.get("cat") == "Node" and event["name"].endswith("_kernel_time") and later and event["ts"] >= later[0]
        )
        # The nodes inside a graph are events of their own; a view launches nothing and takes what its host takes.
        if timed and (name := event["args"]["op_name"]) not in CONTROL and launches(name):
            spent[name] += event["dur"]


def _is_product(name: str) -> bool:
    return any(traits_of(name, domain).product for domain in ("", "com.microsoft"))
