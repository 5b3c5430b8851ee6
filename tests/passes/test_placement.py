"""Every training step lands on CUDA entirely, checked without a GPU by the real provider over stub libraries."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import amp_transpiler as amp
from amp_transpiler.passes.lowering.lowering import lower
from tests.helpers.programs import LAYERS, build
from tests.helpers.where import PLACEMENT

HEADERS = any(Path(p, "driver_types.h").exists() for p in ("/usr/local/cuda/include", "/usr/local/cuda-13.0/include"))

pytestmark = [
    pytest.mark.skipif(shutil.which("gcc") is None or not HEADERS, reason="needs gcc and the CUDA 13 headers"),
]


def place(model: object, path: Path) -> subprocess.CompletedProcess[str]:
    """Ask for placement and capture; where capture is refused, ask again for the nodes that stand in its way."""
    path.write_bytes(model.SerializeToString())  # type: ignore[attr-defined]
    for options in (["--cuda-graph"], []):
        done = subprocess.run(
            [sys.executable, str(PLACEMENT), str(path), *options], capture_output=True, text=True, timeout=300
        )
        if done.returncode != 2:
            return done
    return done


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mode", ["fp32", "amp", "pure-fp16"])
@pytest.mark.parametrize("name", LAYERS)
def test_training_step_is_on_cuda_entirely(name: str, mode: str, dtype: str, tmp_path: Path) -> None:
    if mode == "fp32" and dtype == "bfloat16":
        pytest.skip("fp32 has no 16-bit type")
    net = build(name, mode, dtype=dtype, black=["pool2d"] if name == "use_case" and mode != "fp32" else None)
    shapes = {feed: array.shape for feed, array in net.feeds.items()}
    lowered = lower(net.main, "cuda", shapes, [net.loss])
    done = place(lowered.model, tmp_path / "step.onnx")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_tool_rejects_what_does_not_place(tmp_path: Path) -> None:
    main = amp.Program()
    with amp.program_guard(main, amp.Program()):
        x = amp.data("x", [4, 4], "float32")
        y = main.add_variable("y", "float32", [4, 4])
        main.add_operator("Det", [x], [main.add_variable("d", "float32", [])])
        main.add_operator("Unique", [x], [y], attrs={"sorted": 1})
    done = place(lower(main, "cuda", {"x": (4, 4)}, [main.var("y")]).model, tmp_path / "bad.onnx")
    assert done.returncode == 1 and "Unique" in done.stdout, done.stdout
