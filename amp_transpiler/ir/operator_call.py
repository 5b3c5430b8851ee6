"""How an emitter calls an operator type."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar, overload

Given = TypeVar("Given", contravariant=True)
Made = TypeVar("Made", covariant=True)


class OperatorCall(Protocol[Given, Made]):
    """An operator type of ai.onnx as a method: ``e.Mul(a, b)`` is one value, ``e.Split(a, outputs=2)`` a tuple."""

    @overload
    def __call__(self, *inputs: Given, outputs: int, **options: Any) -> tuple[Made, ...]: ...
    @overload
    def __call__(self, *inputs: Given, outputs: None = None, **options: Any) -> Made: ...
