"""Every training step lands on CUDA entirely, checked without a GPU by the real provider over stub libraries."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import amp_transpiler as amp
from amp_transpiler.passes.lowering.lowering import lower
from tests.helpers.placement import needs_placement_tool, place
from tests.helpers.programs import LAYERS, build

pytestmark = needs_placement_tool


@pytest.mark.parametrize(
    ("mode", "dtype"), [("fp32", "float16"), *itertools.product(("amp", "pure-fp16"), ("float16", "bfloat16"))]
)
@pytest.mark.parametrize("name", LAYERS)
def test_training_step_is_on_cuda_entirely(name: str, mode: str, dtype: str, tmp_path: Path) -> None:
    net = build(name, mode, dtype=dtype, black=["pool2d"] if name == "use_case" and mode != "fp32" else None)
    shapes = {feed: array.shape for feed, array in net.feeds.items()}
    lowered = lower(net.main, "cuda", shapes, [net.loss])
    done = place(lowered.model, tmp_path / "step.onnx")
    assert done.status == 0, done.said


def test_the_tool_rejects_what_does_not_place(tmp_path: Path) -> None:
    main = amp.Program()
    with amp.program_guard(main, amp.Program()):
        x = amp.data("x", [4, 4], "float32")
        y = main.add_variable("y", "float32", [4, 4])
        main.add_operator("Det", [x], [main.add_variable("d", "float32", [])])
        main.add_operator("Unique", [x], [y], attrs={"sorted": 1})
    done = place(lower(main, "cuda", {"x": (4, 4)}, [main.var("y")]).model, tmp_path / "bad.onnx")
    assert done.status == 1 and "Unique" in done.said, done.said
