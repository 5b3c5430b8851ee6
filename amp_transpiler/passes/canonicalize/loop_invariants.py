"""What a Loop hands on unchanged from turn to turn is read from around it.

Loops of TensorFlow carry whatever their body reads, weights too. A state of a loop has the type that the loop was
written with; what is read from around it can be stored in 16 bit, once, instead of being cast in every turn.
"""

from __future__ import annotations

from amp_transpiler.ir.copies import original
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable

#: The trip count and the condition come before the states of a loop, the condition before those that its body makes.
_INPUTS, _MADE = 2, 1


def capture_invariants(program: Graph, names: frozenset[str], keep: frozenset[Operator]) -> None:
    """Take such states out of all loops of a program, in place; variables among ``names`` and operators of ``keep``
    stay what they are."""
    for op in program.nesting:
        if op.full_type == "Loop" and op not in keep:
            _capture(op, op.attrs["body"], names)
        for nested in op.attrs.programs:
            capture_invariants(nested, names, keep)


def _capture(op: Operator, body: Graph, names: frozenset[str]) -> None:
    inputs, outputs, inners = list(op.inputs), list(op.outputs), list(body.inputs)
    unchanged = {i for i in range(len(inners) - _INPUTS) if _is_unchanged(op, body, i, names)}
    if not unchanged:
        return
    body.inputs = [v for i, v in enumerate(inners) if i - _INPUTS not in unchanged]
    body.outputs = [v for i, v in enumerate(body.outputs) if i - _MADE not in unchanged]
    for slot in reversed(range(_INPUTS, len(inputs))):
        op.set_input(slot, None)
    for slot in reversed(range(len(outputs))):
        op.set_output(slot, None)
    for slot, variable in enumerate(v for i, v in enumerate(inputs) if i - _INPUTS not in unchanged):
        if slot >= _INPUTS:
            op.set_input(slot, variable)
    for slot, variable in enumerate(v for i, v in enumerate(outputs) if i not in unchanged):
        op.set_output(slot, variable)
    known = {v.outer: v for v in body.variables if v.outer is not None}
    for state in sorted(unchanged):
        inner, outer = inners[_INPUTS + state], inputs[_INPUTS + state]
        assert outer is not None
        if outer in known:  # one stands for it
            body.replace_uses(inner, known[outer])
            body.remove_variable(inner)
        else:
            known[outer] = inner
            inner.is_input, inner.outer, inner.dtype, inner.shape = False, outer, outer.dtype, outer.shape
            op.add_capture(outer)
        made = outputs[state] if state < len(outputs) else None
        if made is not None:
            _give(op, outer, made)
    body.touch()


def _is_unchanged(op: Operator, body: Graph, state: int, names: frozenset[str]) -> bool:
    inner, outer, made = body.inputs[_INPUTS + state], op.input(_INPUTS + state), op.output(state)
    others = [v for i, v in enumerate(body.outputs) if i != _MADE + state]
    if outer is None or inner in others or inner.name in names or (made is not None and made.name in names):
        return False
    return original(body.outputs[_MADE + state]) is inner


def _give(op: Operator, outer: Variable, made: Variable) -> None:
    """Let what the loop hands out be what it was handed."""
    program = op.program
    if made in program.outputs:
        program.add_operator("Identity", [outer], [made], role=op.role)
        return
    program.replace_uses(made, outer)
    program.remove_variable(made)
