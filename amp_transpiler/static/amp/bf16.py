"""``paddle.static.amp.bf16``: thin names over ``decorate``, ``rewrite_program`` and ``cast_model_to_fp16``.

Lists that are left out are the defaults for bfloat16. There is no loss scaling, as in Paddle; gradients are checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.context import fp16_guard as bf16_guard
from amp_transpiler.lists.amp_lists import AutoMixedPrecisionLists
from amp_transpiler.lists.paddle import paddle_attributes
from amp_transpiler.optimizer import OptimizerWithMixedPrecision, decorate
from amp_transpiler.passes.precision.pure import cast_model_to_fp16
from amp_transpiler.passes.precision.rewrite import rewrite_program
from amp_transpiler.program import Program
from amp_transpiler.runtime.cast_parameters import cast_parameters_to_fp16 as cast_parameters_to_bf16


class AutoMixedPrecisionListsBF16(AutoMixedPrecisionLists):
    """Lists for bfloat16: ``custom_bf16_list`` is the white list, ``custom_fp32_list`` the black one."""

    def __init__(
        self,
        custom_bf16_list: Iterable[str] | None = None,
        custom_fp32_list: Iterable[str] | None = None,
        custom_fp32_varnames: Iterable[str] | None = None,
    ) -> None:
        super().__init__(custom_bf16_list, custom_fp32_list, custom_fp32_varnames, "bfloat16")

    @property
    def bf16_list(self) -> set[str]:
        """``white_list``."""
        return self.white_list

    @property
    def fp32_list(self) -> set[str]:
        """``black_list``."""
        return self.black_list

    @property
    def fp32_varnames(self) -> set[str]:
        """``black_varnames``."""
        return self.black_varnames


def decorate_bf16(
    optimizer: Any,
    amp_lists: AutoMixedPrecisionLists | None = None,
    use_pure_bf16: bool = False,
    use_bf16_guard: bool | None = None,
) -> OptimizerWithMixedPrecision:
    """``decorate(optimizer, amp_lists, use_pure_fp16=use_pure_bf16, dtype="bfloat16")``; errors as there."""
    return decorate(optimizer, amp_lists, use_pure_fp16=use_pure_bf16, use_fp16_guard=use_bf16_guard, dtype="bfloat16")


def rewrite_program_bf16(main_prog: Program, amp_lists: AutoMixedPrecisionLists | None = None) -> None:
    """``rewrite_program`` with lists for bfloat16; errors as there."""
    rewrite_program(main_prog, _bf16_lists("rewrite_program_bf16", amp_lists))


def cast_model_to_bf16(
    program: Program,
    startup_prog: Program | None = None,
    amp_lists: AutoMixedPrecisionLists | None = None,
    use_bf16_guard: bool = True,
) -> set[str]:
    """``cast_model_to_fp16`` with lists for bfloat16; errors as there.

    ArgumentError: a ``startup_prog``. Startup programs write fp32 here, from which masters start;
    ``cast_parameters_to_bf16`` rounds the parameters after it ran.
    """
    if startup_prog is not None:
        raise ArgumentError(
            "cast_model_to_bf16: startup_prog is not rewritten, it writes fp32; leave it out, and call "
            "cast_parameters_to_bf16(place, program, scope) after it ran"
        )
    return cast_model_to_fp16(program, _bf16_lists("cast_model_to_bf16", amp_lists), use_bf16_guard)


def _bf16_lists(call: str, amp_lists: AutoMixedPrecisionLists | None) -> AutoMixedPrecisionLists:
    if amp_lists is not None and amp_lists.dtype != "bfloat16":
        raise ArgumentError(f"{call}: amp_lists are for {amp_lists.dtype}; make them with dtype='bfloat16'")
    return AutoMixedPrecisionListsBF16() if amp_lists is None else amp_lists


__getattr__ = paddle_attributes("amp_transpiler.static.amp.bf16")
__all__ = [
    "AutoMixedPrecisionListsBF16",
    "bf16_guard",
    "cast_model_to_bf16",
    "cast_parameters_to_bf16",
    "decorate_bf16",
    "rewrite_program_bf16",
]
