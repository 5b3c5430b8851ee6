"""The states of a compiled program: their values in a scope, found to fit, and bound to a session.

States are bound from the scope without copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amp_transpiler.errors import ScopeError
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.types import HALF, numpy_dtype
from amp_transpiler.lists import place_traits
from amp_transpiler.passes.lowering.lowered import Port
from amp_transpiler.passes.lowering.place import Place
from amp_transpiler.runtime import device_tensors
from amp_transpiler.runtime.flat_values import FlatValue, flat_from, flat_of
from amp_transpiler.runtime.scope import Scope

#: Bound where nothing is.
NEVER = object()


class State:
    """A state input: the value bound now, and the one last found to fit."""

    def __init__(self, port: Port) -> None:
        self.port, self.name, self.tensor = port, port.variable, port.tensor
        self.bound: Any = NEVER
        self.checked: Any = NEVER
        self.parts = [State(Port(s.variable, port.tensor, port.dtype, s.shape)) for s in port.segments]
        self.flat: FlatValue | None = None


class States:
    """The states of one program on one place."""

    def __init__(self, ports: Sequence[Port], place: Place, program: str, startup: str) -> None:
        self.place, self.program, self.startup = place, program, startup
        traits = place_traits(place.kind)
        #: Values lie on the host between runs, and binding copies one to the device: it is not seen to change there.
        self.copied = traits.device and traits.memory == "cpu"
        states = [State(port) for port in ports]
        self.flat = [state for state in states if state.parts]
        self.all = [state for state in states if not state.parts]

    def bind(self, scope: Scope, binding: Any) -> None:
        """Bind every state whose value is another than the one bound, or all where binding copies."""
        values, copied = scope.ort_values, self.copied
        for state in self.flat:  # first: the variables in them have inputs of their own too
            whole = self.gather(scope, state).whole
            if copied or whole is not state.bound:
                binding.bind_ortvalue_input(state.tensor, whole)
                state.bound = whole
        for state in self.all:
            value = values.get(state.name)
            if copied or value is not state.bound:
                if value is not state.checked:
                    value = self.admit(scope, state)
                binding.bind_ortvalue_input(state.tensor, value)
                state.bound = state.checked = value

    def gather(self, scope: Scope, state: State) -> FlatValue:
        """The value of a flat state, of which the scope holds the views; ScopeError where a variable does not fit."""
        if state.flat is None or not state.flat.is_in(scope.ort_values):
            values = [self.fitting(scope, part) for part in state.parts]
            state.flat = flat_of(state.port, values, self.place)
            if state.flat is None:
                state.flat = flat_from(state.port, values, self.place)
                scope.hold(state.flat.held())
        return state.flat

    def admit(self, scope: Scope, state: State) -> Any:
        """The state's value on this place, found to fit; ScopeError where it is missing or does not."""
        self.fitting(scope, state)
        return scope.ort_value_on(self.place, state.name)

    def fitting(self, scope: Scope, state: State) -> Any:
        """The state's value wherever it lies, found to fit; ScopeError where it is missing or does not."""
        value = scope.ort_values.get(state.name)
        if value is None:
            names = {s.name for each in (*self.all, *self.flat) for s in each.parts or (each,)}
            count = len(names - scope.ort_values.keys())
            raise not_in_scope(f"variable '{state.name}'", self.program, count, self.startup)
        found, wanted = device_tensors.dtype_of(value), state.port.dtype
        if found != wanted:
            raise ScopeError(type_message(state.name, self.program, found, wanted))
        shape = state.port.shape
        if shape is not None and not fits(value.shape(), shape):
            raise ScopeError(
                f"variable '{state.name}' has shape {list(value.shape())} in the scope; program '{self.program}' "
                f"declares {list(shape)}. Programs that share a scope must give different variables different names"
            )
        return value


def not_in_scope(what: str, program: str, count: int = 1, startup: str = "") -> ScopeError:
    """The error of a variable that the scope lacks, and with it ``count`` of the program's altogether."""
    more = f" (and {count - 1} more of its variables)" if count > 1 else ""
    first = f"startup program '{startup}'" if startup else "startup program"
    return ScopeError(
        f"{what}{more} of program '{program}' is not in the scope; run its {first} first, into this scope"
    )


def fetched_state(variable: Variable, scope: Scope, place: Place, as_array: bool) -> Any:
    """A copy of a variable's value in the element type that it was declared with: an array, or a value on a place."""
    value = scope.ort_values.get(variable.name)
    if value is None:
        raise not_in_scope(f"the fetched variable '{variable.name}'", variable.program.name)
    declared = variable.declared or device_tensors.dtype_of(value)
    if declared != device_tensors.dtype_of(value):
        array = device_tensors.to_array(value).astype(numpy_dtype(declared))
        return array if as_array else device_tensors.from_array(array, place)
    return device_tensors.to_array(value) if as_array else device_tensors.copy_to(value, place)


def type_message(name: str, program: str, found: str, wanted: str) -> str:
    """What to say of a variable that the scope holds in another element type than the program declares."""
    head = f"variable '{name}' is {found} in the scope, and program '{program}' declares {wanted}"
    if wanted in HALF:
        return (
            f"{head}; call the optimizer's amp_init(place, scope) after the startup program, or "
            "cast_parameters_to_fp16(place, program)"
        )
    if found in HALF:
        return (
            f"{head}; amp_init has cast it for a 16-bit program. Give this program to amp_init(place, scope, "
            "test_program=...), or run its startup program into a scope of its own"
        )
    return f"{head}; set it with an array of that type, or run the startup program again"


def fits(shape: Sequence[int], declared: Sequence[Any]) -> bool:
    """Whether a shape agrees with a declared one, whose unknown sizes are names, None or -1."""
    return len(shape) == len(declared) and all(
        not isinstance(d, int) or d < 0 or d == s for s, d in zip(shape, declared, strict=True)
    )
