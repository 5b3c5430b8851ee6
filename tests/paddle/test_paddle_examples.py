"""Programs as Paddle's documentation writes them, with the import lines changed: they train in every mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import amp_transpiler as paddle
import amp_transpiler as static
import amp_transpiler.nn.functional as F
from amp_transpiler import ParamAttr
from amp_transpiler.nn import initializer
from amp_transpiler.passes.lowering.lowering import lower
from tests.helpers.cuda_kernels import without_cuda_kernel

Built = tuple[static.Variable, dict[str, np.ndarray]]


def lenet() -> Built:
    """The digits of the getting-started guide."""
    image = static.data(name="image", shape=[None, 1, 28, 28], dtype="float32")
    label = static.data(name="label", shape=[None, 1], dtype="int64")
    conv1 = static.nn.conv2d(input=image, num_filters=6, filter_size=5, padding="SAME", act="relu")
    pool1 = static.nn.pool2d(input=conv1, pool_size=2, pool_stride=2, pool_type="max")
    conv2 = static.nn.conv2d(input=pool1, num_filters=16, filter_size=5, act="relu", use_cudnn=True)
    pool2 = F.max_pool2d(conv2, kernel_size=2, stride=2)
    fc1 = static.nn.fc(x=pool2, size=120, activation="relu")
    fc2 = static.nn.fc(x=fc1, size=84, activation="relu")
    prediction = static.nn.fc(x=fc2, size=10)
    loss = F.cross_entropy(input=prediction, label=label, reduction="mean")
    static.accuracy(input=prediction, label=label, k=5)
    rng = np.random.default_rng(0)
    return loss, {"image": rng.normal(size=(8, 1, 28, 28)).astype(np.float32), "label": np.arange(8)[:, None]}


def conv_bn(input: Any, num_filters: int, filter_size: int, name: str, stride: int = 1, act: str | None = None) -> Any:
    conv = static.nn.conv2d(
        input=input,
        num_filters=num_filters,
        filter_size=filter_size,
        stride=stride,
        padding=(filter_size - 1) // 2,
        groups=1,
        act=None,
        param_attr=ParamAttr(name=f"{name}_weights"),
        bias_attr=False,
    )
    return static.nn.batch_norm(
        input=conv,
        act=act,
        param_attr=ParamAttr(name=f"bn_{name}_scale"),
        bias_attr=ParamAttr(f"bn_{name}_offset"),
        moving_mean_name=f"bn_{name}_mean",
        moving_variance_name=f"bn_{name}_variance",
        data_layout="NCHW",
    )


def resnet() -> Built:
    """A stem, a basic block with a projected shortcut, and a global pool."""
    image = static.data("image", [None, 3, 16, 16])
    label = static.data("label", [None, 1], "int64")
    stem = conv_bn(image, 8, 3, "conv1", act="relu")
    pool = static.nn.pool2d(input=stem, pool_size=3, pool_stride=2, pool_padding=1, pool_type="max")
    conv0 = conv_bn(pool, 16, 3, "res2a_branch2a", stride=2, act="relu")
    conv1 = conv_bn(conv0, 16, 3, "res2a_branch2b")
    short = conv_bn(pool, 16, 1, "res2a_branch1", stride=2)
    block = F.relu(paddle.add(x=short, y=conv1))
    pool = F.adaptive_avg_pool2d(block, 1)
    stdv = 1.0 / 4
    out = static.nn.fc(
        x=paddle.flatten(pool, start_axis=1),
        size=10,
        weight_attr=ParamAttr(name="fc_0.w_0", initializer=initializer.Uniform(-stdv, stdv)),
        bias_attr=ParamAttr(name="fc_offset"),
    )
    cost = F.softmax_with_cross_entropy(logits=out, label=label)
    loss = paddle.mean(cost)
    rng = np.random.default_rng(1)
    return loss, {"image": rng.normal(size=(8, 3, 16, 16)).astype(np.float32), "label": np.arange(8)[:, None]}


def attention(query: Any, width: int, heads: int, mask: Any, dropout: float) -> Any:
    q, k, v = (
        static.nn.fc(x=query, size=width, num_flatten_dims=2, weight_attr=ParamAttr(name=f"attention_{n}_fc.w_0"))
        for n in ("query", "key", "value")
    )

    def split_heads(x: Any) -> Any:
        return paddle.transpose(x=paddle.reshape(x=x, shape=[0, 0, heads, width // heads]), perm=[0, 2, 1, 3])

    product = paddle.matmul(x=split_heads(q), y=split_heads(k), transpose_y=True)
    weights = F.softmax(paddle.scale(product, scale=(width // heads) ** -0.5) + mask)
    weights = F.dropout(weights, p=dropout, mode="upscale_in_train", training=True)
    mixed = paddle.transpose(paddle.matmul(weights, split_heads(v)), perm=[0, 2, 1, 3])
    return static.nn.fc(x=paddle.reshape(mixed, shape=[0, 0, width]), size=width, num_flatten_dims=2)


def norm(x: Any, name: str) -> Any:
    return static.nn.layer_norm(
        input=x,
        begin_norm_axis=len(x.shape) - 1,
        param_attr=ParamAttr(name=f"{name}_scale", initializer=initializer.Constant(1.0)),
        bias_attr=ParamAttr(name=f"{name}_bias", initializer=initializer.Constant(0.0)),
    )


def transformer() -> Built:
    """An encoder block that is normalised after each part, on token and position embeddings, and a tied projection."""
    ids = static.data("src_ids", [None, 8], "int64")
    places = static.data("pos_ids", [None, 8], "int64")
    mask = static.data("input_mask", [None, 8, 1], "float32")
    label = static.data("mask_label", [None, 8, 1], "int64")
    width, heads, words = 32, 4, 40
    start = initializer.TruncatedNormal(std=0.02)
    word = static.nn.embedding(
        input=ids,
        size=[words, width],
        dtype="float32",
        is_sparse=False,
        padding_idx=0,
        param_attr=ParamAttr(name="word_embedding", initializer=start),
    )
    place = static.nn.embedding(places, size=[8, width], param_attr=ParamAttr(name="pos_embedding", initializer=start))
    seen = paddle.matmul(x=mask, y=mask, transpose_y=True)
    bias = paddle.unsqueeze(paddle.scale(seen, scale=10000.0, bias=-1.0, bias_after_scale=False), axis=1)
    x = norm(word + place, "pre_encoder_layer_norm")
    x = norm(x + attention(x, width, heads, bias, 0.1), "post_att_layer_norm")
    inner = static.nn.fc(x=x, size=4 * width, num_flatten_dims=2, activation="gelu")
    x = norm(x + static.nn.fc(x=inner, size=width, num_flatten_dims=2), "post_ffn_layer_norm")
    table = static.default_main_program().var("word_embedding")
    logits = paddle.matmul(x=x, y=table, transpose_y=True)
    loss = F.cross_entropy(logits, label, ignore_index=-1)
    rng = np.random.default_rng(2)
    seen_of = np.ones((4, 8, 1), np.float32)
    seen_of[1, 5:] = 0
    return loss, {
        "src_ids": rng.integers(1, words, (4, 8)),
        "pos_ids": np.tile(np.arange(8), (4, 1)),
        "input_mask": seen_of,
        "mask_label": rng.integers(-1, words, (4, 8, 1)),
    }


def text_classifier() -> Built:
    """Stacked LSTMs on padded texts, the maximum over time of both ways of looking at them."""
    words = static.data("words", [None, 12], "int64")
    length = static.data("length", [None], "int32")
    label = static.data("label", [None, 1], "int64")
    emb = static.nn.embedding(input=words, size=[50, 16], is_sparse=True, padding_idx=0)
    fc1 = static.nn.fc(x=emb, size=16, num_flatten_dims=2)
    lstm1, last, _ = static.nn.lstm(
        fc1, hidden_size=16, num_layers=2, direction="bidirectional", sequence_length=length
    )
    fc_last = paddle.max(fc1, axis=1)
    lstm_last = paddle.max(lstm1, axis=1)
    prediction = static.nn.fc(x=paddle.concat([fc_last, lstm_last, last[-1]], axis=1), size=2)
    loss = paddle.mean(F.softmax_with_cross_entropy(prediction, label))
    rng = np.random.default_rng(3)
    lengths = np.array([12, 3, 7, 9], np.int32)
    texts = np.where(np.arange(12) < lengths[:, None], rng.integers(1, 50, (4, 12)), 0)
    return loss, {"words": texts, "length": lengths, "label": np.array([[0], [1], [1], [0]])}


@pytest.mark.parametrize("mode", ["fp32", "amp", "pure"])
@pytest.mark.parametrize("build", [lenet, resnet, transformer, text_classifier])
def test_trains_as_written(build: Callable[[], Built], mode: str) -> None:
    main, startup = static.Program(), static.Program()
    startup.seed = main.seed = 3
    with static.program_guard(main, startup), static.unique_name.guard():
        loss, feed = build()
        optimizer: Any = paddle.optimizer.Adam(learning_rate=0.01, multi_precision=mode == "pure")
        if mode != "fp32":
            optimizer = static.decorate(
                optimizer,
                init_loss_scaling=128.0,
                use_dynamic_loss_scaling=True,
                use_pure_fp16=mode == "pure",
                use_fp16_guard=False,
            )
        optimizer.minimize(loss, startup)
    exe, scope = static.Executor(static.CPUPlace(), threads=1), static.Scope()
    exe.run(startup, scope=scope)
    if mode == "pure":
        optimizer.amp_init(static.CPUPlace(), scope=scope)
    losses = [float(exe.run(main, feed=feed, fetch_list=[loss], scope=scope)[0]) for _ in range(8)]
    assert np.isfinite(losses).all() and losses[-1] < 0.8 * losses[0], losses
    step = lower(main, "cuda", {name: array.shape for name, array in feed.items()}, [loss])
    assert without_cuda_kernel(step.model) == []
    forward = {op.inputs[0].dtype for op in main.operators if op.type in ("Conv", "MatMul") and op.role == "forward"}
    assert forward == {"float32" if mode == "fp32" else "float16"}
