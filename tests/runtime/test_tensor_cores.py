"""Which sessions let cuDNN use tensor cores: those of 16-bit convolutions where TF32 would round nothing else."""

from __future__ import annotations

from typing import Any

import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.lowering.memory_estimate import lower_sized
from amp_transpiler.runtime import executor
from tests.benchmarks.gpu import feeds
from tests.helpers.benchmark_programs import training


def lowered(main: amp.Program, loss: amp.Variable) -> Any:
    return lower_sized("test", main, amp.CUDAPlace(0), None, [loss])[0]


@pytest.mark.parametrize(
    ("net", "mode", "needs"),
    [
        ("resnet", "pure", True),
        ("resnet", "mixed", True),
        ("resnet", "fp32", False),  # its convolutions themselves would be rounded
        ("mlp", "pure", False),  # has none
    ],
)
def test_of_training_steps(net: str, mode: str, needs: bool) -> None:
    main, _, loss, _ = training(net, mode)
    assert lowered(main, loss).tensor_cores == needs


def test_a_product_of_fp32_is_not_rounded() -> None:
    main, startup = amp.Program(), amp.Program()
    with amp.program_guard(main, startup), amp.unique_name.guard():
        image = amp.data("image", [2, 3, 8, 8], "float32")
        with amp.fp16_guard():
            pooled = F.mean(amp.nn.conv2d(image, 8, 3), axis=[2, 3])
        loss = F.mean(amp.nn.fc(pooled, 1))
        amp.decorate(amp.optimizer.SGD(0.1), use_pure_fp16=True).minimize(loss, startup)
    assert not lowered(main, loss).tensor_cores


def test_the_executor_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Made(Exception):
        pass

    def create_session(model: Any, place: Any, settings: Any, *others: Any) -> Any:
        raise Made(settings.tf32)

    monkeypatch.setattr(executor, "create_session", create_session)
    monkeypatch.setattr(executor, "require", lambda place: None)
    for net, needs in (("resnet", True), ("mlp", False)):
        main, _, loss, _ = training(net, "pure")
        with pytest.raises(Made) as made:
            amp.Executor(amp.CUDAPlace(0)).run(main, feeds(main), [loss], amp.Scope())
        assert made.value.args == (needs,)
