"""What a rule has to give: one tensor for each output that is asked for, a gradient in the shape of its variable."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import onnx

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.infer import type_proto
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.onnx_inference import inferred_types
from amp_transpiler.ir.opdef import Rule, differentiated
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.option_checks import shown
from amp_transpiler.passes.lowering.tensor_types import types_in


def check_results(
    e: Emitter, op: Operator, rule: Rule, results: Any, given: Sequence[Value | None], first: int
) -> Sequence[Any]:
    """What ``rule`` gave for ``op``; GraphError, which says what was expected, where that does not fit its outputs.

    ``given`` is what the rule read, ``first`` the number of the first node that it wrote.
    """
    if not isinstance(results, (list, tuple)):
        raise _error(op, rule, _said(results), f"a list of {len(op.outputs)}, one for each {_what(op)}")
    surplus = [value for value in results[len(op.outputs) :] if value is not None]
    if surplus and differentiated(op) is not None:
        raise _error(op, rule, f"{len(results)} values", f"{len(op.outputs)}, one for each input of the operator")
    for variable, wanted, shape, value in zip_longest(op.outputs, e.wanted, e.output_shapes, results):
        if variable is None or not wanted:
            continue
        if not isinstance(value, Value):
            raise _error(op, rule, f"{_said(value)} for '{variable.name}'", f"a tensor{_like(variable, shape)}")
        if shape is None:
            continue
        if value.dtype and value.dtype not in FLOATS and variable.dtype in FLOATS:
            raise _error(
                op, rule, f"{value.dtype} for '{variable.name}'", f"a tensor of floats{_like(variable, shape)}"
            )
        found = _shape(e, rule, value, given, first)
        if found is not None and tuple(found) != tuple(shape):
            made = f"a tensor of shape {list(found)} for '{variable.name}'"
            raise _error(op, rule, made, f"one{_like(variable, shape)}")
    return results


def _shape(e: Emitter, rule: Rule, value: Value, given: Sequence[Value | None], first: int) -> tuple[int, ...] | None:
    """The shape of a result; where the emitter does not know it, by ONNX's inference of what the rule wrote.

    That takes time, and rules of this package are compared with differences by its tests: those of users are asked.
    """
    if value.shape is not None or getattr(rule, "__module__", "").startswith("amp_transpiler."):
        return value.shape
    model = onnx.ModelProto(ir_version=10)
    for domain, version in {"": e.opset, **dict.fromkeys(e.domains, 1)}.items():
        model.opset_import.add(domain=domain, version=version)
    model.graph.node.extend(e.nodes[first:])
    names = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(tensor for name, tensor in e.initializers.items() if name in names)
    tensors = [read for read in given if read is not None]
    tensors += [e.filled[read.name] for read in tensors if read.name in e.filled]
    for read in tensors:
        if read.name in names:
            model.graph.input.add(name=read.name).type.CopyFrom(type_proto(e.tensor_type(read), read.shape))
    known = inferred_types(model, nested=True)
    return None if known is None else types_in(known.graph).get(value.name, ("", None))[1]


def _error(op: Operator, rule: Rule, gave: str, expected: str) -> GraphError:
    kind = differentiated(op)
    called = f"{'gradient' if kind else 'lowering'} rule of {kind or op.full_type}"
    name = f"{getattr(rule, '__module__', '')}.{getattr(rule, '__qualname__', type(rule).__name__)}"
    return GraphError(f"operator '{op.label}': the {called}, {name}, gave {gave}; expected {expected}")


def _said(value: Any) -> str:
    return "nothing" if value is None else "a tensor" if isinstance(value, Value) else shown(value)


def _what(op: Operator) -> str:
    return "output" if differentiated(op) is None else "input of the operator, None where there is no gradient"


def _like(variable: Variable, shape: Sequence[int] | None) -> str:
    of = variable.grad_of
    return "" if shape is None else f" of shape {list(shape)}" + ("" if of is None else f", that of '{of.name}'")
