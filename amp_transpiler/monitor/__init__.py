"""What happened in a training step: reports, the culprit of a bad one, gradients that vanish."""

from .requests import StepReports
from .writers import CsvWriter, JsonlWriter, TensorBoardWriter

__all__ = ["CsvWriter", "JsonlWriter", "StepReports", "TensorBoardWriter"]
