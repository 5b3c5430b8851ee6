"""Training and fine-tuning of imported models on arrays, in one call: :func:`fit`."""

from .fit import fit
from .options import FitOptions
from .record import EpochRecord, FitResult

__all__ = ["EpochRecord", "FitOptions", "FitResult", "fit"]
