"""CUDA sessions without a GPU: the real provider over stub libraries says what it would refuse, and why."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.helpers.placement import needs_placement_tool
from tests.helpers.where import ROOT
from tests.tools import cuda_placement

pytestmark = needs_placement_tool

SCRIPT = """
import warnings
import numpy as np
from onnx import parser
import amp_transpiler as amp
from amp_transpiler.passes.lowering.lowering import lower
from amp_transpiler.passes.lowering.in_place import refusals
from amp_transpiler.runtime.session import Settings, create_session

def model(signature, body):
    text = f'<ir_version: 10, opset_import: ["" : 21]> net {signature} {{ {body} }}'
    return amp.Program.from_onnx(parser.parse_model(text))

def attempt(label, action):
    try:
        print(label, "|", action())
    except amp.AmpError as error:
        print(label, "|", type(error).__name__, error)

exe = amp.Executor(amp.CUDAPlace(0))
attempt("device", lambda: amp.Executor(amp.CUDAPlace(3)))
alone = model("(float[1,2,2] x) => (float[1] y)", "k = Neg(x) y = Det(k)")
attempt("refused", lambda: exe.run(alone, {"x": np.ones((1, 2, 2), np.float32)}, ["y"]))
lowered = lower(alone, "cuda", {}, [alone.var("y")]).model
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    session, _ = create_session(lowered, amp.CUDAPlace(0), Settings(allow_cpu_fallback=True), "net")
print("allowed |", session.get_providers()[0], [str(w.message) for w in caught])
bf16 = lower(half := model("(bfloat16[2] x) => (bfloat16[2] y)", "y = Reciprocal(x)"), "cuda", {}, [half.var("y")]).model
attempt("no kernel", lambda: create_session(bf16, amp.CUDAPlace(0), Settings(), "net"))
gated = model(
    "(float[2] s, float[2] x) => (float[2] n)",
    "ok = Equal(x, x) t = Sub(s, x) n = Where(ok, t, s)")
_, graph = create_session(lower(gated, "cuda", {}, [gated.var("n")]).model, amp.CUDAPlace(0), Settings(), "net", True)
print("in place |", refusals(graph, [("s", "n")]))
"""


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the script prints, by label."""
    folder = tmp_path_factory.mktemp("stubs")
    cuda_placement.build_stubs(folder)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=dict(os.environ, LD_LIBRARY_PATH=path),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(line.split(" | ", 1) for line in done.stdout.splitlines() if " | " in line)


def test_a_device_that_is_not_there(lines: dict[str, str]) -> None:
    assert lines["device"].startswith("PlaceError CUDAPlace(3) cannot be used") and "device ID: 3" in lines["device"]


def test_an_operator_that_would_fall_to_the_cpu_is_named(lines: dict[str, str]) -> None:
    assert lines["refused"].startswith("PlaceError program 'net' does not run on CUDAPlace(0) alone")
    assert "no CUDA kernel for Det 'y" in lines["refused"] and "allow_cpu_fallback=True" in lines["refused"]


def test_allowed_fallback_warns_and_names(lines: dict[str, str]) -> None:
    assert lines["allowed"].startswith("CUDAExecutionProvider") and "except Det" in lines["allowed"]


def test_an_element_type_without_a_kernel(lines: dict[str, str]) -> None:
    assert lines["no kernel"].startswith("PlaceError") and "Reciprocal" in lines["no kernel"]


def test_the_graph_that_cuda_runs_is_proved(lines: dict[str, str]) -> None:
    assert lines["in place"] == "['']"
