"""Layers of the builder: what they make and compute, in Paddle's spelling too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler import nn
from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.lowering.lowering import lower
from tests.helpers.building import building, run, startup_values
from tests.helpers.cuda_kernels import without_cuda_kernel
from tests.helpers.layers import feed, made

Array = np.ndarray[Any, Any]
LINE, IMAGE, LAST, CUBE = (2, 4, 9), (2, 4, 8, 6), (2, 8, 6, 4), (2, 4, 4, 5, 6)


# -- convolutions: the layer is the function, which is tested beside torch's, with filters of its own ------------
CONVOLUTIONS: dict[str, tuple[str, tuple[int, ...], dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    # layer, input, arguments of both, arguments of the layer alone, the filters' shape
    "1d": ("conv1d", LINE, {"stride": 2, "padding": 1, "groups": 2}, {"num_filters": 6, "filter_size": 3}, (6, 2, 3)),
    "3d": ("conv3d", CUBE, {"padding": [1, 0, 0]}, {"num_filters": 3, "filter_size": (3, 2, 1)}, (3, 4, 3, 2, 1)),
    "2d last": (
        "conv2d",
        LAST,
        {"padding": "SAME", "data_format": "NHWC"},
        {"num_filters": 3, "filter_size": 3},
        (3, 4, 3, 3),
    ),
    "1d transposed": (
        "conv1d_transpose",
        LINE,
        {"stride": 2, "groups": 2},
        {"num_filters": 6, "filter_size": 3},
        (4, 3, 3),
    ),
    "2d transposed": (
        "conv2d_transpose",
        IMAGE,
        {"stride": 2, "padding": 1, "output_size": (16, 12)},
        {"num_filters": 3, "filter_size": 3},
        (4, 3, 3, 3),
    ),
    "2d transposed by size": (
        "conv2d_transpose",
        IMAGE,
        {"stride": 2, "output_size": (17, 14)},
        {"num_filters": 3},
        (4, 3, 3, 4),
    ),
    "3d transposed": ("conv3d_transpose", CUBE, {"dilation": 2}, {"num_filters": 3, "filter_size": 2}, (4, 3, 2, 2, 2)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name: str) -> None:
    layer, shape, both, own, filters = CONVOLUTIONS[name]
    x = feed(*shape)
    found, scope, _ = made(lambda v: getattr(nn, layer)(v, **own, **both), x)
    assert {key: value.shape for key, value in scope.items() if key != "@rng_seed"} == {
        f"{layer}_0.w_0": filters,
        f"{layer}_0.b_0": (own["num_filters"],),
    }
    bias = feed(own["num_filters"], seed=1)
    expected, _, _ = made(
        lambda v: getattr(F, layer)(
            v,
            nn.create_parameter(filters, initializer=scope[f"{layer}_0.w_0"]),
            nn.create_parameter(bias.shape, initializer=bias),
            **both,
        ),
        x,
    )
    axis = -1 if both.get("data_format") == "NHWC" else 1
    np.testing.assert_allclose(
        found + np.expand_dims(bias, [i for i in range(found.ndim) if i != axis % found.ndim]),
        expected,
        rtol=1e-4,
        atol=1e-5,
    )
    plain, scope, _ = made(lambda v: getattr(nn, layer)(v, bias_attr=False, act="relu", **own, **both), x)
    assert set(scope) - {"@rng_seed"} == {f"{layer}_0.w_0"}
    np.testing.assert_allclose(plain, np.maximum(found, 0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [6, 7])
def test_same_padding_of_an_unknown_size(size: int) -> None:
    """ceil(size / stride) positions whatever the size, which only the run knows."""
    with building() as (main, startup):
        x = nn.data("x", [None, 1, None, None])
        y = nn.conv2d(x, 1, 3, stride=2, padding="SAME", param_attr=np.ones((1, 1, 3, 3)))
    scope = startup_values(startup)
    (found,) = run(main, scope, {"x": np.ones((1, 1, size, size), np.float32)}, [y])
    assert found.shape[2:] == (-(-size // 2),) * 2
    assert found[0, 0, 1, 1] == 9 and found[0, 0, -1, -1] == 4
    assert found[0, 0, 0, 0] == (4 if size == 7 else 9)  # the odd element comes behind


# -- norms -----------------------------------------------------------------------------------------------------------
def normal(x: Array, axes: tuple[int, ...], epsilon: float = 1e-5) -> Array:
    x = x.astype(np.float64)
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + epsilon)


def test_group_norm() -> None:
    x, scale, bias = feed(*IMAGE), feed(4, seed=1), feed(4, seed=2)
    expected = normal(x.reshape(2, 2, 2, 8, 6), (2, 3, 4), 1e-3).reshape(x.shape)
    expected = expected * scale[:, None, None] + bias[:, None, None]
    found, _, _ = made(lambda v: nn.group_norm(v, 2, 1e-3, param_attr=scale, bias_attr=bias), x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    last, _, _ = made(
        lambda v: nn.group_norm(input=v, groups=2, epsilon=1e-3, param_attr=scale, bias_attr=bias, data_layout="NHWC"),
        np.ascontiguousarray(x.transpose(0, 2, 3, 1)),
    )
    np.testing.assert_allclose(last.transpose(0, 3, 1, 2), expected, rtol=1e-4, atol=1e-5)
    plain, scope, _ = made(lambda v: nn.group_norm(v, 4, param_attr=False, bias_attr=False), x)
    np.testing.assert_allclose(plain, normal(x, (2, 3)), rtol=1e-4, atol=1e-5)
    assert not set(scope) - {"@rng_seed"}


@pytest.mark.parametrize("shape", [LINE, IMAGE, CUBE])
def test_instance_norm(shape: tuple[int, ...]) -> None:
    x = feed(*shape)
    found, scope, _ = made(lambda v: nn.instance_norm(input=v, epsilon=0.01), x)
    np.testing.assert_allclose(found, normal(x, tuple(range(2, len(shape))), 0.01), rtol=1e-4, atol=1e-5)
    assert {k: v.shape for k, v in scope.items() if k != "@rng_seed"} == {
        "instance_norm_0.w_0": (4,),
        "instance_norm_0.b_0": (4,),
    }


def test_layer_norm_without_its_parameters() -> None:
    x = feed(3, 4, 5)
    found, scope, _ = made(lambda v: nn.layer_norm(input=v, scale=False, shift=False, begin_norm_axis=1), x)
    np.testing.assert_allclose(found, normal(x, (1, 2)), rtol=1e-4, atol=1e-5)
    assert not set(scope) - {"@rng_seed"}


def test_layer_norm_does_not_take_paddles_keyword_for_its_own_default() -> None:
    with building():
        rows, steps = nn.data("rows", [None, 4]), nn.data("steps", [None, 3, 4])
        assert nn.layer_norm(input=rows).shape == (None, 4)
        with pytest.raises(ArgumentError, match="layer_norm: input=.*begin_norm_axis is 1.*Give begin_norm_axis"):
            nn.layer_norm(input=steps)
        with pytest.raises(ArgumentTypeError, match="another name of 'x'"):
            nn.layer_norm(rows, input=rows)


def test_batch_norm_with_channels_last_and_named_statistics() -> None:
    x = feed(*LAST)
    with building() as (main, startup):
        y = nn.batch_norm(
            nn.data("x", [None, *LAST[1:]]),
            data_layout="NHWC",
            momentum=0.75,
            moving_mean_name="m",
            moving_variance_name="v",
            param_attr=False,
        )
        still = nn.batch_norm(main.var("x"), data_layout="NHWC", use_global_stats=True)
    scope = startup_values(startup)
    found, plain = run(main, scope, {"x": x}, [y, still])
    np.testing.assert_allclose(found, normal(x, (0, 1, 2)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(plain, x / np.sqrt(1 + 1e-5), rtol=1e-5)
    np.testing.assert_allclose(scope["m"], 0.25 * x.mean((0, 1, 2)), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(scope["v"], 0.75 + 0.25 * x.var((0, 1, 2)), rtol=1e-4)
    assert "batch_norm_0.w_0" not in scope and not np.any(scope["batch_norm_1.w_1"])


# -- the others --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "mode, layout, shape",
    [
        ("all", "NCHW", (1,)),
        ("channel", "NCHW", (4,)),
        ("channel", "NHWC", (6,)),
        ("element", "NCHW", (1, 4, 8, 6)),
    ],
)
def test_prelu(mode: str, layout: str, shape: tuple[int, ...]) -> None:
    x, slope = feed(*IMAGE), feed(*shape, seed=1)
    found, scope, _ = made(lambda v: nn.prelu(v, mode, param_attr=slope, data_format=layout), x)
    assert scope["prelu_0.w_0"].shape == shape
    across = slope[:, None, None] if mode == "channel" and layout == "NCHW" else slope
    np.testing.assert_allclose(found, np.where(x > 0, x, x * across), rtol=1e-6)
    start = made(lambda v: nn.prelu(v, "all"), x)[1]["prelu_0.w_0"]
    assert start == 0.25


@pytest.mark.parametrize("made", [amp.optimizer.SGD, amp.optimizer.Momentum, amp.optimizer.Adam])
def test_own_rate_penalty_and_clipping_are_those_of_a_group(made: Any) -> None:
    """ParamAttr says for one parameter what parameter_list says for a group."""
    attr = amp.ParamAttr(name="w", learning_rate=0.5, regularizer=amp.regularizer.L2Decay(0.3), need_clip=False)
    group = {"params": ["w"], "learning_rate": 0.5, "weight_decay": 0.3, "grad_clip": None}
    results = []
    for weight_attr, groups in ((attr, None), ("w", [group, {"params": ["b"]}])):
        main, startup = amp.Program(), amp.Program("startup")
        with amp.program_guard(main, startup), amp.unique_name.guard():
            y = nn.fc(amp.data("x", [None, 4]), 3, param_attr=weight_attr, bias_attr="b")
            loss = F.mean(F.square(y)) * 10
            clip = amp.optimizer.ClipGradByGlobalNorm(0.1)
            made(0.1, parameter_list=groups, weight_decay=0.01, grad_clip=clip).minimize(loss, startup)
        scope, exe = amp.Scope(), amp.Executor(threads=1)
        exe.run(startup, scope=scope)
        for _ in range(3):
            exe.run(main, feed={"x": feed(2, 4)}, fetch_list=[], scope=scope)
        results.append([np.array(scope.find_var(name)) for name in ("w", "b")])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_penalty_of_a_parameter_does_not_go_with_an_optimizer_that_decays_by_itself() -> None:
    with building():
        y = nn.fc(nn.data("x", [None, 4]), 3, param_attr=amp.ParamAttr(regularizer=amp.regularizer.L2Decay(0.1)))
        with pytest.raises(ArgumentTypeError, match="AdamW: ParamAttr of 'fc_0.w_0'"):
            amp.optimizer.AdamW(0.1).minimize(F.mean(y))


def test_a_frozen_parameter_keeps_its_value() -> None:
    start = feed(4, 3)
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.data("x", [None, 4])
        y = nn.fc(x, 3, weight_attr=amp.ParamAttr(name="w", initializer=start, trainable=False))
        optimizer = amp.decorate(amp.optimizer.SGD(0.1, multi_precision=True), use_pure_fp16=True, use_fp16_guard=False)
        optimizer.minimize(F.mean(y), startup)
    scope, exe = amp.Scope(), amp.Executor(threads=1)
    exe.run(startup, scope=scope)
    optimizer.amp_init(amp.CPUPlace(), scope=scope)
    exe.run(main, feed={"x": feed(2, 4)}, fetch_list=[], scope=scope)
    np.testing.assert_array_equal(scope.find_var("w"), start.astype(np.float16))
    assert np.all(np.asarray(scope.find_var("fc_0.b_0")) != 0)


@pytest.mark.parametrize("padding", [1, -2])
def test_padding_row_of_an_embedding_is_zero_and_learns_nothing(padding: int) -> None:
    ids, table = np.array([[1, 0], [2, 1]]), feed(3, 4)
    with building() as (main, startup):
        y = nn.embedding(nn.data("ids", [None, 2], "int64"), [3, 4], padding_idx=padding, param_attr=table)
        ((_, grad),) = amp.append_backward(F.sum(y))
    found, d_table = run(main, startup_values(startup), {"ids": ids}, [y, grad])
    np.testing.assert_array_equal(found, np.where(ids[..., None] == 1, 0, table[ids]))
    np.testing.assert_array_equal(d_table, np.array([1, 0, 1])[:, None] * np.ones(4))
    whole, _, _ = made(lambda v: F.embedding(v, nn.create_parameter([3, 4], initializer=table), padding_idx=1), ids)
    np.testing.assert_array_equal(whole, found)


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"pool_size": 2, "pool_stride": 2}, lambda x: x.reshape(2, 4, 4, 2, 3, 2).max((3, 5))),
        ({"pool_size": 2, "pool_stride": 2, "pool_type": "avg"}, lambda x: x.reshape(2, 4, 4, 2, 3, 2).mean((3, 5))),
        ({"pool_type": "avg", "global_pooling": True}, lambda x: x.mean((2, 3), keepdims=True)),
        ({"pool_type": "max", "global_pooling": True}, lambda x: x.max((2, 3), keepdims=True)),
    ],
)
def test_pool2d(options: dict[str, Any], expected: Callable[[Array], Array]) -> None:
    x = feed(*IMAGE)
    found, _, _ = made(lambda v: nn.pool2d(input=v, use_cudnn=False, **options), x)
    np.testing.assert_allclose(found, expected(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["upscale_in_train", "downscale_in_infer"])
def test_dropout_modes(mode: str) -> None:
    x = np.ones((4, 1000), np.float32)
    with building() as (main, startup):
        y = F.dropout(nn.data("x", [None, 1000]), 0.25, mode=mode)
    scope = startup_values(startup)
    kept, tested = (4 / 3, 1.0) if mode == "upscale_in_train" else (1.0, 0.75)
    (found,) = run(main, scope, {"x": x}, [y])
    np.testing.assert_allclose(np.unique(found), [0, kept], rtol=1e-6)
    assert abs((found == 0).mean() - 0.25) < 0.03
    test = main.clone(for_test=True)
    np.testing.assert_allclose(run(test, scope, {"x": x}, [test.var(y.name)])[0], np.full_like(x, tested), rtol=1e-6)


def test_results_are_named() -> None:
    with building():
        x = nn.data("x", [None, 4])
        assert F.relu(x, name="hidden").name == "hidden.tmp_0"
        assert F.silu(x, name="hidden").name == "hidden.tmp_2"  # the sigmoid is hidden.tmp_1
        assert nn.fc(x, 4, act="silu", name="out").name == "out.tmp_3"
        with pytest.raises(ArgumentTypeError, match="relu: name must be a string, not 3"):
            F.relu(x, name=3)


def test_parameters_by_attributes() -> None:
    start = np.full((4, 3), 0.5, np.float32)
    with building() as (main, startup):
        x = nn.data("x", [None, 4])
        nn.fc(
            x,
            3,
            weight_attr=amp.ParamAttr(name="w", initializer=start, trainable=False),
            bias_attr=amp.ParamAttr(initializer=nn.initializer.Constant(2.0)),
        )
        b = nn.create_parameter([3], attr=amp.ParamAttr(name="b"), is_bias=True)
        nn.create_parameter([3], default_initializer=nn.initializer.Constant(7.0))
    assert [v.name for v in main.parameters] == ["fc_0.b_0", "b", "create_parameter_0.w_0"] and b.trainable
    scope = startup_values(startup)
    np.testing.assert_array_equal(scope["w"], start)
    assert [scope[name][0] for name in ("fc_0.b_0", "b", "create_parameter_0.w_0")] == [2, 0, 7]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_clip_has_kernels_in_both_types_of_16_bit(dtype: str) -> None:
    with building() as (main, startup):
        w = nn.create_parameter([4], initializer=np.array([-3, -0.5, 0.25, 3.0]))
        v = F.cast(w, dtype)
        y = F.cast(F.clip(v, -1, 2) + F.clip(v, max=0.0) + F.relu6(v), "float32")
        ((_, grad),) = amp.append_backward(F.sum(y))
    assert {op.type for op in main.operators} >= {"Clip"}
    value, gradient = run(main, startup_values(startup), {}, [y, grad])
    np.testing.assert_array_equal(value, [-4, -1, 0.5, 5])
    np.testing.assert_array_equal(gradient, [1, 2, 2, 1])
    assert without_cuda_kernel(lower(main, "cuda", {}, [y, grad]).model) == []
