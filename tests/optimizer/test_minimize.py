"""``minimize`` and its parts: all or nothing wherever they stop, and the same step from any opset."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import ArgumentError, GraphError, OrderError
from amp_transpiler.ir import context, unique_name
from amp_transpiler.nn import functional as F
from amp_transpiler.warn import AmpWarning
from tests.helpers.refusals import MODES, Net, mixed, pure, refused, snapshot

PACKAGE = str(Path(amp.__file__).parent)


def scheduled(**options: Any) -> Any:
    """An optimizer with everything that building a step changes: a schedule, clipping, masters."""
    rate = amp.optimizer.lr.StepDecay(0.1, 30)
    clip = amp.optimizer.ClipGradByGlobalNorm(1.0)
    return amp.optimizer.AdamW(rate, grad_clip=clip, multi_precision=True, **options)


class Interrupt:
    """A trace function that raises KeyboardInterrupt at the ``at``-th line of the package that is run."""

    def __init__(self, at: int) -> None:
        self.at, self.lines = at, 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self

    def during(self, action: Callable[[], Any]) -> None:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            action()
        finally:
            sys.settrace(before)


def attributes(optimizer: Any) -> list[dict[str, Any]]:
    """Those of a decorated or plain optimizer, of what it wraps, and of the schedules."""
    inner = getattr(optimizer, "optimizers", (optimizer,))
    objects = dict.fromkeys([optimizer, *inner, *(each.learning_rate for each in inner)])
    return [{name: list(v) if isinstance(v, list) else v for name, v in vars(each).items()} for each in objects]


@MODES
def test_ctrl_c_at_any_line_leaves_everything_as_it_was(mode: Callable[..., Any]) -> None:
    def attempt(at: int) -> tuple[Interrupt, tuple[Any, ...], tuple[Any, ...]]:
        net, optimizer, interrupt = Net(), mode(scheduled()), Interrupt(at)

        def state() -> tuple[Any, ...]:
            names = dict(unique_name.counters())
            return snapshot(net.main), snapshot(net.startup), attributes(optimizer), names, context.role()

        before = state()
        with amp.program_guard(net.main, net.startup):
            if at:
                with pytest.raises(KeyboardInterrupt):
                    interrupt.during(lambda: optimizer.minimize(net.loss))
            else:
                interrupt.during(lambda: optimizer.minimize(net.loss))
        return interrupt, before, state()

    for _ in range(2):  # the first fills what the process keeps
        with amp.unique_name.guard():
            lines = attempt(0)[0].lines
    for at in np.linspace(1, lines - 20, 15, dtype=int):
        with amp.unique_name.guard():
            _, before, after = attempt(int(at))
        assert after == before, f"line {at} of {lines}"


def test_ctrl_c_while_a_failed_step_is_taken_back() -> None:
    interrupt = Interrupt(400)

    def choose(name: str) -> bool:
        sys.settrace(interrupt)
        raise ArgumentError("of the user's")

    net, optimizer = Net(), pure(scheduled(apply_decay_param_fun=choose))
    before = attributes(optimizer)
    with refused(KeyboardInterrupt, programs=(net.main, net.startup)):
        try:
            optimizer.minimize(net.loss)
        finally:
            sys.settrace(None)
    assert interrupt.lines == interrupt.at and attributes(optimizer) == before


def test_a_schedule_of_a_step_that_failed_follows_nothing() -> None:
    net, rate = Net(), amp.optimizer.lr.StepDecay(0.1, 30)
    optimizer = amp.optimizer.SGD(rate)
    with refused(GraphError, "does not initialise"):
        optimizer.minimize(net.loss, amp.Program("other"))
    with pytest.raises(ZeroDivisionError):
        mixed(amp.optimizer.AdamW(rate, apply_decay_param_fun=lambda name: 1 / 0)).minimize(net.loss)
    assert rate.by_user().stepped_by_user  # OrderError where a program advances it


@MODES
def test_a_warning_that_is_an_error_takes_the_gradients_back(mode: Callable[..., Any]) -> None:
    net, optimizer = Net(), mode(scheduled())
    before = attributes(optimizer)
    with warnings.catch_warnings(), refused(AmpWarning, "get no gradient", programs=(net.main, net.startup)):
        warnings.simplefilter("error")
        optimizer.backward(net.loss, no_grad_set=["fc_0.tmp_2"])
    assert attributes(optimizer) == before
    optimizer.minimize(net.loss)


def test_a_global_policy_leaves_no_trace_where_minimize_fails() -> None:
    net, optimizer = Net(), amp.optimizer.SGD()
    with amp.policy_scope("mixed_float16"):
        with refused(GraphError, "has no variable", programs=(net.main, net.startup)):
            optimizer.minimize(net.loss, parameter_list=["nothing"])
        assert optimizer.mixed_precision is None
        optimizer.minimize(net.loss)
    assert optimizer.mixed_precision is not None and optimizer.mixed_precision.get_found_inf() is not None


def test_pairs_of_one_program_and_the_loss_of_another() -> None:
    """What is taken back is the program that the update goes into."""
    net, other = Net(), Net(name="other")

    def choose(name: str) -> bool:
        raise OrderError("of the user's")

    optimizer = amp.optimizer.AdamW(apply_decay_param_fun=choose)
    pairs = optimizer.backward(net.loss)
    with refused(OrderError, "of the user's", programs=(net.main, net.startup, other.main, other.startup)):
        optimizer.apply_optimize(other.loss, None, pairs)


# -- one canonical form --------------------------------------------------------------------------------------------
#: In opset 9 scale and statistics of a normalisation have the type of its input; from 14 on they have their own.
NORMED = """<ir_version: 8, opset_import: ["" : OPSET]>
g (float[2,3,4,4] x) => (float loss, float[2,3,2,2] y)
    <float[3,3,3,3] w = {W}, float[3] scale = {1,2,3}, float[3] bias = {0.5,1,0}, float[3] mean = {1,0,0.25},
     float[3] var = {1,2,1.5}> {
    h = Conv(x, w)
    n = BatchNormalization(h, scale, bias, mean, var)
    y = Relu(n)
    s = Mul(y, y)
    loss = ReduceMean <keepdims = 0> (s)
}"""


@pytest.mark.parametrize("opset", [9, 13])
@pytest.mark.parametrize("mode", [mixed, lambda o: amp.decorate(o, use_pure_fp16=True, use_fp16_guard=False)])
def test_a_step_is_decided_in_the_same_form_whatever_the_opset(mode: Callable[..., Any], opset: int) -> None:
    def built(opset: int) -> tuple[list[Any], list[Any], list[Any]]:
        weights = ", ".join(f"{v:.3f}" for v in np.random.default_rng(0).standard_normal(81))
        text = NORMED.replace("OPSET", str(opset)).replace("{W}", "{" + weights + "}")
        program = amp.Program.from_onnx(onnx.parser.parse_model(text))
        test, scope, executor = program.clone(for_test=True), amp.Scope(), amp.Executor(threads=1)
        optimizer = mode(amp.optimizer.SGD(0.1, multi_precision=True))
        optimizer.minimize(program.var("loss"))
        executor.run(program.startup, scope=scope)
        optimizer.amp_init(amp.CPUPlace(), scope, test, use_fp16_test=True)
        feed = {"x": np.random.default_rng(1).standard_normal((2, 3, 4, 4)).astype(np.float32)}
        executor.run(program, feed, [program.var("loss")], scope)
        values = executor.run(test, feed, [test.var("y")], scope)
        operators = [(op.type, op.precision, op.reason) for each in (program, test) for op in each.operators]
        return operators, [(v.name, v.dtype) for v in program.variables if v.persistable], [v.tolist() for v in values]

    with amp.unique_name.guard():
        now = built(21)
    with amp.unique_name.guard():
        assert built(opset) == now
    assert dict(now[1])["scale"] == dict(now[1])["var"] == "float32"


def test_losses_add_up_without_decorate() -> None:
    """The gradients of a list are those of the sum; one loss is of shape [], the other of shape [1]."""
    found = []
    for listed in (True, False):
        main, startup = amp.Program(), amp.Program("startup")
        with amp.program_guard(main, startup), amp.unique_name.guard():
            x = amp.data("x", [4, 3])
            y = amp.nn.fc(x, 2, name="fc")
            losses = [F.mean(y * y), F.mean(F.tanh(y), axis=[0, 1], keepdim=False).reshape([1])]
            amp.optimizer.SGD(0.1).minimize(losses if listed else losses[0] + losses[1])
        scope, executor = amp.Scope(), amp.Executor(threads=1)
        executor.run(startup, scope=scope)
        executor.run(main, feed={"x": np.arange(12, dtype=np.float32).reshape(4, 3) / 7}, scope=scope)
        found.append([scope.find_var(p.name) for p in main.parameters])
    for listed, added in zip(*found, strict=True):
        np.testing.assert_allclose(listed, added, rtol=1e-6)
        assert np.abs(added).max() > 0


@pytest.mark.parametrize("mode", ["fp32", "pure"])
def test_programs_in_turn_over_one_parameter_have_moments_of_their_own(mode: str) -> None:
    """One startup program: two Adams, one master; beside Adam by hand in float64."""
    first, startup, losses, programs = amp.Program(), amp.Program(), [], []
    with amp.program_guard(first, startup), amp.unique_name.guard():
        x = amp.data("x", [4, 3])
        with amp.fp16_guard():
            y = amp.nn.fc(x, 1, bias_attr=False, param_attr=amp.ParamAttr("w", amp.nn.initializer.Constant(0.5)))
    second = first.clone()
    for program, rate in ((first, 0.1), (second, 0.01)):
        with amp.program_guard(program, startup):
            losses.append(F.mean(program.var(y.name)))
            adam: Any = amp.optimizer.Adam(rate, multi_precision=True)
            if mode == "pure":
                adam = amp.decorate(adam, use_pure_fp16=True, use_fp16_guard=False, init_loss_scaling=8.0)
            adam.minimize(losses[-1], startup)
            programs.append((program, adam))
    executor, scope = amp.Executor(), amp.Scope()
    executor.run(startup, scope=scope)
    for _, adam in programs if mode == "pure" else ():
        adam.amp_init(amp.CPUPlace(), scope=scope)
    rng, weight, moments = np.random.default_rng(0), np.full(3, 0.5), [np.zeros((2, 3)), np.zeros((2, 3))]
    for turn in range(6):
        which, x_now = turn % 2, rng.normal(size=(4, 3)).astype(np.float32)
        executor.run(programs[which][0], feed={"x": x_now}, fetch_list=[losses[which]], scope=scope)
        gradient, step = x_now.astype(np.float64).mean(0), turn // 2 + 1
        moment = moments[which]
        moment[:] = 0.9 * moment[0] + 0.1 * gradient, 0.999 * moment[1] + 0.001 * gradient**2
        unbiased = moment[0] / (1 - 0.9**step), moment[1] / (1 - 0.999**step)
        weight = weight - (0.1, 0.01)[which] * unbiased[0] / (np.sqrt(unbiased[1]) + 1e-8)
    masters = [name for name in scope.var_names() if "master" in name and "moment" not in name]
    assert len(masters) == (mode == "pure")
    found = scope.find_var(masters[0] if masters else "w").reshape(-1)
    np.testing.assert_allclose(found, weight, rtol=1e-5 if mode == "fp32" else 1e-2)


def _adam_over_w(name: str, startup: amp.Program) -> tuple[amp.Program, Any]:
    """A program that trains 'w' with Adam, under names of its own guard."""
    program = amp.Program(name)
    with amp.program_guard(program, startup), amp.unique_name.guard():
        y = amp.nn.fc(amp.data("x", [4, 3]), 1, bias_attr=False, param_attr="w")
        loss = F.mean(y)
        adam = amp.optimizer.Adam(0.1, multi_precision=True)
        amp.decorate(adam, use_pure_fp16=True, use_fp16_guard=False).minimize(loss, startup)
    return program, loss


def test_programs_built_under_guards_of_their_own_have_state_of_their_own_in_one_startup_program() -> None:
    startup = amp.Program("startup")
    states = [{v.name for v in _adam_over_w(name, startup)[0].updates} for name in ("first", "second")]
    assert states[0] & states[1] == {"w", "w_fp32_master_0"}
    assert len(states[0]) == len(states[1]) == 9


def test_a_step_says_that_another_startup_program_began_its_state_anew() -> None:
    """A program that is built anew, and begun by its own startup program, is another matter."""
    (first, loss), (second, other) = (_adam_over_w(n, amp.Program(f"{n}_startup")) for n in ("first", "second"))
    executor, scope, feed = amp.Executor(), amp.Scope(), {"x": np.ones((4, 3), np.float32)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for program, fetched in ((first, loss), (second, other)):
            executor.run(program.startup, scope=scope)
            amp.cast_parameters_to_fp16(amp.CPUPlace(), program, scope, {"w"})
            executor.run(program, feed, [fetched], scope)
    match = "'first' trains with '.*' and 7 more, .* 'second_startup' .* own, 'first_startup'.* one startup program"
    with pytest.warns(AmpWarning, match=match):
        executor.run(first, feed, [loss], scope)


@pytest.mark.parametrize("pure", [False, True])
def test_a_static_scale_of_1_unscales_nothing_and_checks_nothing(pure: bool) -> None:
    """``decorate`` says that this scale is not checked: a loop by hand has the step of ``minimize``."""

    def trained(by_hand: bool) -> list[Any]:
        with amp.unique_name.guard(), amp.scope_guard(amp.Scope()):
            main, startup = amp.Program(), amp.Program("startup")
            with amp.program_guard(main, startup):
                x = amp.data("x", [4, 3], "float32")
                with amp.fp16_guard():
                    loss = F.mean(amp.nn.fc(x, 2))
                sgd = amp.optimizer.SGD(0.1, multi_precision=True)
                options: Any = dict(init_loss_scaling=1.0, use_dynamic_loss_scaling=False, use_pure_fp16=pure)
                optimizer = amp.decorate(sgd, **options)
                if by_hand:
                    pairs = amp.append_backward(optimizer.get_scaled_loss(loss))
                    grads = optimizer.get_unscaled_gradients([grad for _, grad in pairs])
                    assert [grad.dtype for grad in grads] == ["float32", "float32"]
                    with pytest.raises(OrderError, match="unscaled by an earlier call"):
                        optimizer.get_unscaled_gradients(grads)
                    optimizer.apply_gradients([(p, grad) for (p, _), grad in zip(pairs, grads, strict=True)])
                else:
                    optimizer.minimize(loss, startup)
                assert optimizer.get_found_inf() is None
                amp.optimizer.ExponentialMovingAverage(0.5).update(main)
            executor = amp.Executor()
            executor.run(startup)
            optimizer.amp_init(amp.CPUPlace())
            weight = main.parameters[0].name
            amp.global_scope().set_var(weight, np.ones((3, 2), np.float16 if pure else np.float32))
            executor.run(main, {"x": np.full((4, 3), 0.3, np.float32)})
            return [np.asarray(amp.global_scope().find_var(name)) for name in (weight, f"{weight}_ema_0")]

    for found, expected in zip(trained(by_hand=True), trained(by_hand=False), strict=True):
        np.testing.assert_array_equal(found, expected)
        assert found.max() < 1


def test_a_step_says_that_another_startup_program_set_its_learning_rate() -> None:
    """SGD has no moments: of two steps in one scope, the first would go by the rate of the second."""
    executor, scope, steps = amp.Executor(), amp.Scope(), []
    for name, rate in (("first", 1.0), ("second", 0.25)):
        program, startup = amp.Program(name), amp.Program(f"{name}_startup")
        with amp.program_guard(program, startup), amp.unique_name.guard():
            y = amp.nn.fc(amp.data("x", [4, 3]), 1, bias_attr=False, param_attr="w")
            amp.optimizer.SGD(rate).minimize(F.mean(y), startup)
        executor.run(startup, scope=scope)
        steps.append(program)
    feed = {"x": np.ones((4, 3), np.float32)}
    with pytest.warns(
        AmpWarning, match="'first' trains with 'learning_rate_0', which .* 'second_startup' .* and rates"
    ):
        executor.run(steps[0], feed, [], scope)
