"""Whatever takes a place takes its kind as well."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.passes.step_check.check_step import check_step
from amp_transpiler.runtime.collective.current import use_engine
from amp_transpiler.runtime.collective.simulated import SimulatedEngine
from tests.helpers.refusals import Net, pure, trained
from tests.helpers.where import ROOT

TEXT = '<ir_version: 8, opset_import: ["" : 17]> m (float[2,4] x) => (float[2,4] y) { a = Exp(x) y = Relu(a) }'
MODEL, HALF = map(onnx.parser.parse_model, (TEXT, TEXT.replace("float[", "float16[")))
SHAPES = {"image": (6, 8), "label": (6, 1)}


def program() -> amp.Program:
    return trained(pure)[0].main


def exported(place: Any, folder: Path) -> bytes:
    net, optimizer, _, scope, _ = trained(pure)
    optimizer.amp_init("cpu", scope)
    home = net.main.export_training(folder / type(place).__name__, place, SHAPES, scope=scope)
    return (home / "manifest.json").read_bytes()


def started(place: Any, _: Path) -> dict[str, bytes]:
    _, optimizer, _, scope, _ = trained(pure)
    optimizer.amp_init(place, scope)
    return {name: scope.find_var(name).tobytes() for name in scope.var_names()}


def cast(place: Any, _: Path) -> dict[str, bytes]:
    net, _, _, scope, _ = trained(pure)
    amp.cast_parameters_to_fp16(place, net.main, scope)
    return {name: scope.find_var(name).tobytes() for name in scope.var_names()}


def recomputed(place: Any, _: Path) -> Any:
    net = Net()
    amp.recompute(net.main, memory_budget=1 << 20, feed_shapes=SHAPES, place=place)
    return net.main.recompute


def checked(place: Any, _: Path) -> Any:
    return amp.check_model(HALF, place, data={"x": np.ones((2, 4), np.float16)}).to_dict()


#: By name what gives something to compare, on a place that runs here where it has to run.
CPU, CUDA = amp.CPUPlace(), amp.CUDAPlace(0)
CALLS: dict[str, tuple[Any, Callable[[Any, Path], Any]]] = {
    "Executor": (CPU, lambda place, _: amp.Executor(place).place),
    "Program.lower": (CUDA, lambda place, _: program().lower(place, SHAPES).model),
    "Program.cost_estimate": (CUDA, lambda place, _: program().cost_estimate(place, SHAPES)),
    "Program.memory_estimate": (CUDA, lambda place, _: program().memory_estimate(SHAPES, place)),
    "Program.export_training": (CUDA, exported),
    "OptimizerWithMixedPrecision.amp_init": (CPU, started),
    "cast_parameters_to_fp16": (CPU, cast),
    "recompute": (CUDA, recomputed),
    "check_step": (CUDA, lambda place, _: check_step(program(), place, SHAPES)),
    "convert": (amp.WebGPUPlace(0), lambda place, _: amp.convert(MODEL, place=place).to_onnx()),
    "check_model": (amp.WebGPUPlace(0), checked),
}
#: Tried where they are tested, and those that hold a place or are for one kind alone.
OTHERS = {"AutoMixedPrecisionLists", "fit", "init"}
OTHERS |= {"CostEstimate", "MemoryEstimate", "ModelCheck", "Scope.ort_value_on", "Engine.on", "NcclEngine"}


@pytest.mark.parametrize("name", CALLS)
def test_a_kind_stands_for_its_place_and_another_name_is_refused(name: str, tmp_path: Path) -> None:
    place, call = CALLS[name]
    found = []
    for given in (place, place.kind.upper()):
        with amp.unique_name.guard():
            found.append(call(given, tmp_path))
    assert found[0] == found[1]
    with pytest.raises(ArgumentError, match=r"place (\(--place\) )?is 'gpu'; .* its kind: cpu, cuda, webgpu"):
        call("gpu", tmp_path)
    with pytest.raises(ArgumentTypeError, match=r"; expected a place.*write CUDAPlace\(\) for a place"):
        call(amp.CUDAPlace, tmp_path)


def test_no_call_that_takes_a_place_is_left_out() -> None:
    pages = re.findall(r"```text\n(\w[\w.]*)\((.*?)\)\n", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.S)
    assert {name for name, given in pages if re.search(r"\bplace\b", given)} == CALLS.keys() | OTHERS


def test_lists_take_a_place_too() -> None:
    assert amp.AutoMixedPrecisionLists(place=amp.WebGPUPlace(0)).place == "webgpu"
    for wrong in (amp.CPUPlace(), amp.CUDAPlace, "gpu"):
        with pytest.raises(amp.errors.ListError, match="expected a place with kernels for 16 bit, 'cuda' or 'webgpu'"):
            amp.AutoMixedPrecisionLists(place=wrong)  # type: ignore[arg-type]


def test_of_several_ranks_each_has_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SimulatedEngine.group(2, 20)[1]
    monkeypatch.setattr(engine, "place", amp.CUDAPlace(1), raising=False)
    monkeypatch.setattr(amp.Executor, "_require", lambda self, place: None)
    with use_engine(engine):
        places = [amp.Executor(given).place for given in ("cuda", "cpu", amp.CUDAPlace(0))]
    assert places == [amp.CUDAPlace(1), amp.CPUPlace(), amp.CUDAPlace(0)]
