"""``amp.fit`` goes through data in batches: every sample once, a short last one, a batch that the model fixes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.finetune.data import batch_sizes
from amp_transpiler.finetune.metrics import Metric
from tests.helpers.exported import exported, loss_and_accuracy, samples, scores
from tests.helpers.fitting import FAST, features, linear


# -- batches -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "count, batch, accumulate",
    [
        (100, 32, 1),
        (96, 32, 1),
        (5, 32, 1),
        (100, 8, 3),
        (97, 8, 4),
        (7, 2, 3),
        (13, 2, 3),
        (6, 2, 3),
        (25, 2, 3),
        (3, 8, 3),
    ],
)
def test_every_sample_is_in_one_batch_and_every_window_is_complete(count: int, batch: int, accumulate: int) -> None:
    sizes = batch_sizes(count, batch, accumulate)
    assert sum(sizes) == count and min(sizes) > 0 and len(sizes) % accumulate == 0
    assert max(sizes) <= batch + 1
    whole = batch_sizes(count, batch, accumulate, whole=True)
    assert set(whole) <= {batch} and len(whole) == count // (batch * accumulate) * accumulate


def test_the_short_last_batch_counts_in_training_and_test(tmp_path: Path) -> None:
    """One step of plain SGD on 7 samples in batches of 4: against the gradient by hand."""
    data = features(7)
    rng = np.random.default_rng([0, 1])
    result = amp.fit(
        linear(), tmp_path / "out.onnx", data=data, test=data, mode="fp32", optimizer="sgd", lr=0.5, batch_size=4
    )
    w, b = (onnx.numpy_helper.to_array(t).astype(np.float64) for t in linear().graph.initializer)
    order, losses = rng.permutation(7), []
    for rows in (order[:4], order[4:]):
        x, y = data["x"][rows].astype(np.float64), data["label"][rows]
        logits = x @ w + b
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        losses.append(-np.log(p[np.arange(len(y)), y]).mean())
        p[np.arange(len(y)), y] -= 1
        w, b = w - 0.5 * x.T @ p / len(y), b - 0.5 * p.mean(0)
    trained = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "out.onnx").graph.initializer}
    np.testing.assert_allclose(trained["w"], w, rtol=1e-5)
    np.testing.assert_allclose(trained["b"], b, rtol=1e-5)
    epoch = result.history[-1]
    assert epoch.loss == pytest.approx((losses[0] * 4 + losses[1] * 3) / 7, rel=1e-5), "means are over samples"
    loss, accuracy = loss_and_accuracy(tmp_path / "out.onnx", data)
    assert epoch.test_loss == pytest.approx(loss, rel=1e-5) and epoch.test_metric == pytest.approx(accuracy)


@pytest.mark.parametrize("name", ["cnn_torchscript_batch1", "encoder_dynamo_batch1"])
def test_a_fixed_batch_is_named_and_freed_on_request(name: str, tmp_path: Path) -> None:
    model, data = exported(name), samples(name, 37)
    told: list[str] = []
    amp.fit(model, tmp_path / "one.onnx", data=data, say=told.append, mode="fp32", lr=1e-3)
    assert any(
        "exported with a fixed batch of 1, and is trained in batches of 1; batch_size=32" in line for line in told
    )
    assert onnx.load(tmp_path / "one.onnx").graph.input[0].type.tensor_type.shape.dim[0].dim_value == 1
    onnx.save(exported(name), tmp_path / "model.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    amp.fit(tmp_path / "model.onnx", tmp_path / "many.onnx", data=data, say=told.append, **FAST)
    assert any("fixed batch of 1: freed of it" in line for line in told)
    graph = onnx.load(tmp_path / "many.onnx").graph
    assert {held.name for held in graph.initializer} <= {name for node in graph.node for name in node.input}
    free = exported(name.removesuffix("_batch1"))
    onnx.save(free, tmp_path / "free.onnx")
    amp.fit(free, tmp_path / "same.onnx", data=data, **FAST)
    np.testing.assert_allclose(
        scores(tmp_path / "many.onnx", data), scores(tmp_path / "same.onnx", data), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("outputs", [False, True], ids=["inputs", "inputs and outputs"])
def test_a_batch_that_is_renamed_on_the_outside_alone_is_found_inside(outputs: bool, tmp_path: Path) -> None:
    renamed, data = exported("encoder_dynamo_batch1"), samples("encoder_dynamo_batch1", 37)
    for value in [*renamed.graph.input, *(renamed.graph.output if outputs else [])]:
        value.type.tensor_type.shape.dim[0].dim_param = "N"
    told: list[str] = []
    amp.fit(renamed, tmp_path / "many.onnx", data=data, say=told.append, **FAST)
    assert any("fixed batch of 1: freed of it" in line for line in told)
    amp.fit(exported("encoder_dynamo_batch1"), tmp_path / "same.onnx", data=data, **FAST)
    np.testing.assert_array_equal(scores(tmp_path / "many.onnx", data), scores(tmp_path / "same.onnx", data))


def test_a_batch_that_cannot_be_freed_is_an_error_that_says_why(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]>\nnet (float[2, 4] x) => (float[2, 3] y) '
        "{ c = Softmax <axis = 0> (x)\n y = MatMul (c, w) }"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4, 3), np.float32), "w"))
    with pytest.raises(
        amp.errors.ArgumentError, match="fixed batch of 2, and cannot be freed of it: output 'y' of a larger"
    ):
        amp.fit(model, tmp_path / "out.onnx", data=features(40), batch_size=8)
    told: list[str] = []
    amp.fit(model, tmp_path / "out.onnx", data=features(41), test=features(7), say=told.append)
    assert any("1 of 41 samples do not fill the model's fixed batch of 2" in line for line in told)
    assert any("1 of 7 samples" in line for line in told)


@pytest.mark.parametrize("batch", ["n", "2"])
def test_a_number_for_all_samples_is_named(batch: str, tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]>\nnet (float[{batch}, 4] x, float scale) => (float[{batch}, 3] y) '
        "{ h = Mul (x, scale)\n y = MatMul (h, w) }"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4, 3), np.float32), "w"))
    data = {**features(40), "scale": np.ones(40, np.float32)}
    with pytest.raises(amp.errors.FeedError, match="'scale' is a single number.*--value scale=NUMBER"):
        amp.fit(model, tmp_path / "out.onnx", data=data, batch_size=8)
    amp.fit(model, tmp_path / "out.onnx", data=data, batch_size=8, values={"scale": 1}, epochs=1)


# -- labels that do not count ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["fp32", "pure"])
def test_batches_without_a_label_that_counts_are_passed_over(mode: str, tmp_path: Path) -> None:
    """The mean over nothing is NaN; the loss of an epoch and of a test is that of the labels that count, in batches of
    any size."""
    data = features(24)
    data["label"] = np.where(np.arange(24) % 4 < 3, -100, data["label"])
    found = []
    for batch in (1, 5, 24):
        told = amp.fit(
            linear(), tmp_path / f"{batch}.onnx", data=data, test=data, epochs=1, batch_size=batch, lr=1e-9, mode=mode
        )
        first, last = told.history
        assert first.test_loss is not None and last.loss is not None
        assert np.isfinite([last.loss, last.test_loss]).all()
        found.append([first.test_loss, last.loss])
    np.testing.assert_allclose(found, np.full((3, 2), found[-1][0]), rtol=1e-3 if mode == "pure" else 1e-5)


def test_data_in_which_no_label_counts_is_refused(tmp_path: Path) -> None:
    data = {**features(8), "label": np.full(8, -100)}
    with pytest.raises(amp.errors.FeedError, match="array 'label' holds -100 alone: no label counts"):
        amp.fit(linear(), tmp_path / "out.onnx", data=data, epochs=1)


# -- metrics -----------------------------------------------------------------------------------------------
def test_metrics_over_uneven_batches() -> None:
    rng = np.random.default_rng(3)
    logits, label = rng.normal(size=(50, 7)).astype(np.float32), rng.integers(0, 7, 50)
    label[4] = -100
    counted = label >= 0
    ranks = (-logits).argsort(1)[counted]
    right = label[counted]
    per_class = [
        2 * ((ranks[:, 0] == c) & (right == c)).sum() / ((ranks[:, 0] == c).sum() + (right == c).sum())
        for c in range(7)
    ]
    expected = {
        "accuracy": (ranks[:, 0] == right).mean(),
        "top5": (ranks[:, :5] == right[:, None]).any(1).mean(),
        "f1": np.mean(per_class),
    }
    for name, value in expected.items():
        metric = Metric(name, "cross_entropy")
        for rows in (slice(0, 30), slice(30, 50)):
            metric.update(logits[rows], label[rows])
        assert metric.value() == pytest.approx(value), name
    yes = (rng.random(50) > 0.5).astype(np.float32)
    scores = logits[:, 0]
    true = ((scores > 0) & (yes > 0)).sum()
    for name, value in {
        "f1": 2 * true / ((scores > 0).sum() + (yes > 0).sum()),
        "accuracy": ((scores > 0) == (yes > 0)).mean(),
        "mae": np.abs(1 / (1 + np.exp(-scores)) - yes).mean(),
    }.items():
        metric = Metric(name, "bce_with_logits")
        metric.update(scores, yes)
        assert metric.value() == pytest.approx(value, rel=1e-5), name
    metric = Metric("mse", "mse")
    metric.update(logits[:20], logits[:20] + 2)
    metric.update(logits[20:], logits[20:])
    assert metric.value() == pytest.approx(4 * 20 / 50, rel=1e-5)


def test_a_class_token_is_repeated_for_every_sample(tmp_path: Path) -> None:
    def model(batch: str, more: str) -> onnx.ModelProto:
        text = (
            f'<ir_version: 10, opset_import: ["" : 20]>\nnet (float[{batch}, 2, 2] x) => (float[{batch}, 3] y) {{ {more} '
            "h = MatMul (all, w)\n r = Tanh (h)\n axes = Constant <value_ints = [1]> ()\n y = ReduceMean <keepdims = 0> (r, axes) }"
        )
        built = onnx.parser.parse_model(text)
        rng = np.random.default_rng(4)
        for name, shape in (("token", (1, 1, 2)), ("w", (2, 3))):
            built.graph.initializer.append(
                onnx.numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name)
            )
        return built

    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 2, 2)).astype(np.float32)
    data = {"x": x, "label": rng.integers(0, 3, 40)}
    amp.fit(model("1", "all = Concat <axis = 1> (token, x)"), tmp_path / "freed.onnx", data=data, **FAST)
    repeated = (
        "n = Shape <start = 0, end = 1> (x)\n rest = Constant <value_ints = [1, 2]> ()\n "
        "size = Concat <axis = 0> (n, rest)\n tokens = Expand (token, size)\n all = Concat <axis = 1> (tokens, x)"
    )
    amp.fit(model("n", repeated), tmp_path / "free.onnx", data=data, **FAST)
    first, second = (scores(tmp_path / name, data) for name in ("freed.onnx", "free.onnx"))
    np.testing.assert_allclose(first, second, rtol=1e-5)
    before = {t.name: onnx.numpy_helper.to_array(t) for t in model("1", "all = Identity (x)").graph.initializer}
    after = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "freed.onnx").graph.initializer}
    assert (before["token"] != after["token"]).all(), "the token is trained"


def test_a_model_exported_to_be_trained_is_freed(tmp_path: Path) -> None:
    """Dropout draws, and a shape is put together of constants: neither stands in the way of a larger batch."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        net (float[2, 4] x) => (float[2, 3] y) <float half = {0.5}, bool on = {1}, int64[1] two = {2}, int64[1] one = {1}> {
            dropped = Dropout (x, half, on)
            rows = Concat <axis = 0> (two, one, two, two)
            apart = Reshape (dropped, rows)
            flat = Flatten (apart)
            y = MatMul (flat, w)
        }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4, 3), np.float32), "w"))
    told: list[str] = []
    amp.fit(model, tmp_path / "out.onnx", data=features(40), batch_size=8, say=told.append)
    assert any("fixed batch of 2: freed of it" in line for line in told)
    assert onnx.load(tmp_path / "out.onnx").graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


def test_a_recurrent_layer_that_begins_with_zeros_is_freed(tmp_path: Path) -> None:
    """As PyTorch writes one: zeros for each sample of its batch, expanded to the batch that comes."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        net (float[3, 4] x) => (float[3, 3] y) <int64[1] axis = {0}, int64[1] one = {1}, int64[1] width = {3}, int64 first = {0}> {
            steps = Unsqueeze (x, axis)
            shape = Shape (x)
            count = Gather (shape, first)
            batch = Unsqueeze (count, axis)
            sizes = Concat <axis = 0> (one, batch, width)
            zeros = Constant <value = float[1, 3, 3] {0, 0, 0, 0, 0, 0, 0, 0, 0}> ()
            begin = Expand (zeros, sizes)
            all, last = GRU <hidden_size = 3> (steps, w, r, , , begin)
            y = Squeeze (last, axis)
        }""")
    rng = np.random.default_rng(0)
    for name, shape in (("w", (1, 9, 4)), ("r", (1, 9, 3))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name))
    told: list[str] = []
    amp.fit(model, tmp_path / "out.onnx", data=features(40), batch_size=8, say=told.append)
    assert any("fixed batch of 3: freed of it" in line for line in told)
    nodes = [node.op_type for node in onnx.load(tmp_path / "out.onnx").graph.node]
    assert "GRU" in nodes and not {"Expand", "Shape"} & set(nodes)


def test_what_the_exporter_says_of_tensors_holds_in_a_freed_model(tmp_path: Path) -> None:
    """Its buffers were trained where the batch was another than that of the export."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        net (float[2, 4] x) => (float[2, 3] y) { h = MatMul (x, w)  r = Relu (h)  y = Mul (r, scale) }""")
    held = {"w": ("PARAMETER", np.ones((4, 3), np.float32)), "scale": ("BUFFER", np.full(3, 0.7, np.float32))}
    for name, (kind, array) in held.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        info = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, array.shape)
        info.metadata_props.add(key="pkg.torch.export.graph_signature.InputSpec.kind", value=kind)
        model.graph.value_info.append(info)
    told: list[str] = []
    amp.fit(model, tmp_path / "out.onnx", data=features(40), batch_size=8, say=told.append, mode="fp32")
    assert any("fixed batch of 2: freed of it" in line for line in told)
    assert any("'scale': buffers of the exported model" in line for line in told)
    after = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "out.onnx").graph.initializer}
    np.testing.assert_array_equal(after["scale"], held["scale"][1])
    assert not np.array_equal(after["w"], held["w"][1])
