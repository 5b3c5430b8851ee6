"""Optimizers as Paddle's scripts make them, what is written on them afterwards, and pairs that are left out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler import optimizer as optim
from amp_transpiler.errors import ArgumentError, ArgumentTypeError, OrderError, ScopeError
from amp_transpiler.nn import functional as F
from amp_transpiler.regularizer import L1Decay, L2Decay
from tests.helpers.optimizing import Training

P0 = np.array([0.5, -0.25, 2.0, 0.0], np.float32)
GRADS = [np.array(g, np.float64) for g in ([1.0, -2.0, 0.5, 0.25], [-0.5, 0.5, 1.0, 0.0], [0.125, 0.0, -1.0, 2.0])]


def trained(optimizer: Any) -> np.ndarray[Any, Any]:
    training = Training(optimizer, [P0])
    for grad in GRADS:
        training.step(grad)
    return training["p0"]


# -- formulas ------------------------------------------------------------------------------------------------
def test_lars_takes_paddles_recorded_steps() -> None:
    """Three steps of Paddle 2.6's ``lars_momentum`` kernel."""
    start = [
        0.045278556644916534,
        -0.49926674365997314,
        -1.271601915359497,
        -0.517983078956604,
        0.5101427435874939,
        -0.2882019281387329,
        -0.23757468163967133,
    ]
    grads = [
        [-0.498752117, -0.734062612, 1.24109435, 0.0745119601, 0.214213774, 0.209977776, -1.57064509],
        [-0.863727987, 1.80902278, 0.669489682, -0.298024237, -0.167692378, -2.0316205, 1.05967295],
        [-2.25875616, -0.929584146, -0.95586282, 1.00510073, 0.164662078, 0.974701285, 0.318961382],
    ]
    params = [
        [0.045314461, -0.499213874, -1.2716912, -0.517988443, 0.510127306, -0.288217038, -0.237461597],
        [0.0453906283, -0.499258131, -1.27180552, -0.517978132, 0.510121882, -0.288127482, -0.237413615],
        [0.0455792695, -0.499248534, -1.27185762, -0.518022239, 0.510108232, -0.288098693, -0.237387389],
    ]
    training = Training(
        optim.LarsMomentum(0.1, 0.9, lars_coeff=0.001, lars_weight_decay=0.0005), [np.array(start, np.float32)]
    )
    for grad, expected in zip(grads, params, strict=True):
        training.step(grad)
        assert np.abs(training["p0"] - expected).max() < 1e-7


def test_what_lars_spares_from_decay_moves_as_with_momentum() -> None:
    spared = trained(optim.Lars(0.1, 0.9, exclude_from_weight_decay=["p0"]))
    assert np.allclose(spared, trained(optim.Momentum(0.1, 0.9)), rtol=1e-6)
    assert not np.allclose(spared, trained(optim.Lars(0.1, 0.9)), rtol=1e-3)


@pytest.mark.parametrize("coeff", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["SGD", "Momentum", "Adam"])
def test_l1_decay_adds_the_sign_to_the_gradient(kind: str, coeff: float) -> None:
    """The steps are those of an optimizer without decay whose gradients are g + coeff * sign(p)."""
    decayed = Training(getattr(optim, kind)(0.1, weight_decay=L1Decay(coeff)), [P0])
    plain = Training(getattr(optim, kind)(0.1), [P0])
    for grad in GRADS:
        plain.step(grad + coeff * np.sign(plain["p0"]))
        decayed.step(grad)
        assert np.allclose(decayed["p0"], plain["p0"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "make",
    [
        lambda **more: optim.SGD(0.1, **more),
        lambda **more: optim.Momentum(0.1, **more),
        lambda **more: optim.Adam(0.1, **more),
    ],
)
def test_l2_decay_is_a_number(make: Callable[..., Any]) -> None:
    number = trained(make(weight_decay=0.5))
    assert trained(make(weight_decay=L2Decay(0.5))).tobytes() == number.tobytes()
    assert trained(make(regularization=amp.regularizer.L2Decay(0.5))).tobytes() == number.tobytes()
    groups = [{"params": ["p0"], "weight_decay": L2Decay(0.5)}]
    assert trained(make(parameters=groups)).tobytes() == number.tobytes()


def test_rescale_grad_comes_before_decay() -> None:
    rescaled = trained(optim.Momentum(0.1, rescale_grad=0.25, weight_decay=0.5))
    plain = Training(optim.Momentum(0.1, weight_decay=0.5), [P0])
    for grad in GRADS:
        plain.step(0.25 * grad)
    assert rescaled.tobytes() == plain["p0"].tobytes()


def test_lr_ratio_is_a_factor_on_the_rate_of_a_parameter() -> None:
    """lr * lr_ratio in the decay and in the step, as in Paddle's formula."""
    layered = Training(optim.AdamW(0.1, lr_ratio=lambda p: {"p0": 0.5, "p1": 1.0}[p.name]), [P0, P0])
    half, full = Training(optim.AdamW(0.05), [P0]), Training(optim.AdamW(0.1), [P0])
    for grad in GRADS:
        layered.step(grad, grad)
        half.step(grad)
        full.step(grad)
    assert np.allclose(layered["p0"], half["p0"], rtol=1e-6) and np.allclose(layered["p1"], full["p0"], rtol=1e-6)


# -- Paddle's signatures -------------------------------------------------------------------------------------
#: Positional calls in the order of Paddle's signatures, and the same by keyword.
CALLS: list[tuple[Any, Any]] = [
    (optim.SGD(0.1, None, 0.5, None, True), optim.SGD(0.1, weight_decay=0.5, multi_precision=True)),
    (
        optim.Momentum(0.1, 0.8, None, True, 0.5, None, True, 0.25),
        optim.Momentum(0.1, 0.8, use_nesterov=True, weight_decay=0.5, multi_precision=True, rescale_grad=0.25),
    ),
    (
        optim.Adam(0.1, 0.5, 0.75, 1e-3, None, 0.5, None, False, True),
        optim.Adam(0.1, 0.5, 0.75, 1e-3, weight_decay=0.5, multi_precision=True),
    ),
    (
        optim.AdamW(0.1, 0.5, 0.75, 1e-3, None, 0.5, None, None, None, False, True),
        optim.AdamW(0.1, 0.5, 0.75, 1e-3, weight_decay=0.5, multi_precision=True),
    ),
    (
        optim.RMSProp(0.1, 0.5, 1e-3, 0.75, True, None, 0.5, None, None, True),
        optim.RMSProp(0.1, rho=0.5, epsilon=1e-3, momentum=0.75, centered=True, weight_decay=0.5, multi_precision=True),
    ),
    (
        optim.Lamb(0.1, 0.02, 0.5, 0.75, 1e-3, None, None, None, True, True),
        optim.Lamb(0.1, 0.02, 0.5, 0.75, 1e-3, multi_precision=True, always_adapt=True),
    ),
]


@pytest.mark.parametrize("positional, named", CALLS, ids=[type(call[0]).__name__ for call in CALLS])
def test_positional_arguments_are_in_paddles_order(positional: Any, named: Any) -> None:
    assert vars(positional) == vars(named) and positional.multi_precision


@pytest.mark.parametrize(
    "make",
    [
        lambda: optim.SGD(0.1, parameters=["p0"]),
        lambda: optim.MomentumOptimizer(0.1, 0.9, parameter_list=["p0"]),
        lambda: optim.Momentum(0.1, parameters=["p0"], use_multi_tensor=True),
        lambda: optim.AdamOptimizer(0.1, parameters=["p0"], lazy_mode=True, grad_clip=None),
        lambda: optim.AdamW(0.1, parameters=["p0"], weight_decay=0.5, lazy_mode=False),
        lambda: optim.Lamb(0.1, parameters=["p0"]),
        lambda: optim.LarsMomentumOptimizer(0.1, 0.9, parameters=["p0"]),
    ],
)
def test_paddles_keywords(make: Callable[[], Any]) -> None:
    assert make().parameter_list == ["p0"]


@pytest.mark.parametrize("decorated", [False, True])
@pytest.mark.parametrize("where", ["optimizer", "group", "minimize"])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_list_of_all_parameters_leaves_the_frozen_ones_alone(by_name: bool, where: str, decorated: bool) -> None:
    """Called by name, statistics that a norm only reads were trained, and those that it updates ended in an error."""
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        frozen = amp.create_parameter([2], name="frozen", trainable=False)
        out = amp.nn.batch_norm(amp.nn.fc(amp.data("x", [4, 3], "float32"), 2), is_test=by_name) * frozen
        everything: list[Any] = main.all_parameters()
        if by_name:
            everything = [parameter.name for parameter in everything]
        given = {"optimizer": everything, "group": [{"params": everything}], "minimize": None}[where]
        optimizer: Any = optim.SGD(0.1, parameters=given)
        if decorated:
            optimizer = amp.decorate(optimizer, init_loss_scaling=8.0)
        more = {"parameters": everything} if where == "minimize" else {}
        _, pairs = optimizer.minimize(F.mean(out), startup, **more)
    assert len(everything) == 7
    assert [p.name for p, _ in pairs] == ["fc_0.w_0", "fc_0.b_0", "batch_norm_0.w_0", "batch_norm_0.b_0"]


@pytest.mark.parametrize("decorated", [False, True])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_list_of_frozen_parameters_alone_is_refused(by_name: bool, decorated: bool) -> None:
    """A parameter with ``trainable=False`` trained where it was called by name."""
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup):
        frozen: Any = amp.create_parameter([2], name="frozen", trainable=False)
        loss = F.mean(amp.nn.fc(amp.data("x", [4, 3], "float32"), 2) * frozen)
        optimizer: Any = optim.SGD(0.1)
        if decorated:
            optimizer = amp.decorate(optimizer, init_loss_scaling=8.0)
        with pytest.raises(ArgumentError, match="parameter_list: 'frozen' do not train.*trainable = True"):
            optimizer.minimize(loss, startup, parameter_list=["frozen" if by_name else frozen])


@pytest.mark.parametrize(
    "call, error, said",
    [
        (
            lambda: optim.AdamW(weight_decay=L2Decay(0.1)),
            ArgumentTypeError,
            r"AdamW: weight_decay is L2Decay\(coeff=0.1\).*the number 0.1",
        ),
        (lambda: optim.Lamb(regularization=L2Decay(0.1)), ArgumentError, "lamb_weight_decay"),
        (
            lambda: optim.SGD(0.1, parameters=["a"], parameter_list=["a"]),
            ArgumentTypeError,
            "another name of 'parameter_list'",
        ),
        (lambda: L2Decay(-1.0), ArgumentError, "L2Decay: coeff is -1.0"),
        (lambda: optim.Adam(weight_decay="l2"), ArgumentError, "weight_decay is 'l2'"),
        (lambda: optim.Momentum(rescale_grad=0), ArgumentError, "rescale_grad is 0"),
        (lambda: optim.Adamax(0.1), AttributeError, "Adam comes nearest"),
        (lambda: optim.RMSProp(0.1, rho=1.0), ArgumentError, "RMSProp: rho is 1.0"),
        (lambda: optim.Adam().step(), AttributeError, "minimize appends the step"),
        (lambda: amp.decorate(optim.Adam()).clear_grad(), AttributeError, "made anew by every run"),
        (lambda: optim.Adam().stepp, AttributeError, "has no attribute 'stepp'$"),
    ],
)
def test_what_is_not_offered_points_elsewhere(call: Callable[[], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()


def test_a_penalty_of_a_parameter_that_the_optimizer_does_not_take_names_a_group() -> None:
    """The way out was a number for ``regularizer``, which takes none."""
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        w = amp.create_parameter([2], attr=amp.ParamAttr("w", regularizer=L2Decay(0.25)))
        loss = F.mean(w * w)
        with pytest.raises(
            ArgumentTypeError, match=r"AdamW: ParamAttr of 'w' asks for L2Decay\(coeff=0.25\).*'params'"
        ):
            optim.AdamW(0.1).minimize(loss, startup)
        plain = amp.create_parameter([2], name="plain")
        optim.AdamW(0.1, parameters=[{"params": ["plain"], "weight_decay": 0.25}]).minimize(F.mean(plain), startup)


@pytest.mark.parametrize("kind", [optim.AdamW, optim.Lamb])
def test_a_penalty_of_0_leaves_a_decay_apart_from_the_gradient_alone(kind: Any) -> None:
    """Norms of Paddle's detectors ask for L2Decay(0.0) whatever the optimizer: AdamW and Lamb refused it."""

    def trained_with(attr: amp.ParamAttr) -> bytes:
        main, startup, scope = amp.Program(), amp.Program("startup"), amp.Scope()
        with amp.program_guard(main, startup), amp.unique_name.guard():
            w = amp.create_parameter([3], attr=attr, initializer=P0[:3])
            kind(0.1).minimize(F.mean(w * w * 0.5), startup)
        executor = amp.Executor(amp.CPUPlace())
        executor.run(startup, scope=scope)
        for _ in range(3):
            executor.run(main, scope=scope)
        return bytes(scope.find_var("w").tobytes())

    assert trained_with(amp.ParamAttr("w", regularizer=L2Decay(0.0))) == trained_with(amp.ParamAttr("w"))


# -- what is written afterwards ------------------------------------------------------------------------------
class Net:
    """Two losses on two layers; the first depends on the first layer alone."""

    def __init__(self, optimizer: Any) -> None:
        self.main, self.startup = amp.Program(), amp.Program("startup")
        with amp.program_guard(self.main, self.startup), amp.unique_name.guard():
            x = amp.data("x", [4, 3], "float32")
            hidden = amp.nn.fc(x, 2)
            self.partial = F.mean(hidden)
            self.loss = F.mean(amp.nn.fc(hidden, 1))
        self.optimizer = optimizer
        self.scope, self.executor = amp.Scope(), amp.Executor(amp.CPUPlace())

    def moved(self) -> float:
        """How far a step moves the last bias, whose gradient is 1."""
        (before,) = self.scope.find_var("fc_1.b_0").copy()
        self.executor.run(self.main, feed={"x": np.ones((4, 3), np.float32)}, scope=self.scope)
        return float(before - self.scope.find_var("fc_1.b_0")[0])


@pytest.mark.parametrize(
    "wrap", [lambda o: o, lambda o: amp.decorate(o, init_loss_scaling=8.0)], ids=["plain", "decorated"]
)
def test_the_learning_rate_is_set_before_and_after_minimize(wrap: Callable[[Any], Any]) -> None:
    net = Net(wrap(optim.SGD(0.1)))
    net.optimizer.learning_rate = 0.5
    assert net.optimizer.get_lr(net.scope) == 0.5
    net.optimizer.minimize(net.loss, net.startup)
    with amp.scope_guard(net.scope):
        with pytest.raises(ScopeError):
            net.optimizer.learning_rate = 7.0
        net.executor.run(net.startup)
        assert net.moved() == pytest.approx(0.5)
        net.optimizer.learning_rate = 7.0
        assert net.optimizer.get_lr() == net.optimizer.learning_rate == 7.0
    assert net.moved() == pytest.approx(7.0)
    with pytest.raises(ArgumentError, match="learning_rate is -1"):
        net.optimizer.learning_rate = -1
    with pytest.raises(OrderError, match="takes no schedule any more"):
        net.optimizer.learning_rate = optim.lr.NoamDecay(8, 3)


def test_other_attributes_reach_the_optimizer_or_raise() -> None:
    decorated = amp.decorate(optim.Momentum(1.0, 0.9))
    decorated.momentum, decorated.weight_decay = 0.0, L2Decay(0.5)
    decorated.parameter_list = ["fc_1.b_0"]
    net = Net(decorated)
    with pytest.raises(AttributeError, match="a decorated Momentum has no attribute 'learnig_rate'"):
        decorated.learnig_rate = 7.0
    decorated.minimize(net.loss, net.startup)
    (update,) = [op for op in net.main.operators if op.type == "Momentum"]
    assert update.attrs["mu"] == 0.0 and update.attrs["l2_decay"] == 0.5 and update.attrs["n"] == 1
    for name, value in (("momentum", 0.9), ("weight_decay", 0.0), ("grad_clip", None), ("parameter_list", None)):
        with pytest.raises(OrderError, match=f"Momentum.{name} is built into program"):
            setattr(decorated, name, value)
    assert decorated.momentum == 0.0
    two = amp.decorate([optim.SGD(0.1, parameter_list=["a"]), optim.SGD(0.2)])
    with pytest.raises(
        ArgumentError, match=r"it holds 2; set it on one of them, as in decorated.optimizers\[0\].learning_rate"
    ):
        two.learning_rate = 0.5
    with pytest.raises(ArgumentError, match=r"it holds 2; .* decorated.optimizers\[0\].set_lr"):
        two.set_lr(0.5)
    two.optimizers[1].learning_rate = 0.5
    assert [each.learning_rate for each in two.optimizers] == [0.1, 0.5]


def test_a_bad_value_set_before_minimize_is_named_by_it() -> None:
    optimizer = optim.Adam()
    optimizer.beta1 = 1.5
    net = Net(optimizer)
    with pytest.raises(ArgumentError, match="beta1 is 1.5"):
        optimizer.minimize(net.loss, net.startup)
    with pytest.raises(ArgumentTypeError, match="grad_clip"):
        optimizer.grad_clip = 1.0  # type: ignore[assignment]
        optimizer.parameter_list = None


# -- parameters without a gradient ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    "wrap", [lambda o: o, lambda o: amp.decorate(o, init_loss_scaling=8.0)], ids=["plain", "decorated"]
)
@pytest.mark.parametrize("steps", ["minimize", "backward"])
def test_parameters_without_a_gradient_are_named(steps: str, wrap: Callable[[Any], Any]) -> None:
    net = Net(wrap(optim.SGD(0.1)))
    with pytest.warns(UserWarning, match=r"get no gradient from this loss.*: 'fc_1.w_0', 'fc_1.b_0'\. ") as seen:
        if steps == "minimize":
            net.optimizer.minimize(net.partial, net.startup)
        else:
            net.optimizer.apply_gradients(net.optimizer.backward(net.partial, net.startup))
    assert len(seen) == 1 and seen[0].filename == __file__
    assert [p.name for p in net.main.updates if p.trainable] == ["fc_0.w_0", "fc_0.b_0"]


@pytest.mark.parametrize(
    "wrap", [lambda o: o, lambda o: amp.decorate(o, init_loss_scaling=8.0)], ids=["plain", "decorated"]
)
@pytest.mark.parametrize(
    "listed, more",
    [(None, {"parameters": ["fc_0.*"]}), (["fc_0.*"], {}), (None, {"no_grad_set": ["fc_1.w_0", "fc_1.b_0"]})],
)
def test_what_was_left_out_on_purpose_is_not_named(listed: Any, more: Any, wrap: Callable[[Any], Any]) -> None:
    net = Net(wrap(optim.SGD(0.1, parameter_list=listed)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net.optimizer.minimize(net.partial, net.startup, **more)


@pytest.mark.parametrize(
    "wrap", [lambda o: o, lambda o: amp.decorate(o, init_loss_scaling=8.0)], ids=["plain", "decorated"]
)
def test_reversed_pairs_are_called_that(wrap: Callable[[Any], Any]) -> None:
    net = Net(wrap(optim.SGD(0.1)))
    pairs = net.optimizer.backward(net.loss, net.startup)
    with pytest.raises(
        ArgumentError, match=r"\('fc_0.w_0@GRAD', 'fc_0.w_0'\) is reversed; a pair is \(parameter, gradient\)"
    ):
        net.optimizer.apply_gradients([(grad, parameter) for parameter, grad in pairs])
