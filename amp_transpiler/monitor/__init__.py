"""What happened in a training step: reports, the culprit of a bad one, gradients that vanish."""

from amp_transpiler.monitor.culprit import Culprit, find_culprit
from amp_transpiler.monitor.requests import StepReports
from amp_transpiler.monitor.step_snapshot import save_step, step_state
from amp_transpiler.monitor.underflow import GradientUnderflow, gradient_underflow
from amp_transpiler.monitor.watching import Watch, watch
from amp_transpiler.monitor.writers import CsvWriter, JsonlWriter, TensorBoardWriter
from amp_transpiler.runtime.report import StepReport

__all__ = [
    "CsvWriter",
    "Culprit",
    "GradientUnderflow",
    "JsonlWriter",
    "StepReport",
    "StepReports",
    "TensorBoardWriter",
    "Watch",
    "find_culprit",
    "gradient_underflow",
    "save_step",
    "step_state",
    "watch",
]
