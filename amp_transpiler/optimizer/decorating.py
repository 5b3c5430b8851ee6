"""``decorate``: the arguments of mixed-precision training, checked."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir.types import HALF, LIMITS, element_type
from amp_transpiler.lists import AutoMixedPrecisionLists
from amp_transpiler.lists.paddle import paddle_arguments
from amp_transpiler.optimizer.accumulation import Accumulation
from amp_transpiler.optimizer.amp_optimizer import OptimizerWithMixedPrecision
from amp_transpiler.optimizer.groups import number
from amp_transpiler.optimizer.levels import by_level, with_levels
from amp_transpiler.optimizer.loss_scaling import scaling_attributes
from amp_transpiler.optimizer.scaler import LossScaler
from amp_transpiler.optimizer.update_rule import UpdateRule
from amp_transpiler.option_checks import switch, whole

_DEFAULT_SCALE = 2.0**15
_DEFAULT_STEPS = {"incr_every_n_steps": 1000, "decr_every_n_nan_or_inf": 2, "incr_ratio": 2.0, "decr_ratio": 0.8}


@with_levels(by_level)
@paddle_arguments("decorate")
def decorate(
    optimizer: UpdateRule | Sequence[UpdateRule],
    amp_lists: AutoMixedPrecisionLists | None = None,
    init_loss_scaling: float = 2**15,
    incr_every_n_steps: int = 1000,
    decr_every_n_nan_or_inf: int = 2,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.8,
    use_dynamic_loss_scaling: bool = True,
    use_pure_fp16: bool = False,
    use_fp16_guard: bool | None = None,
    *,
    dtype: str = "float16",
    scaler: LossScaler | None = None,
    accumulate_steps: int = 1,
    numeric_guards: bool | None = None,
    allreduce_precision: str | None = None,
) -> OptimizerWithMixedPrecision:
    """Wrap an optimizer for training in mixed precision (default) or pure 16 bit.

    Paddle's other signature, by ``level``, is taken as well; see ``levels.with_levels``.

    Args:
        optimizer: an optimizer of this package, not yet used; or several over disjoint parameters, that take every
            step together: one found_inf, one update of the scale. One of them may leave ``parameter_list`` out and
            then has the rest.
        amp_lists: operator lists; the defaults for ``dtype`` where None.
        init_loss_scaling: initial loss scale, > 0. With a scale of 1 and no dynamic scaling gradients are
            not checked in float16.
        incr_every_n_steps, decr_every_n_nan_or_inf, incr_ratio, decr_ratio: see ``update_loss_scaling``.
        use_dynamic_loss_scaling: adapt the scale. A static scale checks gradients and skips bad steps as well.
        use_pure_fp16: run everything that can in 16 bit and store parameters so, instead of black/white lists.
        use_fp16_guard: in pure mode, only what ``fp16_guard`` or ``mark_fp16`` marks; default: ``use_pure_fp16``.
        dtype: "float16" ("fp16", "half") or "bfloat16" ("bf16"). bfloat16 has fp32's range: it trains
            with scale 1 and without dynamic scaling unless one of the five scaling numbers is given other than its
            default; its gradients are checked in any case.
        scaler: another rule for the loss scale, such as ``amp.LossScaler.torch()``; the five scaling numbers and
            ``use_dynamic_loss_scaling`` then keep their defaults.
        accumulate_steps: micro-batches whose gradients, kept in fp32, are averaged before one check and one update.
            Each ``Executor.run`` of the program takes one; the last of a window does the update. With equal
            micro-batches and a mean as loss that is the step of the whole batch.
        numeric_guards: keep fp32 what is known to leave 16 bit, as ``amp.convert`` does. None: as the program says:
            imported programs do, unless ``prepare_training`` was told otherwise, built ones do not. False takes mode
            and lists literally.
        allreduce_precision: the element type in which gradients travel where the program is trained by several ranks
            (``amp.distributed``): "float16", "bfloat16" or "float32"; ``dtype`` where None. They are added in fp32 in
            any case, in the order of ranks, and rounded once.

    Raises:
        ArgumentTypeError: no optimizer, no lists, no scaler. ArgumentError: a number out of range, an optimizer
            decorated already, a ``dtype`` that is not that of ``amp_lists``, a scaler beside numbers for another.
    """
    optimizers = _checked_optimizers(optimizer)
    dtype = _one_of(HALF, "dtype", dtype, "'float16' or 'bfloat16'")
    if not isinstance(amp_lists, (AutoMixedPrecisionLists, type(None))):
        raise ArgumentTypeError(f"decorate: amp_lists is {amp_lists!r}; expected amp.AutoMixedPrecisionLists(...)")
    if amp_lists is not None and amp_lists.dtype != dtype:
        raise ArgumentError(
            f"decorate: dtype is {dtype}, but amp_lists are for {amp_lists.dtype}; pass dtype="
            f"'{amp_lists.dtype}', or lists made with dtype='{dtype}'"
        )
    use_dynamic_loss_scaling = switch("decorate: use_dynamic_loss_scaling", use_dynamic_loss_scaling)
    use_pure_fp16 = switch("decorate: use_pure_fp16", use_pure_fp16)
    guard = use_pure_fp16 if use_fp16_guard is None else switch("decorate: use_fp16_guard", use_fp16_guard)
    numeric_guards = None if numeric_guards is None else switch("decorate: numeric_guards", numeric_guards)
    scale = number("decorate", "init_loss_scaling", init_loss_scaling, 0, 2.0**128, open_low=True)
    if not LIMITS["float32"].holds(scale):
        raise ArgumentError(f"decorate: init_loss_scaling is {scale!r}, which fp32 does not hold")
    steps = scaling_attributes("decorate", incr_every_n_steps, decr_every_n_nan_or_inf, incr_ratio, decr_ratio)
    defaults = scale == _DEFAULT_SCALE and steps == _DEFAULT_STEPS
    if scaler is not None:
        _check_scaler(scaler, defaults and use_dynamic_loss_scaling)
    elif not use_dynamic_loss_scaling or (dtype == "bfloat16" and defaults):
        scaler = LossScaler.fixed(1.0 if dtype == "bfloat16" and defaults else scale)
    else:
        scaler = LossScaler(
            scale,
            growth_factor=incr_ratio,
            growth_every=incr_every_n_steps,
            backoff_factor=decr_ratio,
            backoff_after=decr_every_n_nan_or_inf,
        )
    whole("decorate: accumulate_steps", accumulate_steps, 1)
    travels = dtype
    if allreduce_precision is not None:
        expected = "'float16', 'bfloat16', 'float32' or None"
        travels = _one_of((*HALF, "float32"), "allreduce_precision", allreduce_precision, expected)
    decorated = OptimizerWithMixedPrecision(
        optimizers,
        amp_lists or AutoMixedPrecisionLists(dtype=dtype),
        scaler,
        use_pure_fp16,
        guard,
        Accumulation(int(accumulate_steps)) if accumulate_steps > 1 else None,
        numeric_guards,
        travels,
    )
    for each in optimizers:
        if use_pure_fp16 and not each.multi_precision:
            each.warn_low_precision(f"use_pure_fp16 stores parameters in {dtype}")
    return decorated


def _one_of(types: Collection[str], argument: str, given: Any, expected: str) -> str:
    try:
        name = element_type(given)
    except ArgumentError:
        name = ""
    if name not in types:
        raise ArgumentError(f"decorate: {argument} is {given!r}; expected {expected}")
    return name


def _checked_optimizers(optimizer: Any) -> list[UpdateRule]:
    """The optimizers given; errors for anything else, and for two that both want all parameters."""
    found = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for each in found:
        if isinstance(each, OptimizerWithMixedPrecision):
            raise ArgumentError("decorate: this optimizer is decorated already")
        if not isinstance(each, UpdateRule):
            raise ArgumentTypeError(
                f"decorate: optimizer is {each!r}; expected one of amp.optimizer, such as amp.optimizer.Adam()"
            )
    if not found or len({id(each) for each in found}) < len(found):
        raise ArgumentError("decorate: the list of optimizers is empty, or has one of them twice")
    if sum(each.parameter_list is None for each in found) > 1:
        raise ArgumentError(
            "decorate: two optimizers without parameter_list would both update every parameter; give "
            "all but one of them a parameter_list"
        )
    return found


def _check_scaler(scaler: LossScaler, alone: bool) -> None:
    """Raise for a scaler that is none, or that stands beside numbers for another."""
    if not isinstance(scaler, LossScaler):
        raise ArgumentTypeError(f"decorate: scaler is {scaler!r}; expected amp.LossScaler.torch() or another scaler")
    if not alone:
        raise ArgumentError(
            "decorate: scaler says all about the loss scale; leave out init_loss_scaling, "
            "incr_every_n_steps, decr_every_n_nan_or_inf, incr_ratio, decr_ratio and "
            "use_dynamic_loss_scaling, and give the scaler its numbers, as in "
            "amp.LossScaler.torch(init_scale=1024)"
        )
