"""The weights of an exported model as they were before the export, in place.

Exporters and optimisers keep weights in Constant operators and nested graphs: they become parameters, and what only
looks like one does not. Each function here returns what it did, in words.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import onnx

from amp_transpiler.finetune.layer_names import is_vector
from amp_transpiler.ir.copies import unmoved
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.tensors import as_array, tensor_type
from amp_transpiler.ir.torch_marks import PARAMETER, exported_kind, logarithm_of, torch_bias_left_out
from amp_transpiler.ir.types import FLOATS, numpy_dtype
from amp_transpiler.ir.weights import STATISTICS, not_a_weight
from amp_transpiler.passes.view.constants import content
from amp_transpiler.program import Program

_CHANNELS = 4  # of an image
_SCALES = frozenset({"Add", "Sub", "Mul", "Div"})
#: How scikit-learn's exporter, Keras's Normalization and others name what a scaler was fitted to.
_FITTED = re.compile(
    r"^[A-Z][a-z]_(Add|Sub|Mul|Div)cst\d*$|(^|/)normalization(_\d+)*/|(^|[._/])(mean|std|mu|sigma)$", re.IGNORECASE
)


def weights_from_constants(program: Program) -> list[str]:
    """Let float weights in Constant operators and nested graphs be persistable variables of the program.

    Where most weights are initializers, Constant operators hold none: such are states, anchors and filters then, which
    the model was not trained by.
    """
    count, initializers = 0, _elements(program.parameters)
    for op in list(program.operators):
        for nested in op.attrs.programs:
            count += _hoist(nested, op)
    loose = [v for v in program.variables if not (v.persistable or v.is_input or v.outer is not None)]
    found = [v for v in loose if _weight_in(v) is not None]
    if _elements(found) > initializers:
        count += sum([_adopt(v) for v in found])
    return [f"{count} weights were constants of operators or nested graphs"] if count else []


def _elements(variables: Iterable[Variable]) -> int:
    return sum(math.prod(size for size in v.shape or () if isinstance(size, int)) for v in variables)


def _weight_in(variable: Variable) -> tuple[Any, str] | None:
    """The content of a constant that is a weight ("") or a running statistic, and which of them."""
    data = content(variable)
    if data is None or tensor_type(data)[0] not in FLOATS:
        return None
    before, variable.data = variable.data, data
    reason = not_a_weight(variable)
    variable.data = before
    return (data, reason) if reason in ("", STATISTICS) else None


def _adopt(variable: Variable) -> bool:
    """Make a constant persistable where it is a weight or a running statistic."""
    found = _weight_in(variable)
    if found is None:
        return False
    data, reason = found
    _keep(variable, data, trainable=not reason)
    return True


def _keep(variable: Variable, data: Any, trainable: bool) -> None:
    """Make a constant with this content persistable."""
    if variable.producer is not None:
        variable.program.remove_operator(variable.producer)
    variable.data = data
    variable.dtype, variable.shape = tensor_type(data)
    variable.persistable, variable.trainable = True, trainable


def _hoist(nested: Graph, op: Operator) -> int:
    """Move weights out of a nested graph, and capture them there; what it gives as it is, is no weight, and would be
    given past it. Nor is what nothing reads."""
    count, given = 0, set(nested.outputs)
    for inner in nested.operators:
        for deeper in inner.attrs.programs:
            count += _hoist(deeper, inner)
    for variable in list(nested.variables):
        if variable.outer is not None or variable.is_input or variable in given or not variable.readers:
            continue
        if not _adopt(variable):
            continue
        facts = {"persistable": True, "trainable": variable.trainable, "data": variable.data}
        outer = op.program.fresh_variable(variable.name, variable.dtype, variable.shape, **facts)
        variable.outer, variable.data = outer, None
        variable.persistable = variable.trainable = False
        op.add_capture(outer)
        count += 1
    return count


def adopt_named(program: Program, names: Collection[str]) -> dict[str, Variable]:
    """Let float constants that a user calls by their very name be parameters, whatever they look like."""
    found = {}
    for variable in program.variables:
        if variable.name in names and not variable.persistable and variable.outer is None:
            data = content(variable)
            if data is not None and tensor_type(data)[0] in FLOATS:
                _keep(variable, data, trainable=True)
                found[variable.name] = variable
    return found


def restore_parameters(program: Program) -> list[str]:
    """Let parameters that PyTorch's dynamo exporter left out, or took something of, be there again."""
    return _restore_biases(program) + _restore_logarithms(program)


def _restore_biases(program: Program) -> list[str]:
    """Let layers add the biases again that their operators lack, being zero."""
    count = 0
    for op in program.operators:
        slots, made = traits_of(op).biases, op.output(0)
        if not traits_of(op).product or slots != (2,) or op.input(2) is not None or made is None:
            continue
        name = torch_bias_left_out(op)
        channels = (made.shape or ())[1:2]  # of Gemm and of Conv
        shape = tuple(size for size in channels if isinstance(size, int))
        if not name or not shape:
            continue
        bias = program.var(name) if program.has_var(name) else None  # another layer reads it too
        if bias is None:
            zeros = onnx.numpy_helper.from_array(np.zeros(shape, numpy_dtype(made.dtype)), name)
            bias = program.add_variable(name, made.dtype, shape, persistable=True, trainable=True, data=zeros)
            count += 1
        if bias.is_parameter and bias.shape == shape:
            op.set_input(2, bias)
    return [f"{count} biases that the exporter left out, being zero, are parameters again"] if count else []


def _restore_logarithms(program: Program) -> list[str]:
    """Let parameters whose exponential was computed be what is learned again: the temperature of a contrastive loss,
    the rates of a state space model."""
    names = []
    for variable in program.parameters:
        name, array = logarithm_of(variable), np.asarray(as_array(variable.data))
        if not name or program.has_var(name) or not ((array > 0).all() or (array < 0).all()):
            continue
        logarithm = np.log(np.abs(array.astype(np.float64))).astype(array.dtype)
        learned = program.add_variable(
            name, variable.dtype, variable.shape, persistable=True, trainable=True,
            data=onnx.numpy_helper.from_array(logarithm, name),
        )  # fmt: skip
        variable.persistable, variable.trainable, variable.data = False, False, None
        if (array < 0).all():
            made = program.fresh_variable(f"{name}.exp", variable.dtype, variable.shape)
            program.add_operator("Neg", [made], [variable])
        else:
            made = variable
        program.add_operator("Exp", [learned], [made])
        names.append(name)
    return [f"{', '.join(map(repr, names))}: trained, and not the exponential, as before the export"] if names else []


def leave_input_scaling(program: Program) -> list[str]:
    """Let the numbers that bring inputs to zero mean and unit variance be constants again.

    Those of an image's channels are few, and act elementwise on what comes from the inputs before any weight does.
    Those of features are told by their names: a flow, say, begins with a scale and a shift that it learns. What
    PyTorch's exporter calls a parameter is none.
    """
    weighted, fed = {v for v in program.variables if v.persistable}, set(program.inputs)
    left: list[Variable] = []
    scaled = set(program.inputs)
    for op in program.operators:
        read = [v for v in (*op.inputs, *op.captures) if v is not None]
        weights = [v for v in read if v in weighted]
        made = [v for v in op.outputs if v is not None]
        if len(weights) == 1 and any(v in fed for v in read if v not in weights) and _scales_image(op, weights[0]):
            left += weights
        elif weights:
            weighted.update(made)
        if (vector := _scales_features(op, scaled)) is not None:
            left.append(vector)
            scaled.update(made)
        if any(v in fed for v in read):
            fed.update(made)
    for variable in dict.fromkeys(left):
        if exported_kind(variable) != PARAMETER and all(op.type in _SCALES for op, _ in variable.readers):
            variable.persistable = variable.trainable = False
    names = [v.name for v in dict.fromkeys(left) if not v.persistable]
    return [f"{', '.join(map(repr, names))}: scaling of the input, not trained"] if names else []


def _scales_image(op: Operator, variable: Variable) -> bool:
    """Whether the operator combines an image with one number a channel."""
    made = op.output(0)
    return (
        op.full_type in _SCALES
        and variable.is_parameter
        and math.prod(d for d in variable.shape or () if isinstance(d, int)) <= _CHANNELS
        and made is not None
        and made.shape is not None
        and len(made.shape) >= 3
    )


def _scales_features(op: Operator, scaled: Collection[Variable]) -> Variable | None:
    """The vector that an operator scales or shifts one of these by, if its name says that it was fitted to data."""
    read = [v for v in op.inputs if v is not None]
    vectors = [v for v in read if v.is_parameter and v.data is not None and is_vector(v) and _FITTED.search(v.name)]
    if op.full_type not in _SCALES or len(vectors) != 1 or len(vectors[0].readers) != 1:
        return None
    return vectors[0] if any(unmoved(v) in scaled for v in read if v is not vectors[0]) else None
