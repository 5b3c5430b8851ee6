"""The layer builder: what it emits, what that computes (against numpy), and what it refuses."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest

from amp_transpiler import nn
from amp_transpiler.ir import unique_name
from amp_transpiler.ir.clone import clone
from amp_transpiler.ir.context import fp16_guard, name_scope
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.nn import functional as F
from amp_transpiler.program import Program, program_guard
from tests.helpers.building import building, run, startup_values
from tests.helpers.layers import computed, feed, softmax

Array = np.ndarray[Any, Any]


def types(program: Program) -> list[str]:
    return [op.type for op in program.operators]


# -- programs -------------------------------------------------------------------------------------------
def use_case() -> tuple[Variable, Variable]:
    image, label = nn.data("image", [None, 1, 28, 28], "float32"), nn.data("label", [None, 1], "int64")
    conv = nn.conv2d(image, num_filters=6, filter_size=3)
    with fp16_guard():
        normed = nn.batch_norm(conv, act="relu")
        pool = F.max_pool2d(normed, kernel_size=2, stride=2)
        hidden = nn.fc(pool, size=64)
        prediction = F.softmax(hidden)
        return prediction, F.cross_entropy(prediction, label, reduction="mean")


def test_use_case_program() -> None:
    with building() as (main, startup):
        prediction, loss = use_case()
    assert [(op.type, op.guard) for op in main.operators] == [
        ("Conv", False),
        ("BatchNormalization", True),
        ("Relu", True),
        ("MaxPool", True),
        ("Flatten", True),
        ("MatMul", True),
        ("Add", True),
        ("Softmax", True),
        ("Squeeze", True),
        ("SoftmaxCrossEntropyLoss", True),
    ]
    shapes = {v.name: (v.shape, v.trainable) for v in main.variables if v.persistable}
    assert shapes == {
        "conv2d_0.w_0": ((6, 1, 3, 3), True),
        "conv2d_0.b_0": ((6,), True),
        "batch_norm_0.w_0": ((6,), True),
        "batch_norm_0.b_0": ((6,), True),
        "batch_norm_0.w_1": ((6,), False),
        "batch_norm_0.w_2": ((6,), False),
        "fc_0.w_0": ((1014, 64), True),
        "fc_0.b_0": ((64,), True),
    }
    assert {s.name: v.name for s, v in main.updates.items()} == {
        "batch_norm_0.w_1": "batch_norm_0.w_1@NEW",
        "batch_norm_0.w_2": "batch_norm_0.w_2@NEW",
    }
    assert main.var("conv2d_0.tmp_0").shape == (None, 6, 26, 26)
    assert prediction.shape == (None, 64) and loss.shape == () and loss.dtype == "float32"
    assert all(v.dtype for v in main.variables)
    assert {v.name for v in startup.variables if v.persistable} == set(shapes) | {"@rng_seed"}
    assert types(startup).count("ConstantInitializer") == 6


def test_use_case_computes() -> None:
    with building() as (main, startup):
        prediction, loss = use_case()
    scope = startup_values(startup)
    x, label = feed(4, 1, 28, 28), np.array([[3], [0], [63], [7]])
    probability, value = run(main, scope, {"image": x, "label": label}, [prediction, loss])
    w, b = scope["conv2d_0.w_0"], scope["conv2d_0.b_0"]
    windows = np.lib.stride_tricks.sliding_window_view(x[:, 0], (3, 3), (1, 2))
    h = np.einsum("nhwij,fij->nfhw", windows, w[:, 0]) + b[:, None, None]
    mean, variance = h.mean((0, 2, 3)), h.var((0, 2, 3))
    h = np.maximum((h - mean[:, None, None]) / np.sqrt(variance[:, None, None] + 1e-5), 0)
    h = h.reshape(4, 6, 13, 2, 13, 2).max((3, 5)).reshape(4, -1)
    expected = softmax(h @ scope["fc_0.w_0"] + scope["fc_0.b_0"])
    np.testing.assert_allclose(probability, expected, rtol=1e-4, atol=1e-6)
    logs = np.log(softmax(expected))
    np.testing.assert_allclose(value, -logs[np.arange(4), label[:, 0]].mean(), rtol=1e-5)
    np.testing.assert_allclose(scope["batch_norm_0.w_1"], 0.1 * mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(scope["batch_norm_0.w_2"], 0.9 + 0.1 * variance, rtol=1e-4)


def test_test_program_shares_parameters() -> None:
    """Built alike under its own name guard: the same names, and the startup program initialises each once."""
    with building() as (main, startup):
        use_case()
        count = len(startup.operators)
        test = Program("test")
        with program_guard(test, startup), unique_name.guard():
            prediction, _ = use_case()
    assert len(startup.operators) == count
    assert [v.name for v in test.parameters] == [v.name for v in main.parameters]
    assert prediction.program is test


def test_clone_for_test() -> None:
    with building() as (main, startup):
        prediction, _ = use_case()
    test = clone(main, for_test=True)
    (norm,) = [op for op in test.operators if op.type == "BatchNormalization"]
    assert norm.attrs["training_mode"] == 0 and len(norm.outputs) == 1 and not test.updates
    scope = startup_values(startup)
    x = feed(2, 1, 28, 28)
    scope["batch_norm_0.w_1"], scope["batch_norm_0.w_2"] = feed(6, seed=1), np.abs(feed(6, seed=2)) + 0.5
    before = {name: value.copy() for name, value in scope.items()}
    feeds = {"image": x, "label": np.zeros((2, 1), np.int64)}
    conv, normed = test.var("conv2d_0.tmp_0"), test.var("batch_norm_0.tmp_0")
    h, found, probability = run(test, scope, feeds, [conv, normed, test.var(prediction.name)])
    shift, spread = (scope[f"batch_norm_0.w_{i}"][:, None, None] for i in (1, 2))
    np.testing.assert_allclose(found, (h - shift) / np.sqrt(spread + 1e-5), rtol=1e-4, atol=1e-5)
    assert all(np.array_equal(before[name], scope[name]) for name in before)
    alone = run(test, scope, {name: value[:1] for name, value in feeds.items()}, [test.var(prediction.name)])
    np.testing.assert_allclose(alone[0], probability[:1], rtol=1e-5)


def test_a_copy_by_the_standard_library_is_a_program_of_its_own() -> None:
    with building() as (main, startup):
        y = nn.data("x", [None, 4]) * 2.0
    before = types(main)
    other = copy.copy(main)
    assert types(other) == before and all(op.program is other for op in other.operators)
    with program_guard(other, startup):
        F.relu(other.var(y.name))
    assert types(main) == before and types(other) == [*before, "Relu"]


def test_names_and_scopes() -> None:
    with building() as (main, startup):
        x = nn.data("x", [None, 4])
        with name_scope("outer"), name_scope("inner"):
            h = nn.fc(x, 4, act="tanh")
        nn.fc(nn.fc(h, 4, name="tied"), 4, name="tied")
        nn.fc(h, 4, param_attr=main.var("tied.w_0"), bias_attr="shared_bias")
        nn.fc(h, 4, param_attr=np.eye(4, dtype=np.float32), bias_attr=False)
    assert {op.scope for op in main.operators[:3]} == {"outer/inner"} and main.operators[3].scope == ""
    assert [v.name for v in main.parameters] == [
        "fc_0.w_0",
        "fc_0.b_0",
        "tied.w_0",
        "tied.b_0",
        "shared_bias",
        "fc_2.w_0",
    ]
    assert len(main.var("tied.w_0").readers) == 3
    np.testing.assert_array_equal(startup_values(startup)["fc_2.w_0"], np.eye(4))


# -- layers ---------------------------------------------------------------------------------------------
def test_conv2d_arguments() -> None:
    with building() as (main, _):
        x = nn.data("x", [None, 4, 9, 11])
        y = nn.conv2d(x, 8, (3, 2), stride=(2, 1), padding=(1, 2, 0, 1), dilation=(1, 2), groups=2, bias_attr=False)
        z = nn.conv2d(x, 2, 1, act="gelu")
    op = y.producer
    assert op is not None and len(op.inputs) == 2
    attrs = {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 2, 1], "dilations": [1, 2], "group": 2}
    assert dict(op.attrs) == attrs
    assert y.shape == (None, 8, 5, 10)
    assert main.var("conv2d_0.w_0").shape == (8, 2, 3, 2)
    assert z.name == "conv2d_1.tmp_1" and z.producer is not None and z.producer.type == "Gelu"


def test_fc_keeps_dimensions() -> None:
    x = feed(2, 3, 4, 5)
    with building() as (main, startup):
        v = nn.data("x", [None, 3, 4, 5])
        outputs = [nn.fc(v, 7, num_flatten_dims=kept) for kept in (1, 2, 3)]
    assert [v.shape for v in outputs] == [(None, 7), (None, 3, 7), (None, 3, 4, 7)]
    assert types(main) == ["Flatten", "MatMul", "Add", "Reshape", "MatMul", "Add", "MatMul", "Add"]
    scope = startup_values(startup)
    for i, found in enumerate(run(main, scope, {"x": x}, outputs)):
        lead = x.shape[: i + 1]
        expected = x.reshape(*lead, -1) @ scope[f"fc_{i}.w_0"]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_batch_norm_statistics_stay_fp32() -> None:
    with building() as (main, _):
        x = nn.data("x", [None, 3, 4, 4], "float16")
        y = nn.batch_norm(x)
        nn.batch_norm(x, is_test=True)
    assert y.dtype == "float16"
    assert {main.var(f"batch_norm_0.{n}").dtype for n in ("w_0", "b_0", "w_1", "w_2", "w_1@NEW", "w_2@NEW")} == {
        "float32"
    }
    assert len(main.updates) == 2


def test_layer_norm() -> None:
    x = feed(2, 3, 4)
    (found,) = computed(nn.layer_norm, x)
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    (found,) = computed(lambda v: nn.layer_norm(v, begin_norm_axis=1, bias_attr=False), x)
    expected = (x - x.mean((1, 2), keepdims=True)) / np.sqrt(x.var((1, 2), keepdims=True) + 1e-5)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_embedding() -> None:
    table, ids = feed(10, 4), np.array([[1, 9], [0, 3], [3, 3]])
    (found,) = computed(lambda v: nn.embedding(v, [10, 4], param_attr=table), ids)
    np.testing.assert_array_equal(found, table[ids])


@pytest.mark.parametrize("masking", ["none", "bool", "float"])
def test_multi_head_attention(masking: str) -> None:
    batch, length, source, width, heads = 2, 5, 7, 12, 3
    query, key = feed(batch, length, width), feed(batch, source, 8, seed=1)
    seen = np.random.default_rng(2).random((batch, 1, length, source)) > 0.3
    seen[..., 0] = True
    mask = seen if masking == "bool" else np.where(seen, 0, -1e9).astype(np.float32)
    with building() as (main, startup):
        q, k = nn.data("q", [None, length, width]), nn.data("k", [None, source, 8])
        m = None if masking == "none" else nn.data("m", [None, 1, length, source], mask.dtype)
        y = nn.multi_head_attention(q, k, num_heads=heads, attn_mask=m)
    assert y.shape == (None, length, width)
    assert {op.scope for op in main.operators} == {"multi_head_attention_0"}
    scope = startup_values(startup)
    feeds = {"q": query, "k": key} | ({} if m is None else {"m": mask})
    (found,) = run(main, scope, feeds, [y])

    def project(x: Array, name: str) -> Array:
        return x @ scope[f"multi_head_attention_0.{name}.w_0"] + scope[f"multi_head_attention_0.{name}.b_0"]

    def split(x: Array) -> Array:
        return x.reshape(batch, -1, heads, width // heads).transpose(0, 2, 1, 3)

    a, b, c = split(project(query, "q_proj")), split(project(key, "k_proj")), split(project(key, "v_proj"))
    scores = a @ b.transpose(0, 1, 3, 2) / math.sqrt(width // heads)
    if m is not None:
        scores = np.where(seen, scores, -1e9)
    mixed = (softmax(scores) @ c).transpose(0, 2, 1, 3).reshape(batch, length, width)
    np.testing.assert_allclose(found, project(mixed, "out_proj"), rtol=1e-4, atol=1e-5)


def test_constants_take_the_element_type() -> None:
    with building() as (main, _):
        for dtype in ("float16", "bfloat16", "float64", "int64"):
            x = nn.data(dtype, [2], dtype)
            assert (x * 2).dtype == dtype and (3 - x).dtype == dtype
    assert all(v.dtype == op.input(0).dtype for op in main.operators for v in op.inputs if v is not None)


def test_equality_is_identity() -> None:
    with building():
        a, b = nn.data("a", [2]), nn.data("b", [2])
        assert a == a and a != b and len({a, b}) == 2


def test_an_older_program_is_brought_to_the_opset_of_the_layers() -> None:
    main = Program()
    main.info.opsets[""] = 13
    with program_guard(main, Program("startup")), unique_name.guard():
        x = nn.data("x", [None, 4])
        old = main.add_variable("old", "float32", [None])
        main.add_operator("ReduceMean", [x], [old], attrs={"axes": [1], "keepdims": 0})
        F.gelu(x)
        assert main.opset() == 21 and old.producer is not None
        assert "axes" not in old.producer.attrs and old.producer.inputs[1] is not None
    main.verify()
