"""Which activations stand behind another one of a convolution.

For places that compute with channels last onnxruntime writes an activation into the convolution before it, and then the
next one in its place: the first is lost. By then its optimisers have brought the two together: constants that are
added and multiplied are in the convolution's own, what turns tensors has been moved, and what an activation is written
out in is one operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from amp_transpiler.ir.opdef import traits_named

#: What is no activation by itself, and goes into a convolution or away.
_LINEAR = frozenset({"Add", "Sub", "Mul", "Div", "BatchNormalization", "Dropout", "Identity", "Transpose", "Cast"})
#: Through two of them no optimiser sees; what stands for a second activation has them.
_APART = "Neg"


#: Of a tensor the full type of what makes it, and what that reads; None of what nothing makes.
MadeBy = Callable[[Any], tuple[str, Sequence[Any]] | None]


def behind_activation(read: Any, made_by: MadeBy) -> bool:
    """Whether a tensor is made of what one convolution gives, through an activation and element by element."""
    pending, seen, convolutions, bent = [read], {read}, set(), False
    while pending:
        name = pending.pop()
        made = made_by(name)
        if made is None:  # a constant, or what is fed
            continue
        type_, inputs = made
        if type_ == "Conv":
            convolutions.add(name)
        elif type_ != _APART and (type_ in _LINEAR or traits_named(type_).elementwise):
            bent |= type_ not in _LINEAR
            new = [each for each in inputs if each and each not in seen]
            seen.update(new)
            pending += new
        elif type_ != "Constant":
            return False
    return bent and len(convolutions) == 1
