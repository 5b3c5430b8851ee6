"""Gradient accumulation: a window of micro-batches, one finite check and one update at its end.

Every run of the program adds the gradients of its micro-batch to fp32 sums. The executor counts the runs in a scope:
all but the last of a window write the sums, the randomness counter and running statistics alone; the last one does the
rest of the step, and sets the sums back to zero. A bad window gives running statistics back as it found them.
"""

from __future__ import annotations

from amp_transpiler.ir import context
from amp_transpiler.ir.nodes import BACKWARD, OWN, SCALING, Variable, Window
from amp_transpiler.ops.training.accumulate import ACCUMULATE, RESET
from amp_transpiler.ops.training.scaling import master_type
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
from amp_transpiler.passes.step_check.check_step import UNGATED
from amp_transpiler.program import Program


class Accumulation:
    """What is appended to a program whose step is spread over ``steps`` runs."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._updates: dict[Variable, Variable] = {}

    def add_up(self, program: Program, startup: Program, params_grads: ParamsGrads) -> ParamsGrads:
        """Append the sums; the pairs with them in the place of the gradients of one micro-batch."""
        self._updates = {}  # an attempt that failed leaves nothing
        found: ParamsGrads = []
        rows: list[Variable] = []
        with context.operator_role(BACKWARD):
            for parameter, grad in params_grads:
                total = create_state(
                    program,
                    startup,
                    owned_name(program, f"{parameter.name}_accumulated"),
                    master_type(parameter.dtype),
                    static_shape(parameter),
                    0,
                )
                new = next_value(total)
                new.grad_of = parameter
                rows += [total, grad]
                self._updates[total] = new
                found.append((parameter, new))
            program.add_operator(ACCUMULATE, rows, [grad for _, grad in found], domain=OWN)
        with context.operator_role(SCALING):
            zeros = [next_value(total) for total in self._updates]
            program.add_operator(RESET, list(self._updates.values()), zeros, domain=OWN)
        for total, zero in zip(self._updates, zeros, strict=True):
            program.set_update(total, zero)
        return found

    def gate(self, program: Program, startup: Program, found_inf: Variable | None, state: Variable) -> None:
        """Let state that the forward pass writes keep, on a bad window, the value that it had before the window."""
        new = program.updates[state]
        self._updates[state] = new
        if state.name in UNGATED or found_inf is None:
            return
        name = owned_name(program, f"{state.name}_before_window")
        before = create_copy(program, startup, state, name, str(state.dtype))
        kept = gated_value(state, before, new, found_inf)
        program.set_update(state, kept)
        program.set_update(before, kept)

    def close(self, program: Program, startup: Program) -> None:
        """Tell the program of its window, when the whole step is there."""
        counter = create_state(program, startup, shared_name(program, "micro_step"), "int32", [], 0)
        program.window = Window(self.steps, counter, dict(self._updates))
