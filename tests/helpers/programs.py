"""Programs that several tests train, lower and place: the use case, an MLP, a ResNet and a transformer block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import amp_transpiler as amp
from amp_transpiler.nn import functional as F

Built = tuple[dict[str, object], object]


@dataclass
class Net:
    """A training program: its programs, loss, feeds, and the decorated (or plain) optimizer."""

    main: amp.Program
    startup: amp.Program
    loss: object
    feeds: dict[str, np.ndarray]
    optimizer: object
    output: object


def use_case_layers(guard: bool = True) -> tuple[object, object, object]:
    """conv2d outside the guard; batch_norm(relu), max_pool2d, fc(64), softmax, cross entropy inside."""
    image = amp.data("image", [None, 1, 28, 28], "float32")
    label = amp.data("label", [None, 1], "int64")
    conv = amp.nn.conv2d(input=image, num_filters=6, filter_size=3)
    with amp.fp16_guard():
        normed = amp.nn.batch_norm(input=conv, act="relu")
        pool = F.max_pool2d(normed, kernel_size=2, stride=2)
        hidden = amp.nn.fc(pool, size=64)
        prediction = F.softmax(hidden)
        loss = F.cross_entropy(prediction, label, reduction="mean")
    return prediction, loss, image


def mlp_layers() -> tuple[object, object, object]:
    """784-512-512-10 with relu."""
    x = amp.data("image", [None, 784], "float32")
    label = amp.data("label", [None, 1], "int64")
    with amp.fp16_guard():
        h = amp.nn.fc(x, 512, act="relu")
        h = amp.nn.fc(h, 512, act="relu")
        logits = amp.nn.fc(h, 10)
        loss = F.cross_entropy(logits, label)
    return logits, loss, x


def resnet_layers() -> tuple[object, object, object]:
    """A residual block with batch norm, a strided shortcut and global average pooling."""
    x = amp.data("image", [None, 3, 16, 16], "float32")
    label = amp.data("label", [None, 1], "int64")
    with amp.fp16_guard():
        a = amp.nn.batch_norm(amp.nn.conv2d(x, 8, 3, padding=1), act="relu")
        b = amp.nn.batch_norm(amp.nn.conv2d(a, 16, 3, stride=2, padding=1), act="relu")
        b = amp.nn.batch_norm(amp.nn.conv2d(b, 16, 3, padding=1))
        shortcut = amp.nn.batch_norm(amp.nn.conv2d(a, 16, 1, stride=2))
        y = F.relu(b + shortcut)
        y = F.max_pool2d(y, 3, 2, padding=1)
        logits = amp.nn.fc(F.global_avg_pool2d(y), 10)
        loss = F.cross_entropy(logits, label)
    return logits, loss, x


def transformer_layers(
    layers: int = 1, hidden: int = 32, heads: int = 4, seq: int = 16, vocab: int = 50
) -> tuple[object, object, object]:
    """Token and position embeddings, post-norm encoder layers, token classification."""
    ids = amp.data("ids", [2, seq], "int64")
    label = amp.data("label", [2 * seq, 1], "int64")
    h = amp.nn.embedding(ids, [vocab, hidden])
    position = amp.create_parameter([seq, hidden], "float32", name="positions")
    with amp.fp16_guard():
        h = amp.nn.dropout(amp.nn.layer_norm(h + position), 0.1)
        for _ in range(layers):
            attended = amp.nn.multi_head_attention(h, num_heads=heads)
            h = amp.nn.layer_norm(h + amp.nn.dropout(attended, 0.1))
            inner = amp.nn.fc(h, 4 * hidden, act="gelu", num_flatten_dims=2)
            h = amp.nn.layer_norm(h + amp.nn.dropout(amp.nn.fc(inner, hidden, num_flatten_dims=2), 0.1))
        logits = F.reshape(amp.nn.fc(h, vocab, num_flatten_dims=2), [-1, vocab])
        loss = F.cross_entropy(logits, label)
    return logits, loss, ids


LAYERS: dict[str, Callable[..., tuple[object, object, object]]] = {
    "use_case": use_case_layers,
    "mlp": mlp_layers,
    "resnet": resnet_layers,
    "transformer": transformer_layers,
}


def feeds_of(name: str, batch: int = 4, seed: int = 0) -> dict[str, np.ndarray]:
    """Random feeds for one of the programs."""
    rng = np.random.default_rng(seed)
    if "transformer" in name:
        return {"ids": rng.integers(0, 50, (2, 16)), "label": rng.integers(0, 50, (32, 1))}
    shape = {"use_case": (batch, 1, 28, 28), "mlp": (batch, 784), "resnet": (batch, 3, 16, 16)}[name]
    return {"image": rng.standard_normal(shape).astype(np.float32), "label": rng.integers(0, 10, (batch, 1))}


def build(
    name: str,
    mode: str = "fp32",
    *,
    optimizer: object = None,
    dtype: str = "float16",
    seed: int = 7,
    batch: int = 4,
    black: list[str] | None = None,
    **options: object,
) -> Net:
    """Build and minimise a program in mode "fp32", "amp" or "pure-fp16"."""
    main, startup = amp.Program(), amp.Program("startup")
    startup.seed = main.seed = seed
    with amp.program_guard(main, startup), amp.unique_name.guard():
        output, loss, _ = LAYERS[name]()
        opt = optimizer or amp.optimizer.Adam(0.001, multi_precision=mode == "pure-fp16")
        if mode != "fp32":
            lists = amp.AutoMixedPrecisionLists(custom_black_list=black, dtype=dtype)
            if dtype == "float16":
                options.setdefault("init_loss_scaling", 128.0)
            opt = amp.decorate(opt, lists, use_pure_fp16=mode == "pure-fp16", dtype=dtype, **options)
        opt.minimize(loss, startup)
    return Net(main, startup, loss, feeds_of(name, batch), opt, output)
