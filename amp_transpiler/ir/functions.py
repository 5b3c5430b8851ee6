"""Model-local functions: each is defined once, calls no other in a circle, and expands to a size that can be handled.

What a model becomes once its functions are expanded is counted here, before anything expands them: forty functions
that each call the one before twice are a terabyte of operators in a file of four kilobytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import onnx

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.control import nested_graphs
from amp_transpiler.lists import plain_domain

#: Operators that the calls of functions may add to a model.
EXPANDED = 50_000
#: Functions that may call one another in a row; onnx's own limit.
CALLS = 100
#: Graphs that may lie around one another; protobuf reads no more than 100 messages deep, three to a graph.
NESTED = 30

Key = tuple[str, str, str]


@dataclass
class _Size:
    """Of a graph or function with all that it calls: operators, calls in a row, graphs in one another."""

    operators: int = 0
    calls: int = 0
    depth: int = 0


def check_functions(model: onnx.ModelProto) -> None:
    """GraphError for functions that are defined twice, recursive, malformed, or too deep or too large once expanded."""
    if not model.functions:
        return
    functions: dict[Key, onnx.FunctionProto] = {}
    for function in model.functions:
        key = (plain_domain(function.domain), function.name, function.overload)
        if key in functions:
            raise GraphError(f"function {_name(key)} is defined twice")
        functions[key] = function
        _check_names(function)
    sizes: dict[Key, _Size] = {}
    for key in functions:
        _measure(key, functions, sizes)
    whole, plain = _Size(), 0
    for node, depth in _nodes(model.graph.node):
        _add(whole, node, depth, functions, sizes)
        plain += _key(node) not in functions
    if whole.operators - plain > EXPANDED:
        raise GraphError(
            f"its functions expand to {whole.operators - plain:,} operators, above the limit of "
            f"{EXPANDED:,}; inline them, or export the model without"
        )
    if whole.depth > NESTED:
        raise GraphError(too_deep("the model with its functions expanded"))


def too_deep(what: str) -> str:
    """The message for graphs that lie too deep in one another."""
    return (
        f"{what} nests graphs (of If, Loop, Scan) more than {NESTED} deep, near which protobuf ends; flatten them "
        "where the model is made"
    )


def _measure(start: Key, functions: dict[Key, onnx.FunctionProto], sizes: dict[Key, _Size]) -> None:
    """Put the size of a function, and of those that it calls, into ``sizes``; without recursion, as chains are long."""
    path: dict[Key, Iterator[Key]] = {}
    if start not in sizes:
        path[start] = iter(_called(functions[start], functions))
    while path:
        key = next(reversed(path))
        called = next((k for k in path[key] if k not in sizes), None)
        if called in path:
            circle = [*list(path)[list(path).index(called) :], called]
            raise GraphError(
                f"functions call one another in a circle: {' -> '.join(map(_name, circle[:8]))}; a "
                "function may not be recursive"
            )
        if called is not None:
            path[called] = iter(_called(functions[called], functions))
            continue
        del path[key]
        size = sizes[key] = _Size()
        for node, depth in _nodes(functions[key].node):
            _add(size, node, depth, functions, sizes)
        if size.calls >= CALLS:
            raise GraphError(
                f"function {_name(key)} is the end of more than {CALLS} functions that call one another in a row"
            )


def _add(
    size: _Size, node: onnx.NodeProto, depth: int, functions: dict[Key, onnx.FunctionProto], sizes: dict[Key, _Size]
) -> None:
    key = _key(node)
    inner = sizes[key] if key in functions else _Size(operators=1)
    if key in functions:
        function = functions[key]
        for kind, found, most in (
            ("inputs", len(node.input), len(function.input)),
            ("outputs", len(node.output), len(function.output)),
        ):
            if found > most:
                raise GraphError(f"node '{node.name}' calls function {_name(key)} with {found} {kind}; it has {most}")
        size.calls = max(size.calls, 1 + inner.calls)
    size.operators += inner.operators
    size.depth = max(size.depth, depth + inner.depth)


def _called(function: onnx.FunctionProto, functions: dict[Key, onnx.FunctionProto]) -> list[Key]:
    return list(dict.fromkeys(key for node, _ in _nodes(function.node) if (key := _key(node)) in functions))


def _nodes(nodes: Iterable[onnx.NodeProto], depth: int = 0) -> Iterator[tuple[onnx.NodeProto, int]]:
    """Every node, those of nested graphs included, and how many graphs it lies in."""
    for node in nodes:
        yield node, depth
        for graph in nested_graphs(node):
            yield from _nodes(graph.node, depth + 1)


def _check_names(function: onnx.FunctionProto) -> None:
    """What a function writes is written once; what it gives is written or read."""
    what = f"function '{function.name}'"
    if not function.name:
        raise GraphError("a function has no name")
    known = set(function.input)
    if len(known) < len(function.input):
        raise GraphError(f"{what} has two inputs of one name")
    for node in function.node:
        for name in node.output:
            if name and name in known:
                raise GraphError(f"{what} writes '{name}' twice")
            known.add(name)
    for name in function.output:
        if name not in known:
            raise GraphError(f"{what} gives the output '{name}', which nothing in it produces")


def _key(node: onnx.NodeProto) -> Key:
    return plain_domain(node.domain), node.op_type, node.overload


def _name(key: Key) -> str:
    domain, name, overload = key
    return f"'{f'{domain}::' if domain else ''}{name}{f':{overload}' if overload else ''}'"
