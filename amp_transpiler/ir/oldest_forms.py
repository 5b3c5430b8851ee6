"""How operators of opsets 1 to 6, which onnxruntime does not run, are written in the form of opset 7.

They broadcast by attributes, casts name their types, and shapes and scales are attributes. ONNX's inference says
nothing of many of them, so that what they make is inferred in order, in the form of opset 7. A program keeps the form
in which it was read until it is converted, lowered or trained.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import onnx

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.annotate import annotate
from amp_transpiler.ir.clone import clone
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import declare_missing
from amp_transpiler.ir.nodes import Operator

#: The oldest opset whose operators onnxruntime runs, and that passes know.
OLDEST = 7
#: Operators whose memory could be used again for their result.
_IN_PLACE = frozenset(
    """
    Abs Add BatchNormalization Ceil Clip Div Dropout Elu Exp Floor HardSigmoid InstanceNormalization LeakyRelu Log Max
    Mean Min Mul Neg PRelu Reciprocal Relu Reshape Selu Sigmoid Sqrt Sub Sum Tanh
    """.split()  # noqa: SIM905
)
#: Attributes that say nothing to a model that is evaluated, or that opset 7 takes for granted.
_DROPPED = {
    "BatchNormalization": ("is_test",),
    "Dropout": ("is_test",),
    "GRU": ("output_sequence",),
    "Gemm": ("broadcast",),
    "LSTM": ("output_sequence",),
    "RNN": ("output_sequence",),
}
Form = Callable[[Operator], None]
#: operator type -> (first version that needs no change, what writes it in that form).
_FORMS: dict[str, tuple[int, Form]] = {}


def bring_to_oldest(program: Graph) -> bool:
    """Write operators of opsets 1 to 6 in the form of opset 7, nested programs too; whether the program is of these.

    GraphError names an operator of which that has no form.
    """
    version = program.info.opsets.get("", OLDEST)
    if version >= OLDEST or all(op.domain for op in program.walk()):
        return False
    program.info.opsets[""] = OLDEST
    for op in list(program.walk()):
        if not op.domain:
            _adapt(op, version)
            declare_missing(op)
    program.touch()
    return True


def type_oldest(program: Graph) -> None:
    """Put the types on the variables of a program of opsets 1 to 6 that its form at opset 7 tells, where it has one."""
    copy = clone(program)
    with suppress(GraphError):
        if bring_to_oldest(copy):
            annotate(copy)
            for each, typed in zip(_graphs(program), _graphs(copy), strict=True):
                for variable in each.variables:
                    if variable.data is None and (known := typed.find(variable.name)) is not None:
                        variable.dtype, variable.shape = known.dtype, known.shape


def _graphs(program: Graph) -> list[Graph]:
    """The program, and every nested one."""
    return [program, *(nested for op in program.walk() for nested in op.attrs.programs)]


def _adapt(op: Operator, version: int) -> None:
    for name in ("consumed_inputs",) * (op.type in _IN_PLACE) + _DROPPED.get(op.type, ()):
        op.attrs.pop(name, None)
    upto, form = _FORMS.get(op.type, (0, None))
    if form is not None and onnx.defs.get_schema(op.type, version, "").since_version < upto:
        form(op)


def _error(op: Operator, reason: str) -> GraphError:
    return GraphError(f"operator '{op.label}' ({op.type}) of an opset before 7 has no form at opset 7: {reason}")


def _form(upto: int, *types: str) -> Callable[[Form], Form]:
    def register(function: Form) -> Form:
        _FORMS.update(dict.fromkeys(types, (upto, function)))
        return function

    return register


@_form(7, "Add", "And", "Div", "Equal", "Greater", "Less", "Mul", "Or", "Pow", "Sub", "Xor")
def _broadcast(op: Operator) -> None:
    """The second operand lay along the axes of the first from ``axis`` on, or along its last ones."""
    axis, broadcast = op.attrs.pop("axis", None), op.attrs.pop("broadcast", 0)
    if broadcast and axis is not None:
        _lie_along(op, int(axis))


@_form(7, "PRelu")
def _slope(op: Operator) -> None:
    """Slopes are those of channels, or a single one."""
    _lie_along(op, 1)


def _lie_along(op: Operator, axis: int) -> None:
    """Let the second operand, which lies along the axes of the first from ``axis`` on, have as many axes behind it."""
    first, second = op.inputs[0], op.inputs[1]
    if first is None or second is None or first.shape is None or second.shape is None:
        raise _error(op, f"it broadcasts along axis {axis}, and how many axes its inputs have is not known; declare it")
    rank, own = len(first.shape), len(second.shape)
    behind = rank - axis % max(rank, 1) - own
    if behind <= 0 or all(size == 1 for size in second.shape):
        return
    wide = op.program.fresh_variable(f"{second.name}.along", second.dtype, (*second.shape, *[1] * behind))
    axes = list(range(own, own + behind))
    op.program.add_operator("Unsqueeze", [second], [wide], attrs={"axes": axes}, like=op)
    op.set_input(1, wide)


@_form(6, "Cast")
def _cast(op: Operator) -> None:
    name, known = str(op.attrs.get("to", "")).upper(), onnx.TensorProto.DataType
    if name not in known.keys():  # noqa: SIM118  # an enumeration, which has no `in`
        raise _error(op, f"'{name}' is no element type")
    op.attrs["to"] = known.Value(name)


@_form(4, "Concat")
def _concat(op: Operator) -> None:
    op.attrs.setdefault("axis", 1)


@_form(5, "Reshape")
def _reshape(op: Operator) -> None:
    shape, made = np.array(op.attrs.pop("shape", [0]), np.int64), next(v for v in op.outputs if v is not None)
    op.set_input(1, op.program.add_constant(f"{made.name}.shape", shape))


@_form(2, "Pad")
def _pad(op: Operator) -> None:
    if "paddings" in op.attrs:
        op.attrs["pads"] = op.attrs["paddings"]
        del op.attrs["paddings"]


@_form(2, "LpPool", "GlobalLpPool")
def _power(op: Operator) -> None:
    op.attrs["p"] = int(op.attrs.get("p", 2.0))


@_form(2, "Split")
def _split(op: Operator) -> None:
    if op.input(1) is not None:
        raise _error(op, "the sizes of its parts are an input")


@_form(6, "Tile")
def _tile(op: Operator) -> None:
    raise _error(op, "how often it repeats is a number for one axis")


@_form(7, "Upsample")
def _upsample(op: Operator) -> None:
    height, width = (float(op.attrs.pop(name, 1.0)) for name in ("height_scale", "width_scale"))
    op.attrs["scales"] = [1.0, 1.0, height, width]
