"""Layers and functions of the builder train in fp32, in mixed and in pure fp16, and their steps land on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler import nn
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.lowering.lowering import lower
from tests.helpers.cuda_kernels import without_cuda_kernel


def feed(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def line(x: amp.Variable) -> amp.Variable:
    x = F.max_pool1d(nn.conv1d(x, 6, 3, padding="SAME", act="silu"), 2)
    x = nn.instance_norm(nn.conv1d_transpose(x, 6, filter_size=3, stride=2))
    return F.adaptive_avg_pool1d(nn.prelu(x, "channel"), 4)


def plane(x: amp.Variable) -> amp.Variable:
    x = nn.group_norm(nn.conv2d(x, 8, 3), 4, act="hardswish")
    x = nn.conv2d_transpose(x, 8, filter_size=4, stride=2, padding=1, groups=2, act="elu")
    return F.relu6(F.stack([x[:, ::2, 1:], x[:, -4:, :-1], x[:, :4, -1:0:-1]], 1))


def resized(x: amp.Variable) -> amp.Variable:
    x = F.pad(F.interpolate(nn.conv2d(x, 4, 3), size=[6, 5], mode="bilinear"), [1, 0, 0, 1], mode="reflect")
    return F.adaptive_max_pool2d(F.pixel_shuffle(nn.prelu(x, "all"), 2), 5)


def last(x: amp.Variable) -> amp.Variable:
    x = nn.conv2d(x, 6, 3, padding="SAME", data_format="NHWC")
    return F.avg_pool2d(nn.batch_norm(x, data_layout="NHWC", act="mish"), 2, data_format="NHWC")


def cube(x: amp.Variable) -> amp.Variable:
    x = F.avg_pool3d(F.leaky_relu(nn.conv3d(x, 4, 2)), (1, 2, 1))
    return F.max_pool3d(nn.conv3d_transpose(x, 4, filter_size=2, stride=2), 2)


def bare(x: amp.Variable) -> amp.Variable:
    """Norms without scales and biases: constants in their place."""
    x = nn.batch_norm(nn.conv2d(x, 6, 3), param_attr=False, bias_attr=False)
    x = nn.group_norm(x, 2, param_attr=False, bias_attr=False)
    x = nn.instance_norm(nn.conv2d(x, 6, 2), param_attr=False, bias_attr=False)
    x = F.layer_norm(nn.layer_norm(nn.conv2d(x, 6, 2), scale=False, shift=False), [2])
    return nn.layer_norm(x, 1, shift=False)


def rows(x: amp.Variable) -> amp.Variable:
    norms = F.normalize(F.clip(nn.fc(x, 8), -3, 3)) * F.rsqrt(F.var(nn.fc(x, 20), 1, keepdim=True) + 1)
    steps = nn.fc(F.unsqueeze(x, 1), 8, num_flatten_dims=2)
    extremes = F.max(steps, 1) - F.min(F.abs(steps), 1) + F.topk(F.cumsum(nn.fc(x, 20), -1), 8)[0]
    a, b, c, d = F.chunk(nn.fc(x, 32), 4, -1)
    return (
        norms + extremes + F.softplus(a) * F.selu(b) + F.hardsigmoid(c) - F.softsign(d) * F.celu(a) + F.log_sigmoid(b)
    )


def losses_of(x: amp.Variable, y: amp.Variable) -> amp.Variable:
    target = F.one_hot(y, 5)
    soft = F.mean(F.softmax_with_cross_entropy(x, F.label_smooth(target), soft_label=True))
    probabilities = F.cross_entropy(x, y, label_smoothing=0.1) + F.nll_loss(F.log_softmax(x), y) + soft
    binary = F.binary_cross_entropy(F.sigmoid(x), target) + F.bce_with_logits(x, target)
    halves = 0.1 * F.mse_loss(*F.chunk(x, 2))  # of a batch of any size
    return probabilities + binary + F.smooth_l1_loss(x, target) + F.l1_loss(x, target) + halves


NETS: dict[str, tuple[tuple[int, ...], Callable[[amp.Variable], amp.Variable]]] = {
    "line": ((4, 9), line),
    "plane": ((4, 6, 6), plane),
    "resized": ((4, 6, 6), resized),
    "last": ((6, 6, 4), last),
    "cube": ((2, 4, 5, 6), cube),
    "bare": ((4, 6, 6), bare),
    "rows": ((30,), rows),
    "losses": ((30,), lambda x: nn.fc(x, 16, act="relu")),
}


@pytest.mark.parametrize("mode", ["fp32", "amp", "pure"])
@pytest.mark.parametrize("name", NETS)
def test_trains(name: str, mode: str) -> None:
    """A few steps lower the loss in every mode, and the same step has a CUDA kernel for each node."""
    shape, net = NETS[name]
    loss_of = losses_of if name == "losses" else F.cross_entropy
    main, startup = amp.Program(), amp.Program("startup")
    startup.seed = main.seed = 1
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x, y = amp.data("x", [None, *shape], "float32"), amp.data("y", [None], "int64")
        loss = loss_of(nn.fc(net(x), 5), y)
        optimizer: Any = amp.optimizer.Adam(0.02, multi_precision=mode == "pure")
        if mode != "fp32":
            optimizer = amp.decorate(
                optimizer, init_loss_scaling=128.0, use_pure_fp16=mode == "pure", use_fp16_guard=False
            )
        optimizer.minimize(loss, startup)
    scope, exe = amp.Scope(), amp.Executor(amp.CPUPlace(), threads=1)
    exe.run(startup, scope=scope)
    if mode == "pure":
        optimizer.amp_init(amp.CPUPlace(), scope=scope)
    feeds = {"x": feed(8, *shape), "y": np.arange(8) % 5}
    losses = [float(exe.run(main, feed=feeds, fetch_list=[loss], scope=scope)[0]) for _ in range(6)]
    assert np.isfinite(losses).all() and losses[-1] < 0.9 * losses[0], losses
    model = lower(main, "cuda", {key: array.shape for key, array in feeds.items()}, [loss]).model
    missing = {node.split("(")[0] for node in without_cuda_kernel(model)}
    assert missing <= {"Mish"}  # which onnxruntime replaces by its function body, of operators that have one


@pytest.mark.parametrize("mode", ["fp32", "pure"])
def test_an_empty_batch_leaves_running_statistics(mode: str) -> None:
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x, y = amp.data("x", [None, 4]), amp.data("y", [None, 1], "int64")
        loss = F.cross_entropy(F.cast(nn.batch_norm(nn.fc(x, 3)), "float32"), y)
        optimizer = amp.optimizer.SGD(0.1, multi_precision=mode == "pure")
        if mode == "pure":
            optimizer = amp.decorate(optimizer, use_pure_fp16=True, use_fp16_guard=False)
        optimizer.minimize(loss)
    scope, executor = amp.Scope(), amp.Executor(threads=1)
    executor.run(startup, scope=scope)
    if mode == "pure":
        optimizer.amp_init(amp.CPUPlace(), scope=scope)
    states = [v.name for v in main.updates if "batch_norm" in v.name and not v.trainable]
    seen = []
    for rows in (5, 0, 5):
        feed = {"x": np.ones((rows, 4), np.float32), "y": np.zeros((rows, 1), np.int64)}
        executor.run(main, feed=feed, scope=scope)
        seen.append([scope.find_var(name) for name in states])
    assert states and np.isfinite(seen).all()
    np.testing.assert_array_equal(seen[0], seen[1])
    assert not np.array_equal(seen[1], seen[2])


@pytest.mark.parametrize("mode", [None, {}, {"use_pure_fp16": True, "use_fp16_guard": False}])
def test_calls_of_one_batch_norm_move_its_statistics_in_turn(mode: dict[str, Any] | None) -> None:
    """As of a siamese network: those of the last call alone were kept. A bad step keeps what was."""
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        inputs = [amp.data(name, [8, 4]) for name in "ab"]
        names = {"param_attr": "w", "bias_attr": "c", "moving_mean_name": "m", "moving_variance_name": "v"}
        outputs = [nn.batch_norm(x, **names) for x in inputs]
        optimizer: Any = amp.optimizer.SGD(0.0, multi_precision=True)
        optimizer = optimizer if mode is None else amp.decorate(optimizer, init_loss_scaling=8.0, **mode)
        loss = F.mean(outputs[0] * outputs[1])
        test = main.clone(for_test=True)
        optimizer.minimize(loss, startup)
    executor, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
    executor.run(startup, scope=scope)
    rng = np.random.default_rng(0)
    feed = {name: rng.normal(size=(8, 4)).astype(np.float32) for name in "ab"}
    executor.run(main, feed=feed, fetch_list=[loss], scope=scope)
    means, spreads = ([getattr(feed[name].astype(np.float64), what)(0) for name in "ab"] for what in ("mean", "var"))
    tolerance = 1e-6 if not mode else 1e-3
    moved = scope.find_var("m"), scope.find_var("v")
    np.testing.assert_allclose(moved[0], 0.9 * 0.1 * means[0] + 0.1 * means[1], atol=tolerance)
    np.testing.assert_allclose(moved[1], 0.9 * (0.9 + 0.1 * spreads[0]) + 0.1 * spreads[1], atol=tolerance)
    found = executor.run(test, feed=feed, fetch_list=[v.name for v in outputs], scope=scope)
    for name, y in zip("ab", found, strict=True):
        np.testing.assert_allclose(y, (feed[name] - moved[0]) / np.sqrt(moved[1] + 1e-5), atol=1e-5)
    if mode is not None:
        feed["b"][0] = np.inf
        executor.run(main, feed=feed, fetch_list=[loss], scope=scope)
        assert np.array_equal(scope.find_var("m"), moved[0]) and np.array_equal(scope.find_var("v"), moved[1])
