"""``LossScaler``: the rule by which a loss scale changes, as data, with the rules of other systems as presets.

The state is one record, :class:`LossScale`: the scale (fp32) and two counts (int32). A scaler says how a good step, all
of whose gradients are finite, and a bad step change it. Read the tables of the presets like this::

    good step: good += 1; bad = 0; at good == 1000: scale *= 2, good = 0
    bad step:  bad += 1; good = 0; at bad == 2: scale *= 0.8, bad = 0

``at good == n`` compares the count after it was raised. Scales are fp32 and are multiplied by fp32 factors. Systems
that keep the scale as a Python float (Apex, DeepSpeed, MindSpore) agree with this where the scale is a power of two
between 2**-149 and 2**127, which it is with their factors and a power of two to begin with.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir.types import LIMITS
from amp_transpiler.ops.training.scaling import RULE
from amp_transpiler.optimizer.alarm import raise_alarm
from amp_transpiler.option_checks import LARGEST_COUNT, is_finite, switch, whole

_LARGEST = 2.0**128
_FLAGS = ("dynamic", "accumulate", "hysteresis", "clamp_always", "finite_growth", "at_least", "error_at_floor")
#: Fields that a scale which never changes uses too.
_FIXED = ("init_scale", "dynamic", "max_bad_in_a_row")


class LossScale(NamedTuple):
    """What a scaler changes from step to step: the scale and the counts behind it.

    ``good``: good steps since the last bad step or growth. ``bad``: bad steps that count towards a decrease; what is
    left of a hysteresis of n is n − ``bad``. The rest is there where an alarm is on, else None: the number of steps, up
    to now and in a row, that were bad, whose loss was not finite, that were due to decrease a scale at its floor.
    """

    scale: float
    good: int | None = None
    bad: int | None = None
    bad_in_a_row: int | None = None
    loss_bad_in_a_row: int | None = None
    bad_at_floor: int | None = None


@dataclass(frozen=True)
class LossScaler:
    """A rule for the loss scale; ``decorate(..., scaler=)`` takes one. The defaults are PaddlePaddle's.

    Attributes:
        init_scale: the scale of the first step, > 0.
        dynamic: False for a scale that never changes; the fields from here to ``at_least`` are then left alone.
        growth_factor: factor >= 1 after ``growth_every`` good steps without a bad one between them.
        growth_every: see there, >= 1.
        growth_delay: good steps that do not count at the start and after each bad step, >= 0.
        backoff_factor: factor in (0, 1] after ``backoff_after`` bad steps.
        backoff_after: see there, >= 1.
        accumulate: the count of bad steps starts anew when the scale grows. Otherwise at every good step, so that only
            bad steps in a row make up ``backoff_after``.
        hysteresis: a decrease leaves the count of bad steps where it is, so that each further bad step decreases the
            scale, until the count starts anew. Otherwise a decrease starts it anew.
        floor: a decrease stops here (it raises a scale that is below); None for no floor.
        ceiling: a growth stops here; None for no ceiling.
        clamp_always: floor and ceiling hold at every step, not at a decrease and a growth alone.
        finite_growth: a growth that leaves fp32 does not happen (its count starts anew); otherwise the scale gets
            infinite.
        at_least: counts fire on ``>=``, not on ``==``. They differ only for counts restored from another rule.
        max_bad_in_a_row: alarm when more steps than this in a row are bad; None for no such alarm.
        error_at_floor: alarm when a bad step is due to decrease a scale that is at its floor.

    Raises:
        ArgumentTypeError, ArgumentError: a value of the wrong kind, out of range, or left unused by the other fields.
    """

    init_scale: float = 2.0**15
    dynamic: bool = True
    growth_factor: float = 2.0
    growth_every: int = 1000
    growth_delay: int = 0
    backoff_factor: float = 0.8
    backoff_after: int = 2
    accumulate: bool = False
    hysteresis: bool = False
    floor: float | None = 1.0
    ceiling: float | None = None
    clamp_always: bool = False
    finite_growth: bool = True
    at_least: bool = False
    max_bad_in_a_row: int | None = None
    error_at_floor: bool = False

    def __post_init__(self) -> None:
        for name in _FLAGS:
            object.__setattr__(self, name, switch(f"LossScaler: {name}", getattr(self, name)))
        for name, low, high in (
            ("init_scale", 0, _LARGEST),
            ("growth_factor", 1, _LARGEST),
            ("backoff_factor", 0, 1),
            ("floor", 0, _LARGEST),
            ("ceiling", 0, _LARGEST),
        ):
            self._number(name, low, high)
        for name, low in (("growth_every", 1), ("growth_delay", 0), ("backoff_after", 1), ("max_bad_in_a_row", 0)):
            self._count(name, low)
        self._consistent()

    def _number(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if value is None and name in ("floor", "ceiling"):
            return
        good = is_finite(value)
        if not good or value < low or value > high or not LIMITS["float32"].holds(value):
            bounds = f"[1, {high:g})" if low else f"(0, {high:g}{']' if high == 1 else ')'}"
            raise ArgumentError(f"LossScaler: {name} is {value!r}; expected a number in {bounds}")
        object.__setattr__(self, name, float(value))

    def _count(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if value is None and name == "max_bad_in_a_row":
            return
        whole(f"LossScaler: {name}", value, low, LARGEST_COUNT)
        object.__setattr__(self, name, int(value))

    def _consistent(self) -> None:
        """Raise for a field that the others leave without effect, or that contradicts them."""
        if not self.dynamic:
            dynamic = [field for field in dataclasses.fields(self) if field.name not in _FIXED]
            unused = [field.name for field in dynamic if getattr(self, field.name) != field.default]
            if unused:
                raise ArgumentError(
                    f"LossScaler: a fixed scale makes no use of {', '.join(unused)}; leave "
                    f"{'it' if len(unused) == 1 else 'them'} out, or pass dynamic=True"
                )
            return
        if self.backoff_after == 1 and (self.accumulate or self.hysteresis):
            raise ArgumentError(
                "LossScaler: with backoff_after=1 every bad step decreases the scale, so that "
                "accumulate and hysteresis have no effect; pass accumulate=False, hysteresis=False, or "
                "a backoff_after of 2 or more"
            )
        if self.error_at_floor and self.floor is None:
            raise ArgumentError("LossScaler: error_at_floor needs a floor; pass floor=1.0, or use max_bad_in_a_row")
        if self.clamp_always and self.floor is None and self.ceiling is None:
            raise ArgumentError("LossScaler: clamp_always has nothing to hold the scale between; pass floor or ceiling")
        if self.floor is not None and self.ceiling is not None and self.floor > self.ceiling:
            raise ArgumentError(f"LossScaler: floor {self.floor:g} is above ceiling {self.ceiling:g}")
        if self.ceiling is not None and self.init_scale > self.ceiling:
            raise ArgumentError(f"LossScaler: init_scale {self.init_scale:g} is above ceiling {self.ceiling:g}")
        if self.clamp_always and self.floor is not None and self.init_scale < self.floor:
            raise ArgumentError(
                f"LossScaler: init_scale {self.init_scale:g} is below floor {self.floor:g}, where "
                "clamp_always does not leave it"
            )

    # -- presets -------------------------------------------------------------------------------------
    @classmethod
    def _preset(cls, changes: dict[str, Any], **fields: Any) -> LossScaler:
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(changes) - known)
        if unknown:
            raise ArgumentTypeError(
                f"LossScaler has no field {', '.join(unknown)}; the fields are {', '.join(sorted(known))}"
            )
        return cls(**{**fields, **changes})

    @classmethod
    def fixed(cls, scale: float = 2.0**15, **changes: Any) -> LossScaler:
        """A scale that never changes; bad steps are skipped all the same."""
        return cls._preset(changes, init_scale=scale, dynamic=False)

    @classmethod
    def paddle(cls, **changes: Any) -> LossScaler:
        """PaddlePaddle's ``update_loss_scaling`` (September 2020 and later) with the defaults of ``decorate``.

        ::

            start:     scale = 2**15, good = bad = 0
            good step: good += 1; bad = 0; at good == 1000: scale *= 2 if that is finite, good = 0
            bad step:  bad += 1; good = 0; at bad == 2: scale = max(scale * 0.8, 1), bad = 0
        """
        return cls._preset(changes)

    @classmethod
    def exponential(cls, **changes: Any) -> LossScaler:
        """``ExponentialUpdateLossScaleManager`` of tf.contrib.mixed_precision.

        Bad steps need not be in a row::

            start:     scale = 2**32, good = bad = 0
            good step: good += 1; at good >= 1000: scale *= 2 if that is finite, good = bad = 0
            bad step:  bad += 1; good = 0; at bad >= 2: scale = max(scale * 0.8, 1), good = bad = 0

        The manager has no default for the initial scale and the 1000; NVIDIA's BERT for TensorFlow gives these.
        """
        return cls._preset(changes, init_scale=2.0**32, accumulate=True, at_least=True)

    @classmethod
    def torch(cls, **changes: Any) -> LossScaler:
        """``torch.amp.GradScaler`` (kernel ``_amp_update_scale_``).

        There is no floor: the scale can sink below 1::

            start:     scale = 2**16, good = 0
            good step: good += 1; at good == 2000: scale *= 2 if that is finite, good = 0
            bad step:  good = 0; scale *= 0.5
        """
        return cls._preset(
            changes, init_scale=2.0**16, growth_every=2000, backoff_factor=0.5, backoff_after=1, floor=None
        )

    @classmethod
    def keras(cls, **changes: Any) -> LossScaler:
        """``LossScaleOptimizer`` of Keras 3.

        Nothing holds the scale: it can reach 0 and infinity, and then stays there. ``tf_keras`` has both guards::

            start:     scale = 2**15, good = 0
            good step: good += 1; at good == 2000: scale *= 2, good = 0
            bad step:  good = 0; scale *= 0.5
        """
        return cls._preset(
            changes, growth_every=2000, backoff_factor=0.5, backoff_after=1, floor=None, finite_growth=False
        )

    @classmethod
    def tf_keras(cls, **changes: Any) -> LossScaler:
        """``LossScaleOptimizer`` of tf_keras (Keras 2).

        ::

            start:     scale = 2**15, good = 0
            good step: good += 1; at good >= 2000: scale *= 2 if that is finite, good = 0
            bad step:  good = 0; scale = max(scale / 2, 1)
        """
        return cls._preset(changes, growth_every=2000, backoff_factor=0.5, backoff_after=1, at_least=True)

    @classmethod
    def apex(cls, **changes: Any) -> LossScaler:
        """``apex.amp.scaler.LossScaler``; its ``min_loss_scale`` is ``floor``.

        ::

            start:     scale = 2**16, good = 0
            good step: good += 1; at good == 2000: scale = min(scale * 2, 2**24), good = 0
            bad step:  good = 0; scale /= 2
        """
        return cls._preset(
            changes,
            init_scale=2.0**16,
            growth_every=2000,
            backoff_factor=0.5,
            backoff_after=1,
            floor=None,
            ceiling=2.0**24,
        )

    @classmethod
    def deepspeed(cls, **changes: Any) -> LossScaler:
        """DeepSpeed's ``DynamicLossScaler`` (ZeRO) with the defaults of its JSON configuration.

        ::

            start:     scale = 2**16, good = bad = 0
            good step: good += 1; at good == 1000: scale *= 2, good = bad = 0
            bad step:  good = 0; if bad < 1: bad += 1
                       else: error if scale == 1; scale = max(scale / 2, 1)

        ``bad`` is ``delayed_shift − cur_hysteresis``: ``backoff_after`` is ``delayed_shift``, and ``accumulate=False``
        is ``consecutive_hysteresis=True``. The error is the alarm ``error_at_floor``. DeepSpeed's scale, a Python
        float, may grow past fp32; this one stays at the last finite one.
        """
        return cls._preset(
            changes,
            init_scale=2.0**16,
            backoff_factor=0.5,
            accumulate=True,
            hysteresis=True,
            at_least=True,
            error_at_floor=True,
        )

    @classmethod
    def deepspeed_fused(cls, **changes: Any) -> LossScaler:
        """DeepSpeed's ``FP16_Optimizer`` without ZeRO.

        No hysteresis, no error, and one good step more to a growth that follows a bad step or the start::

            start:     scale = 2**16, good = -1
            good step: good += 1; at good == 1000: scale *= 2, good = 0
            bad step:  good = -1; scale = max(scale / 2, 1)
        """
        return cls._preset(
            changes, init_scale=2.0**16, growth_delay=1, backoff_factor=0.5, backoff_after=1, at_least=True
        )

    @classmethod
    def megatron(cls, **changes: Any) -> LossScaler:
        """Megatron-core's ``DynamicGradScaler`` with the defaults of its command line.

        The hysteresis is refilled by a growth alone; once it is used up, every bad step decreases the scale::

            start:     scale = 2**32, good = bad = 0
            good step: good += 1; at good == 1000: scale *= 2, good = bad = 0
            bad step:  good = 0; bad += 1; at bad >= 2: scale = max(scale * 0.5, 1), bad = 1

        ``bad`` is ``hysteresis − _hysteresis_tracker``, not counted on where that has become used up. Megatron's scale
        may grow to infinity; this one stays at the last finite one.
        """
        return cls._preset(changes, init_scale=2.0**32, backoff_factor=0.5, accumulate=True, hysteresis=True)

    @classmethod
    def jmp(cls, **changes: Any) -> LossScaler:
        """``jmp.DynamicLossScale``; its ``min_loss_scale`` is ``floor``.

        It has no default for the initial scale; 2**15 is that of its documentation::

            start:     scale = 2**15, good = 0
            good step: good += 1; at good == 2000: scale *= 2 if that is finite, good = 0
            bad step:  good = 0; scale = max(scale / 2, 1)
        """
        return cls._preset(changes, growth_every=2000, backoff_factor=0.5, backoff_after=1)

    @classmethod
    def mindspore(cls, **changes: Any) -> LossScaler:
        """MindSpore's ``DynamicLossScaleManager``.

        There is an error after more than 1000 bad steps in a row, the alarm ``max_bad_in_a_row``::

            start:     scale = 2**24, good = 0
            good step: good += 1; at good == 2000: scale *= 2, good = 0
            bad step:  good = 0; scale = max(scale * 0.5, 1)

        MindSpore's scale, a Python float, may grow past fp32; this one stays at the last finite one.
        """
        return cls._preset(
            changes,
            init_scale=2.0**24,
            growth_every=2000,
            backoff_factor=0.5,
            backoff_after=1,
            at_least=True,
            max_bad_in_a_row=1000,
        )

    @classmethod
    def oneflow(cls, **changes: Any) -> LossScaler:
        """OneFlow's ``dynamic_loss_scale_schedule``.

        ::

            start:     scale = 2**16, good = 0
            good step: good += 1; at good >= 2000: scale = min(scale * 2, largest fp32), good = 0
            bad step:  good = 0; scale = max(scale / 2, 1)
        """
        return cls._preset(
            changes,
            init_scale=2.0**16,
            growth_every=2000,
            backoff_factor=0.5,
            backoff_after=1,
            ceiling=LIMITS["float32"].largest,
            at_least=True,
        )

    # -- the alarm -----------------------------------------------------------------------------------
    @property
    def alarm(self) -> bool:
        """Whether the program counts what an alarm looks at."""
        return self.error_at_floor or self.max_bad_in_a_row is not None

    def check(self, state: LossScale) -> None:
        """Raise LossScaleError where ``state`` is one that this scaler has an alarm for."""
        at_floor = self.error_at_floor and bool(state.bad_at_floor)
        too_many = self.max_bad_in_a_row is not None and (state.bad_in_a_row or 0) > self.max_bad_in_a_row
        if at_floor or too_many:
            raise_alarm(state.scale, state.bad_in_a_row or 0, not state.loss_bad_in_a_row, at_floor=at_floor)

    # -- for the program -----------------------------------------------------------------------------
    def attributes(self) -> dict[str, Any]:
        """The attributes of ``UpdateLossScaling``; those that are PaddlePaddle's rule are left out."""
        rule = {name: 0.0 if getattr(self, name) is None else getattr(self, name) for name in RULE}  # no floor: 0
        return {
            "incr_every_n_steps": self.growth_every,
            "decr_every_n_nan_or_inf": self.backoff_after,
            "incr_ratio": self.growth_factor,
            "decr_ratio": self.backoff_factor,
            **{name: value for name, value in rule.items() if value != RULE[name]},
        }
