"""The weights that a training came to, and the file that is written of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from amp_transpiler.conversion.converting import convert
from amp_transpiler.distributed import find_var, rank
from amp_transpiler.finetune.options import FitOptions
from amp_transpiler.ir.decompose import write_out
from amp_transpiler.ir.locations import model_size
from amp_transpiler.passes.numerics.quantised import let_load
from amp_transpiler.passes.view.training_step import training_step
from amp_transpiler.program import Program
from amp_transpiler.runtime import Scope


class TrainedWeights:
    """A scope in which a parameter has the value of its fp32 master, or, rounded without one, that it was given.

    ``given`` has the values of the model's variables as they were before training. All ranks make one; masters that one
    rank each holds are brought to rank 0, which alone reads it.
    """

    def __init__(self, program: Program, scope: Scope, given: Mapping[str, Any]) -> None:
        updated = training_step(program).rows
        self.scope, self.given = scope, given
        self.masters = {r.parameter.name: r.master.name for r in updated if r.parameter and r.master}
        self.held: dict[str, Any] = {}
        for parameter, master in self.masters.items():
            if program.var(master).owner is not None:
                value = find_var(master, scope)
                if rank() == 0:
                    self.held[parameter] = value

    def find_var(self, name: str) -> Any:
        """The master's value, else the variable's own."""
        if name in self.held:
            return self.held[name]
        found = self.scope.find_var(self.masters.get(name, name))
        rounded = name in self.given and np.asarray(found).dtype != np.asarray(self.given[name]).dtype
        return self.given[name] if rounded else found

    def kept(self) -> TrainedWeights:
        """These with copies of all values, which training on does not change."""
        if rank() == 0:
            self.held |= {name: self.find_var(name) for name in self.given}
        return self


def write_trained(
    output: Path,
    model: Program,
    weights: TrainedWeights,
    options: FitOptions,
    rows: Mapping[str, Any],
    tell: Callable[[str], None],
) -> None:
    """Write the trained model for inference, in the chosen precision.

    What has no master, as the loss does not depend on it, is as it was given.
    What leaves the range of 16 bit on ``rows``, a batch of the inputs, stays fp32, as with ``convert --calibration``.
    """
    served = model.clone()
    write_out(served)
    let_load(served)
    trained = served.to_onnx(scope=weights, external_data=False)
    if options.saved == "fp32":
        Program.from_onnx(trained).to_onnx(output)
    else:
        convert(
            trained,
            mode=options.saved,
            dtype=options.dtype,
            black_list=list(options.black_list) or None,
            calibration=dict(rows),
        ).to_onnx(output)
    precision = options.saved if options.saved == "fp32" else f"{options.saved} {options.dtype}"
    tell(f"{output}: the trained model in {precision}, {model_size(output):,} bytes")
