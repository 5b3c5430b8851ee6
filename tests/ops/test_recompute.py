"""Recompute: less memory, the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from tests.helpers.placement import needs_placement_tool, place
from tests.helpers.programs import feeds_of, resnet_layers
from tests.tools.memory_run import measured

Ask = Callable[[amp.Program], None]


def encoder_layers(layers: int = 3) -> object:
    """Token embedding and encoder layers under scopes, dropout everywhere, a classifier."""
    ids, label = amp.data("ids", [2, 16], "int64"), amp.data("label", [32, 1], "int64")
    with amp.fp16_guard():
        h = amp.nn.dropout(amp.nn.layer_norm(amp.nn.embedding(ids, [50, 32])), 0.1)
        for number in range(layers):
            with amp.name_scope(f"encoder/layer_{number}"):
                attended = amp.nn.multi_head_attention(h, num_heads=4, dropout=0.1)
                h = amp.nn.layer_norm(h + amp.nn.dropout(attended, 0.1))
                inner = amp.nn.fc(h, 128, act="gelu", num_flatten_dims=2)
                h = amp.nn.layer_norm(h + amp.nn.dropout(amp.nn.fc(inner, 32, num_flatten_dims=2), 0.1))
        return F.cross_entropy(F.reshape(amp.nn.fc(h, 50, num_flatten_dims=2), [-1, 50]), label)


def residual_layers() -> object:
    return resnet_layers()[1]


LAYERS = {"transformer": encoder_layers, "resnet": residual_layers}


class Training:
    """A program that is trained for a few steps; ``ask`` may call recompute before the gradients are appended."""

    def __init__(self, name: str, mode: str, ask: Ask | None = None, **options: object) -> None:
        self.main, self.startup = amp.Program(), amp.Program("startup")
        self.main.seed = self.startup.seed = 7
        with amp.program_guard(self.main, self.startup), amp.unique_name.guard():
            self.loss = LAYERS[name]()
            if ask is not None:
                ask(self.main)
            self.optimizer = amp.optimizer.Adam(0.01, multi_precision=mode == "pure-fp16")
            if mode != "fp32":
                options.setdefault("init_loss_scaling", 128.0)
                self.optimizer = amp.decorate(self.optimizer, use_pure_fp16=mode == "pure-fp16", **options)
            _, self.pairs = self.optimizer.minimize(self.loss)
        self.main.verify()
        self.mode, self.feed = mode, feeds_of(name)

    def states(self, steps: int = 3) -> dict[str, np.ndarray]:
        """State, losses and gradients after each of some steps, by name."""
        executor, scope = amp.Executor(threads=1, optimization_level="basic"), amp.Scope()
        executor.run(self.startup, scope=scope)
        if self.mode != "fp32":
            self.optimizer.amp_init(amp.CPUPlace(), scope=scope)
        names = [self.loss.name, *(gradient.name for _, gradient in self.pairs)]
        found = {}
        for step in range(steps):
            results = executor.run(self.main, feed=self.feed, fetch_list=names, scope=scope)
            found |= {f"{step} {name}": result for name, result in zip(names, results, strict=True)}
            found |= {f"{step} {name}": scope.find_var(name).copy() for name in scope.var_names()}
        return found

    def recomputed(self) -> list[str]:
        return [op.label for op in self.main.operators if op.reason.startswith("recomputed")]


def assert_equal_bits(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    different = [name for name in wanted if found[name].tobytes() != wanted[name].tobytes()]
    assert not different


ASKS: dict[str, tuple[str, Ask]] = {
    "scopes": ("transformer", lambda main: amp.recompute(main, ["encoder/layer_*"])),
    "checkpoints": (
        "transformer",
        lambda main: amp.recompute(main, ["layer_norm_2.tmp_0", main.var("layer_norm_4.tmp_0")]),
    ),
    "statistics": ("resnet", lambda main: amp.recompute(main, ["batch_norm_1.tmp_3", "batch_norm_2.tmp_0"])),
}


@cache
def plain_states(name: str, mode: str) -> dict[str, np.ndarray]:
    return Training(name, mode).states()


@pytest.mark.parametrize("mode", ["fp32", "amp", "pure-fp16"])
@pytest.mark.parametrize("ask", ASKS)
def test_no_bit_changes(ask: str, mode: str) -> None:
    """Losses, gradients, parameters, moments, running statistics and the random state, dropout included."""
    name, request = ASKS[ask]
    again = Training(name, mode, request)
    assert len(again.recomputed()) > 5
    assert_equal_bits(again.states(), plain_states(name, mode))


def test_a_bad_step_stays_a_bad_step() -> None:
    """Infinite and NaN gradients reach the token; nothing of them may reach what is computed again, or the verdict."""
    options = {"init_loss_scaling": 2.0**40, "decr_every_n_nan_or_inf": 1, "decr_ratio": 2.0**-12}
    plain = Training("transformer", "pure-fp16", **options)
    again = Training("transformer", "pure-fp16", ASKS["scopes"][1], **options)
    found = again.states(5)
    scales = [float(v.item()) for name, v in found.items() if name.endswith("loss_scaling_0")]
    assert scales == [2.0**28, 2.0**16, 2.0**4, 2.0**4, 2.0**4]
    assert any(not np.isfinite(v).all() for v in found.values() if v.dtype == np.float16)
    assert_equal_bits(found, plain.states(5))


def test_special_values_pass_the_barrier() -> None:
    """-0.0, +0.0, subnormals, infinities and NaN, whatever the gradient is."""
    from amp_transpiler.ops.training.recompute_barrier import INPUT, TOKEN

    special = np.array([0.0, -0.0, 1e-40, -1e-45, np.inf, -np.inf, np.nan, 1.5], np.float32)
    for dtype, values in (("float32", special), ("int64", np.arange(8)), ("bool", np.arange(8) % 2 == 0)):
        main = amp.Program()
        with amp.program_guard(main, amp.Program("startup")), amp.unique_name.guard():
            gradient, x = amp.data("g", [2], "float32"), amp.data("x", [8], dtype)
            token, late = main.add_variable("token", "float32", ()), main.add_variable("late", dtype, (8,))
            main.add_operator(TOKEN, [gradient], [token], domain="amp_transpiler")
            main.add_operator(INPUT, [token, x], [late], domain="amp_transpiler")
        for first in (1.0, np.nan, np.inf, -np.inf, 0.0):
            feed = {"g": np.array([first, 2], np.float32), "x": values}
            (result,) = amp.Executor(threads=1).run(main, feed=feed, fetch_list=[late], scope=amp.Scope())
            assert result.tobytes() == values.tobytes()


def test_the_copies_survive_the_optimiser_and_less_is_kept() -> None:
    plain, again = Training("transformer", "fp32"), Training("transformer", "fp32", ASKS["scopes"][1])
    before, after = (training.main.memory_estimate().activations for training in (plain, again))
    assert after < 0.25 * before


@pytest.mark.parametrize("mode", ["fp32", "pure-fp16"])
def test_measured_memory_falls(mode: str) -> None:
    (_, plain), (forecast, again) = measured("mlp", mode), measured("mlp", mode, "block_*")
    assert again < 0.75 * plain and 0.7 * again < forecast < 1.1 * again, (plain, again, forecast)


def test_running_statistics_are_updated_once() -> None:
    main = Training("resnet", "fp32", ASKS["statistics"][1]).main
    norms = [op for op in main.operators if op.type == "BatchNormalization"]
    assert sum(op.role == "backward" for op in norms) > 0
    updated = {v.name for v in main.updates.values()}
    assert not any(v is not None and v.name in updated for op in norms if op.role == "backward" for v in op.outputs)


def test_weights_are_neither_copied_nor_delayed() -> None:
    main = Training("transformer", "amp", ASKS["scopes"][1]).main
    late = [op.inputs[1] for op in main.operators if op.type == "RecomputeInput"]
    assert late and not any(v.persistable or v.is_constant for v in late)


def test_what_is_not_for_training_has_no_copies() -> None:
    training = Training("transformer", "fp32", ASKS["scopes"][1])
    test = training.main.clone(for_test=True)
    assert not any("Recompute" in op.type or op.reason.startswith("recomputed") for op in test.operators)


def test_a_request_survives_a_clone() -> None:
    main = amp.Program()
    with amp.program_guard(main, amp.Program("startup")), amp.unique_name.guard():
        loss = encoder_layers()
        amp.recompute(loss, ["encoder/layer_*"])
        copy = main.clone()
    amp.append_backward(copy.var(loss.name))
    assert any(op.reason.startswith("recomputed") for op in copy.operators)


@needs_placement_tool
@pytest.mark.parametrize("mode", ["fp32", "pure-fp16"])
def test_a_recomputing_step_is_on_cuda_entirely(mode: str, tmp_path: Path) -> None:
    training = Training("transformer", mode, ASKS["scopes"][1])
    done = place(training.main.lower(amp.CUDAPlace(0), None, [training.loss]).model, tmp_path / "step.onnx")
    assert done.status == 0, done.said


# -- a byte budget ---------------------------------------------------------------------------------------
def within(budget: int) -> Training:
    return Training("transformer", "fp32", lambda main: amp.recompute(main, memory_budget=budget))


def test_a_budget_takes_no_more_than_needed_and_says_what_is_out_of_reach() -> None:
    with pytest.raises(amp.AmpError, match=r"within memory_budget=1000 .*the least that was found is \d+") as raised:
        within(1000)
    message = str(raised.value)
    least = int(message.split("the least that was found is ")[1].split()[0])
    without = int(float(message.split(", and ")[1].split()[0]) * 2**20) + 2**13
    trainings = [within(budget) for budget in (without, (3 * without + least) // 4, least)]
    counts = [len(training.recomputed()) for training in trainings]
    assert counts[0] == 0 < counts[1] < counts[2]
    assert_equal_bits(trainings[2].states(), plain_states("transformer", "fp32"))


def test_a_budget_on_cuda_needs_no_gpu() -> None:
    """16-bit tensors take half of what they take on CPU."""
    counts = []
    for device in (amp.CPUPlace(), amp.CUDAPlace(0)):
        training = Training(
            "transformer", "pure-fp16", lambda main, p=device: amp.recompute(main, memory_budget=370_000, place=p)
        )
        counts.append(len(training.recomputed()))
    assert counts[0] > counts[1] == 0


# -- wrong requests ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "takes segments, or a memory_budget"),
        ({"segments": ["encoder/*"], "memory_budget": 1}, "one of the two"),
        ({"segments": []}, "segments is empty"),
        ({"segments": "encoder/*"}, "segments is a list of variables, names or patterns"),
        ({"segments": [3]}, "segments holds 3"),
        ({"segments": ["decoder/*"]}, "pattern 'decoder/.*' matches no operator name or scope"),
        ({"segments": ["ids"]}, "checkpoint 'ids' is not made by the forward pass"),
        ({"segments": ["re:("]}, "no regular expression"),
        ({"segments": ["encoder/*"], "feed_shapes": {}}, "feed_shapes and place belong to memory_budget"),
        ({"memory_budget": 1, "place": "gpu"}, "recompute: place is 'gpu'"),
        ({"memory_budget": 0}, "at least 1"),
        ({"memory_budget": 1.5}, "a number of bytes"),
        ({"memory_budget": 1, "feed_shapes": {"idx": (1,)}}, "'idx' is no feed"),
    ],
)
def test_wrong_requests_are_named(arguments: dict[str, object], message: str) -> None:
    main = amp.Program()
    with amp.program_guard(main, amp.Program("startup")), amp.unique_name.guard():
        loss = encoder_layers(1)
    with pytest.raises(amp.AmpError, match=message):
        amp.recompute(loss, **arguments)
    assert main.recompute is None


def test_too_late() -> None:
    main = Training("transformer", "fp32").main
    with pytest.raises(amp.AmpError, match="has its gradients already; call recompute before"):
        amp.recompute(main, ["encoder/*"])
    with pytest.raises(TypeError, match="takes a Program or its loss"):
        amp.recompute("encoder/*", ["x"])


def test_a_batch_without_examples_changes_nothing() -> None:
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.data("x", [None, 3], "float32")
        h = F.tanh(amp.nn.fc(F.tanh(amp.nn.fc(x, 4)), 4))
        amp.recompute(main, [h])
        amp.optimizer.SGD(0.1).minimize(F.sum(F.tanh(h)))
    executor, scope = amp.Executor(), amp.Scope()
    executor.run(startup, scope=scope)
    before = {name: scope.find_var(name).copy() for name in scope.var_names()}
    assert any(op.type == "RecomputeToken" for op in main.operators)
    executor.run(main, {"x": np.zeros((0, 3), np.float32)}, scope=scope)
    assert_equal_bits({name: scope.find_var(name) for name in before}, before)


@pytest.mark.parametrize("layer", [amp.nn.lstm, amp.nn.gru])
@pytest.mark.parametrize("mode", ["fp32", "pure"])
def test_a_recurrent_layer_computes_both_times_alike(layer: Callable[..., Sequence[amp.Variable]], mode: str) -> None:
    """Where gates are kept for a gradient it is composed, and rounds otherwise than the kernel of inference does."""

    def trained(ask: bool) -> dict[str, np.ndarray]:
        main, startup = amp.Program(), amp.Program("startup")
        main.seed = startup.seed = 1
        with amp.program_guard(main, startup), amp.unique_name.guard():
            x = amp.data("x", [2, 5, 3], "float32")
            h = F.tanh(amp.nn.layer_norm(layer(x, 4)[0]))
            if ask:
                amp.recompute(main, [h])
            loss = F.mean(F.square(F.mean(h, axis=1) - 1.0))
            optimizer = amp.optimizer.SGD(0.5, multi_precision=True)
            if mode == "pure":
                optimizer = amp.decorate(optimizer, use_pure_fp16=True, use_fp16_guard=False, init_loss_scaling=8.0)
            optimizer.minimize(loss)
        executor, scope = amp.Executor(threads=1), amp.Scope()
        executor.run(startup, scope=scope)
        if mode == "pure":
            optimizer.amp_init(amp.CPUPlace(), scope)
        assert ask == any(op.reason.startswith("recomputed") for op in main.operators)
        found = {}
        for step in range(3):
            feed = {"x": np.random.default_rng(step).normal(size=(2, 5, 3)).astype(np.float32)}
            (found[f"loss {step}"],) = executor.run(main, feed, [loss], scope=scope)
        return found | {name: scope.find_var(name) for name in scope.var_names()}

    assert_equal_bits(trained(ask=True), trained(ask=False))


def test_a_recomputed_clip_is_not_one_of_gradients() -> None:
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.data("x", [4, 3], "float32")
        h = F.tanh(F.tanh(F.clip(amp.nn.fc(x, 4), -0.5, 0.5)) * 2.0)
        amp.recompute(main, [h])
        amp.decorate(amp.optimizer.SGD(0.1), init_loss_scaling=8.0).minimize(F.mean(F.square(h)))
    assert any(op.type == "Clip" and op.reason.startswith("recomputed") for op in main.operators)
    amp.check_step(main)


#: What gradients have to know before the run: axes in a Constant operator, and sizes that are computed of an open one.
KNOWN = {
    "axes": ("N, 3", "axes = Constant<value_ints = [1]>()  n = ReduceL2(h, axes)  z = Div(h, n)  y = Sin(z)"),
    "sizes": (
        "N, 1, 3",
        "n = Shape<end = 1>(x)  rest = Constant<value_ints = [1, 3]>()  sizes = Concat<axis = 0>(n, rest)"
        "  t = Tanh(h)  z = Reshape(t, sizes)  y = Sin(z)",
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_gradients_know_of_sizes_and_axes_they_know_in_a_part_that_is_computed_again(name: str) -> None:
    shape, nodes = KNOWN[name]
    net = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 18]>
        net (float[N, 3] x) => (float[{shape}] y) <float[3, 3] w = {{1, 2, 3, -1, 0, 1, 2, -2, 1}}> {{
            h = MatMul(x, w)  {nodes} }}""")

    def trained(ask: bool) -> dict[str, Any]:
        main, scope, executor = amp.Program.from_onnx(net), amp.Scope(), amp.Executor(threads=1)
        with amp.program_guard(main, main.startup), amp.unique_name.guard():
            if ask:
                amp.recompute(main, ["h", "y"])
            amp.optimizer.SGD(0.1).minimize(F.mean(main.outputs[0]))
        assert ask == any(op.reason.startswith("recomputed") for op in main.operators)
        executor.run(main.startup, scope=scope)
        for size in (4, 2):
            executor.run(main, {"x": np.arange(3 * size, dtype=np.float32).reshape(size, 3) / 10}, scope=scope)
        return {name: scope.find_var(name) for name in scope.var_names()}

    assert_equal_bits(trained(ask=True), trained(ask=False))
