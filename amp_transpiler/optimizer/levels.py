"""Paddle's second signature of ``decorate``: by ``level``, with scaling defaults of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, cast, overload

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir.types import element_type
from amp_transpiler.lists import AutoMixedPrecisionLists
from amp_transpiler.optimizer.scaler import LossScaler
from amp_transpiler.optimizer.update_rule import UpdateRule
from amp_transpiler.option_checks import switch

One = ParamSpec("One")
Other = ParamSpec("Other")
Decorated = TypeVar("Decorated", covariant=True)
#: Keywords that stand in one of the two signatures alone.
_OURS = {"use_pure_fp16", "use_fp16_guard", "use_bf16"}
_LEVELS = {"level", "master_weight", "master_grad", "use_amp_guard"}
_SCALING = {
    "init_loss_scaling": 2.0**16,
    "incr_every_n_steps": 2000,
    "decr_every_n_nan_or_inf": 1,
    "incr_ratio": 2.0,
    "decr_ratio": 0.5,
}


class InTwoWays(Protocol[One, Other, Decorated]):
    """The type of a function that takes two signatures."""

    @overload
    def __call__(self, *args: One.args, **kwargs: One.kwargs) -> Decorated: ...
    @overload
    def __call__(self, *args: Other.args, **kwargs: Other.kwargs) -> Decorated: ...


class _Ours(TypedDict, total=False):
    """What ``decorate`` takes beside either signature of Paddle's."""

    scaler: LossScaler | None
    accumulate_steps: int
    numeric_guards: bool | None
    allreduce_precision: str | None


def with_levels(
    by_level: Callable[Other, tuple[dict[str, Any], list[UpdateRule]]],
) -> Callable[[Callable[One, Decorated]], InTwoWays[One, Other, Decorated]]:
    """Let ``decorate`` take Paddle's signature with ``level`` too, which ``by_level`` turns into ours.

    That is ``decorate(optimizer, amp_lists=None, level="O1", dtype="float16", master_weight=None, master_grad=False,
    init_loss_scaling=2**16, incr_every_n_steps=2000, decr_every_n_nan_or_inf=1, incr_ratio=2.0, decr_ratio=0.5,
    use_dynamic_loss_scaling=None, use_amp_guard=False, use_promote=False)``. It is meant where the third
    argument is a string, or a keyword is given that it alone has. ``use_bf16=True`` is ``dtype="bfloat16"``.
    """

    def carry(decorate: Callable[..., Decorated]) -> Callable[..., Decorated]:
        @wraps(decorate)
        def call(*args: Any, **kwargs: Any) -> Decorated:
            if not kwargs.keys() & _LEVELS and not (len(args) > 2 and isinstance(args[2], str)):
                if switch("decorate: use_bf16", kwargs.pop("use_bf16", False)):
                    if element_type(kwargs.setdefault("dtype", "bfloat16")) != "bfloat16":
                        raise ArgumentError(f"decorate: use_bf16=True and dtype={kwargs['dtype']!r}; give one of them")
                return decorate(*args, **kwargs)
            mixed = sorted(kwargs.keys() & _OURS)
            if mixed:
                raise ArgumentTypeError(
                    f"decorate: {mixed[0]} belongs to the other of Paddle's two signatures; with level "
                    "say level='O2', use_amp_guard=True or dtype='bfloat16'"
                )
            keywords, masters = by_level(*args, **kwargs)
            try:
                for one in masters:
                    one.multi_precision = True
                return decorate(**keywords)
            except BaseException:
                for one in masters:
                    one.multi_precision = False
                raise

        return call

    return cast(Callable[[Callable[One, Decorated]], InTwoWays[One, Other, Decorated]], carry)


def by_level(
    optimizer: UpdateRule | Sequence[UpdateRule] | None = None,  # decorate says what is missing
    amp_lists: AutoMixedPrecisionLists | None = None,
    level: str = "O1",
    dtype: str = "float16",
    master_weight: bool | None = None,
    master_grad: bool = False,
    init_loss_scaling: float = 2.0**16,
    incr_every_n_steps: int = 2000,
    decr_every_n_nan_or_inf: int = 1,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.5,
    use_dynamic_loss_scaling: bool | None = None,
    use_amp_guard: bool = False,
    use_promote: bool = False,
    **ours: Unpack[_Ours],
) -> tuple[dict[str, Any], list[UpdateRule]]:
    """Our keywords for a call by level, and the optimizers that get masters.

    ``master_grad`` changes nothing: gradients are unscaled and applied in fp32.
    """
    flags = {"master_weight": master_weight, "master_grad": master_grad, "use_amp_guard": use_amp_guard}
    for name, flag in flags.items():
        if flag is not None:
            switch(f"decorate: {name}", flag)
    if not isinstance(level, str) or level.upper() not in ("O1", "O2", "OD"):
        way = " Without mixed precision, call minimize of the optimizer itself." if level in ("O0", "o0") else ""
        raise ArgumentError(
            f"decorate: level is {level!r}; expected 'O1' (black and white lists), 'O2' (pure 16 bit) "
            f"or 'OD' (white operators alone).{way}"
        )
    if level.upper() == "OD":
        amp_lists = _white_alone(amp_lists, dtype)
    scaling = dict(
        zip(
            _SCALING,
            (init_loss_scaling, incr_every_n_steps, decr_every_n_nan_or_inf, incr_ratio, decr_ratio),
            strict=True,
        )
    )
    given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    masters = [one for one in given if isinstance(one, UpdateRule) and not one.multi_precision]
    keywords: dict[str, Any] = {
        "optimizer": optimizer,
        "amp_lists": amp_lists,
        "dtype": dtype,
        "use_pure_fp16": level.upper() == "O2",
        "use_fp16_guard": use_amp_guard,
        "use_promote": use_promote,
        **ours,
    }
    # bfloat16 is scaled where numbers say so alone; a scaler has numbers of its own.
    if scaling != _SCALING or (element_type(dtype) != "bfloat16" and ours.get("scaler") is None):
        keywords |= scaling
    if use_dynamic_loss_scaling is not None:
        keywords["use_dynamic_loss_scaling"] = use_dynamic_loss_scaling
    return keywords, masters if master_weight is not False else []


def _white_alone(amp_lists: AutoMixedPrecisionLists | None, dtype: str) -> AutoMixedPrecisionLists:
    if amp_lists is not None:
        raise ArgumentError(
            "decorate: level 'OD' runs the default white operators in 16 bit and all others in fp32, "
            "and takes no amp_lists; with lists of your own say level='O1'"
        )
    lists = AutoMixedPrecisionLists(dtype=element_type(dtype))
    lists.black_list |= lists.gray_list
    lists.gray_list.clear()
    return lists
