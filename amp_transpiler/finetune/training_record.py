"""What a run of :func:`~amp_transpiler.finetune.fit` did."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from amp_transpiler.finetune.metrics import shown
from amp_transpiler.finetune.options import FitOptions
from amp_transpiler.finetune.prepare import Preparation


@dataclass(frozen=True)
class EpochRecord:
    """One epoch; epoch 0 is the model before training.

    ``loss`` is the mean over the samples of the steps that counted, ``metric`` what the training predictions gave;
    both None for epoch 0. ``test_loss`` and ``test_metric`` are those of the test data, None without. ``loss_scale``
    is the last one, None in fp32; ``skipped_steps`` counts the bad steps.
    """

    epoch: int
    loss: float | None = None
    metric: float | None = None
    test_loss: float | None = None
    test_metric: float | None = None
    loss_scale: float | None = None
    skipped_steps: int | None = None

    def line(self, metric: str) -> str:
        """The record in one line."""
        parts = [f"loss {shown('loss', self.loss)}"] if self.loss is not None else []
        parts += [f"{metric} {shown(metric, self.metric)}"] if self.metric is not None else []
        if self.loss_scale is not None:
            parts += [f"loss scale {self.loss_scale:g}", f"skipped steps {self.skipped_steps}"]
        parts += [f"test loss {shown('loss', self.test_loss)}"] if self.test_loss is not None else []
        parts += [f"test {metric} {shown(metric, self.test_metric)}"] if self.test_metric is not None else []
        return f"{f'epoch {self.epoch}' if self.epoch else 'before training'}: {', '.join(parts)}"

    def columns(self, metric: str) -> dict[str, Any]:
        """The record as a log holds it: the metric goes by its name."""
        names = {"metric": metric, "test_metric": f"test_{metric}"}
        return {names.get(name, name): value for name, value in self.plain().items()}

    def plain(self) -> dict[str, Any]:
        """The record as a checkpoint holds it: numbers that are not finite are None."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }


@dataclass(frozen=True)
class FitResult:
    """What :func:`fit` gives: the file, how it was trained, and the record of each epoch (a resumed run's too).

    ``best_epoch`` is the best one by ``monitor``, where ``patience`` or ``restore_best_weights`` ask for it; None where
    none had a finite value.
    """

    output: Path
    options: FitOptions
    preparation: Preparation
    history: tuple[EpochRecord, ...]
    notes: tuple[str, ...] = ()
    best_epoch: int | None = None
