"""Scopes: the values that persistable variables have between runs."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import onnx

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, OrderError, ScopeError
from amp_transpiler.ir.context import inside
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.types import FLOATS, numpy_dtype
from amp_transpiler.lists.paddle import paddle_attributes
from amp_transpiler.ops.training.master_names import master_names, mastered
from amp_transpiler.passes.lowering.place import CPUPlace, Place
from amp_transpiler.runtime import device_tensors
from amp_transpiler.runtime.forks import OfOneProcess
from amp_transpiler.runtime.locks import StepLock
from amp_transpiler.runtime.providers import lies_on
from amp_transpiler.spelling import near_names


class Scope(OfOneProcess):
    """Values by variable name. Programs that name a variable alike share its value (train and test programs do).

    A value stays on the device of the executor that used it last; it moves when another asks for it.

    Threads may share a scope, through one executor or several. A step, from reading its state to storing the new one,
    happens alone: other steps, ``set_var``, ``amp_init`` and the loading of files wait for its end and it for theirs.
    Runs that write nothing (evaluation, inference) go on side by side, each between two steps, as ``find_var`` does
    and the saving of a checkpoint. What takes several calls is whole inside ``reading()`` or ``writing()``.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        #: The values where they lie, OrtValues by name: to be read, since training writes into them.
        self.ort_values: Mapping[str, Any] = MappingProxyType(self._values)
        #: The ranks that hold what this one does not, by the names of variables.
        self.elsewhere: Mapping[str, int] = MappingProxyType({})
        #: The rows of variables that are dealt out among the ranks, by name; of these it holds its own.
        self.dealt: Mapping[str, int] = MappingProxyType({})
        #: What parameters were before averages took their place for a while, by name, of each such while that goes on.
        self.replaced: list[dict[str, Any]] = []
        #: The startup programs that have begun state of training steps here, by its name, the latest one last.
        self.begun: Mapping[str, Sequence[weakref.ref[Graph]]] = MappingProxyType({})
        self._lock = StepLock()

    if not TYPE_CHECKING:  # to a type checker an unknown name is an error
        __getattr__ = paddle_attributes("amp_transpiler.Scope")

    def reading(self) -> AbstractContextManager[None]:
        """Inside, no other thread changes the scope: the values of several ``find_var`` belong to one step.

        A thread may take it again, and run programs inside. Do not wait inside for another thread that trains.
        """
        return self._lock.reading()

    def writing(self) -> AbstractContextManager[None]:
        """Inside, no other thread reads or changes the scope: what several calls change, others see all at once.

        A thread may take it again, and run programs inside. Do not wait inside for another thread that uses the scope.
        """
        return self._lock.writing()

    def find_var(self, name: str) -> np.ndarray:
        """A copy of a variable's value, whatever its shape and dtype (ml_dtypes for bfloat16).

        It is a copy because training updates values where they lie. ScopeError for an unknown name.
        """
        with self.reading():
            return device_tensors.to_array(self.ort_value(name))

    def set_var(self, name: str, value: Any) -> None:
        """Give a variable a value: a numpy array, ONNX tensor or OrtValue, or Python numbers; it is copied.

        Python numbers take the element type that the variable already has here. A parameter and its fp32 master
        weight are one value: setting either sets both, the master to what is given, a 16-bit parameter to that
        rounded (what a master rounds to already leaves it alone, and a master leaves alone what it did not round to
        before). ArgumentTypeError for what is no tensor;
        ArgumentError for numbers that the element type cannot hold; PrecisionError for a parameter beyond its 16 bit.
        """
        if not isinstance(name, str) or not name:
            raise ArgumentTypeError(f"a variable's name is a string, got {name!r}")
        with self.writing():
            tied = self._tied(name, self._convert(name, value))
            self._values.update({each: new for each, new in tied.items() if each not in self.elsewhere})

    def hold(self, values: Mapping[str, Any]) -> None:
        """Let variables have these very OrtValues, uncopied, all of them at once."""
        with self.writing():
            self._values.update(values)
            if not self.elsewhere.keys().isdisjoint(values):
                self._place({name: rank for name, rank in self.elsewhere.items() if name not in values})

    def leave(self, owners: Mapping[str, int]) -> None:
        """Let other ranks, ``owners`` by name, hold these variables: no value of them stays here."""
        with self.writing():
            for name in owners:
                self._values.pop(name, None)
            self._place({**self.elsewhere, **owners})

    def deal(self, rows: Mapping[str, int], held: Collection[str]) -> None:
        """Know that of the variables that it was given to hold these are rows of so many, dealt out among the ranks."""
        with self.writing():
            kept = {name: count for name, count in self.dealt.items() if name not in held}
            self.dealt = MappingProxyType({**kept, **rows})

    def _place(self, owners: dict[str, int]) -> None:
        self.elsewhere = MappingProxyType(owners)

    def has_var(self, name: str) -> bool:
        """Whether a variable of this name has a value."""
        return name in self._values

    def var_names(self) -> list[str]:
        """The names of every variable that has a value, oldest first."""
        return list(self._values)

    def drop(self, *names: str) -> None:
        """Forget variables, and free their memory. ScopeError for an unknown name; then none is forgotten."""
        with self.writing():
            for name in names:
                self.ort_value(name)
            for name in names:
                self._values.pop(name, None)

    def ort_value(self, name: str) -> Any:
        """The value of a variable where it lies, an OrtValue that training writes into. ScopeError: an unknown name."""
        value = self._values.get(name)
        if value is None:
            if name in self.elsewhere:
                raise ScopeError(
                    f"variable '{name}' lies in the scope of rank {self.elsewhere[name]} alone: the optimizer's state "
                    f"is dealt out among the ranks. amp.distributed.find_var('{name}'), called on all of them, gives it"
                )
            hint = near_names(name, self._values) or "run the startup program first, into this scope"
            raise ScopeError(f"no variable '{name}' in the scope ({len(self._values)} variables); {hint}")
        return value

    def ort_value_on(self, place: Place, name: str) -> Any:
        """The value on ``place``, moved there for good where it lay elsewhere; None where there is none."""
        value = self._values.get(name)
        if value is not None and not lies_on(value, place):
            value = self._values[name] = device_tensors.copy_to(value, place)
        return value

    def _convert(self, name: str, value: Any) -> Any:
        if hasattr(value, "data_ptr") and hasattr(value, "element_type"):
            return device_tensors.copy_to(value, CPUPlace())
        if isinstance(value, onnx.TensorProto):
            value = onnx.numpy_helper.to_array(value)
        elif isinstance(value, (bool, int, float, list, tuple)):
            source = next(self.masters(name), name)
            old = self._values.get(source)
            dtype = "float32" if source in self.elsewhere else None  # masters and accumulators
            value = literal(value, dtype if old is None else device_tensors.dtype_of(old), f"variable '{name}'")
        try:
            return device_tensors.from_array(value)
        except ArgumentError:
            raise ArgumentTypeError(
                f"variable '{name}' is given {type(value).__name__} of {np.asarray(value).dtype}; expected an array of "
                "numbers, of one of ONNX's element types"
            ) from None

    # -- master weights -------------------------------------------------------------------------------
    def masters(self, name: str) -> Iterator[str]:
        """The names of the master weights that a parameter has, here or on another rank."""
        return itertools.takewhile(lambda each: each in self._values or each in self.elsewhere, master_names(name))

    def _tied(self, name: str, value: Any) -> dict[str, Any]:
        """What variables take when ``name`` is set: a parameter and its masters go together."""
        if device_tensors.dtype_of(value) not in FLOATS:
            return {name: value}
        owner = mastered(name)
        if owner is not None:
            held = (self._values.get(name), self._values.get(owner))
            follows = name in self.elsewhere or (None not in held and _rounds_to(*map(device_tensors.to_array, held)))
            return {name: value} | (self._as_held(owner, value) if follows else {})
        masters = list(self.masters(name))
        if not masters:
            return {name: value}
        found = {name: value} | self._as_held(name, value)
        for master in (each for each in masters if each in self._values):
            kept = device_tensors.to_array(self._values[master])
            if not _rounds_to(kept, device_tensors.to_array(found[name])):
                wide = device_tensors.rounded(master, device_tensors.to_array(value), "float32")
                found[master] = device_tensors.from_array(wide)
        return found

    def _as_held(self, parameter: str, value: Any) -> dict[str, Any]:
        """The parameter with a value in the element type that it has here; nothing where it is not here."""
        held = self._values.get(parameter)
        dtype = None if held is None else device_tensors.dtype_of(held)
        if dtype not in FLOATS:
            return {}
        rounded = device_tensors.rounded(parameter, device_tensors.to_array(value), dtype)
        return {parameter: device_tensors.from_array(rounded)}

    def __repr__(self) -> str:
        return f"<Scope: {len(self._values)} variables>"


def _rounds_to(master: np.ndarray, parameter: np.ndarray) -> bool:
    with np.errstate(over="ignore"):
        return master.astype(parameter.dtype).tobytes() == parameter.tobytes()


def literal(value: Any, dtype: str | None, what: str) -> np.ndarray:
    """Python numbers as an array of ``dtype`` (None: numpy's choice); ArgumentError where they do not fit it."""
    try:
        natural = np.asarray(value)
    except ValueError as error:
        raise ArgumentError(f"{what}: the lists do not form an array: {error}") from None
    if natural.dtype.kind not in "biuf":
        raise ArgumentError(f"{what}: {value!r:.80} is not an array of numbers")
    if dtype is None or natural.size == 0:
        return natural if dtype is None else natural.astype(numpy_dtype(dtype))
    target = numpy_dtype(dtype)
    with np.errstate(all="ignore"):
        array = natural.astype(target)
        if dtype.startswith(("int", "uint")):
            fits = _whole(natural, ml_dtypes.iinfo(target))
            array = np.asarray(value, target) if fits else array  # ``natural`` may hold large integers as floats
        elif dtype == "bool":
            fits = bool(np.all((natural == 0) | (natural == 1)))
        else:
            fits = bool(np.all(np.isfinite(array.astype(np.float64)) | ~np.isfinite(natural)))
    if not fits:
        raise ArgumentError(f"{what}: {value!r:.80} does not fit {dtype}")
    return array


def _whole(array: np.ndarray, limits: Any) -> bool:
    """Whether every element is an integer between the limits."""
    if not np.all(np.isfinite(array)) or not np.all(array == np.trunc(array)):
        return False
    return int(limits.min) <= int(array.min()) and int(array.max()) <= int(limits.max)


#: The scope for the process, and that of the innermost ``scope_guard`` of the running thread or task.
_process = Scope()
_guarded: ContextVar[Scope | None] = ContextVar("scope", default=None)


def global_scope() -> Scope:
    """The scope that runs use when none is given: that of the innermost ``scope_guard``, else one for the process."""
    return _guarded.get() or _process


@contextmanager
def scope_guard(scope: Scope) -> Iterator[Scope]:
    """Let ``global_scope()`` be ``scope`` inside, for this thread (or asyncio task) alone.

    A thread that is started inside does not stand inside: give it the scope, ``exe.run(..., scope=scope)``.
    """
    if not isinstance(scope, Scope):
        raise ArgumentTypeError(f"scope_guard takes a Scope, got {scope!r}")
    with inside(_guarded, scope):
        yield scope


def check_not_replaced(scope: Scope) -> None:
    """OrderError where parameters are something else than what is trained, for the time being."""
    if scope.replaced:
        raise OrderError(
            "inside ExponentialMovingAverage.applied parameters are not what is trained, and their state is: save it "
            "outside; save_inference_model takes parameters as they are"
        )


def check_scope(scope: Scope | None) -> Scope:
    """``scope``, or the global one for None; ArgumentTypeError for anything else."""
    if scope is None:
        return global_scope()
    if not isinstance(scope, Scope):
        raise ArgumentTypeError(f"expected a Scope, got {scope!r}")
    return scope
