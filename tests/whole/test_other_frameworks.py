"""The recipes of other frameworks: a global policy and a loss scale optimizer, a getter that stores fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler import mixed_precision
from amp_transpiler.errors import ArgumentError, ArgumentTypeError, OrderError
from amp_transpiler.nn import functional as F


class Net:
    """A regression, built with whatever ``build`` makes of the input."""

    def __init__(self, build: Callable[[Any], Any] = lambda x: amp.nn.fc(amp.nn.fc(x, 5, act="relu"), 1)) -> None:
        self.main, self.startup = amp.Program(), amp.Program("startup")
        self.main.seed = self.startup.seed = 5
        with self.guard(), amp.unique_name.guard():
            x = amp.data("x", [8, 3], "float32")
            self.loss = F.mean(F.cast(build(x), "float32") ** 2.0)
        self.scope, self.executor = amp.Scope(), amp.Executor(amp.CPUPlace(), threads=1)

    def guard(self) -> Any:
        return amp.program_guard(self.main, self.startup)

    def start(self) -> None:
        self.executor.run(self.startup, scope=self.scope)

    def step(self, factor: float = 1.0) -> float:
        x = np.random.default_rng(1).standard_normal((8, 3)).astype(np.float32) * np.float32(factor)
        return float(self.executor.run(self.main, feed={"x": x}, fetch_list=[self.loss], scope=self.scope)[0])

    def products(self) -> set[str]:
        return {op.inputs[0].dtype for op in self.main.operators if op.type == "MatMul" and op.role == "forward"}


@pytest.fixture(autouse=True)
def policy() -> Iterator[None]:
    yield
    amp.set_global_policy("float32")


# -- Keras ---------------------------------------------------------------------------------------------------
def test_the_two_line_recipe() -> None:
    mixed_precision.set_global_policy("mixed_float16")
    optimizer = mixed_precision.LossScaleOptimizer(amp.optimizer.SGD(0.05), initial_scale=8.0, dynamic_growth_steps=3)
    net = Net()
    optimizer.minimize(net.loss, net.startup)
    net.start()
    assert net.products() == {"float16"}
    losses = []
    with amp.scope_guard(net.scope):
        for expected in (8.0, 8.0, 16.0, 16.0):
            losses.append(net.step())
            assert optimizer.loss_scale == expected, "twice as large after three good steps"
        before = net.scope.find_var("fc_0.w_0").copy()
        net.step(np.inf)
        assert optimizer.loss_scale == 8.0 and np.array_equal(before, net.scope.find_var("fc_0.w_0"))
    assert losses[-1] < losses[0]
    assert (optimizer.initial_scale, optimizer.dynamic, optimizer.dynamic_growth_steps) == (8.0, True, 3)
    assert isinstance(optimizer.inner_optimizer, amp.optimizer.SGD)


def test_a_custom_loop_of_keras() -> None:
    """get_scaled_loss, gradients, get_unscaled_gradients, apply_gradients take the step of minimize."""

    def optimizer() -> Any:
        return amp.LossScaleOptimizer(amp.optimizer.SGD(0.05), False, 64.0)

    whole, parts = Net(), Net()
    optimizer().minimize(whole.loss, whole.startup)
    opt = optimizer()
    with parts.guard():
        pairs = amp.append_backward(opt.get_scaled_loss(parts.loss))
        grads = opt.get_unscaled_gradients([grad for _, grad in pairs])
        with pytest.raises(ArgumentError, match=r"is reversed; a pair is \(parameter, gradient\)"):
            opt.apply_gradients(list(zip(grads, [p for p, _ in pairs], strict=True)))
        opt.apply_gradients(list(zip([p for p, _ in pairs], grads, strict=True)))
    for net in (whole, parts):
        net.start()
        net.step()
    for name in ("fc_0.w_0", "fc_1.b_0"):
        assert np.array_equal(whole.scope.find_var(name), parts.scope.find_var(name))
    assert opt.dynamic_growth_steps is None and not opt.dynamic
    with pytest.raises(OrderError, match="get_loss_scale_state before minimize"):
        _ = optimizer().loss_scale


@pytest.mark.parametrize(
    "name, compute", [("float32", "float32"), ("mixed_float16", "float16"), ("mixed_bfloat16", "bfloat16")]
)
def test_a_policy_is_its_name(name: str, compute: str) -> None:
    policy = amp.Policy(name)
    assert (policy, policy.name, policy.compute_dtype, policy.variable_dtype) == (name, name, compute, "float32")
    mixed_precision.set_global_policy(policy)
    assert mixed_precision.global_policy() == amp.get_global_policy() == policy
    assert mixed_precision.global_policy().compute_dtype == compute
    net = Net()
    amp.optimizer.SGD(0.1).minimize(net.loss, net.startup)
    assert net.products() == {compute}
    scaled = Net()
    amp.LossScaleOptimizer(amp.optimizer.SGD(0.1)).minimize(scaled.loss, scaled.startup)
    assert scaled.products() == {"float16" if compute == "float32" else compute}


@pytest.mark.parametrize(
    "call, error, said",
    [
        (lambda: amp.Policy("float16"), ArgumentError, "'float16' is no policy; known are 'float32', 'mixed_float16'"),
        (lambda: amp.LossScaleOptimizer(amp.optimizer.SGD(), dynamic=False), ArgumentError, "needs initial_scale"),
        (lambda: amp.LossScaleOptimizer(amp.optimizer.SGD(), 1024.0), ArgumentTypeError, "initial_scale=1024.0"),  # type: ignore[arg-type]
        (lambda: amp.LossScaleOptimizer(amp.optimizer.SGD(), initial_scale=0), ArgumentError, "init_scale is 0"),
        (lambda: amp.LossScaleOptimizer("adam"), ArgumentTypeError, "optimizer is 'adam'"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments(call: Callable[[], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()


# -- getters -------------------------------------------------------------------------------------------------
def halved(x: Any) -> Any:
    return amp.nn.fc(amp.nn.fc(F.cast(x, "float16"), 5, act="relu"), 1)


def stored_wide(x: Any) -> Any:
    with amp.custom_getter(amp.float32_variable_storage_getter):
        return halved(x)


def test_a_getter_stores_fp32_where_layers_compute_in_16_bit() -> None:
    """Parameters have the names, and start as, those of an fp32 network; gradients and updates are fp32."""
    plain, wide, narrow = Net(), Net(stored_wide), Net(halved)
    for net in (plain, wide):
        _, pairs = amp.optimizer.SGD(1e-4).minimize(net.loss, net.startup)
        net.start()
        assert {p.name: p.dtype for p in net.main.parameters} == dict.fromkeys(
            ["fc_0.w_0", "fc_0.b_0", "fc_1.w_0", "fc_1.b_0"], "float32"
        )
        assert {grad.dtype for _, grad in pairs} == {"float32"}
    assert wide.products() == {"float16"} and plain.products() == {"float32"}
    assert {p.dtype for p in narrow.main.parameters} == {"float16"}, "without the getter"
    for name in ("fc_0.w_0", "fc_1.w_0"):
        assert np.array_equal(plain.scope.find_var(name), wide.scope.find_var(name))
    before = wide.scope.find_var("fc_1.w_0").copy()
    plain.step(), wide.step()
    moved = wide.scope.find_var("fc_1.w_0") - before
    assert np.allclose(moved, plain.scope.find_var("fc_1.w_0") - before, rtol=1e-2, atol=1e-7) and np.any(moved)
    assert not np.array_equal(wide.scope.find_var("fc_1.w_0").astype(np.float16), wide.scope.find_var("fc_1.w_0"))


def test_a_getter_works_with_loss_scaling_and_shared_parameters() -> None:
    def tied(x: Any) -> Any:
        with amp.custom_getter(amp.float32_variable_storage_getter):
            half = F.cast(x, "float16")
            return amp.nn.fc(amp.nn.fc(half, 3, param_attr="w"), 3, param_attr="w")

    net = Net(tied)
    amp.decorate(amp.optimizer.SGD(0.01), init_loss_scaling=256.0).minimize(net.loss, net.startup)
    net.start()
    assert [p.name for p in net.main.parameters] == ["w", "fc_0.b_0", "fc_1.b_0"]
    losses = [net.step() for _ in range(4)]
    assert losses[-1] < losses[0] and net.products() == {"float16"}


def test_getters_are_functions_around_the_creation_of_a_parameter() -> None:
    asked = []

    def watching(create: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        asked.append((name, kwargs["dtype"], kwargs["trainable"]))
        return create(name, *args, **kwargs)

    main = amp.Program()
    with amp.program_guard(main), amp.unique_name.guard():
        with amp.custom_getter(watching), amp.custom_getter(amp.float32_variable_storage_getter):
            made = amp.create_parameter([2], "float16", "a", np.array([0.1, 0.2]))
            frozen = amp.create_parameter([2], "float16", "b", trainable=False)
            full = amp.create_parameter([2], "float32", "c")
        outside = amp.create_parameter([2], "float16", "d")
    assert asked == [("a", "float32", True), ("b", "float16", False), ("c", "float32", True)]
    assert made.dtype == "float16" and made.producer.inputs == [main.var("a")] and main.var("a").dtype == "float32"
    assert frozen is main.var("b") and full is main.var("c") and outside is main.var("d") and outside.dtype == "float16"
    executor, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
    executor.run(main.startup, scope=scope)
    assert np.array_equal(scope.find_var("a"), np.array([0.1, 0.2], np.float32)), "not rounded to 16 bit"


def test_a_getter_that_gives_something_else_is_named() -> None:
    with amp.program_guard(amp.Program()), amp.unique_name.guard():
        with (
            amp.custom_getter(lambda create, name, **kwargs: None),
            pytest.raises(ArgumentTypeError, match="gave None for 'w'"),
        ):
            amp.create_parameter([2], name="w")
        with amp.custom_getter(lambda create, name, **kwargs: create(name, regularizer=1, **kwargs)):
            with pytest.raises(ArgumentError, match="gives regularizer"):
                amp.create_parameter([2], name="w")
        with pytest.raises(ArgumentTypeError, match="takes a function"), amp.custom_getter("float32"):  # type: ignore[arg-type]
            pass
        assert amp.create_parameter([2], name="w").dtype == "float32"
