"""What happened in a training step: reports, the culprit of a bad one, gradients that vanish."""

from amp_transpiler.monitor.culprit import Culprit as Culprit, find_culprit as find_culprit
from amp_transpiler.monitor.requests import StepReports as StepReports
from amp_transpiler.monitor.step_snapshot import save_step as save_step, step_state as step_state
from amp_transpiler.monitor.underflow import (
    GradientUnderflow as GradientUnderflow,
    gradient_underflow as gradient_underflow,
)
from amp_transpiler.monitor.watching import Watch as Watch, watch as watch
from amp_transpiler.monitor.writers import (
    CsvWriter as CsvWriter,
    JsonlWriter as JsonlWriter,
    TensorBoardWriter as TensorBoardWriter,
)
from amp_transpiler.runtime.report import StepReport as StepReport
