"""The best epoch of a training by what its test data gave, and whether to stop for want of a better one.

Both hang on the records of the epochs alone, so that a resumed training finds what one in a single run finds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from amp_transpiler.finetune.metrics import is_share
from amp_transpiler.finetune.options import FitOptions
from amp_transpiler.finetune.training_record import EpochRecord


def best_epoch(history: Sequence[EpochRecord], options: FitOptions) -> int | None:
    """The epoch whose monitored value no later one betters by more than ``min_delta``; None before there is one.

    Keras's rule: of equal ones the first is the best, the model before training is no candidate, and neither is a value
    that is not finite.
    """
    best, least = None, math.inf
    for record in history:
        value = _monitored(record, options)
        if record.epoch and value < least and (best is None or value < least - options.min_delta):
            best, least = record.epoch, value
    return best


def waited(history: Sequence[EpochRecord], options: FitOptions) -> int:
    """The epochs since the best one, or since the beginning."""
    return (history[-1].epoch if history else 0) - (best_epoch(history, options) or 0)


def stops(history: Sequence[EpochRecord], options: FitOptions) -> bool:
    """Whether as many epochs as ``patience`` brought no better one."""
    return options.patience is not None and waited(history, options) >= options.patience


def _monitored(record: EpochRecord, options: FitOptions) -> float:
    """The monitored value as one to be made small; infinite where it is not finite or was not measured."""
    value = record.test_loss if options.monitor == "test_loss" else record.test_metric
    if value is None or not math.isfinite(value):
        return math.inf
    return -value if options.monitor != "test_loss" and is_share(options.measured) else value
