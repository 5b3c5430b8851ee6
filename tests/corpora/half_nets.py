"""Small nets in float16, as ONNX text and as torch functions, whose gradients torch's own autograd has been asked for.

``NETS`` maps a name to the shapes of the parameters, the body of an ONNX graph that makes ``y`` of ``x`` and them, and
the same in torch: ``f(F, torch, x, *parameters)``. tests/record/half_nets.py records torch's gradients in float16 and
in float64, tests/ops/test_half_gradients.py compares.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

#: Rows and columns of x and y.
ROWS, WIDTH = 24, 16
_SQUARE = (WIDTH, WIDTH)


def _unary(onnx_name: str, torch_name: str, **attrs: float) -> tuple[Any, ...]:
    """x w0 through a function of one number, times w1."""
    words = ", ".join(f"{k} = {v!r}" for k, v in attrs.items())
    text = f"h = MatMul(x, w0)\na = {onnx_name}{f' <{words}>' if words else ''}(h)\ny = MatMul(a, w1)"

    def net(F: Any, torch: Any, x: Any, w0: Any, w1: Any) -> Any:
        return getattr(F, torch_name, None or getattr(torch, torch_name, None))(x @ w0) @ w1

    return [_SQUARE, _SQUARE], text, net


def _block(F: Any, torch: Any, x: Any, s0: Any, b0: Any, w0: Any, b1: Any, w1: Any, s1: Any, b2: Any) -> Any:
    h = F.layer_norm(x, [WIDTH], s0, b0)
    h = F.gelu(h @ w0 + b1) @ w1 + x
    return F.layer_norm(h, [WIDTH], s1, b2)


def _attention(F: Any, torch: Any, x: Any, wq: Any, wk: Any, wv: Any, wo: Any) -> Any:
    q, k, v = ((x @ w).reshape(4, 6, WIDTH) for w in (wq, wk, wv))
    return (F.softmax(q @ k.transpose(1, 2), -1) @ v).reshape(ROWS, WIDTH) @ wo + x


def _group(F: Any, torch: Any, x: Any, w0: Any, s0: Any, b0: Any, w1: Any) -> Any:
    h = F.group_norm((x @ w0).reshape(ROWS, 8, 2), 4, s0, b0)
    return h.reshape(ROWS, WIDTH) @ w1


def _quotients(F: Any, torch: Any, x: Any, w0: Any, b0: Any, s0: Any, w1: Any) -> Any:
    h = x @ w0
    return (h / (b0 + torch.sqrt(torch.exp(h) + 1)) * s0) @ w1 - F.log_softmax(h, -1)


def _images(F: Any, torch: Any, x: Any, w0: Any, s0: Any, b0: Any, w1: Any, s1: Any, b1: Any, w2: Any) -> Any:
    c = F.conv2d(x.reshape(4, 6, 4, 4), w0, padding=1)
    a = torch.tanh(F.batch_norm(c, None, None, s0, b0, training=True))
    c = F.conv2d(a, w1, stride=2, padding=1)
    a = F.batch_norm(c, None, None, s1, b1, training=True)
    return F.conv_transpose2d(a, w2, stride=2).reshape(ROWS, WIDTH)


NETS: dict[str, tuple[list[tuple[int, ...]], str, Callable[..., Any]]] = {
    "block": (
        [(WIDTH,), (WIDTH,), (WIDTH, 48), (48,), (48, WIDTH), (WIDTH,), (WIDTH,)],
        """n = LayerNormalization <axis = -1> (x, w0, w1)
        h = MatMul(n, w2)
        hb = Add(h, w3)
        a = Gelu(hb)
        o = MatMul(a, w4)
        r = Add(o, x)
        y = LayerNormalization <axis = -1> (r, w5, w6)""",
        _block,
    ),
    "attention": (
        [_SQUARE] * 4,
        """q0 = MatMul(x, w0)
        k0 = MatMul(x, w1)
        v0 = MatMul(x, w2)
        heads = Constant <value_ints = [4, 6, 16]> ()
        rows = Constant <value_ints = [24, 16]> ()
        q = Reshape(q0, heads)
        k = Reshape(k0, heads)
        v = Reshape(v0, heads)
        kt = Transpose <perm = [0, 2, 1]> (k)
        s = MatMul(q, kt)
        p = Softmax <axis = -1> (s)
        m = MatMul(p, v)
        mr = Reshape(m, rows)
        o = MatMul(mr, w3)
        y = Add(o, x)""",
        _attention,
    ),
    "group norm": (
        [_SQUARE, (8,), (8,), _SQUARE],
        """h = MatMul(x, w0)
        apart = Constant <value_ints = [24, 8, 2]> ()
        rows = Constant <value_ints = [24, 16]> ()
        c = Reshape(h, apart)
        n = GroupNormalization <num_groups = 4, epsilon = 1.0e-5> (c, w1, w2)
        f = Reshape(n, rows)
        y = MatMul(f, w3)""",
        _group,
    ),
    "quotients": (
        [_SQUARE, (WIDTH,), (WIDTH,), _SQUARE],
        """h = MatMul(x, w0)
        e = Exp(h)
        wide = Constant <value_float = 1.0> ()
        one = Cast <to = 10> (wide)
        e1 = Add(e, one)
        root = Sqrt(e1)
        below = Add(root, w1)
        d = Div(h, below)
        sc = Mul(d, w2)
        o = MatMul(sc, w3)
        l = LogSoftmax <axis = -1> (h)
        y = Sub(o, l)""",
        _quotients,
    ),
    "images": (
        [(8, 6, 3, 3), (8,), (8,), (8, 8, 3, 3), (8,), (8,), (8, 6, 2, 2)],
        """size = Constant <value_ints = [4, 6, 4, 4]> ()
        rows = Constant <value_ints = [24, 16]> ()
        wide = Constant <value_floats = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]> ()
        zero = Cast <to = 10> (wide)
        i = Reshape(x, size)
        c0 = Conv <pads = [1, 1, 1, 1]> (i, w0)
        n0, m0, v0 = BatchNormalization <training_mode = 1, epsilon = 1.0e-5> (c0, w1, w2, zero, zero)
        a0 = Tanh(n0)
        c1 = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (a0, w3)
        n1, m1, v1 = BatchNormalization <training_mode = 1, epsilon = 1.0e-5> (c1, w4, w5, zero, zero)
        c2 = ConvTranspose <strides = [2, 2]> (n1, w6)
        y = Reshape(c2, rows)""",
        _images,
    ),
    "gelu tanh": (
        [_SQUARE, _SQUARE],
        'h = MatMul(x, w0)\na = Gelu <approximate = "tanh"> (h)\ny = MatMul(a, w1)',
        lambda F, torch, x, w0, w1: F.gelu(x @ w0, approximate="tanh") @ w1,
    ),
    "sigmoid": _unary("Sigmoid", "sigmoid"),
    "tanh": _unary("Tanh", "tanh"),
    "softplus": _unary("Softplus", "softplus"),
    "elu": _unary("Elu", "elu"),
    "selu": _unary("Selu", "selu"),
    "leaky relu": _unary("LeakyRelu", "leaky_relu"),
    "hard swish": _unary("HardSwish", "hardswish"),
    "softsign": _unary("Softsign", "softsign"),
    "mish": _unary("Mish", "mish"),
    "erf": _unary("Erf", "erf"),
}


#: Those whose operators have bfloat16 in ONNX at opset 21.
BRAIN = ("block", "attention", "group norm", "quotients", "gelu tanh", "sigmoid", "tanh", "leaky relu", "erf")


def arrays_of(name: str) -> list[Array]:
    """x, the cotangent of y, and the parameters, in float16."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    made = [rng.normal(size=(ROWS, WIDTH)) for _ in range(2)]
    for shape in NETS[name][0]:
        made.append(rng.normal(size=shape) / 5 if len(shape) > 1 else rng.uniform(0.5, 1.5, shape))
    return [a.astype(np.float16) for a in made]
