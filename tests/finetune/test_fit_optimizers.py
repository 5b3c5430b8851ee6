"""The optimizers of ``amp.fit`` and ``amp-transpile train``, and their weight decay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.finetune.options import OPTIMIZERS
from amp_transpiler.ir.tensors import as_array
from tests.helpers.fitting import features, linear


def weights(folder: Path, **options: Any) -> tuple[float, np.ndarray]:
    """What four epochs make of a linear layer: the last loss by the first, and the weights."""
    data = {**features(64), "label": np.arange(64) % 3}
    result = amp.fit(linear(), folder / "out.onnx", data=data, epochs=4, lr=0.02, mode="fp32", **options)
    found = {each.name: as_array(each) for each in onnx.load(folder / "out.onnx").graph.initializer}
    return result.history[-1].loss / result.history[0].loss, found["w"]


def test_every_optimizer_of_the_package_is_offered() -> None:
    public = {name: getattr(amp.optimizer, name) for name in amp.optimizer.__all__}
    updates = {
        name
        for name, kind in public.items()
        if isinstance(kind, type) and issubclass(kind, amp.optimizer.Optimizer) and kind is not amp.optimizer.Optimizer
    }
    assert set(OPTIMIZERS.values()) == updates and all(name == kind.lower() for name, kind in OPTIMIZERS.items())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains(name: str, tmp_path: Path) -> None:
    assert weights(tmp_path, optimizer=OPTIMIZERS[name])[0] < 1


@pytest.mark.parametrize("name, own", [("adamw", 0.01), ("lamb", 0.01), ("lars", 0.0005), ("momentum", 0.0)])
def test_no_decay_is_none_and_what_is_not_given_the_optimizers_own(name: str, own: float, tmp_path: Path) -> None:
    made = [weights(tmp_path, optimizer=name, **more)[1] for more in ({}, {"weight_decay": own}, {"weight_decay": 0})]
    assert np.array_equal(made[0], made[1])
    assert np.array_equal(made[0], made[2]) == (own == 0)


def test_adamw_without_decay_is_adam(tmp_path: Path) -> None:
    decoupled, plain = (weights(tmp_path, optimizer=name, weight_decay=0)[1] for name in ("adamw", "adam"))
    assert np.array_equal(decoupled, plain)
