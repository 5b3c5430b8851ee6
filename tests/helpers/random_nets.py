"""Nets drawn at random, layer by layer: for what no one thinks of putting behind each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

import amp_transpiler as amp
from amp_transpiler.nn import functional as F

Variable = amp.Variable
#: ``layer(draw, x) -> x``; one that does not fit ``x`` gives it back.
Layer = Callable[[Random, Variable], Variable]

ACTIVATIONS: list[Callable[[Variable], Variable]] = [
    *(F.relu, F.gelu, F.sigmoid, F.tanh, F.silu, F.hardswish, F.softplus, F.elu, F.leaky_relu, F.mish, F.selu, F.celu),
    *(F.softsign, F.hardsigmoid, F.relu6, F.softshrink, F.hardshrink, F.log_sigmoid, F.tanhshrink, F.square, F.erf),
    lambda x: F.exp(F.clip(x, -2, 2)),
    lambda x: F.rsqrt(F.square(x) + 0.5),
    lambda x: F.pow(F.abs(x) + 0.3, 1.5),
    lambda x: F.minimum(x, x * x),
    lambda x: F.where(F.greater_than(x, F.zeros_like(x)), x, x * 0.2),
]


def _act(draw: Random, x: Variable) -> Variable:
    return draw.choice(ACTIVATIONS)(x)


def _channels(x: Variable) -> int:
    return int((x.shape or ())[1] or 0)


def _least(x: Variable) -> int:
    return min(int(n or 0) for n in (x.shape or ())[2:])


def _conv(draw: Random, x: Variable) -> Variable:
    kernel, pad, dilation = draw.choice([1, 1, 2, 3, 3, 5]), draw.choice([0, 1, 2, 3]), draw.choice([1, 1, 1, 2])
    if _least(x) + 2 * pad < (kernel - 1) * dilation + 1:
        kernel = 1
    groups = draw.choice([1, 1, 1, _channels(x)])
    outputs = draw.choice([1, 2]) * groups if groups > 1 else draw.choice([3, 4, 8, 17])
    bias, act = draw.choice([None, False]), draw.choice([None, None, "relu", "gelu"])
    sizes = {"stride": draw.choice([1, 1, 1, 2, 3]), "padding": pad, "dilation": dilation, "groups": groups}
    return amp.nn.conv2d(x, outputs, kernel, bias_attr=bias, act=act, **sizes)


def _conv_transpose(draw: Random, x: Variable) -> Variable:
    if _least(x) > 12:
        return x
    kernel, stride = draw.choice([2, 3]), draw.choice([1, 2])
    return amp.nn.conv2d_transpose(x, draw.choice([4, 6]), filter_size=kernel, stride=stride)


def _residual(draw: Random, x: Variable) -> Variable:
    act = draw.choice([None, "relu"])
    inner = amp.nn.batch_norm(amp.nn.conv2d(x, _channels(x), 3, padding=1, bias_attr=False), act=act)
    total = x + amp.nn.batch_norm(amp.nn.conv2d(inner, _channels(x), 1, bias_attr=False))
    return F.relu(total) if draw.random() < 0.6 else total


def _pool(draw: Random, x: Variable) -> Variable:
    pool = draw.choice([F.max_pool2d, F.avg_pool2d])
    return pool(x, draw.choice([2, 3]), draw.choice([1, 2, 3]), draw.choice([0, 1])) if _least(x) > 3 else x


def _squeeze_and_excite(draw: Random, x: Variable) -> Variable:
    gate = F.sigmoid(amp.nn.fc(F.mean(x, axis=[2, 3]), _channels(x)))
    return x * F.unsqueeze(gate, [2, 3])


def _halves(draw: Random, x: Variable) -> Variable:
    if _channels(x) % 2:
        return x
    a, b = F.split(x, 2, axis=1)
    return F.concat([F.relu(b), a * F.sigmoid(b)], axis=1)


def _last(draw: Random, x: Variable) -> Variable:
    """With the channels behind, and back."""
    return F.transpose(_act(draw, F.transpose(x, [0, 2, 3, 1])), [0, 3, 1, 2])


IMAGE: dict[str, Layer] = {
    "conv": _conv,
    "conv again": _conv,
    "transposed": _conv_transpose,
    "residual": _residual,
    "batch norm": lambda draw, x: amp.nn.batch_norm(x, act=draw.choice([None, "relu"])),
    "group norm": lambda draw, x: amp.nn.group_norm(x, groups=1 if _channels(x) % 2 else 2),
    "instance norm": lambda draw, x: amp.nn.instance_norm(x) if _least(x) > 1 else x,
    "layer norm": lambda draw, x: amp.nn.layer_norm(x, begin_norm_axis=draw.choice([1, 2])),
    "act": _act,
    "pool": _pool,
    "squeeze": _squeeze_and_excite,
    "halves": _halves,
    "last": _last,
    "dropout": lambda draw, x: F.dropout(x, 0.3),
    "resize": lambda draw, x: F.interpolate(x, scale_factor=2, mode="bilinear") if _least(x) < 9 else x,
    "prelu": lambda draw, x: amp.nn.prelu(x, mode=draw.choice(["all", "channel"])),
    "normalize": lambda draw, x: F.normalize(x, axis=1),
    "softmax": lambda draw, x: x * F.softmax(x, axis=draw.choice([1, 2, -1])),
    "maximum": lambda draw, x: x - F.max(x, axis=[draw.choice([1, 2])], keepdim=True) * 0.5,
    "mean": lambda draw, x: x - F.mean(x, axis=draw.choice([[1], [2, 3], [0]]), keepdim=True) * 0.5,
}


def _attention(draw: Random, x: Variable) -> Variable:
    heads, dropout = draw.choice([1, 2, 4]), draw.choice([0.0, 0.1])
    mixed = amp.nn.multi_head_attention(x, num_heads=heads, attn_mask=_mask(draw, x, heads), dropout=dropout)
    return x + (F.dropout(mixed, 0.1) if draw.random() < 0.5 else mixed)


def _mask(draw: Random, x: Variable, heads: int) -> Variable | None:
    """None, what is seen, or what is added, of a size that spreads in one of the ways there are."""
    batch, length = (int(size or 0) for size in (x.shape or ())[:2])
    sizes = [(length,), (batch, 1, 1, length), (1, heads, length, length), (length, length), (batch, 1, length, length)]
    kind, size = draw.choice(["none", "bool", "float"]), draw.choice(sizes)
    if kind == "none":
        return None
    values = np.array([draw.uniform(-2, 2) for _ in range(int(np.prod(size)))], np.float32).reshape(size)
    return amp.default_main_program().add_constant("mask", values > -1 if kind == "bool" else values)


def _feed_forward(draw: Random, x: Variable) -> Variable:
    width, act = int((x.shape or ())[-1] or 0), draw.choice(["gelu", "relu", "tanh"])
    wide = F.dropout(amp.nn.fc(x, 3 * width, act=act, num_flatten_dims=2), 0.1)
    return x + amp.nn.fc(wide, width, num_flatten_dims=2)


def _turned(draw: Random, x: Variable) -> Variable:
    a, b = F.split(x, 2, axis=-1)
    return F.concat([a - b * 0.5, a * 0.5 + b], axis=-1)


def _linear(draw: Random, x: Variable) -> Variable:
    """As in PyTorch, whose weights have the outputs first."""
    width = int((x.shape or ())[-1] or 0)
    w = amp.create_parameter([width, width], "float32")
    product = F.matmul(x, F.transpose(w, [1, 0]))
    return x + (product + amp.create_parameter([width], "float32") if draw.random() < 0.5 else product)


TOKENS: dict[str, Layer] = {
    "attention": _attention,
    "linear": _linear,
    "feed forward": _feed_forward,
    "layer norm": lambda draw, x: amp.nn.layer_norm(x, begin_norm_axis=draw.choice([1, 2])),
    "lstm": lambda draw, x: amp.nn.lstm(x, int((x.shape or ())[-1] or 0))[0],
    "act": _act,
    "dropout": lambda draw, x: F.dropout(x, 0.2),
    "products": lambda draw, x: x + F.matmul(F.softmax(F.matmul(x, x, transpose_y=True) * 0.3, axis=-1), x),
    "turned": _turned,
    "softmax": lambda draw, x: x * F.softmax(x, axis=draw.choice([-1, 1])),
    "sums": lambda draw, x: F.cumsum(x, axis=1) * 0.3,
    "logsumexp": lambda draw, x: x - F.logsumexp(x, axis=-1, keepdim=True),
    "normalize": lambda draw, x: F.normalize(x, axis=-1) * 2.0,
    "rolled": lambda draw, x: x + F.roll(x, 1, axis=1),
    "maximum": lambda draw, x: x + F.max(x, axis=[1], keepdim=True),
}


@dataclass
class Net:
    """A training step, with feeds for it; ``layers`` are the names of those drawn."""

    main: amp.Program
    startup: amp.Program
    loss: Variable
    optimizer: Any
    feeds: dict[str, np.ndarray]
    layers: list[str]


def random_net(seed: int, mode: str) -> Net:
    """A net for images or tokens of one to six layers, in "fp32", "mixed" or "pure"; the same one for each mode."""
    draw, rng = Random(seed), np.random.default_rng(seed)
    main, startup = amp.Program(f"net_{seed}"), amp.Program("startup")
    main.random_seed = startup.random_seed = seed + 1
    batch, images = draw.randint(1, 5), draw.random() < 0.7
    layers = draw.choices(list(IMAGE if images else TOKENS), k=draw.randint(1, 6))
    with amp.program_guard(main, startup), amp.unique_name.guard():
        label = amp.data("label", [batch, 1], "int64")
        feeds: dict[str, np.ndarray] = {"label": rng.integers(0, 5, (batch, 1))}
        if images:
            shape = [batch, draw.choice([2, 3, 4]), draw.choice([5, 8, 12]), draw.choice([5, 8, 13])]
            x = amp.data("x", shape, "float32")
            feeds["x"] = rng.standard_normal(shape).astype(np.float32)
        else:
            shape = [batch, draw.choice([3, 8, 16])]
            x = amp.data("x", shape, "int64")
            feeds["x"] = rng.integers(0, 20, shape)
        with amp.fp16_guard():
            x = x if images else amp.nn.embedding(x, [20, draw.choice([8, 16])])
            for name in layers:
                x = (IMAGE if images else TOKENS)[name](draw, x)
            means = F.mean(x, axis=[2, 3] if images else [1])
            scores = amp.nn.fc(means if draw.random() < 0.5 else F.flatten(x, 1), 5)
        loss = F.cross_entropy(scores, label)
        optimizer: Any = amp.optimizer.Momentum(0.1, 0.9, multi_precision=mode != "fp32")
        if mode != "fp32":
            optimizer = amp.decorate(optimizer, use_pure_fp16=mode == "pure", init_loss_scaling=128.0)
        optimizer.minimize(loss, startup)
    return Net(main, startup, loss, optimizer, feeds, layers)
