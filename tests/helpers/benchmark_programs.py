"""Training steps whose costs are recorded: BERT of two layers, a ResNet, an MLP, a CNN, an LSTM; in three modes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import amp_transpiler as amp
from amp_transpiler.nn import functional as F

MODES = ("fp32", "mixed", "pure")


def bert(batch: int = 8, length: int = 64, width: int = 256, layers: int = 2, heads: int = 4, words: int = 2000) -> Any:
    """Embeddings, encoder layers with dropout and masked attention, the loss of a span."""
    ids, mask = (amp.data(name, [batch, length], "int64") for name in ("ids", "mask"))
    start, end = (amp.data(name, [batch], "int64") for name in ("start", "end"))
    with amp.fp16_guard():
        x = amp.nn.embedding(ids, [words, width])
        x = x + amp.create_parameter([length, width], "float32", "position")
        x = F.dropout(amp.nn.layer_norm(x), 0.1)
        seen = F.unsqueeze(F.cast(mask, "bool"), [1, 2])
        for _ in range(layers):
            mixed = amp.nn.multi_head_attention(x, num_heads=heads, attn_mask=seen, dropout=0.1)
            x = amp.nn.layer_norm(x + F.dropout(mixed, 0.1))
            wide = amp.nn.fc(x, 4 * width, act="gelu", num_flatten_dims=2)
            x = amp.nn.layer_norm(x + F.dropout(amp.nn.fc(wide, width, num_flatten_dims=2), 0.1))
    both = amp.nn.fc(x, 2, num_flatten_dims=2)
    return F.span_loss(*[F.squeeze(part, 2) for part in F.split(both, 2, axis=2)], start, end)


def resnet(
    batch: int = 16,
    size: int = 64,
    stem: int = 32,
    stages: Sequence[tuple[int, int]] = ((1, 32), (1, 64)),
    classes: int = 100,
) -> Any:
    """A stem and stages of bottlenecks, each with its number of blocks and inner channels."""
    image, label = amp.data("image", [batch, 3, size, size], "float32"), amp.data("label", [batch, 1], "int64")

    def conv(x: Any, channels: int, kernel: int, stride: int = 1, act: str | None = None) -> Any:
        x = amp.nn.conv2d(x, channels, kernel, stride=stride, padding=kernel // 2, bias_attr=False)
        return amp.nn.batch_norm(x, act=act)

    with amp.fp16_guard():
        x = F.max_pool2d(conv(image, stem, 7, 2, "relu"), 3, 2, 1)
        for stage, (blocks, channels) in enumerate(stages):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                inner = conv(conv(x, channels, 1, 1, "relu"), channels, 3, stride, "relu")
                x = F.relu(conv(inner, 4 * channels, 1) + (x if block else conv(x, 4 * channels, 1, stride)))
        logits = amp.nn.fc(F.mean(x, axis=[2, 3]), classes)
    return F.cross_entropy(logits, label)


def mlp(batch: int = 256) -> Any:
    """784-512-512-10 with relu."""
    x, label = amp.data("image", [batch, 784], "float32"), amp.data("label", [batch, 1], "int64")
    with amp.fp16_guard():
        logits = amp.nn.fc(amp.nn.fc(amp.nn.fc(x, 512, act="relu"), 512, act="relu"), 10)
    return F.cross_entropy(logits, label)


def cnn(batch: int = 64) -> Any:
    """Convolutions with biases and pooling, dropout, two dense layers."""
    image, label = amp.data("image", [batch, 1, 28, 28], "float32"), amp.data("label", [batch, 1], "int64")
    with amp.fp16_guard():
        x = F.max_pool2d(amp.nn.conv2d(image, 16, 3, padding=1, act="relu"), 2, 2)
        x = F.max_pool2d(amp.nn.conv2d(x, 32, 3, padding=1, act="relu"), 2, 2)
        logits = amp.nn.fc(F.dropout(amp.nn.fc(x, 128, act="relu"), 0.5), 10)
    return F.cross_entropy(logits, label)


def lstm(batch: int = 16, length: int = 8, width: int = 128) -> Any:
    """Embeddings, one layer in both directions, a dense layer over the mean."""
    ids, label = amp.data("ids", [batch, length], "int64"), amp.data("label", [batch, 1], "int64")
    with amp.fp16_guard():
        x = amp.nn.embedding(ids, [1000, width])
        y, _, _ = amp.nn.lstm(x, width, direction="bidirectional")
        logits = amp.nn.fc(F.mean(y, axis=[1]), 10)
    return F.cross_entropy(logits, label)


def ctc(batch: int = 32, length: int = 32, words: int = 28) -> Any:
    """Speech: two convolutions over time, a dense layer, the CTC loss."""
    x = amp.data("x", [batch, 1, 2 * length, 40], "float32")
    label, lengths = amp.data("label", [batch, 8], "int32"), amp.data("lengths", [batch], "int32")
    with amp.fp16_guard():
        h = amp.nn.conv2d(x, 32, 3, stride=2, padding=1, act="relu")
        h = amp.nn.conv2d(h, 32, 3, padding=1, act="relu")
        h = F.reshape(F.transpose(h, [2, 0, 1, 3]), [length, -1, 32 * 20])
        scores = amp.nn.fc(h, words + 1, num_flatten_dims=2)
    return F.ctc_loss(scores, label, amp.data("steps", [batch], "int32"), lengths)


PROGRAMS: dict[str, Callable[..., Any]] = {"bert": bert, "resnet": resnet, "mlp": mlp, "cnn": cnn, "lstm": lstm}
#: Of what size activations, not the update, take the most memory.
LARGE: dict[str, dict[str, int]] = {
    "bert": {"batch": 64, "length": 128, "layers": 4},
    "resnet": {"batch": 64},
    "mlp": {"batch": 4096},
    "cnn": {"batch": 1024},
    "ctc": {"batch": 256},
}


def training(name: str, mode: str, **sizes: Any) -> tuple[amp.Program, amp.Program, Any, Any]:
    """A whole training step (Adam, Momentum for the ResNet) in a mode: programs, loss and optimizer."""
    main, startup = amp.Program(name), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        loss = (PROGRAMS | {"ctc": ctc})[name](**sizes)
        wide = mode == "pure"
        optimizer: Any = (
            amp.optimizer.Momentum(0.1, 0.9, multi_precision=wide)
            if name == "resnet"
            else amp.optimizer.Adam(1e-3, multi_precision=wide)
        )
        if mode != "fp32":
            optimizer = amp.decorate(optimizer, use_pure_fp16=mode == "pure")
        optimizer.minimize(loss, startup)
    return main, startup, loss, optimizer


def step(name: str, mode: str) -> tuple[amp.Program, Any]:
    """The training step that is recorded, and its loss."""
    main, _, loss, _ = training(name, mode)
    return main, loss
