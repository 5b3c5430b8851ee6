"""Operators that read nothing but what is known, run together in one onnxruntime session."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx

from amp_transpiler.errors import AmpError
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import type_proto
from amp_transpiler.ir.nodes import Operator, TensorType, Variable
from amp_transpiler.passes.lowering.place import CPUPlace
from amp_transpiler.runtime.budget import watched
from amp_transpiler.runtime.session import Settings, create_session


def ran(
    program: Graph,
    operators: Sequence[Operator],
    types: Callable[[Variable], TensorType],
    arrays: Mapping[Variable, np.ndarray],
) -> dict[Variable, np.ndarray] | None:
    """What operators of ``program`` make, in order, of the ``arrays`` of variables; None where the run fails."""
    made = [v for op in operators for v in op.outputs if v is not None]
    own = set(made)
    read = list(dict.fromkeys(v for op in operators for v in op.inputs if v is not None and v not in own))
    opset = onnx.helper.make_opsetid("", program.opset())
    given = [onnx.helper.make_value_info(_called(v), type_proto(*types(v))) for v in read]
    wanted = [onnx.helper.make_value_info(_called(v), type_proto(types(v)[0], None)) for v in made]
    graph = onnx.helper.make_graph([_node(op) for op in operators], "fold", given, wanted)
    model = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8)
    feeds = {_called(v): arrays[v] for v in read}
    settings = Settings(optimization_level="disable", threads=1)
    try:
        with watched(f"folding constants of program '{program.name}'") as options:
            session, _ = create_session(model, CPUPlace(), settings, program.name)
            found = session.run([_called(v) for v in made], feeds, options)
    except AmpError:
        return None
    except Exception:  # onnxruntime's errors have no common base class; what fails here will fail in the run
        return None
    return dict(zip(made, map(np.asarray, found), strict=True))


def _called(variable: Variable | None) -> str:
    return "" if variable is None else f"v{variable.key}"


def _node(op: Operator) -> onnx.NodeProto:
    node: onnx.NodeProto = onnx.helper.make_node(
        op.type, [_called(v) for v in op.inputs], [_called(v) for v in op.outputs]
    )
    node.attribute.extend(op.attrs.protos())
    return node


def range_of(ends: Sequence[np.ndarray], most: int) -> np.ndarray | None:
    """The terms of a Range by its operands; None where they are no numbers, or the terms take over ``most`` bytes."""
    if len(ends) != 3 or any(end.size != 1 for end in ends):
        return None
    first, last, step = (end.reshape(-1) for end in ends)
    if not np.isfinite([*first, *last, *step]).all() or not step[0]:
        return None
    count = max(math.ceil((float(last[0]) - float(first[0])) / float(step[0])), 0)
    if count * first.itemsize > most:
        return None
    terms = np.concatenate([first, np.repeat(step, max(count - 1, 0))])[:count]
    return np.add.accumulate(terms, dtype=first.dtype)  # adding up, as onnxruntime does
