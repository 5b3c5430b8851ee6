"""Feeds: what a run is given, checked against what the program declares before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, FeedError, FeedTypeError
from amp_transpiler.ir.adjacency import predecessors
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Shape, Variable
from amp_transpiler.ir.types import element_type, numpy_dtype
from amp_transpiler.passes.view.reached import reached
from amp_transpiler.runtime import device_tensors
from amp_transpiler.runtime.scope import literal
from amp_transpiler.spelling import near_names

#: Python numbers, which take the declared element type.
LITERALS = (bool, int, float, list, tuple)

#: What exporters write for a size that has no name.
_ANONYMOUS = frozenset({"", "?", "-1", "None", "unk", "unknown"})


@dataclass(frozen=True)
class Feed:
    """An input as the program declares it. ``dtype`` None: no tensor (a sequence, a map)."""

    name: str
    dtype: str | None
    shape: Shape | None
    numpy: np.dtype | None
    required: bool
    fixed: bool  # its value comes from the program or the scope


class Feeds:
    """The inputs of one program, of which ``targets`` need some.

    Holds names and types alone, so that a cache of these does not keep a program alive.
    """

    def __init__(self, program: Graph, targets: Iterable[Variable]) -> None:
        needed = _needed_inputs(program, targets)
        self.program = program.name
        self.feeds = {
            v.name: Feed(
                v.name,
                v.dtype,
                v.shape,
                None if v.dtype is None else numpy_dtype(v.dtype),
                v.key in needed and not v.persistable and v.data is None,
                v.persistable or v.data is not None,
            )
            for v in program.inputs
        }
        self.required = [f for f in self.feeds.values() if f.required]
        self.used = {v.name for v in program.inputs if v.key in needed}
        self.variables = {v.name: _unfed(v) for v in program.variables if not v.is_input}

    def check(self, feed: Mapping[Any, Any] | None) -> dict[str, Any]:
        """The values that the run needs by name, each a contiguous array of the declared type, or an OrtValue.

        FeedError for a missing or unknown name, FeedTypeError for another element type.
        """
        feed = _named(feed)
        if len(feed) != len(self.required) or any(f.name not in feed for f in self.required):
            self._check_names(feed)
        result = {}
        for name, value in feed.items():
            declared = self.feeds[name]
            if declared.fixed:
                raise FeedError(
                    f"feed '{name}' of program '{self.program}' has its value from an initializer; set it with "
                    "scope.set_var, or export the model without the initializer"
                )
            if type(value) is np.ndarray and value.dtype == declared.numpy and value.flags.c_contiguous:
                result[name] = value
            else:
                result[name] = self._converted(declared, value)
        return result if len(result) == len(self.used) else {n: v for n, v in result.items() if n in self.used}

    def check_shapes(self, values: Mapping[str, Any]) -> None:
        """FeedError where a value's rank or a size is not the declared one, or two sizes of one name differ."""
        sizes: dict[str, tuple[int, str]] = {}
        for name, value in values.items():
            declared = self.feeds[name]
            if declared.dtype is None or declared.shape is None:
                continue
            shape = shape_of(value)
            if len(shape) != len(declared.shape):
                raise FeedError(
                    f"feed '{name}' of program '{self.program}' has shape {list(shape)}; it is declared with "
                    f"{len(declared.shape)} dimensions: {_text(declared.shape)}"
                )
            for axis, (size, wanted) in enumerate(zip(shape, declared.shape, strict=True)):
                if isinstance(wanted, str):
                    if wanted in _ANONYMOUS:
                        continue
                    known, other = sizes.setdefault(wanted, (size, name))
                    if known != size:
                        raise FeedError(
                            f"feed '{name}' of program '{self.program}' has size {size} where feed '{other}' has "
                            f"{known}; both sizes are declared as '{wanted}'"
                        )
                elif wanted is not None and wanted >= 0 and wanted != size:
                    raise FeedError(
                        f"feed '{name}' of program '{self.program}' has shape {list(shape)}; dimension {axis} is "
                        f"declared as {wanted}: {_text(declared.shape)}"
                    )

    # -- names --------------------------------------------------------------------------------------
    def _check_names(self, feed: Mapping[str, Any]) -> None:
        missing = [f.name for f in self.required if f.name not in feed]
        unknown = [name for name in feed if name not in self.feeds]
        for name in unknown:
            if name in self.variables:
                raise FeedError(f"feed '{name}' is no input of program '{self.program}' but {self.variables[name]}")
            hint = near_names(name, [*missing, *self.feeds]) or f"it has {_names(self.feeds)}"
            raise FeedError(f"program '{self.program}' has no input '{name}'; {hint}")
        if missing:
            given = f"given were {_names(feed)}" if feed else "nothing was fed"
            raise FeedError(
                f"program '{self.program}' needs the input{'s' * (len(missing) > 1)} {_names(missing)}; {given}"
            )

    # -- values -------------------------------------------------------------------------------------
    def _converted(self, declared: Feed, value: Any) -> Any:
        if declared.dtype is None:
            return value
        if isinstance(value, Variable):
            raise FeedTypeError(
                f"feed '{declared.name}': expected an array, got the variable '{value.name}' of a program"
            )
        if hasattr(value, "data_ptr") and hasattr(value, "device_name"):
            self._check_type(declared, device_tensors.dtype_of(value) if value.is_tensor() else "no tensor", "")
            return value
        if isinstance(value, LITERALS) and not _holds_arrays(value) and declared.dtype != "string":
            try:
                return literal(value, declared.dtype, f"feed '{declared.name}' of program '{self.program}'")
            except ArgumentError as error:
                raise FeedTypeError(str(error)) from None
        return self._array(declared, value)

    def _array(self, declared: Feed, value: Any) -> np.ndarray:
        try:
            array = np.asarray(value)
            found = element_type(array.dtype)
            if array.dtype == object and not isinstance(next(array.flat, ""), (str, bytes)):
                raise TypeError("it holds Python objects")
        except (ArgumentError, TypeError, ValueError, RuntimeError) as error:
            raise FeedTypeError(
                f"feed '{declared.name}' of program '{self.program}' is not an array of numbers: "
                f"{type(value).__name__} ({error})"
            ) from None
        if declared.dtype == "string" and found == "string":
            return array.astype(object)
        self._check_type(declared, found, f"feed {declared.name}.astype('{declared.dtype}')")
        return np.asarray(array, declared.numpy, order="C")

    def _check_type(self, declared: Feed, found: str, cast: str) -> None:
        if found == declared.dtype:
            return
        if declared.dtype == "bfloat16" and cast:
            cast = f"feed {declared.name}.astype(ml_dtypes.bfloat16)"
        raise FeedTypeError(
            f"feed '{declared.name}' of program '{self.program}' is {found}; it is declared as {declared.dtype}"
            + (f": {cast}" if cast else "")
        )


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of a checked feed."""
    if isinstance(value, np.ndarray):
        shape: tuple[int, ...] = value.shape
        return shape
    return tuple(value.shape()) if hasattr(value, "data_ptr") else ()


def _named(feed: Mapping[Any, Any] | None) -> Mapping[str, Any]:
    if feed is None:
        return {}
    if not isinstance(feed, Mapping):
        raise ArgumentTypeError(f"feed is a dictionary of input name -> array, got {type(feed).__name__}")
    if all(type(name) is str for name in feed):
        return feed
    named = {key.name if isinstance(key, Variable) else key: value for key, value in feed.items()}
    for key in named:
        if not isinstance(key, str):
            raise ArgumentTypeError(f"the keys of feed are input names or variables, got {key!r}")
    if len(named) < len(feed):
        twice = next(key.name for key in feed if isinstance(key, Variable) and key.name in feed)
        raise ArgumentError(f"feed has '{twice}' twice, as a variable and by its name")
    return named


def _unfed(variable: Variable) -> str:
    """What a variable is that is no input."""
    if variable.persistable:
        return "a persistable variable: set it with scope.set_var"
    return "a constant: leave it out" if variable.data is not None else "computed by the program; it cannot be fed"


def _holds_arrays(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_holds_arrays(item) for item in value)
    return hasattr(value, "dtype")


def _needed_inputs(program: Graph, targets: Iterable[Variable]) -> set[int]:
    """Keys of the inputs that the targets depend on; one walk backwards."""
    return set(reached([v.key for v in targets], predecessors(program.graph).__getitem__))


def _text(shape: Sequence[Any]) -> str:
    return "[" + ", ".join("?" if d is None or (isinstance(d, int) and d < 0) else str(d) for d in shape) + "]"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "no inputs"
