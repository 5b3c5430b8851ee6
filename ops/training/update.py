"""Update operators: SGD, Momentum, Lars, Adam, AdamW, Lamb. One operator updates a whole parameter group.

Inputs: ``found_inf`` (None: no gate), ``learning_rate``, the optimizer's shared scalars, then one row per
parameter: parameter, gradient, accumulators, master weight (None where the parameter is its own master).
Outputs: the new shared scalars, then rows of parameter, accumulators, master weight. Scalars and accumulators have
Paddle's names. ``lr_factor`` multiplies the learning rate where it is given, ``rescale_grad`` the gradient;
``with_decay`` has a flag for every row. ``l1_decay`` takes the place of ``l2_decay`` where the penalty is that of L1.
Formulas are PaddlePaddle's (phi kernels ``sgd``, ``momentum``, ``lars_momentum``, ``adam``, ``adamw``, ``lamb``; beside
this module ``adagrad``, ``rmsprop``); ``RowWiseAdagrad`` is FBGEMM's, with one accumulator for each row.

``SparseSGD`` and so on, of those in which a row of a parameter does not depend on the others, take the same step for
some rows alone: those of a merged sparse gradient (``ops/training/sparse.py``), whose ``rows`` stand behind it.

Arithmetic is fp32 on the master weight; a 16-bit parameter is the rounded new master. On CPU these
operators, not the backward pass, decide the time of a step, so the scalar parts of a formula are folded
together and as few passes over whole tensors as possible remain. There the update of a parameter that lies by
itself is in the branch of an If, and a bad step takes the other, which keeps what was; elsewhere, where a branch could
not be captured, a ``Switch`` gates the parts of an update.
"""

from __future__ import annotations

from collections.abc import Callable

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import lowering_rule, own, slots_of
from amp_transpiler.ir.slots import Slots
from amp_transpiler.ops.common import scaled_by
from amp_transpiler.ops.training.scaling import (
    Switch,
    add_product,
    blended,
)
from amp_transpiler.ops.training.update_nodes import Gradient, Prepare, Step, emit_update

_BETAS = ("beta1_pow_acc", "beta2_pow_acc")
_MOMENTS = ("moment1", "moment2")

#: Updates that take norms of every parameter, or of its rows, and so treat each by itself.
BY_PARAMETER = frozenset({"Lamb", "Lars", "RowWiseAdagrad"})
_SPARSE = "Sparse"


def sparse_update(type_: str) -> str | None:
    """The operator that takes the step of an update for some rows of a parameter; None where there is none."""
    return None if slots_of(_SPARSE + type_) is None else _SPARSE + type_


def update_rule(
    type_: str, scalars: tuple[str, ...] = (), accumulators: tuple[str, ...] = (), by_row: bool = True
) -> Callable[[Prepare], Prepare]:
    """Register an update: scalars are prepared once for the group and gated, then every row takes a step.

    ``by_row``: a row of a parameter does not depend on the others, so that there is an update of some.
    """
    dense, sparse = (
        Slots(
            inputs=("found_inf", "learning_rate", *scalars),
            input_row=("parameter", "gradient", *beside, *accumulators, "master"),
            outputs=scalars,
            output_row=("parameter", *accumulators, "master"),
            gated=True,
        )
        for beside in ((), ("rows",))
    )

    def register(prepare: Prepare) -> Prepare:
        @lowering_rule(own(type_), native=True, slots=dense)
        def emit(e: Emitter, op: Operator, found_inf: Value | None, *inputs: Value | None) -> list[Value | None]:
            slots = dense if op.type == type_ else sparse
            return emit_update(e, op, slots, accumulators, prepare, found_inf, inputs)

        if by_row:
            lowering_rule(own(_SPARSE + type_), native=True, slots=sparse)(emit)
        return prepare

    return register


def _decay(op: Operator, index: int, attribute: str) -> float:
    """The decay of the parameter of row ``index``: the attribute, or 0 where ``with_decay`` leaves the row out."""
    return float(op.attrs.get(attribute, 0)) if op.attrs["with_decay"][index] else 0.0


def _rescaled(e: Emitter, op: Operator, gradient: Value) -> Value:
    """The gradient times ``rescale_grad``."""
    return scaled_by(e, gradient, float(op.attrs.get("rescale_grad", 1)))


def decayed(e: Emitter, op: Operator, index: int, gradient: Value, master: Value) -> Value:
    """The gradient of ``l2_decay / 2 * |master|^2`` added, or of ``l1_decay * |master|``."""
    decay = _decay(op, index, "l2_decay")
    if decay:
        return e.Add(gradient, e.Mul(master, e.like(decay, master)))
    return _with_l1(e, op, index, gradient, master)


def _with_l1(e: Emitter, op: Operator, index: int, gradient: Value, master: Value) -> Value:
    decay = _decay(op, index, "l1_decay")
    return e.Add(gradient, e.Mul(e.Sign(master), e.like(decay, master))) if decay else gradient


@update_rule("SGD")
def _sgd(e: Emitter, op: Operator, switch: Switch, lr: Value) -> tuple[list[Value], Step]:
    def step(index: int, p: Value, g: Gradient) -> tuple[Value, ...]:
        rate, decay = e.cast(lr, p.dtype), _decay(op, index, "l2_decay")
        g = g.changed(_with_l1(e, op, index, g.value, p))
        if decay:
            p = e.Mul(p, switch.keep(e.Sub(e.like(1, p), e.Mul(rate, e.like(decay, p)))))
        return (add_product(e, p, g.tensor, g.share(e.Neg(rate))),)

    return [], step


@update_rule("Momentum", accumulators=("velocity",))
def _momentum(e: Emitter, op: Operator, switch: Switch, lr: Value) -> tuple[list[Value], Step]:
    mu = op.attrs["mu"]

    def step(index: int, p: Value, g: Gradient, velocity: Value) -> tuple[Value, ...]:
        rate = e.cast(lr, p.dtype)
        g = g.changed(decayed(e, op, index, _rescaled(e, op, g.value), p))
        new = blended(e, switch, velocity, mu, g.tensor, g.share(e.like(1, p)))
        if not op.attrs["use_nesterov"]:
            return shifted(e, switch, p, new, e.Neg(rate)), new
        way = e.Add(e.Mul(new, e.Mul(rate, e.like(mu, p))), e.Mul(g.value, rate))
        return shifted(e, switch, p, way, e.like(-1, p)), new

    return [], step


def shifted(e: Emitter, switch: Switch, p: Value, way: Value, factor: Value) -> Value:
    """``p + way * factor``; p on a bad step."""
    return add_product(e, p, switch.added(way), switch.share(factor))


@update_rule("Lars", accumulators=("velocity",), by_row=False)
def _lars(e: Emitter, op: Operator, switch: Switch, lr: Value) -> tuple[list[Value], Step]:
    mu, coeff, epsilon = op.attrs["mu"], op.attrs["lars_coeff"], op.attrs["epsilon"]

    def step(index: int, p: Value, gradient: Gradient, velocity: Value) -> tuple[Value, ...]:
        g, rate = _rescaled(e, op, gradient.value), e.cast(lr, p.dtype)
        decay = _decay(op, index, "lars_weight_decay")
        if decay:  # as in Paddle's kernels: without decay this is Momentum
            size, length = (e.ReduceL2(v, keepdims=0, shape=()) for v in (p, g))
            bottom = e.Add(e.Add(length, e.Mul(size, e.like(decay, p))), e.like(epsilon, p))
            rate = e.Mul(rate, _both(e, size, length, e.Div(e.Mul(size, e.like(coeff, p)), bottom)))
            g = e.Add(g, e.Mul(p, e.like(decay, p)))
        new = shifted(e, switch, e.Mul(velocity, switch.keep(e.like(mu, p))), g, rate)
        return shifted(e, switch, p, new, e.like(-1, p)), new

    return [], step


class _Moments:
    """What Adam, AdamW and Lamb share: bias correction folded into scalars, and the two moments.

    ``m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)`` is ``rate * m / (sqrt(v) + eps * root)`` with
    ``root = sqrt(1 - beta2^t)`` and ``rate = root / (1 - beta1^t)``; the powers are those of this step.
    """

    def __init__(self, e: Emitter, op: Operator, switch: Switch, pow1: Value, pow2: Value) -> None:
        self.e, self.switch = e, switch
        self.beta1, self.beta2 = op.attrs["beta1"], op.attrs["beta2"]
        one = e.like(1, pow1)
        root = e.Sqrt(e.Sub(one, pow2), shape=())
        self.rate = e.Div(root, e.Sub(one, pow1), shape=())
        self.eps = e.Mul(root, e.like(op.attrs["epsilon"], root), shape=())
        # Zero, but made of everything that reads the powers: so they can be updated where they lie.
        after = e.Mul(self.rate, e.like(0, one))
        self.advanced = [
            e.Mul(power, e.Add(e.like(beta, power), after), shape=())
            for power, beta in ((pow1, self.beta1), (pow2, self.beta2))
        ]

    def step(self, g: Gradient, m: Value, v: Value) -> tuple[Value, Value, Value]:
        """New moments, and ``m / (sqrt(v) + eps * root)`` of them."""
        e, tensor = self.e, g.tensor
        m = blended(e, self.switch, m, self.beta1, tensor, g.share(e.like(1 - self.beta1, m)))
        square = e.Mul(tensor, tensor)
        v = blended(e, self.switch, v, self.beta2, square, g.share(e.like(1 - self.beta2, v), 2))
        return m, v, e.Div(m, e.Add(e.Sqrt(v), e.cast(self.eps, v.dtype)))


@update_rule("Adam", _BETAS, _MOMENTS)
def _adam(e: Emitter, op: Operator, switch: Switch, lr: Value, pow1: Value, pow2: Value) -> tuple[list[Value], Step]:
    moments = _Moments(e, op, switch, pow1, pow2)
    rate = e.Neg(e.Mul(lr, moments.rate))

    def step(index: int, p: Value, g: Gradient, m: Value, v: Value) -> tuple[Value, ...]:
        m, v, direction = moments.step(g.changed(decayed(e, op, index, g.value, p)), m, v)
        return shifted(e, switch, p, direction, e.cast(rate, p.dtype)), m, v

    return moments.advanced, step


@update_rule("AdamW", _BETAS, _MOMENTS)
def _adamw(e: Emitter, op: Operator, switch: Switch, lr: Value, pow1: Value, pow2: Value) -> tuple[list[Value], Step]:
    moments = _Moments(e, op, switch, pow1, pow2)
    rate = e.Neg(e.Mul(lr, moments.rate))
    kept = e.Sub(e.like(1, lr), e.Mul(lr, e.like(op.attrs["coeff"], lr)))

    def step(index: int, p: Value, g: Gradient, m: Value, v: Value) -> tuple[Value, ...]:
        m, v, direction = moments.step(g, m, v)
        if _decay(op, index, "coeff"):
            p = e.Mul(p, switch.keep(e.cast(kept, p.dtype)))
        return shifted(e, switch, p, direction, e.cast(rate, p.dtype)), m, v

    return moments.advanced, step


@update_rule("Lamb", _BETAS, _MOMENTS, by_row=False)
def _lamb(e: Emitter, op: Operator, switch: Switch, lr: Value, pow1: Value, pow2: Value) -> tuple[list[Value], Step]:
    moments = _Moments(e, op, switch, pow1, pow2)

    def step(index: int, p: Value, g: Gradient, m: Value, v: Value) -> tuple[Value, ...]:
        m, v, direction = moments.step(g, m, v)
        direction = e.Mul(direction, e.cast(moments.rate, p.dtype))
        decay = _decay(op, index, "lamb_weight_decay")
        if decay:
            direction = e.Add(direction, e.Mul(p, e.like(decay, p)))
        rate = e.cast(lr, p.dtype)
        if decay or op.attrs["always_adapt"]:
            rate = e.Mul(rate, _trust(e, p, direction))
        return shifted(e, switch, p, direction, e.Neg(rate)), m, v

    return moments.advanced, step


def _trust(e: Emitter, p: Value, direction: Value) -> Value:
    """``|p| / |direction|``, 1 where either norm is zero."""
    size, length = (e.ReduceL2(v, keepdims=0, shape=()) for v in (p, direction))
    return _both(e, size, length, e.Div(size, length))


def _both(e: Emitter, size: Value, length: Value, trust: Value) -> Value:
    """``trust`` where both norms are above zero, else 1."""
    zero, one = e.like(0, trust), e.like(1, trust)
    return e.Where(e.And(e.Greater(size, zero), e.Greater(length, zero)), trust, one, shape=())
