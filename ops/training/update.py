"""Update operators: SGD, Momentum, Lars, Adam, AdamW, Lamb. One operator updates a whole parameter group.

Inputs: ``found_inf`` (None: no gate), ``learning_rate``, the optimizer's shared scalars, then one row per
parameter: parameter, gradient, accumulators, master weight (None where the parameter is its own master).
Outputs: the new shared scalars, then rows of parameter, accumulators, master weight. Scalars and accumulators have
Paddle's names. ``lr_factor`` multiplies the learning rate where it is given, ``rescale_grad`` the gradient;
``with_decay`` has a flag for every row. ``l1_decay`` takes the place of ``l2_decay`` where the penalty is that of L1.
Formulas are PaddlePaddle's (phi kernels ``sgd``, ``momentum``, ``lars_momentum``, ``adam``, ``adamw``, ``lamb``).

Arithmetic is fp32 on the master weight; a 16-bit parameter is the rounded new master. On CPU these
operators, not the backward pass, decide the time of a step, so the scalar parts of a formula are folded
together and as few passes over whole tensors as possible remain.
"""

from __future__ import annotations

from collections.abc import Callable

from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.opdef import Slots, lowering_rule, own
from amp_transpiler.ops.training.scaling import gate

_BETAS = ("beta1_pow_acc", "beta2_pow_acc")
_MOMENTS = ("moment1", "moment2")

#: ``step(index, master, gradient, *accumulators) -> (new master, *new accumulators)``
Step = Callable[..., tuple[Value, ...]]
#: ``prepare(e, op, learning_rate, *scalars) -> (new scalars, step)``
Prepare = Callable[..., tuple[list[Value], Step]]


def _update(
    type_: str, scalars: tuple[str, ...] = (), accumulators: tuple[str, ...] = ()
) -> Callable[[Prepare], Prepare]:
    """Register an update: scalars are prepared once for the group, then every row takes a step and is gated."""
    slots = Slots(
        inputs=("found_inf", "learning_rate", *scalars),
        input_row=("parameter", "gradient", *accumulators, "master"),
        outputs=scalars,
        output_row=("parameter", *accumulators, "master"),
        gated=True,
    )

    def register(prepare: Prepare) -> Prepare:
        @lowering_rule(own(type_), slots=slots)
        def emit(e: Emitter, op: Operator, found_inf: Value | None, *inputs: Value | None) -> list[Value | None]:
            kept = gate(e, found_inf)
            head, values = inputs[: len(slots.inputs) - 1], [None, *inputs]
            rate, *shared = [e.reshape(v, ()) for v in head if v is not None]
            if "lr_factor" in op.attrs:
                rate = e.Mul(rate, e.like(op.attrs["lr_factor"], rate))
            advanced, step = prepare(e, op, rate, *shared)
            results: list[Value | None] = [
                e.reshape(kept(new, old), was.shape or ())
                for new, old, was in zip(advanced, shared, head[1:], strict=True)
                if was is not None
            ]
            for index, row in enumerate(slots.rows(values)):
                parameter, gradient, master = row["parameter"], row["gradient"], row["master"]
                assert parameter is not None and gradient is not None
                old = master or parameter
                before = [row[name] for name in accumulators]
                new, *after = step(index, old, e.cast(gradient, old.dtype), *before)
                results.append(kept(new, parameter))
                results += [kept(value, was) for value, was in zip(after, before, strict=True) if was]
                results.append(kept(new, master) if master else None)
            return results

        return prepare

    return register


def _decay(op: Operator, index: int, attribute: str) -> float:
    """The decay of the parameter of row ``index``: the attribute, or 0 where ``with_decay`` leaves the row out."""
    return float(op.attrs.get(attribute, 0)) if op.attrs["with_decay"][index] else 0.0


def _rescaled(e: Emitter, op: Operator, gradient: Value) -> Value:
    """The gradient times ``rescale_grad``."""
    factor = float(op.attrs.get("rescale_grad", 1))
    return gradient if factor == 1 else e.Mul(gradient, e.like(factor, gradient))


def _decayed(e: Emitter, op: Operator, index: int, gradient: Value, master: Value) -> Value:
    """The gradient of ``l2_decay / 2 * |master|^2`` added, or of ``l1_decay * |master|``."""
    decay = _decay(op, index, "l2_decay")
    if decay:
        return e.Add(gradient, e.Mul(master, e.like(decay, master)))
    return _with_l1(e, op, index, gradient, master)


def _with_l1(e: Emitter, op: Operator, index: int, gradient: Value, master: Value) -> Value:
    decay = _decay(op, index, "l1_decay")
    return e.Add(gradient, e.Mul(e.Sign(master), e.like(decay, master))) if decay else gradient


@_update("SGD")
def _sgd(e: Emitter, op: Operator, lr: Value) -> tuple[list[Value], Step]:
    def step(index: int, p: Value, g: Value) -> tuple[Value, ...]:
        rate, decay = e.cast(lr, p.dtype), _decay(op, index, "l2_decay")
        g = _with_l1(e, op, index, g, p)
        if decay:
            p = e.Mul(p, e.Sub(e.like(1, p), e.Mul(rate, e.like(decay, p))))
        return (e.Sub(p, e.Mul(g, rate)),)

    return [], step


@_update("Momentum", accumulators=("velocity",))
def _momentum(e: Emitter, op: Operator, lr: Value) -> tuple[list[Value], Step]:
    mu = op.attrs["mu"]

    def step(index: int, p: Value, g: Value, velocity: Value) -> tuple[Value, ...]:
        rate = e.cast(lr, p.dtype)
        g = _decayed(e, op, index, _rescaled(e, op, g), p)
        new = e.Add(e.Mul(velocity, e.like(mu, p)), g)
        if not op.attrs["use_nesterov"]:
            return e.Sub(p, e.Mul(new, rate)), new
        return e.Sub(p, e.Add(e.Mul(new, e.Mul(rate, e.like(mu, p))), e.Mul(g, rate))), new

    return [], step


@_update("Lars", accumulators=("velocity",))
def _lars(e: Emitter, op: Operator, lr: Value) -> tuple[list[Value], Step]:
    mu, coeff, epsilon = op.attrs["mu"], op.attrs["lars_coeff"], op.attrs["epsilon"]

    def step(index: int, p: Value, g: Value, velocity: Value) -> tuple[Value, ...]:
        g, rate, decay = _rescaled(e, op, g), e.cast(lr, p.dtype), _decay(op, index, "lars_weight_decay")
        if decay:  # as in Paddle's kernels: without decay this is Momentum
            size, length = (e.ReduceL2(v, keepdims=0, shape=()) for v in (p, g))
            bottom = e.Add(e.Add(length, e.Mul(size, e.like(decay, p))), e.like(epsilon, p))
            rate = e.Mul(rate, _both(e, size, length, e.Div(e.Mul(size, e.like(coeff, p)), bottom)))
            g = e.Add(g, e.Mul(p, e.like(decay, p)))
        new = e.Add(e.Mul(velocity, e.like(mu, p)), e.Mul(g, rate))
        return e.Sub(p, new), new

    return [], step


class _Moments:
    """What Adam, AdamW and Lamb share: bias correction folded into scalars, and the two moments.

    ``m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)`` is ``rate * m / (sqrt(v) + eps * root)`` with
    ``root = sqrt(1 - beta2^t)`` and ``rate = root / (1 - beta1^t)``; the powers are those of this step.
    """

    def __init__(self, e: Emitter, op: Operator, pow1: Value, pow2: Value) -> None:
        self.e = e
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

    def step(self, g: Value, m: Value, v: Value) -> tuple[Value, Value, Value]:
        """New moments, and ``m / (sqrt(v) + eps * root)`` of them."""
        e = self.e
        m = e.Add(e.Mul(m, e.like(self.beta1, m)), e.Mul(g, e.like(1 - self.beta1, g)))
        v = e.Add(e.Mul(v, e.like(self.beta2, v)), e.Mul(e.Mul(g, g), e.like(1 - self.beta2, g)))
        return m, v, e.Div(m, e.Add(e.Sqrt(v), e.cast(self.eps, v.dtype)))


@_update("Adam", _BETAS, _MOMENTS)
def _adam(e: Emitter, op: Operator, lr: Value, pow1: Value, pow2: Value) -> tuple[list[Value], Step]:
    moments = _Moments(e, op, pow1, pow2)
    rate = e.Mul(lr, moments.rate)

    def step(index: int, p: Value, g: Value, m: Value, v: Value) -> tuple[Value, ...]:
        m, v, direction = moments.step(_decayed(e, op, index, g, p), m, v)
        return e.Sub(p, e.Mul(direction, e.cast(rate, p.dtype))), m, v

    return moments.advanced, step


@_update("AdamW", _BETAS, _MOMENTS)
def _adamw(e: Emitter, op: Operator, lr: Value, pow1: Value, pow2: Value) -> tuple[list[Value], Step]:
    moments = _Moments(e, op, pow1, pow2)
    rate = e.Mul(lr, moments.rate)
    kept = e.Sub(e.like(1, lr), e.Mul(lr, e.like(op.attrs["coeff"], lr)))

    def step(index: int, p: Value, g: Value, m: Value, v: Value) -> tuple[Value, ...]:
        m, v, direction = moments.step(g, m, v)
        if _decay(op, index, "coeff"):
            p = e.Mul(p, e.cast(kept, p.dtype))
        return e.Sub(p, e.Mul(direction, e.cast(rate, p.dtype))), m, v

    return moments.advanced, step


@_update("Lamb", _BETAS, _MOMENTS)
def _lamb(e: Emitter, op: Operator, lr: Value, pow1: Value, pow2: Value) -> tuple[list[Value], Step]:
    moments = _Moments(e, op, pow1, pow2)

    def step(index: int, p: Value, g: Value, m: Value, v: Value) -> tuple[Value, ...]:
        m, v, direction = moments.step(g, m, v)
        direction = e.Mul(direction, e.cast(moments.rate, p.dtype))
        decay = _decay(op, index, "lamb_weight_decay")
        if decay:
            direction = e.Add(direction, e.Mul(p, e.like(decay, p)))
        rate = e.cast(lr, p.dtype)
        if decay or op.attrs["always_adapt"]:
            rate = e.Mul(rate, _trust(e, p, direction))
        return e.Sub(p, e.Mul(direction, rate)), m, v

    return moments.advanced, step


def _trust(e: Emitter, p: Value, direction: Value) -> Value:
    """``|p| / |direction|``, 1 where either norm is zero."""
    size, length = (e.ReduceL2(v, keepdims=0, shape=()) for v in (p, direction))
    return _both(e, size, length, e.Div(size, length))


def _both(e: Emitter, size: Value, length: Value, trust: Value) -> Value:
    """``trust`` where both norms are above zero, else 1."""
    zero, one = e.like(0, trust), e.like(1, trust)
    return e.Where(e.And(e.Greater(size, zero), e.Greater(length, zero)), trust, one, shape=())
