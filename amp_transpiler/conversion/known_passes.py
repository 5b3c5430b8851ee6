"""Every pass that a text may name, and the pipelines behind the calls of the package; ``amp.Pipeline`` loads them."""

from __future__ import annotations

from amp_transpiler.conversion.conversion_options import ConversionOptions
from amp_transpiler.conversion.converting import conversion
from amp_transpiler.optimizer.step_passes import training
from amp_transpiler.passes.canonicalize.fuse_gelu import FuseGelus
from amp_transpiler.passes.canonicalize.fuse_rms import KeepRootMeanSquares
from amp_transpiler.passes.lowering.lowering import lowering
from amp_transpiler.passes.pipeline import PASSES, Pass, Pipeline
from amp_transpiler.passes.precision.modes import Precision
from amp_transpiler.passes.precision.widen import Widen

__all__ = ["ALONE", "PASSES", "Pipeline", "pipelines"]

#: Passes of none of the pipelines.
ALONE: tuple[type[Pass], ...] = (FuseGelus, KeepRootMeanSquares, Widen)


def pipelines() -> dict[str, Pipeline]:
    """What each call runs, by default."""
    return {"convert": conversion(ConversionOptions()), "decorate": training(Precision()), "lower": lowering("cuda")}
