"""What happened in a training step: reports, the culprit of a bad one, gradients that vanish."""

from .culprit import Culprit, find_culprit
from .requests import StepReports
from .state import save_step, step_state
from .underflow import GradientUnderflow, gradient_underflow
from .watch import Watch, watch
from .writers import CsvWriter, JsonlWriter, TensorBoardWriter

__all__ = [
    "CsvWriter", "Culprit", "GradientUnderflow", "JsonlWriter", "StepReports", "TensorBoardWriter", "Watch",
    "find_culprit", "gradient_underflow", "save_step", "step_state", "watch",
]  # fmt: skip
