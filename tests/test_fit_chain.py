"""What ``train`` and ``convert`` write trains again: in every mode, from both exporters, and gets no worse."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
import pytest
from exported import exported, loss_and_accuracy, samples

import amp_transpiler as amp

MODES = ("fp32", "mixed", "pure-fp16")
CODES = {"float16": onnx.TensorProto.FLOAT16, "bfloat16": onnx.TensorProto.BFLOAT16}
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
            amp.convert(before, mode="pure-fp16" if save == "fp32" else save, dtype=dtype).to_onnx(after)
        else:
            amp.fit(before, after, data=data, mode=mode, save=save, dtype=dtype, lr=0.01, epochs=2)
    return paths


@pytest.mark.parametrize("mode, save, dtype", COMBINATIONS)
@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_f7_what_was_written_trains_again(exporter: str, mode: str, save: str, dtype: str, tmp_path: Path,
                                          pytestconfig: pytest.Config) -> None:  # fmt: skip
    number = COMBINATIONS.index((mode, save, dtype))
    if number // 2 % 2 == (exporter == "dynamo") and not pytestconfig.getoption("--every-chain"):
        pytest.skip("the other exporter's turn; --every-chain runs both")
    model = f"{('cnn', 'encoder')[(number // 4 + (exporter == 'dynamo')) % 2]}_{exporter}"
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
