"""A model that was exported with a fixed batch, freed of it where its operators let it.

Exporters write the batch of their example into the inputs and into constant shapes. Here the first dimension of each
input and of each Reshape of what comes from them is set free; what is left is tried: on samples of the data, the freed
model has to give for a larger batch what the model gave for its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx

from amp_transpiler.conversion.fold_constants import fold_values
from amp_transpiler.errors import AmpError
from amp_transpiler.ir.constant_data import constant_array
from amp_transpiler.ir.control import every_node
from amp_transpiler.ir.infer import static
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.ir.types import FLOATS, numpy_dtype
from amp_transpiler.passes.canonicalize.simplify import remove_dead
from amp_transpiler.passes.view.constants import constant_content
from amp_transpiler.program import Program
from amp_transpiler.runtime import CPUPlace, Executor, Scope

#: What the free dimension is called.
BATCH = "batch"
#: The opset from which on Shape gives a part of a shape.
_SHAPE_OF_A_PART = 15
#: What is made to repeat a token: the batch, the other sizes, both, the repeated token.
_PARTS = ("batch", "rest", "sizes", "repeated")


def fixed_batch(inputs: list[Variable]) -> int | None:
    """The batch that inputs are fixed to; None where it is free."""
    return next((v.shape[0] for v in inputs if v.shape and isinstance(v.shape[0], int)), None)


def with_hidden_batch(
    program: Program,
    inputs: list[Variable],
    rows: Callable[[int], Mapping[str, np.ndarray]],
    values: Mapping[str, Any] | None = None,
) -> Program:
    """The program, its inputs fixed to the batch that constant shapes inside of it have, where they say an open one.

    So are files whose inputs were renamed alone. ``rows`` gives so many samples for the inputs; the program is run
    where such a shape makes it doubtful, and stays as it is where it takes a batch that no shape has.
    """
    found = {
        int(target[0])
        for op in _reached(inputs)
        if op.full_type == "Reshape" and (target := constant_array(op.inputs[1])) is not None and target[:1] > 0
    }
    others = _of_others(program, values)

    def passes(batch: int) -> bool:
        try:
            _run(program, {**rows(batch), **others})
        except AmpError:
            return False
        return True

    if not found or passes(max(found) + 1):
        return program
    hidden = next((batch for batch in sorted(found) if passes(batch)), None)
    if hidden is None:
        return program
    model = program.to_onnx(external_data=False)
    names = {v.name for v in inputs}
    for value in model.graph.input:
        if value.name in names:
            value.type.tensor_type.shape.dim[0].dim_value = hidden
    return Program.from_onnx(model, name=program.name)


def freed(
    program: Program, inputs: list[Variable], feed: Mapping[str, np.ndarray], values: Mapping[str, Any] | None = None
) -> Program | str:
    """The program with a free batch, or why it cannot have one.

    ``inputs`` are those that are fed samples, all of one fixed batch; ``feed`` has one sample more than that for each.
    ``values`` are those of other inputs.
    """
    others = _of_others(program, values)
    plain = _with_known_shapes(program, inputs)
    model = plain.to_onnx(external_data=False)
    names = {v.name for v in inputs}
    sizes = {v.name: v.shape[0] for v in inputs if v.shape}
    if len(set(sizes.values())) > 1:
        return f"its inputs differ in their first dimension: {sizes}"
    batch = next(iter(sizes.values()))
    assert isinstance(batch, int)
    for value in model.graph.input:
        if value.name in names:
            value.type.tensor_type.shape.dim[0].dim_param = BATCH
    for value in model.graph.output:
        dims = value.type.tensor_type.shape.dim
        if dims and dims[0].dim_value == batch:
            dims[0].dim_param = BATCH
    held = {tensor.name for tensor in model.graph.initializer}
    said = [info for info in model.graph.value_info if info.name in held]  # which of them are weights, for one
    del model.graph.value_info[:]
    model.graph.value_info.extend(said)
    given = [plain.var(v.name) for v in inputs]
    reached = _reached(given)
    _free_reshapes(plain, model.graph, reached)
    if batch == 1:
        _repeat_tokens(plain, model.graph, given, reached)
    try:
        free = Program.from_onnx(model, name=program.name)
        own = [
            _run(program, {name: rows[start : start + batch] for name, rows in feed.items()} | others)
            for start in (0, 1)
        ]
        larger = _run(free, {**feed, **others})
    except AmpError as error:
        return f"a larger batch does not pass: {error}"
    for out, first, second, found in zip(program.outputs, *own, larger, strict=True):
        expected = np.concatenate([first, second[-1:]]) if first.ndim and len(first) == batch else None
        if expected is None or expected.shape != found.shape or not _near(found, expected):
            return f"output '{out.name}' of a larger batch is not what the samples give by themselves"
    return free


def _of_others(program: Program, values: Mapping[str, Any] | None) -> dict[str, np.ndarray]:
    return {
        v.name: np.asarray(values[v.name], numpy_dtype(str(v.dtype)))
        for v in program.inputs
        if values and v.name in values
    }


def _with_known_shapes(program: Program, inputs: list[Variable]) -> Program:
    """A copy in which what exporters put together of constants, for a Reshape say, is one. What comes from the inputs
    stays, for their sizes are others in a larger batch, and so do numbers, of which some may be weights."""
    plain = program.clone()
    keep = {*_reached([plain.var(v.name) for v in inputs])}
    for op in plain.walk():
        if op.program is not plain or any(v is not None and v.dtype in FLOATS for v in op.outputs):
            keep.add(op)
    unread = frozenset(v.name for v in plain.variables if not v.readers)
    fold_values(plain, frozenset(keep))
    _begin_with_zeros(plain)
    remove_dead(plain, unread, frozenset())
    return plain


def _begin_with_zeros(program: Program) -> None:
    """Let recurrent layers whose states begin with zeros for each sample of the fixed batch leave that to the operator.

    Zeros that are weights stay, for they may be trained.
    """
    for op in program.operators:
        for slot in traits_of(op).starts:
            state = op.input(slot)
            made = None if state is None else state.producer
            zeros = made.input(0) if made is not None and made.type == "Expand" else state
            held = constant_content(zeros)
            if held is not None and not as_array(held).any():
                op.set_input(slot, None)


def _run(program: Program, feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """What it gives when it is tested: nothing is drawn, and samples do not depend on each other."""
    executor, scope = Executor(CPUPlace()), Scope()
    if program.startup is not None:
        executor.run(program.startup, scope=scope)
    test = program.clone(for_test=True)
    found: list[np.ndarray] = executor.run(test, feed=dict(feed), fetch_list=list(test.outputs), scope=scope)
    return found


def _near(found: np.ndarray, expected: np.ndarray) -> bool:
    a, b = (np.asarray(array, np.float64) for array in (found, expected))
    return bool(np.allclose(a, b, rtol=1e-3, atol=1e-3 * max(float(np.abs(b).max(initial=0.0)), 1e-6), equal_nan=True))


def _free_reshapes(program: Program, graph: onnx.GraphProto, reached: list[Operator]) -> None:
    """Let constant shapes of what comes from the inputs leave their first size open; what nobody reads then goes."""
    replaced: set[str] = set()
    nodes = {node.output[0]: node for node in graph.node if node.op_type == "Reshape" and node.output}
    for op in reached:
        shape = op.input(1)
        target = None if op.full_type != "Reshape" or shape is None else constant_array(shape)
        out = op.output(0)
        if target is None or out is None or out.name not in nodes or 0 in target[1:]:
            continue
        free = _free_shape(target, op.inputs[0], out)
        if free is not None:
            name = program.unique(f"{out.name}.shape")
            graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(free, np.int64), name))
            node = nodes[out.name]
            replaced.add(node.input[1])
            node.input[1] = name
            kept = [attribute for attribute in node.attribute if attribute.name != "allowzero"]  # 0 is: as it comes
            del node.attribute[:]
            node.attribute.extend(kept)
    replaced -= {name for node in every_node(graph.node) for name in node.input} | {out.name for out in graph.output}
    for held in [each for each in graph.initializer if each.name in replaced]:
        graph.initializer.remove(held)


def _repeat_tokens(program: Program, graph: onnx.GraphProto, inputs: list[Variable], reached: list[Operator]) -> None:
    """Let what stands beside each sample, as a class token does, be repeated for every sample of a batch."""
    made = {*inputs, *(v for op in reached for v in op.outputs)}
    if program.opset() < _SHAPE_OF_A_PART:
        return
    for op in reached:
        out = op.output(0)
        sample = next((v for v in op.inputs if v in made), None)
        if op.full_type != "Concat" or out is None or sample is None or op.attrs.get("axis", 0) == 0:
            continue
        at = next(i for i, node in enumerate(graph.node) if out.name in node.output)
        for slot, token in enumerate(op.inputs):
            if token is None or token in made or token.is_input or not token.shape or token.shape[0] != 1:
                continue
            part, rest, sizes, new = (program.unique(f"{out.name}.{what}{slot}") for what in _PARTS)
            graph.node[at].input[slot] = new
            held = np.array(token.shape[1:], np.int64)
            graph.initializer.append(onnx.numpy_helper.from_array(held, rest))
            for node in (
                onnx.helper.make_node("Expand", [token.name, sizes], [new]),
                onnx.helper.make_node("Concat", [part, rest], [sizes], axis=0),
                onnx.helper.make_node("Shape", [sample.name], [part], start=0, end=1),
            ):
                graph.node.insert(at, node)


def _free_shape(target: np.ndarray, read: Variable | None, made: Variable) -> list[int] | None:
    """A constant shape whose first size follows the batch; None where it does so, or cannot be made to."""
    sizes = [int(size) for size in target]
    if not sizes or sizes[0] in (0, -1) or read is None or not read.shape:
        return None
    if read.shape[0] == sizes[0]:
        return [0, *sizes[1:]]
    known = static(made.shape and made.shape[1:])
    return None if known is None or len(known) != len(sizes) - 1 else [-1, *known]


def _reached(inputs: list[Variable]) -> list[Operator]:
    """The operators that compute with what comes from the inputs."""
    found: dict[Operator, None] = {}
    stack: list[Any] = list(inputs)
    while stack:
        for op, _ in stack.pop().readers:
            if op not in found:
                found[op] = None
                stack += [v for v in op.outputs if v is not None]
    return list(found)
