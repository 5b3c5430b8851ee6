"""Models whose fields are set to extreme or wrong values: any field of any message, by its kind."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import onnx
from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import DecodeError

_INTEGERS = [0, 1, -1, 2, 3, 7, 16, 99, 1000, 2**16, 2**31 - 1, -(2**31), 2**31, 2**40, 2**62, 2**63 - 1, -(2**63)]
_SMALL = [n for n in _INTEGERS if -(2**31) <= n < 2**31]
_FLOATS = [0.0, -0.0, 1.0, -1.0, 1e-30, 3e38, float("inf"), float("-inf"), float("nan"), 65505.0]
_TEXTS = [
    "",
    "x",
    "y",
    "h",
    "Relu",
    "If",
    "Loop",
    "Constant",
    "ai.onnx",
    "com.microsoft",
    "amp_transpiler",
    "f",
    "a/b/c",
    "\x1b[31m",
    "\u202e",
    "\0",
    "../x",
    "re:(",
    "*",
    "NaN",
    "-1",
    "amp_transpiler.state",
    "é" * 50,
    "n" * 5000,
]
_OPERATORS = [
    "Add",
    "MatMul",
    "Conv",
    "Cast",
    "Concat",
    "Constant",
    "ConstantOfShape",
    "Expand",
    "Gather",
    "Identity",
    "If",
    "Loop",
    "LSTM",
    "Pad",
    "Range",
    "Reshape",
    "Resize",
    "Scan",
    "Shape",
    "Slice",
    "Softmax",
    "Split",
    "Tile",
    "Transpose",
    "Unsqueeze",
    "Where",
    "MatMulGrad",
    "Adam",
    "ArrayInitializer",
    "BatchNormalization",
    "Einsum",
    "TopK",
    "SequenceAt",
    "Loss",
    "Attention",
    "QuickGelu",
]


def mutated(model: onnx.ModelProto, rng: random.Random) -> onnx.ModelProto:
    """A copy with one to three things changed."""
    changed = copy.deepcopy(model)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        rng.choice(_CHANGES)(changed, rng)
    return changed


# -- any field ---------------------------------------------------------------------------------------------------
def _messages(message: Any, into: Any = None) -> Iterator[Any]:
    """The message and all in it."""
    yield message
    for field, value in message.ListFields():
        if field.type == Field.TYPE_MESSAGE:
            for item in value if hasattr(value, "extend") else (value,):
                yield from _messages(item)


def _any_field(model: onnx.ModelProto, rng: random.Random) -> None:
    """Set, empty, repeat or shorten one field of one message."""
    message = rng.choice(list(_messages(model)))
    field = rng.choice(message.DESCRIPTOR.fields)
    value = getattr(message, field.name)
    if not hasattr(value, "append") and not hasattr(value, "add"):
        if rng.random() < 0.2:
            message.ClearField(field.name)
        elif field.type == Field.TYPE_MESSAGE:
            value.SetInParent()
        else:
            setattr(message, field.name, _value(field, rng))
        return
    what = rng.random()
    if what < 0.3 and len(value):
        del value[rng.randrange(len(value))]
    elif what < 0.5 and len(value):
        value.append(copy.deepcopy(rng.choice(list(value))))
    elif what < 0.6 and len(value) > 1:
        items = [copy.deepcopy(item) for item in value]
        rng.shuffle(items)
        del value[:]
        value.extend(items)
    elif field.type == Field.TYPE_MESSAGE:
        value.add()
    elif what < 0.9 and len(value):
        value[rng.randrange(len(value))] = _value(field, rng)
    else:
        value.append(_value(field, rng))


def _value(field: Any, rng: random.Random) -> Any:
    if field.type == Field.TYPE_ENUM:
        return rng.choice([v.number for v in field.enum_type.values])
    if field.type in (Field.TYPE_FLOAT, Field.TYPE_DOUBLE):
        return rng.choice(_FLOATS)
    if field.type == Field.TYPE_STRING:
        return rng.choice(_TEXTS)
    if field.type == Field.TYPE_BYTES:
        return rng.choice([b"", b"\xff\xfe", b"relu", bytes(rng.randrange(64))])
    if field.type == Field.TYPE_UINT64:
        return abs(rng.choice(_INTEGERS)) % 2**63
    return rng.choice(_SMALL if field.type == Field.TYPE_INT32 else _INTEGERS)


# -- what a graph is made of -----------------------------------------------------------------------------------
def _graphs(model: onnx.ModelProto) -> list[Any]:
    return [m for m in _messages(model) if isinstance(m, onnx.GraphProto | onnx.FunctionProto) and len(m.node)]


def _names(graph: Any) -> list[str]:
    found = [name for node in graph.node for name in (*node.input, *node.output)]
    if isinstance(graph, onnx.GraphProto):
        found += [t.name for t in graph.initializer] + [i.name for i in graph.input]
    return found or ["x"]


def _node(model: onnx.ModelProto, rng: random.Random) -> tuple[Any, Any]:
    graph = rng.choice(_graphs(model) or [model.graph])
    return graph, rng.choice(list(graph.node)) if len(graph.node) else graph.node.add(op_type="Relu")


def _rewire(model: onnx.ModelProto, rng: random.Random) -> None:
    graph, node = _node(model, rng)
    slots = rng.choice([node.input, node.output])
    if len(slots):
        slots[rng.randrange(len(slots))] = rng.choice([*_names(graph), "", "nowhere"])


def _operator(model: onnx.ModelProto, rng: random.Random) -> None:
    _, node = _node(model, rng)
    node.op_type = rng.choice(_OPERATORS)
    node.domain = rng.choice(["", "", "", node.domain, "amp_transpiler", "com.microsoft", "f", "elsewhere"])


def _attribute(model: onnx.ModelProto, rng: random.Random) -> None:
    """An attribute of another node, or one of another value."""
    _, node = _node(model, rng)
    others = [a for graph in _graphs(model) for n in graph.node for a in n.attribute]
    if others and rng.random() < 0.5:
        node.attribute.append(copy.deepcopy(rng.choice(others)))
    elif len(node.attribute):
        attribute = rng.choice(list(node.attribute))
        fields = [f for f in attribute.DESCRIPTOR.fields if f.name in ("f", "i", "s", "floats", "ints", "strings")]
        field = rng.choice(fields)
        value = _value(field, rng)
        if hasattr(getattr(attribute, field.name), "append"):
            getattr(attribute, field.name).append(value)
        else:
            setattr(attribute, field.name, value)
        if rng.random() < 0.7:
            attribute.type = attribute.AttributeType.Value(
                {"f": "FLOAT", "i": "INT", "s": "STRING"}.get(field.name, field.name.upper())
            )


def _dims(model: onnx.ModelProto, rng: random.Random) -> None:
    """Sizes of a declaration or a tensor."""
    found = [m for m in _messages(model) if isinstance(m, onnx.TensorProto | onnx.TensorShapeProto.Dimension)]
    message = rng.choice(found)
    if isinstance(message, onnx.TensorProto):
        if len(message.dims) and rng.random() < 0.8:
            message.dims[rng.randrange(len(message.dims))] = rng.choice(_INTEGERS)
        else:
            message.dims.append(rng.choice(_INTEGERS))
    else:
        message.dim_value = rng.choice(_INTEGERS)


def _content(model: onnx.ModelProto, rng: random.Random) -> None:
    """The numbers in a small integer constant: axes, shapes, pads, counts; of the right length, so that they are used."""
    found = [m for m in _messages(model) if isinstance(m, onnx.TensorProto) and m.data_type == onnx.TensorProto.INT64]
    for tensor in rng.sample(found, min(len(found), 1)):
        count = max(1, len(tensor.raw_data) // 8)
        numbers = [rng.choice(_INTEGERS[:10] + [2**31 - 1, 2**40, 2**62]) for _ in range(count)]
        tensor.raw_data = b"".join(n.to_bytes(8, "little", signed=True) for n in numbers)


def _nest(model: onnx.ModelProto, rng: random.Random) -> None:
    """Put the nodes of a graph into branches of an If, many times over."""
    graph = model.graph
    for level in range(rng.choice([1, 2, 5, 20, 26, 33])):
        node = onnx.NodeProto(op_type="If", input=[rng.choice(["c", "x", _names(graph)[0]])], name=f"nest{level}")
        node.output.extend(info.name for info in graph.output)
        for name in ("then_branch", "else_branch"):
            inner = onnx.GraphProto(name=name, output=graph.output)
            inner.node.extend(graph.node if name == "then_branch" or level < 2 else [])
            for info in graph.output if name == "else_branch" and level >= 2 else []:
                inner.node.add(op_type="Identity", input=["x"], output=[info.name])
            try:
                node.attribute.append(onnx.AttributeProto(name=name, type=onnx.AttributeProto.GRAPH, g=inner))
                onnx.GraphProto(node=[node])
            except DecodeError:  # deeper than protobuf copies
                return
        del graph.node[:]
        graph.node.append(node)


def _function(model: onnx.ModelProto, rng: random.Random) -> None:
    """Functions that call one another: in circles, in rows, twice each; or one that takes an operator's name."""
    kind = rng.choice(["circle", "row", "double", "shadow", "twice"])
    count = rng.choice([2, 5, 12, 41, 120]) if kind in ("row", "double") else 3
    for i in range(count):
        called = f"Z{i - 1}" if i else (f"Z{count - 1}" if kind == "circle" else "")
        function = model.functions.add(domain="z", name=f"Z{i}", input=["a"], output=["b"])
        for domain, version in (("", 21), ("z", 1)):
            function.opset_import.add(domain=domain, version=version)
        turns = 2 if kind == "double" else 1
        for turn in range(turns):
            function.node.add(
                op_type=called or "Neg",
                domain="z" if called else "",
                input=["a" if turn == 0 else "m"],
                output=["b" if turn == turns - 1 else "m"],
            )
    if kind == "twice":
        model.functions.append(copy.deepcopy(model.functions[-1]))
    if kind == "shadow":
        model.functions[-1].name = rng.choice(_OPERATORS)
        model.functions[-1].domain = ""
    graph, node = _node(model, rng)
    if len(node.input) and len(node.output):
        graph.node.add(op_type=f"Z{count - 1}", domain="z", input=[node.input[0]], output=["zz"])
        node.input[0] = "zz" if rng.random() < 0.5 else node.input[0]
    if not any(o.domain == "z" for o in model.opset_import):
        model.opset_import.add(domain="z", version=1)


def _opset(model: onnx.ModelProto, rng: random.Random) -> None:
    if len(model.opset_import):
        rng.choice(list(model.opset_import)).version = rng.choice(
            [1, 5, 7, 8, 9, 10, 11, 12, 13, 15, 17, 19, 20, 22, 23, 0]
        )


def _marks(model: onnx.ModelProto, rng: random.Random) -> None:
    """Metadata as this package writes it, and not quite."""
    _, node = _node(model, rng)
    key = rng.choice(["role", "guard", "scope", "precision", "reason", "fp32"])
    node.metadata_props.add(
        key=f"amp_transpiler.{key}", value=rng.choice(["backward", "update", "1", "float16", *_TEXTS])
    )
    node.metadata_props.add(
        key="pkg.torch.onnx.name_scopes", value=rng.choice(["['a', 'a.b']", "[1]", "[" * 2000, "x"])
    )
    if rng.random() < 0.4:
        state = rng.choice(
            [
                "{}",
                "[]",
                "[" * 5000,
                '{"trainable": [1], "persistable": [], "updates": {}}',
                '{"trainable": ["x"], "persistable": ["y"], "updates": {"x": "y"}}',
                '{"trainable": [], "persistable": [], "updates": {}, "window": {"steps": "a"}}',
            ]
        )
        model.graph.metadata_props.add(key="amp_transpiler.state", value=state)


_CHANGES: list[Callable[[onnx.ModelProto, random.Random], None]] = [
    _any_field,
    _any_field,
    _any_field,
    _any_field,
    _rewire,
    _rewire,
    _operator,
    _attribute,
    _attribute,
    _dims,
    _content,
    _nest,
    _function,
    _opset,
    _marks,
]
