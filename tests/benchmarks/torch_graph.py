"""An ONNX graph, operator by operator, in torch's autograd: an independent oracle for gradients, and its clock.

Runs in an environment of its own that has torch, onnx and numpy:

    python torch_graph.py gradients MODEL.onnx FEEDS.npz OUT.npz DTYPE      # of float64, float32, float16, bfloat16
    python torch_graph.py steps MODEL.onnx FEEDS.npz COUNT

The loss is the first output where that is a scalar, else its mean squared distance to ``FEEDS["target"]``, in fp32 or
wider. ``gradients`` writes the loss, the loss scale (not 1 in float16 alone), and the scaled gradient of every float
initializer, computed with all weights and activations in DTYPE; ``steps`` runs Adam (1e-4) steps, and prints the
process time of each in ms and the peak memory in MiB.
"""

from __future__ import annotations

import collections
import math
import resource
import sys
import time

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

OPS = {}


def op(*types):
    def register(function):
        OPS.update(dict.fromkeys(types, function))
        return function

    return register


def simple(**functions):
    for type_, function in functions.items():
        OPS[type_] = lambda a, *x, _f=function: _f(*x)


simple(
    Add=torch.add,
    Sub=torch.sub,
    Mul=torch.mul,
    Pow=lambda x, p: x ** p.to(x.dtype),
    Relu=torch.relu,
    Sigmoid=torch.sigmoid,
    Tanh=torch.tanh,
    Erf=torch.erf,
    Sqrt=torch.sqrt,
    Cos=torch.cos,
    Sin=torch.sin,
    Neg=torch.neg,
    Equal=torch.eq,
    And=torch.logical_and,
    IsNaN=torch.isnan,
    Less=torch.lt,
    Max=torch.maximum,
    LessOrEqual=torch.le,
    GreaterOrEqual=torch.ge,
    MatMul=torch.matmul,
    HardSwish=F.hardswish,
    Identity=lambda x: x,
    Expand=lambda x, s: x.broadcast_to(torch.broadcast_shapes(tuple(x.shape), tuple(s.tolist()))),
    Div=lambda x, y: x / y if x.dtype.is_floating_point else torch.div(x, y, rounding_mode="trunc"),
)


@op("Shape")
def shape(a, x):
    return torch.tensor(x.shape[a.get("start", 0) :])


@op("Where")
def where(a, c, x, y):
    return torch.where(c, x, y)


@op("Constant")
def constant(a):
    (value,) = a.values()
    return torch.from_numpy(numpy_helper.to_array(value).copy()) if hasattr(value, "dims") else torch.tensor(value)


@op("Cast")
def cast(a, x):
    return x.to(torch.from_numpy(np.zeros(1, onnx.helper.tensor_dtype_to_np_dtype(a["to"]))).dtype)


@op("Reshape")
def reshape(a, x, shape):
    sizes = [x.shape[i] if d == 0 and not a.get("allowzero") else d for i, d in enumerate(shape.tolist())]
    return x.reshape(sizes)


@op("Flatten")
def flatten(a, x):
    axis = a.get("axis", 1)
    return x.reshape(math.prod(x.shape[:axis]), -1)


@op("Transpose")
def transpose(a, x):
    return x.permute(a.get("perm", list(range(x.dim()))[::-1]))


@op("Concat")
def concat(a, *x):
    return torch.cat(x, a["axis"])


@op("Split")
def split(a, x, sizes=None):
    axis = a.get("axis", 0)
    if sizes is None:
        return tuple(torch.chunk(x, a["num_outputs"], axis))
    return tuple(torch.split(x, sizes.tolist(), axis))


@op("Slice")
def slice_(a, x, starts, ends, axes=None, steps=None):
    axes = range(len(starts)) if axes is None else axes.tolist()
    steps = [1] * len(starts) if steps is None else steps.tolist()
    for start, end, axis, step in zip(starts.tolist(), ends.tolist(), axes, steps, strict=True):
        taken = list(range(*slice(start, end, step).indices(x.shape[axis])))
        x = x.index_select(axis, torch.tensor(taken, dtype=torch.int64))
    return x


@op("Gather")
def gather(a, x, i):
    axis = a.get("axis", 0)
    i = torch.where(i < 0, i + x.shape[axis], i)
    flat = x.index_select(axis, i.reshape(-1))
    axis %= x.dim()
    return flat.reshape([*x.shape[:axis], *i.shape, *x.shape[axis + 1 :]])


@op("GatherElements")
def gather_elements(a, x, i):
    return torch.gather(x, a.get("axis", 0), i)


@op("GatherND")
def gather_nd(a, x, i):
    assert not a.get("batch_dims")
    return x[tuple(i[..., k] for k in range(i.shape[-1]))]


@op("Squeeze")
def squeeze(a, x, axes=None):
    axes = a.get("axes") if axes is None else axes.tolist()
    for axis in sorted((d % x.dim() for d in axes), reverse=True):
        x = x.squeeze(axis)
    return x


@op("Unsqueeze")
def unsqueeze(a, x, axes=None):
    axes = a.get("axes") if axes is None else axes.tolist()
    for axis in sorted(d % (x.dim() + len(axes)) for d in axes):
        x = x.unsqueeze(axis)
    return x


@op("ConstantOfShape")
def constant_of_shape(a, shape):
    value = torch.from_numpy(numpy_helper.to_array(a["value"]).copy()) if "value" in a else torch.zeros(1)
    return value.reshape(()).expand(shape.tolist()).clone()


@op("Softmax")
def softmax(a, x):
    return torch.softmax(x, a.get("axis", -1))


@op("LogSoftmax")
def log_softmax(a, x):
    return torch.log_softmax(x, a.get("axis", -1))


@op("Gelu")
def gelu(a, x):
    return F.gelu(x, approximate=a.get("approximate", b"none").decode())


@op("HardSigmoid")
def hard_sigmoid(a, x):
    return torch.clamp(a.get("alpha", 0.2) * x + a.get("beta", 0.5), 0, 1)


@op("ReduceMean")
def reduce_mean(a, x, axes=None):
    axes = a.get("axes") if axes is None else axes.tolist()
    return x.mean(axes, keepdim=bool(a.get("keepdims", 1)))


@op("ReduceSum")
def reduce_sum(a, x, axes=None):
    return x.sum(list(range(x.dim())) if axes is None else axes.tolist(), keepdim=bool(a.get("keepdims", 1)))


@op("LayerNormalization")
def layer_norm(a, x, scale, bias=None):
    return F.layer_norm(x, scale.shape, scale, bias, a.get("epsilon", 1e-5))


@op("Gemm")
def gemm(a, x, y, c=None):
    x, y = (x.T if a.get("transA") else x), (y.T if a.get("transB") else y)
    alpha = a.get("alpha", 1.0)
    return alpha * (x @ y) if c is None else torch.addmm(c, x, y, beta=a.get("beta", 1.0), alpha=alpha)


@op("Conv")
def conv(a, x, w, b=None):
    rank = w.dim() - 2
    pads = a.get("pads", [0] * 2 * rank)
    x = F.pad(x, [p for i in reversed(range(rank)) for p in (pads[i], pads[i + rank])])
    run = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    return run(x, w, b, a.get("strides", 1), 0, a.get("dilations", 1), a.get("group", 1))


@op("MaxPool")
def max_pool(a, x):
    pads = a.get("pads", [0] * 4)
    x = F.pad(x, [pads[1], pads[3], pads[0], pads[2]], value=-math.inf)
    return F.max_pool2d(x, a["kernel_shape"], a.get("strides", [1, 1]))


@op("GlobalAveragePool")
def global_average_pool(a, x):
    return x.mean(list(range(2, x.dim())), keepdim=True)


@op("BatchNormalization")
def batch_norm(a, x, scale, bias, mean, var):
    training = bool(a.get("training_mode", 0))
    statistics = (None, None) if training else (mean, var)
    return F.batch_norm(x, *statistics, scale, bias, training, eps=a.get("epsilon", 1e-5))


#: The places of torch's gates among those of ONNX: LSTM i, f, g, o of i, o, f, g; GRU r, z, n of z, r, n.
GATES = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2)}


def gates(w, kind):
    """Rows of one direction in torch's order."""
    blocks = w.chunk(len(GATES[kind]))
    return torch.cat([blocks[i] for i in GATES[kind]])


@op("LSTM", "GRU")
def rnn(a, x, w, r, b=None, lengths=None, h0=None, c0=None, *, kind):
    """torch's own recurrent layer."""
    assert kind == "LSTM" or a.get("linear_before_reset")
    assert a.get("direction", b"forward") in (b"forward", b"bidirectional")
    weights = []
    for d in range(len(w)):
        weights += [gates(w[d], kind), gates(r[d], kind)]
        weights += [gates(half, kind) for half in b[d].chunk(2)] if b is not None else []
    start = x.new_zeros(len(w), x.shape[1], r.shape[-1])
    states = [start if s is None else s for s in (h0, c0)[: 1 + (kind == "LSTM")]]
    packed, sizes, order = x, None, None
    if lengths is not None:
        packed, sizes, order, back = pack_padded_sequence(x, lengths.long(), enforce_sorted=False)
        states = [s[:, order] for s in states]
    hidden = states if kind == "LSTM" else states[0]
    run = torch._VF.lstm if kind == "LSTM" else torch._VF.gru
    options = (weights, b is not None, 1, 0.0, False, len(w) == 2)
    if lengths is None:
        y, *last = run(packed, hidden, *options, False)
    else:
        y, *last = run(packed, sizes, hidden, *options)
        y = pad_packed_sequence(PackedSequence(y, sizes, order, back), total_length=len(x))[0]
        last = [s[:, back] for s in last]
    return y.unflatten(-1, (len(w), -1)).transpose(1, 2), *last


@op("SoftmaxCrossEntropyLoss")
def cross_entropy(a, x, label):
    ignored, reduction = a.get("ignore_index", -100), a.get("reduction", b"mean").decode()
    return F.cross_entropy(loss_type(x), label.long(), ignore_index=ignored, reduction=reduction)


@op("CTCLoss")
def ctc_loss(a, x, labels, steps, symbols):
    p = F.log_softmax(loss_type(x), -1)
    return F.ctc_loss(p, labels.long(), steps.long(), symbols.long(), a["blank"], a["reduction"].decode())


def loss_type(x):
    """Of what a loss reads: no 16-bit type."""
    return x if x.dtype == torch.float64 else x.float()


class Graph:
    """The model: float initializers of more than one element are leaves."""

    def __init__(self, path, dtype):
        model = onnx.load(path)
        self.nodes, self.dtype = model.graph.node, dtype
        self.outputs = [o.name for o in model.graph.output]
        self.values, self.leaves = {}, {}
        for tensor in model.graph.initializer:
            value = self.tensor(numpy_helper.to_array(tensor))
            if value.dtype.is_floating_point and value.numel() > 1:
                value.requires_grad_()
                self.leaves[tensor.name] = value
            self.values[tensor.name] = value
        self.linear = dict(self.biased_products())

    def biased_products(self):
        """The sums and products that are one linear layer of torch, which rounds once: (output of Add, its parts)."""
        readers = collections.Counter(name for node in self.nodes for name in node.input)
        products = {n.output[0]: n.input for n in self.nodes if n.op_type == "MatMul" and readers[n.output[0]] == 1}
        for node in self.nodes:
            for product, bias in (node.input, node.input[::-1]) if node.op_type == "Add" else ():
                x, weight = products.get(product, ("", ""))
                if weight in self.leaves and bias in self.leaves and self.leaves[bias].dim() == 1:
                    yield node.output[0], (x, weight, bias)

    def tensor(self, array):
        value = torch.from_numpy(np.array(array))
        return value.to(self.dtype) if value.dtype.is_floating_point else value

    def loss(self, feeds):
        env = {**self.values, **{name: self.tensor(array) for name, array in feeds.items()}}
        for node in self.nodes:
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            inputs = [env[name] if name else None for name in node.input]
            more = {"kind": node.op_type} if node.op_type in ("LSTM", "GRU") else {}
            if node.output[0] in self.linear:
                x, weight, bias = (env[name] for name in self.linear[node.output[0]])
                out = F.linear(x, weight.T, bias)
            else:
                out = OPS[node.op_type](attributes, *inputs, **more)
            if node.op_type in ("Constant", "ConstantOfShape", "Cast") and out.dtype.is_floating_point:
                out = out.to(self.dtype)
            for name, value in zip(node.output, out if isinstance(out, tuple) else (out,), strict=False):
                env[name] = value
        out = env[self.outputs[0]]
        return F.mse_loss(loss_type(out), loss_type(env["target"])) if out.dim() else out


def gradients(graph, feeds):
    """The loss, the loss scale, and gradients times it by name: in float16, the scale at which all are finite."""
    scale = 2.0**16 if graph.dtype == torch.float16 else 1.0  # where torch's GradScaler starts
    while True:
        loss = graph.loss(feeds)
        (loss * scale).backward()
        found = {name: leaf.grad for name, leaf in graph.leaves.items() if leaf.grad is not None}
        if scale == 1.0 or all(bool(grad.isfinite().all()) for grad in found.values()):
            return loss.item(), scale, found
        scale /= 2
        for leaf in graph.leaves.values():
            leaf.grad = None


def main():
    """See the module's text."""
    what, path, feeds, *rest = sys.argv[1:]
    feeds = dict(np.load(feeds))
    if what == "gradients":
        out, dtype = rest
        loss, scale, found = gradients(Graph(path, getattr(torch, dtype)), feeds)
        wide = torch.float64 if dtype == "float64" else torch.float32
        np.savez(out, loss=loss, scale=scale, **{f"d:{name}": grad.to(wide).numpy() for name, grad in found.items()})
        return
    torch.set_num_threads(1)
    graph = Graph(path, torch.float32)
    optimizer = torch.optim.Adam(graph.leaves.values(), lr=1e-4)
    for _ in range(int(rest[0])):
        start = time.process_time()
        optimizer.zero_grad(set_to_none=True)
        loss = graph.loss(feeds)
        loss.backward()
        optimizer.step()
        print(f"step {(time.process_time() - start) * 1e3:.3f}", flush=True)
    print(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.1f}", flush=True)


if __name__ == "__main__":
    main()
