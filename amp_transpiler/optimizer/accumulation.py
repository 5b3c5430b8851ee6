"""Gradient accumulation: a window of micro-batches, one finite check and one update at its end.

Every run of the program adds the gradients of its micro-batch to fp32 sums. The executor counts the runs in a scope:
all but the last of a window write the sums, the randomness counter and running statistics alone; the last one does the
rest of the step, and sets the sums back to zero. A bad window gives running statistics back as it found them.
"""

from __future__ import annotations

from dataclasses import dataclass

from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir import context
from amp_transpiler.ir.accumulation_window import AccumulationWindow
from amp_transpiler.ir.nodes import BACKWARD, OWN, SCALING, Variable
from amp_transpiler.ops.training.accumulate import ACCUMULATE, ACCUMULATE_ROWS, RESET
from amp_transpiler.ops.training.scaling import master_type
from amp_transpiler.ops.training.seeds import STEP
from amp_transpiler.optimizer.pairs import ParamsGrads
from amp_transpiler.optimizer.state import (
    create_copy,
    create_state,
    gated_value,
    next_value,
    owned_name,
    shared_name,
    static_shape,
)
from amp_transpiler.program import Program


@dataclass(frozen=True)
class Accumulation:
    """What is appended to a program whose step is spread over ``steps`` runs."""

    steps: int

    def add_up(
        self, program: Program, startup: Program, params_grads: ParamsGrads
    ) -> tuple[ParamsGrads, dict[Variable, Variable]]:
        """Append the sums.

        Returns the pairs, with sums in the place of the gradients of one micro-batch, and each sum's value after one.
        """
        found: ParamsGrads = []
        sums: dict[Variable, Variable] = {}
        rows: list[Variable] = []
        made: list[Variable] = []
        with context.operator_role(BACKWARD):
            for parameter, grad in params_grads:
                if parameter.dealt is not None:
                    raise ArgumentError(
                        f"accumulate_steps adds up gradients of whole tables, and the rows of '{parameter.name}' are "
                        "dealt out among the ranks; leave it out of shard_tables, or take larger batches"
                    )
                total = create_state(
                    program,
                    startup,
                    owned_name(f"{parameter.name}_accumulated", program, startup),
                    master_type(parameter.dtype),
                    static_shape(parameter),
                    0,
                )
                new = next_value(total)
                new.grad_of = parameter
                if grad.rows is None:
                    rows += [total, grad]
                    made.append(new)
                else:
                    program.add_operator(ACCUMULATE_ROWS, [total, grad.rows, grad], [new], domain=OWN)
                sums[total] = new
                found.append((parameter, new))
            if made:
                program.add_operator(ACCUMULATE, rows, made, domain=OWN)
        with context.operator_role(SCALING):
            zeros = [next_value(total) for total in sums]
            program.add_operator(RESET, list(sums.values()), zeros, domain=OWN)
        for total, zero in zip(sums, zeros, strict=True):
            program.set_update(total, zero)
        return found, sums

    def gate(self, program: Program, startup: Program, found_inf: Variable | None, state: Variable) -> None:
        """Let state that the forward pass writes keep, on a bad window, the value that it had before the window."""
        if state.name == STEP or found_inf is None:  # the randomness counter advances on a bad step too
            return
        new = program.updates[state]
        name = owned_name(f"{state.name}_before_window", program, startup)
        before = create_copy(program, startup, state, name, str(state.dtype))
        kept = gated_value(state, before, new, found_inf)
        program.set_update(state, kept)
        program.set_update(before, kept)

    def close(self, program: Program, startup: Program, updates: dict[Variable, Variable]) -> None:
        """Tell the program of its window, when the whole step is there; ``updates`` are what every run writes."""
        counter = create_state(program, startup, shared_name("micro_step", program, startup), "int32", [], 0)
        program.accumulation = AccumulationWindow(self.steps, counter, updates)
