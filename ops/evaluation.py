"""How ``Program.clone(for_test=True)`` changes operators that train and evaluate differently.

The clone has no state updates, and itself removes variables that these rules leave without a use.
"""

from __future__ import annotations

from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import for_test
from amp_transpiler.ops.training.random import MASK_ID


@for_test("BatchNormalization")
def batch_normalization(op: Operator) -> None:
    """Use the running statistics, and leave them as they are."""
    if not op.attrs.get("training_mode", 0):
        return
    op.attrs["training_mode"] = 0
    for slot, state in ((2, op.input(4)), (1, op.input(3))):
        new = op.output(slot)
        if new is not None and state is not None:
            op.program.replace_uses(new, state)
            op.set_output(slot, None)


@for_test("Dropout")
def dropout(op: Operator) -> None:
    """Pass the data through."""
    op.metadata.pop(MASK_ID, None)
    if op.input(2) is not None:
        op.set_input(2, None)
    mask = op.output(1)
    if mask is not None and not mask.readers:
        op.set_output(1, None)
