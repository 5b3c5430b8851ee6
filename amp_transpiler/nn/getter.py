"""Custom getters: a function that stands between a layer and the parameter that it asks for.

The one that is here keeps parameters in fp32 where layers compute in 16 bit, so that no layer need know of it::

    with amp.custom_getter(amp.float32_variable_storage_getter):
        hidden = amp.nn.fc(F.cast(x, "float16"), 64)  # stores fp32 weights, multiplies in float16

Name and protocol are those of TensorFlow's ``variable_scope(custom_getter=...)`` and of NVIDIA's getter for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from amp_transpiler.errors import ArgumentError, ArgumentTypeError
from amp_transpiler.ir.context import inside
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.types import HALF, element_type
from amp_transpiler.nn.elementwise_functions import cast

#: ``getter(create, name, shape=, dtype=, initializer=, trainable=)`` gives a variable; ``create`` takes the same.
Getter = Callable[..., Variable]
_getters: ContextVar[tuple[Getter, ...]] = ContextVar("getters", default=())


@contextmanager
def custom_getter(getter: Getter) -> Iterator[None]:
    """Let every parameter asked for inside come from ``getter``; getters around it are called by ``create``.

    ArgumentTypeError: no function.
    """
    if not callable(getter):
        raise ArgumentTypeError(
            f"custom_getter takes a function, such as amp.float32_variable_storage_getter, not {getter!r}"
        )
    with inside(_getters, (*_getters.get(), getter)):
        yield


def float32_variable_storage_getter(
    create: Getter,
    name: str,
    shape: Any = None,
    dtype: Any = None,
    initializer: Any = None,
    trainable: bool = True,
    **more: Any,
) -> Variable:
    """A trainable parameter of 16 bit is stored in fp32, under its name, and what the layer gets is its cast.

    The optimizer finds the fp32 parameter, and its gradient is fp32.
    """
    wide = trainable and element_type(dtype) in HALF
    storage = "float32" if wide else dtype
    stored = create(name, shape, dtype=storage, initializer=initializer, trainable=trainable, **more)
    return cast(stored, dtype) if wide else stored


def got(
    call: str,
    create: Callable[..., Variable],
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    initializer: Any,
    trainable: bool,
) -> Variable:
    """The parameter by way of the getters around; ArgumentTypeError for one that gives no variable of this type."""

    def make(
        name: str,
        shape: Any = None,
        dtype: Any = "float32",
        initializer: Any = initializer,
        trainable: bool = True,
        **more: Any,
    ) -> Variable:
        given = sorted(key for key, value in more.items() if value is not None)
        if given:
            raise ArgumentError(f"{call}: a custom getter gives {given[0]}, and a parameter has none")
        return create(name, tuple(shape), element_type(dtype), initializer, trainable)

    function: Getter = make
    getters = _getters.get()
    for getter in getters:
        function = partial(getter, function)
    made = function(name, shape=shape, dtype=dtype, initializer=initializer, trainable=trainable)
    if getters and not (isinstance(made, Variable) and made.shape == shape and made.dtype == dtype):
        raise ArgumentTypeError(
            f"{call}: the custom getter gave {made!r} for '{name}'; expected a variable, {dtype} {list(shape)}"
        )
    return made
