"""An ONNX graph, operator by operator, in torch's autograd: an independent oracle for gradients, and its clock.

Runs in an environment of its own that has torch, onnx and numpy:

    python torch_graph.py gradients MODEL.onnx FEEDS.npz OUT.npz [float64]
    python torch_graph.py steps MODEL.onnx FEEDS.npz COUNT

The loss is the mean squared distance of the first output to ``FEEDS["target"]``. ``gradients`` writes the loss and
the gradient of every float initializer; ``steps`` runs Adam (1e-4) steps, and prints the process time of each in ms
and the peak memory in MiB.
"""

from __future__ import annotations

import math
import resource
import sys
import time

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from onnx import numpy_helper

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
    LessOrEqual=torch.le,
    GreaterOrEqual=torch.ge,
    MatMul=torch.matmul,
    HardSwish=F.hardswish,
    Identity=lambda x: x,
    Shape=lambda x: torch.tensor(x.shape),
    Expand=lambda x, s: x.broadcast_to(torch.broadcast_shapes(tuple(x.shape), tuple(s.tolist()))),
    Div=lambda x, y: x / y if x.dtype.is_floating_point else torch.div(x, y, rounding_mode="trunc"),
)


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


@op("LayerNormalization")
def layer_norm(a, x, scale, bias=None):
    return F.layer_norm(x, scale.shape, scale, bias, a.get("epsilon", 1e-5))


@op("Gemm")
def gemm(a, x, y, c=None):
    x, y = (x.T if a.get("transA") else x), (y.T if a.get("transB") else y)
    out = a.get("alpha", 1.0) * (x @ y)
    return out if c is None else out + a.get("beta", 1.0) * c


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


def recurrent(x, h, c, w, r, b, kind):
    """One direction; ONNX's gate orders are iofc and zrh."""
    size = r.shape[-1]
    wb, rb = (b[: len(b) // 2], b[len(b) // 2 :]) if b is not None else (0, 0)
    rows = []
    for step in x:
        if kind == "LSTM":
            i, o, f, g = (step @ w.T + h @ r.T + wb + rb).split(size, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        else:
            zx, rx, hx = (step @ w.T + wb).split(size, -1)
            zh, rh, hh = (h @ r.T + rb).split(size, -1)  # linear_before_reset, as torch has it
            z, reset = torch.sigmoid(zx + zh), torch.sigmoid(rx + rh)
            h = (1 - z) * torch.tanh(hx + reset * hh) + z * h
        rows.append(h)
    return torch.stack(rows), h, c


@op("LSTM", "GRU")
def rnn(a, x, w, r, b=None, lengths=None, h0=None, c0=None, *, kind):
    assert lengths is None and (kind == "LSTM" or a.get("linear_before_reset"))
    ys, hs, cs = [], [], []
    for d in range(w.shape[0]):
        start = x.new_zeros(x.shape[1], r.shape[-1])
        back = a.get("direction", b"forward") == b"reverse" or d == 1
        y, h, c = recurrent(
            x.flip(0) if back else x,
            start if h0 is None else h0[d],
            start if c0 is None else c0[d],
            w[d],
            r[d],
            None if b is None else b[d],
            kind,
        )
        ys.append(y.flip(0) if back else y)
        hs.append(h)
        cs.append(c)
    return torch.stack(ys, 1), torch.stack(hs), torch.stack(cs)


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

    def tensor(self, array):
        value = torch.from_numpy(np.array(array))
        return value.to(self.dtype) if value.dtype.is_floating_point else value

    def loss(self, feeds):
        env = {**self.values, **{name: self.tensor(array) for name, array in feeds.items()}}
        for node in self.nodes:
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            inputs = [env[name] if name else None for name in node.input]
            more = {"kind": node.op_type} if node.op_type in ("LSTM", "GRU") else {}
            out = OPS[node.op_type](attributes, *inputs, **more)
            if node.op_type in ("Constant", "ConstantOfShape", "Cast") and out.dtype.is_floating_point:
                out = out.to(self.dtype)
            for name, value in zip(node.output, out if isinstance(out, tuple) else (out,), strict=False):
                env[name] = value
        return ((env[self.outputs[0]] - env["target"]) ** 2).mean()


def main():
    """See the module's text."""
    what, path, feeds, *rest = sys.argv[1:]
    feeds = dict(np.load(feeds))
    if what == "gradients":
        graph = Graph(path, torch.float64 if rest[1:] == ["float64"] else torch.float32)
        loss = graph.loss(feeds)
        loss.backward()
        np.savez(
            rest[0],
            loss=loss.detach().numpy(),
            **{f"d:{n}": v.grad.numpy() for n, v in graph.leaves.items() if v.grad is not None},
        )
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
