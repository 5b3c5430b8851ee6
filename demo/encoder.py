"""The network of the question answering demo: BERT built layer by layer, or an exported encoder, and a span head."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import squad

import amp_transpiler as amp
from amp_transpiler.nn import functional as F, initializer

#: Logit of a place that cannot be part of an answer: far below any other, and within fp16.
_NEVER = -1e4


@dataclass
class Model:
    """Training and test program; ``feed`` makes their inputs, all but the answers, of windows."""

    main: amp.Program
    startup: amp.Program
    test: amp.Program
    loss: amp.Variable
    logits: list[str]
    feed: Callable[[squad.Windows], dict[str, np.ndarray]]


def share(options: argparse.Namespace) -> int:
    """Windows of a batch that each rank takes."""
    return int(options.batch) // amp.distributed.world_size()


def built(options: argparse.Namespace, vocabulary: int) -> Model:
    """BERT (Devlin et al. 2019) of the asked size, its encoder inside ``fp16_guard``."""
    main, startup = amp.Program(), amp.Program("startup")
    shape = [share(options), options.seq_len]
    with amp.program_guard(main, startup), amp.unique_name.guard():
        ids, segments, mask = (amp.data(name, shape, "int64") for name in ("ids", "segments", "mask"))
        with amp.fp16_guard():
            hidden = _bert(ids, segments, mask, options, vocabulary)
        loss, logits = _head(hidden, options)
    test = main.clone(for_test=True)

    def feed(data: squad.Windows) -> dict[str, np.ndarray]:
        return {"ids": data.ids, "segments": data.segments, "mask": data.mask, "inside": data.spans[:, :, 0] >= 0}

    return Model(main, startup, test, loss, logits, feed)


def _bert(
    ids: amp.Variable, segments: amp.Variable, mask: amp.Variable, options: argparse.Namespace, vocabulary: int
) -> amp.Variable:
    """The encoder: [batch, length] numbers to [batch, length, hidden]."""
    width, small = options.hidden, initializer.Normal(0.0, 0.02)
    with amp.name_scope("embeddings"):
        x = amp.nn.embedding(ids, [vocabulary, width], param_attr=small, name="embeddings.word")
        x = x + amp.nn.embedding(segments, [3, width], param_attr=small, name="embeddings.segment")
        x = x + amp.create_parameter(
            [options.seq_len, width],
            "float32",
            "embeddings.position",
            initializer.Assign(_waves(options.seq_len, width)),
        )
        x = F.dropout(amp.nn.layer_norm(x, epsilon=1e-12, name="embeddings.norm"), options.dropout)
    seen = F.unsqueeze(F.cast(mask, "bool"), [1, 2])
    for number in range(options.layers):
        name = f"layer_{number}"
        with amp.name_scope(name):
            mixed = amp.nn.multi_head_attention(
                x, num_heads=options.heads, attn_mask=seen, dropout=options.dropout, name=f"{name}.attention"
            )
            x = amp.nn.layer_norm(x + F.dropout(mixed, options.dropout), epsilon=1e-12, name=f"{name}.attention_norm")
            wide = amp.nn.fc(x, 4 * width, act="gelu", num_flatten_dims=2, name=f"{name}.intermediate")
            back = amp.nn.fc(wide, width, num_flatten_dims=2, name=f"{name}.output")
            x = amp.nn.layer_norm(x + F.dropout(back, options.dropout), epsilon=1e-12, name=f"{name}.output_norm")
    return x


def _waves(length: int, width: int) -> np.ndarray:
    """Sines and cosines of the place (Vaswani et al. 2017), as large as the words' first vectors: a place a few words
    further is a rotation of them, which a small data set lets a network find."""
    angles = np.arange(length)[:, None] / 10000 ** (np.arange(width)[None] // 2 * 2 / width)
    return np.where(np.arange(width) % 2, np.cos(angles), np.sin(angles)).astype(np.float32) * np.float32(0.028)


def _head(hidden: amp.Variable, options: argparse.Namespace) -> tuple[amp.Variable, list[str]]:
    """Start and end logits of every place of the paragraph, and their loss; outside the guard, in fp32."""
    shape = [share(options), options.seq_len]
    inside = amp.data("inside", shape, "bool")
    start, end = (amp.data(name, shape[:1], "int64") for name in ("start", "end"))
    with amp.name_scope("span"):
        both = amp.nn.fc(hidden, 2, num_flatten_dims=2, name="span_logits")
        logits = [F.where(inside, F.squeeze(part, 2), _NEVER) for part in F.split(both, 2, axis=2)]
        return F.span_loss(*logits, start, end), [each.name for each in logits]


def imported(options: argparse.Namespace) -> Model:
    """An exported encoder with a fresh head. Its first output is [batch, length, hidden]."""
    main = amp.Program.from_onnx(str(options.model))
    hidden = main.outputs[0]
    if hidden.shape is None or len(hidden.shape) != 3:
        raise SystemExit(
            f"error: the first output of {options.model}, '{hidden.name}', is {hidden.shape}; expected "
            "last_hidden_state, [batch, length, hidden]"
        )
    names = {_part(v.name, str(options.model)): v.name for v in main.inputs}
    main.mark_fp16("*")
    with amp.program_guard(main, main.startup), amp.unique_name.guard():
        loss, logits = _head(hidden, options)
    test = main.clone(for_test=True)

    def feed(data: squad.Windows) -> dict[str, np.ndarray]:
        # A model that was trained before knows two segments alone.
        parts = {"ids": data.ids, "mask": data.mask, "segments": np.minimum(data.segments, 1)}
        return {names[part]: parts[part] for part in names} | {"inside": data.spans[:, :, 0] >= 0}

    assert main.startup is not None
    return Model(main, main.startup, test, loss, logits, feed)


def _part(name: str, file: str) -> str:
    """Which part of a window an input of an exported encoder takes."""
    for part, signs in (("segments", ("type", "segment")), ("mask", ("mask",)), ("ids", ("ids", "input"))):
        if any(sign in name.lower() for sign in signs):
            return part
    raise SystemExit(f"error: {file} has an input '{name}'; expected input_ids, attention_mask and token_type_ids")


def adopt_sizes(options: argparse.Namespace) -> None:
    """Take batch and length from an exported encoder that fixes them; its batch is that of each rank."""
    shape = amp.Program.from_onnx(str(options.model)).inputs[0].shape or ()
    for name, size in zip(("batch", "seq_len"), shape, strict=False):
        size = size * amp.distributed.world_size() if name == "batch" and isinstance(size, int) else size
        if isinstance(size, int) and size != getattr(options, name):
            print(f"{options.model} fixes --{name.replace('_', '-')} {size}")
            setattr(options, name, size)
    options.doc_stride = min(options.doc_stride, max(1, options.seq_len // 2))
