"""Training loops as users of other systems write them, gradient accumulation, several optimizers, wrong order of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import ArgumentError, OrderError
from amp_transpiler.nn import functional as F

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 6)).astype(np.float32)
IDS = RNG.integers(0, 10, (16, 3))
Y = (X[:, :3].argmax(1) % 3)[:, None]
FEED = {"x": X, "ids": IDS, "y": Y}


@pytest.fixture(autouse=True)
def fresh_names() -> Iterator[None]:
    with amp.unique_name.guard(), amp.scope_guard(amp.Scope()):
        yield


class Net:
    """An embedding and dense layers: parameters table, fc_0.w_0, fc_0.b_0, fc_1.w_0, fc_1.b_0."""

    def __init__(self, norm: bool = False) -> None:
        self.main, self.startup = amp.Program(), amp.Program("startup")
        self.startup.seed = 7
        with amp.program_guard(self.main, self.startup), amp.unique_name.guard():
            x, ids = amp.data("x", [None, 6], "float32"), amp.data("ids", [None, 3], "int64")
            y = amp.data("y", [None, 1], "int64")
            rows = F.mean(amp.nn.embedding(ids, [10, 8], param_attr="table"), axis=1)
            with amp.fp16_guard():
                hidden = amp.nn.fc(x, 8, act="relu") + rows
                if norm:
                    hidden = amp.nn.batch_norm(hidden)
                self.scores = amp.nn.fc(hidden, 3)
                self.loss = F.cross_entropy(self.scores, y)

    def guard(self) -> Any:
        return amp.program_guard(self.main, self.startup)

    def start(self, optimizer: Any = None) -> tuple[amp.Executor, amp.Scope]:
        scope, executor = amp.Scope(), amp.Executor(threads=1)
        executor.run(self.startup, scope=scope)
        if hasattr(optimizer, "amp_init"):
            optimizer.amp_init(amp.CPUPlace(), scope)
        return executor, scope

    def losses(self, optimizer: Any, steps: int = 30) -> list[float]:
        executor, scope = self.start(optimizer)
        runs = (executor.run(self.main, feed=FEED, fetch_list=[self.loss], scope=scope) for _ in range(steps))
        return [np.asarray(loss).item() for (loss,) in runs]


def adam(**options: Any) -> Any:
    return amp.optimizer.Adam(0.02, multi_precision=True, **options)


# -- the loops of our users' systems -----------------------------------------------------------------------------
def paddle(net: Net) -> Any:
    """decorate, minimize."""
    optimizer = amp.decorate(
        adam(grad_clip=amp.optimizer.ClipGradByGlobalNorm(1.0)), init_loss_scaling=128.0, use_pure_fp16=True
    )
    optimizer.minimize(net.loss, net.startup)
    return optimizer


def model_garden(net: Net) -> Any:
    """Scaled loss, gradients, unscaled gradients, clipping written out, apply."""
    optimizer = amp.decorate(adam(), init_loss_scaling=128.0, use_pure_fp16=True)
    with net.guard():
        pairs = amp.append_backward(optimizer.get_scaled_loss(net.loss))
        grads = optimizer.get_unscaled_gradients([grad for _, grad in pairs])
        norm = F.sqrt(sum_of([F.sum(grad * grad) for grad in grads]))
        factor = F.where(norm > 1.0, 1.0 / norm, norm * 0.0 + 1.0)
        optimizer.apply_gradients([(p, grad * factor) for (p, _), grad in zip(pairs, grads, strict=True)])
    return optimizer


def sum_of(values: list[amp.Variable]) -> amp.Variable:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def sparse_operation_kit(net: Net) -> Any:
    """One optimizer for the embeddings and one for the rest, gradients unscaled group by group, one verdict."""
    embedding = adam(parameter_list=["table"])
    optimizer = amp.decorate([embedding, adam()], init_loss_scaling=128.0, use_pure_fp16=True)
    with net.guard():
        pairs = amp.append_backward(optimizer.get_scaled_loss(net.loss))
        sparse = [(p, g) for p, g in pairs if p.name == "table"]
        dense = [(p, g) for p, g in pairs if p.name != "table"]
        done = []
        for group in (sparse, dense):
            grads = optimizer.get_unscaled_gradients([g for _, g in group])
            done += [(p, g) for (p, _), g in zip(group, grads, strict=True)]
        optimizer.apply_gradients(done)
    return optimizer


def loss_scale_manager(net: Net) -> Any:
    """A loss scale manager around Adam, whose attributes are read through the wrapper."""
    optimizer = amp.decorate(adam(), use_pure_fp16=True, scaler=amp.LossScaler.exponential(init_scale=128.0))
    assert (optimizer.learning_rate, optimizer.beta1, optimizer.type) == (0.02, 0.9, "Adam")
    optimizer.apply_gradients(optimizer.backward(net.loss))
    assert optimizer.get_lr() == pytest.approx(0.02)
    return optimizer


@pytest.mark.parametrize("loop", [paddle, model_garden, sparse_operation_kit, loss_scale_manager])
def test_every_loop_trains_to_the_loss_of_plain_fp32(loop: Callable[[Net], Any]) -> None:
    plain = Net()
    clip = amp.optimizer.ClipGradByGlobalNorm(1.0) if loop in (paddle, model_garden) else None
    reference = amp.optimizer.Adam(0.02, grad_clip=clip)
    reference.minimize(plain.loss, plain.startup)
    expected = plain.losses(reference)
    net = Net()
    optimizer = loop(net)
    amp.check_step(net.main)
    found = net.losses(optimizer)
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.004)
    assert found[-1] < 0.5 * found[0]
    test = net.main.clone(for_test=True)
    test.verify()
    assert not any("@UNSCALED" in v.name for v in test.variables), "code on gradients is no part of evaluation"


def test_groups_with_one_verdict() -> None:
    """An overflow in the gradients of one optimizer stops the other as well, and the scale moves once."""
    net = Net()
    optimizer = sparse_operation_kit(net)
    executor, scope = net.start(optimizer)
    before = {name: np.array(scope.find_var(name)) for name in scope.var_names()}
    table = scope.find_var("table")
    scope.set_var("table", np.full_like(table, np.inf))
    for _ in range(2):
        executor.run(net.main, feed=FEED, scope=scope)
    assert scope.find_var("loss_scaling_0")[0] == np.float32(128 * np.float32(0.8)), "one decrease after two bad steps"
    for name, value in before.items():
        if name not in ("table", "loss_scaling_0", "num_bad_steps_0"):
            np.testing.assert_array_equal(scope.find_var(name), value, name)


def test_several_losses_add_up() -> None:
    def build(two: bool) -> list[float]:
        net = Net()
        with net.guard():
            penalty = F.mean(net.scores * net.scores)
            optimizer = amp.decorate(adam(), init_loss_scaling=128.0)
            optimizer.minimize([net.loss, penalty] if two else net.loss + penalty)
        return net.losses(optimizer, 10)

    np.testing.assert_allclose(build(True), build(False), rtol=1e-3)


def test_losses_of_their_own_parameters() -> None:
    """As a generator and a discriminator have them: backward twice, one update."""
    net = Net()
    with net.guard():
        other = F.mean(net.scores * net.scores)
        first, second = adam(parameter_list=["table"]), adam(parameter_list=["fc_1.w_0", "fc_1.b_0"])
        optimizer = amp.decorate([first, second], init_loss_scaling=128.0, use_pure_fp16=True)
        pairs = optimizer.backward(net.loss, parameter_list=["table"])
        pairs += optimizer.backward(other, parameter_list=["fc_1.w_0", "fc_1.b_0"])
        assert len(optimizer.apply_gradients(pairs)) == 2
    executor, scope = net.start(optimizer)
    before = {name: np.array(scope.find_var(name)) for name in ("table", "fc_0.w_0", "fc_1.w_0")}
    values = [executor.run(net.main, feed=FEED, fetch_list=[other], scope=scope)[0].item() for _ in range(20)]
    assert values[-1] < values[0]
    assert [np.array_equal(scope.find_var(n), v) for n, v in before.items()] == [False, True, False]


# -- accumulation ------------------------------------------------------------------------------------------------
#: In fp32, so that only the order of additions differs.
FP32 = amp.AutoMixedPrecisionLists(custom_black_list=["MatMul", "Gemm"])


def windows(steps: int, accumulate: int, lists: Any = FP32, norm: bool = False, **options: Any) -> tuple[Any, ...]:
    net = Net(norm)
    optimizer = amp.decorate(
        amp.optimizer.Momentum(0.1, multi_precision=True),
        lists,
        init_loss_scaling=128.0,
        accumulate_steps=accumulate,
        **options,
    )
    with amp.unique_name.guard():
        optimizer.minimize(net.loss, net.startup)
    executor, scope = net.start(optimizer)
    size = 16 // accumulate
    for step in range(steps * accumulate):
        part = slice(step % accumulate * size, (step % accumulate + 1) * size)
        executor.run(net.main, feed={n: v[part] for n, v in FEED.items()}, scope=scope)
    return net, optimizer, executor, scope


@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulation_equals_the_large_batch(accumulate: int) -> None:
    *_, large = windows(5, 1)
    *_, small = windows(5, accumulate)
    for name in ("table", "fc_0.w_0", "fc_0.b_0", "fc_1.w_0", "fc_1.b_0"):
        np.testing.assert_allclose(small.find_var(name), large.find_var(name), rtol=1e-6, atol=1e-6)
    assert small.find_var("num_good_steps_0")[0] == 5, "one check and one update of the scale in a window"


@pytest.mark.parametrize("mode", ["mixed", "pure"])
def test_only_the_last_of_a_window_updates(mode: str) -> None:
    net, optimizer, executor, scope = windows(1, 4, None, norm=True, use_pure_fp16=mode == "pure")
    part = {name: value[:4] for name, value in FEED.items()}
    for turn in range(1, 5):
        before = {name: np.array(scope.find_var(name)) for name in scope.var_names()}
        loss, found = executor.run(net.main, feed=part, fetch_list=[net.loss, optimizer.get_found_inf()], scope=scope)
        changed = {n for n, v in before.items() if not np.array_equal(scope.find_var(n), v)}
        sums = {name for name in before if "accumulated" in name}
        assert np.isfinite(loss).all() and not found[0]
        assert scope.find_var("micro_step_0") == turn % 4
        if turn < 4:
            assert changed <= sums | {"micro_step_0", "batch_norm_0.w_1", "batch_norm_0.w_2"}
            assert {"table_accumulated_0", "batch_norm_0.w_1"} <= changed
        else:
            assert "fc_1.w_0" in changed and all(not scope.find_var(name).any() for name in sums)
    report = executor.memory_report(net.main)
    assert not any("fc_" in name for name in report.two_buffers), report


@pytest.mark.parametrize("bad_turn", [0, 3])
def test_one_bad_micro_batch_makes_the_window_bad(bad_turn: int) -> None:
    net, _, executor, scope = windows(1, 4, None, norm=True, use_pure_fp16=True)
    before = {name: np.array(scope.find_var(name)) for name in scope.var_names()}
    for turn in range(4):
        part = {name: value[:4].copy() for name, value in FEED.items()}
        if turn == bad_turn:
            part["x"][0, 0] = np.nan
        executor.run(net.main, feed=part, scope=scope)
    changed = {n for n, v in before.items() if scope.find_var(n).tobytes() != v.tobytes()}
    assert changed == {"num_good_steps_0", "num_bad_steps_0"}, "also the running statistics are as before the window"
    executor.run(net.main, feed={n: v[:4] for n, v in FEED.items()}, scope=scope)
    assert np.isfinite(scope.find_var("table_accumulated_0")).all(), "the next window starts from zero"


def test_a_window_goes_on_where_a_copy_of_the_scope_stopped() -> None:
    net, _, executor, scope = windows(1, 4)
    part = {name: value[:4] for name, value in FEED.items()}
    for _ in range(2):
        executor.run(net.main, feed=part, scope=scope)
    copy = amp.Scope()
    for name in scope.var_names():
        copy.set_var(name, np.array(scope.find_var(name)))
    for each, runner in ((scope, executor), (copy, amp.Executor(threads=1))):
        for _ in range(2):
            runner.run(net.main, feed=part, scope=each)
    for name in scope.var_names():
        np.testing.assert_array_equal(copy.find_var(name), scope.find_var(name), name)


def test_a_window_survives_clones_and_files() -> None:
    net, _, executor, scope = windows(1, 4)
    clone, again = net.main.clone(), amp.Program.from_onnx(net.main.to_onnx())
    part = {name: value[:4] for name, value in FEED.items()}
    for program in (clone, again):
        assert program.accumulation is not None and program.accumulation.steps == 4
        before = np.array(scope.find_var("fc_1.w_0"))
        for turn in range(4):
            executor.run(program, feed=part, scope=scope)
            assert np.array_equal(scope.find_var("fc_1.w_0"), before) == (turn < 3)
    assert net.main.clone(for_test=True).accumulation is None


# -- two lines ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("policy, dtype", [("mixed_float16", "float16"), ("mixed_bfloat16", "bfloat16")])
def test_a_global_policy_trains_what_is_not_decorated(policy: str, dtype: str) -> None:
    plain, net = Net(), Net()
    reference = amp.optimizer.Adam(0.02)
    reference.minimize(plain.loss, plain.startup)
    assert reference.mixed_precision is None
    optimizer = amp.optimizer.Adam(0.02)
    with amp.policy_scope(policy):
        optimizer.minimize(net.loss, net.startup)
    assert amp.get_global_policy() == "float32"
    assert {op.precision for op in net.main.operators if op.type == "MatMul"} == {dtype}
    amp.check_step(net.main)
    assert (optimizer.mixed_precision.get_loss_scaling() is not None) and optimizer.get_lr() == pytest.approx(0.02)
    np.testing.assert_allclose(net.losses(optimizer), plain.losses(reference), rtol=0.05, atol=0.01)


def test_a_policy_that_there_is_not_is_named() -> None:
    with pytest.raises(ArgumentError, match="'mixed_fp16' is no policy; known are 'float32', 'mixed_float16'"):
        amp.set_global_policy("mixed_fp16")
    assert amp.get_global_policy() == "float32"


# -- wrong calls -------------------------------------------------------------------------------------------------
def decorated(**options: Any) -> Any:
    return amp.decorate(adam(), init_loss_scaling=128.0, **options)


def unscaled(net: Net, optimizer: Any) -> tuple[Any, Any]:
    with net.guard():
        pairs = amp.append_backward(optimizer.get_scaled_loss(net.loss))
        return pairs, optimizer.get_unscaled_gradients([g for _, g in pairs])


def test_unscaling_twice_names_the_earlier_call() -> None:
    net, optimizer = Net(), decorated()
    pairs, grads = unscaled(net, optimizer)
    for again in (pairs[0][1], grads[0]):
        with pytest.raises(OrderError, match="was unscaled by an earlier call of get_unscaled_gradients"):
            optimizer.get_unscaled_gradients([again])


def test_scaled_gradients_are_not_applied_beside_unscaled_ones() -> None:
    net, optimizer = Net(), decorated()
    with net.guard():
        pairs = amp.append_backward(optimizer.get_scaled_loss(net.loss))
        (one,) = optimizer.get_unscaled_gradients([pairs[0][1]])
        with pytest.raises(ArgumentError, match=f"'{pairs[1][1].name}' of '{pairs[1][0].name}' is still scaled"):
            optimizer.apply_gradients([(pairs[0][0], one), *pairs[1:]])
        rest = optimizer.get_unscaled_gradients([g for _, g in pairs[1:]])
        optimizer.apply_gradients([(p, g) for (p, _), g in zip(pairs, [one, *rest], strict=True)])


def test_order_of_calls() -> None:
    net, optimizer = Net(), decorated()
    for call in (
        optimizer.get_scaled_loss,
        lambda: optimizer.get_unscaled_gradients([net.loss]),
        lambda: optimizer.apply_gradients([(net.loss, net.loss)]),
    ):
        with pytest.raises(OrderError, match=r"before minimize: call minimize\(loss\), backward\(loss\) or"):
            call()
    pairs, grads = unscaled(net, optimizer)
    with net.guard():
        optimizer.apply_gradients([(p, g) for (p, _), g in zip(pairs, grads, strict=True)])
    with pytest.raises(OrderError, match="update already, from an earlier call of apply_gradients or minimize"):
        optimizer.apply_gradients(pairs)
    with pytest.raises(
        OrderError, match=r"program 'program_\d+' has its training step already, and a program takes one"
    ):
        optimizer.minimize(net.loss)
    with pytest.raises(OrderError, match="get_unscaled_gradients after apply_gradients"):
        optimizer.get_unscaled_gradients([pairs[0][1]])


def test_none_gradients() -> None:
    net, optimizer = Net(), decorated()
    with net.guard():
        pairs = amp.append_backward(optimizer.get_scaled_loss(net.loss))
        grads = optimizer.get_unscaled_gradients([None, *(g for _, g in pairs[1:])])
        assert grads[0] is None
        with pytest.raises(ArgumentError, match="every gradient is None"):
            optimizer.get_unscaled_gradients([None, None])
        with pytest.warns(UserWarning, match=f"without a gradient.*'{pairs[0][0].name}'"):
            optimizer.apply_gradients([(p, g) for (p, _), g in zip(pairs, grads, strict=True)])


@pytest.mark.parametrize(
    "optimizers, told",
    [
        (lambda: [adam(), adam()], "two optimizers without parameter_list"),
        (lambda: [], "empty"),
        (lambda: [adam(parameter_list=["table"]), adam(parameter_list=["table"])], "'table'.*two optimizers"),
        (lambda: [adam(parameter_list=["table"]), adam(parameter_list=["fc_0.w_1"])], "did you mean"),
    ],
)
def test_optimizers_that_cannot_go_together(optimizers: Callable[[], Any], told: str) -> None:
    net = Net()
    with pytest.raises(amp.AmpError, match=told):
        amp.decorate(optimizers()).minimize(net.loss, net.startup)
    amp.decorate(adam()).minimize(net.loss, net.startup)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "2"])
def test_accumulate_steps_is_a_number(steps: Any) -> None:
    with pytest.raises(ArgumentError, match="accumulate_steps is"):
        amp.decorate(adam(), accumulate_steps=steps)
