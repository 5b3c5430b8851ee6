"""What a loss reads that applies a model's last activation itself: what stands before that activation.

Exports have operators behind it: a transposition where channels are last, a reshape, one column of several. Those that
only move elements are put behind what the activation reads, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from amp_transpiler.ir.copies import original
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.canonicalize.matching import maker, number
from amp_transpiler.passes.numerics.ranges import Ranges

#: What puts zeros beside the elements that it moves, or scales them.
_MORE_THAN_MOVES = frozenset({"CenterCropPad", "Dropout", "Trilu"})


def _read(op: Operator) -> Variable:
    assert op.inputs[0] is not None
    return op.inputs[0]


@dataclass(frozen=True)
class Applied:
    """The activation that a loss applies itself.

    ``takes``: what the loss takes in its place, in words; ``made``: the same, made of the operator, into the current
    program. ``rows``: results depend on each other, so that those of several operators do not belong together.
    ``pair``: the probabilities of no and yes, which a model makes of one number, are two classes to the loss.
    """

    activation: str
    takes: str = "logits"
    made: Callable[[Operator], Variable] = _read
    rows: bool = False
    pair: bool = False

    def ending(self, out: Variable) -> list[str]:
        """The types of the operators from the activation on to this output; none where there is no activation."""
        op = original(out).producer
        if op is None or op.domain:
            return []
        if op.type == self.activation and op.inputs[0] is not None:
            return [op.type]
        likely = self._likely(op)
        if likely is not None:
            endings = [_OF_YES.ending(likely)]
        else:
            endings = [self.ending(v) if v is not None else [] for v in _moved(op, self.rows)]
        return [*endings[0], op.type] if endings and all(endings) else []

    def before(self, out: Variable) -> Variable:
        """What the loss takes in the place of an output that has an :meth:`ending`, into the current program."""
        out = original(out)
        op = out.producer
        assert op is not None
        if op.type == self.activation:
            return self.made(op)
        likely = self._likely(op)
        if likely is not None:  # softmax([0, z]) is [1 - sigmoid(z), sigmoid(z)]
            logit = _OF_YES.before(likely)
            return F.concat([F.zeros_like(logit), logit], axis=op.attrs["axis"])
        program, moved = op.program, _moved(op, self.rows)
        read = [self.before(v) if v is not None and v in moved else v for v in op.inputs]
        made = [None if v is None else program.fresh_variable(f"{v.name}.before", v.dtype, v.shape) for v in op.outputs]
        program.add_operator(op.type, read, made, attrs=op.attrs.copy(), like=op)
        found = made[op.outputs.index(out)]
        assert found is not None
        return found

    def _likely(self, op: Operator) -> Variable | None:
        """What an operator joins with 1 minus it, as the second of two classes."""
        if not self.pair or op.type != "Concat" or len(op.inputs) != 2 or op.outputs[0] is None:
            return None
        no, yes = (None if v is None else original(v) for v in op.inputs)
        rest, shape, axis = maker(no, "Sub"), op.outputs[0].shape or (), op.attrs["axis"]
        if rest is None or yes is None or rest.inputs[1] is None or original(rest.inputs[1]) is not yes:
            return None
        return yes if number(rest.input(0)) == 1 and shape and shape[axis] == 2 else None


#: One probability, of yes.
_OF_YES = Applied("Sigmoid")


def _moved(op: Operator, rows: bool) -> list[Variable | None]:
    """The inputs whose elements the outputs hold, and nothing else; none where the operator computes."""
    slots = traits_of(op).moves
    chosen = range(len(op.inputs)) if slots is None else slots
    if op.type in _MORE_THAN_MOVES or (rows and len(chosen) > 1):
        return []
    return [op.input(slot) for slot in chosen]


def probabilities(out: Variable) -> bool:
    """Whether an output is known to lie between 0 and 1."""
    found = Ranges(out.program, trained=True).bound(out)
    return found is not None and found[0] >= 0 and found[1] <= 1
