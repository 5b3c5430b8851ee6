"""How operators are written: through an emitter into an ONNX graph, as parts of one into a program."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar, overload

Given = TypeVar("Given", contravariant=True)
Made = TypeVar("Made", covariant=True)
Held = TypeVar("Held")


class OperatorCall(Protocol[Given, Made]):
    """An operator type of ai.onnx as a method: ``e.Mul(a, b)`` is one value, ``e.Split(a, outputs=2)`` a tuple."""

    @overload
    def __call__(self, *inputs: Given, outputs: int, **options: Any) -> tuple[Made, ...]: ...
    @overload
    def __call__(self, *inputs: Given, outputs: None = None, **options: Any) -> Made: ...


class Writer(Protocol[Held]):
    """What an emitter and :class:`~amp_transpiler.ir.decompose.Parts` have in common, for forms that both write."""

    def __getattr__(self, type_: str) -> OperatorCall[Held | None, Held]: ...
