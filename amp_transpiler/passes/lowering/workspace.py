"""What CPU kernels take beside their tensors: their large temporaries, measured with onnxruntime 1.31."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx

from amp_transpiler.ir.kernel_cost import Kind, tensor_bytes
from amp_transpiler.ops.rnn.gates import GATES

#: Kernels that take their workspace before their results.
EARLY = frozenset({"Where"})


def workspace(
    proto: onnx.NodeProto, inputs: Sequence[str], outputs: Sequence[str], tensor: Callable[[str], Kind]
) -> tuple[int, ...]:
    """Bytes of each temporary of a node that reads ``inputs``; ``tensor`` tells what is known of a name."""
    type_ = proto.op_type
    if type_ == "Where":  # both selections, before they are merged
        condition = tensor(inputs[0])[1]
        return tuple(_selected(condition, tensor(name)) for name in inputs[1:3])
    if type_ in GATES:
        return _recurrent(proto, *(tensor(name) for name in inputs[:3:2]))
    if type_ == "Sum" and len(inputs) > 2:
        return (tensor_bytes(tensor(outputs[0])),)
    if type_ in ("Softmax", "LogSoftmax"):
        axis = next((a.i for a in proto.attribute if a.name == "axis"), -1)
        inner = axis in (-1, len(tensor(inputs[0])[1]) - 1)
        return () if inner else (tensor_bytes(tensor(outputs[0])),) * 2
    return (tensor_bytes(tensor(outputs[0])),) * 2 if type_ == "Einsum" else ()


def _recurrent(proto: onnx.NodeProto, fed: Kind, weights: Kind) -> tuple[int, ...]:
    """The gates of all steps for each direction; for a reverse one the input and the output turned round too."""
    steps, batch, width = fed[1]
    directions, _, hidden = weights[1]
    item = tensor_bytes((fed[0], (steps, batch)))
    direction = next((a.s for a in proto.attribute if a.name == "direction"), b"forward")
    turned = () if direction == b"forward" else (item * width, item * hidden)
    return (*turned, *(item * hidden * GATES[proto.op_type],) * directions)


def _selected(condition: tuple[int, ...], chosen: Kind) -> int:
    type_, shape = chosen
    rank = max(len(condition), len(shape))
    sides = zip(_aligned(condition, rank), _aligned(shape, rank), strict=True)
    return tensor_bytes((type_, tuple(max(pair) for pair in sides)))


def _aligned(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return (1,) * (rank - len(shape)) + shape
