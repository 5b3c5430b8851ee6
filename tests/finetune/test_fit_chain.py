"""What ``train`` and ``convert`` write trains again: in every mode, from both exporters, and gets no worse."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from tests.helpers.exported import exported, loss_and_accuracy, samples

MODES = ("fp32", "mixed", "pure")
CODES = {"float16": onnx.TensorProto.FLOAT16, "bfloat16": onnx.TensorProto.BFLOAT16}
EXPORTERS = ("torchscript", "dynamo")
COMBINATIONS = list(itertools.product(MODES, MODES, CODES))


def weight_types(path: Path) -> set[int]:
    return {t.data_type for t in onnx.load(path).graph.initializer if t.dims and np.prod(t.dims) > 4} - {
        onnx.TensorProto.INT64
    }


def links(model: str, mode: str, save: str, dtype: str, folder: Path) -> list[Path]:
    """train, train, convert, train: the files, the export first."""
    data = samples(model, 96)
    paths = [folder / f"{turn}.onnx" for turn in range(5)]
    onnx.save(exported(model), paths[0])
    for turn, (before, after) in enumerate(itertools.pairwise(paths)):
        if turn == 2:
            amp.convert(before, mode="pure" if save == "fp32" else save, dtype=dtype).to_onnx(after)
        else:
            amp.fit(before, after, data=data, mode=mode, save=save, dtype=dtype, lr=0.01, epochs=2)
    return paths


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each combination with one exporter and one model, in turn; with both exporters where that is asked for."""
    if "save" not in metafunc.fixturenames:
        return
    chains = []
    for number, (mode, save, dtype) in enumerate(COMBINATIONS):
        both = [f"{('cnn', 'encoder')[(number // 4 + turn) % 2]}_{EXPORTERS[turn]}" for turn in (0, 1)]
        if not metafunc.config.getoption("--every-chain"):
            both = [both[number // 2 % 2]]
        chains += [(model, mode, save, dtype) for model in both]
    metafunc.parametrize("model, mode, save, dtype", chains)


def test_what_was_written_trains_again(model: str, mode: str, save: str, dtype: str, tmp_path: Path) -> None:
    test = samples(model, 200, seed=50)
    paths = links(model, mode, save, dtype, tmp_path)
    results = [loss_and_accuracy(path, test) for path in paths]
    for step, ((loss, _), (after, _)) in enumerate(itertools.pairwise(results)):
        assert after <= loss * (1.02 if step == 2 else 1) + (0.02 if step == 2 else 0), (step, results)
    assert results[-1][1] > results[0][1] + 0.2, results
    half = {CODES[dtype]}
    for path in (paths[1], paths[2], paths[4]):
        assert (weight_types(path) & half == half) == (save != "fp32"), "it is saved as asked"
        if save == "fp32":
            assert weight_types(path) == {onnx.TensorProto.FLOAT}, "fp32 means fp32"
            text = onnx.printer.to_text(onnx.load(path))
            assert "Cast" not in text and "float16" not in text


@pytest.mark.parametrize("model, keep_io", [("cnn_dynamo", True), ("encoder_torchscript", False)])
def test_a_float16_model_of_another_converter_trains(model: str, keep_io: bool, tmp_path: Path) -> None:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    half = convert_float_to_float16(exported(model), keep_io_types=keep_io)
    onnx.save(half, tmp_path / "half.onnx")
    data, test = samples(model, 96), samples(model, 200, seed=50)
    amp.fit(tmp_path / "half.onnx", tmp_path / "out.onnx", data=data, mode="fp32", lr=0.01, epochs=6)
    assert weight_types(tmp_path / "out.onnx") == {onnx.TensorProto.FLOAT}
    onnx.save(exported(model), tmp_path / "full.onnx")
    before, after = (loss_and_accuracy(tmp_path / name, test) for name in ("full.onnx", "out.onnx"))
    assert after[0] < before[0] and after[1] > before[1] + 0.2
