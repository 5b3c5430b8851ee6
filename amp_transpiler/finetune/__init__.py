"""Training and fine-tuning of imported models on arrays, in one call: :func:`fit`."""

from amp_transpiler.finetune.fit import fit
from amp_transpiler.finetune.options import FitOptions
from amp_transpiler.finetune.training_record import EpochRecord, FitResult

__all__ = ["EpochRecord", "FitOptions", "FitResult", "fit"]
