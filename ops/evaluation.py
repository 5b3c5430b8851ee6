"""How ``Program.clone(for_test=True)`` changes operators that train and evaluate differently."""

from __future__ import annotations

from amp_transpiler.ir.opdef import for_test
from amp_transpiler.ir.program import Operator, Variable

from .random import MASK_ID


def _drop_output(op: Operator, slot: int, stand_in: Variable | None) -> None:
    """Take an output away; its readers, if any, read ``stand_in``."""
    variable = op.output(slot)
    if variable is None:
        return
    if stand_in is not None:
        op.program.replace_uses(variable, stand_in)
    elif variable.readers:
        return
    op.set_output(slot, None)
    op.program.remove_variable(variable)


@for_test("BatchNormalization")
def batch_normalization(op: Operator) -> None:
    """Use the running statistics, and leave them as they are."""
    if not op.attrs.get("training_mode", 0):
        return
    op.attrs["training_mode"] = 0
    updates = op.program.updates
    for slot, state in ((2, op.input(4)), (1, op.input(3))):
        if state is not None and state in updates and updates[state] is op.output(slot):
            del updates[state]
        _drop_output(op, slot, state)


@for_test("Dropout")
def dropout(op: Operator) -> None:
    """Pass the data through."""
    op.metadata.pop(MASK_ID, None)
    if op.input(2) is not None:
        op.set_input(2, None)
    _drop_output(op, 1, None)
