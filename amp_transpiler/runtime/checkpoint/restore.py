"""Stored tensors fitted to a program: which goes where, what is made of it in another precision, what does not fit.

Between modes the master weight, or else the fp32 parameter, is the value: masters take it as it is, 16-bit
parameters take it rounded. Moments and statistics are fp32 in every mode.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from amp_transpiler.errors import CheckpointError, CheckpointMismatchError
from amp_transpiler.ir.dealt_rows import held_shape
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.types import FLOATS, numpy_dtype
from amp_transpiler.option_checks import listed
from amp_transpiler.passes.lowering.lowered import needed
from amp_transpiler.passes.view.training_step import training_step
from amp_transpiler.program import Program
from amp_transpiler.runtime import device_tensors
from amp_transpiler.runtime.checkpoint.part_counts import agreed_counts, fit_counts
from amp_transpiler.runtime.checkpoint.reading import TensorFile
from amp_transpiler.runtime.checkpoint.renaming import Renames, renamed
from amp_transpiler.runtime.checkpoint.state_slots import (
    AVERAGED,
    BEFORE,
    INFERENCE,
    MASTER,
    MICRO_STEP,
    NAMED,
    OF_A_MODE,
    OF_A_WINDOW,
    PARAMETER,
    SCALING,
    UNUSED,
    Key,
    Slot,
    Stored,
    scaler_settings,
    state_slots,
)
from amp_transpiler.runtime.dealt import own_rows, whole_rows
from amp_transpiler.runtime.executor import Executor
from amp_transpiler.runtime.heap import trim
from amp_transpiler.runtime.scope import Scope
from amp_transpiler.runtime.shards import elsewhere
from amp_transpiler.runtime.states import fits
from amp_transpiler.warn import warn_user

_SHOWN = 200  # names of each kind in a message
#: Bytes of values that are replaced from one trim to the next: in a heap of many pieces that takes its time.
_ROOM = 1 << 25


def stored_tensors(
    meta: Mapping[str, Any], file: TensorFile, program: Program, rename: Renames | None, what: str
) -> dict[Key, Stored]:
    """The tensors of a checkpoint by what they stand for, a scale that moved left out where that of ``program`` is
    fixed. CheckpointError: two stand for the same."""
    said = meta["tensors"]
    window = {role: _runs(program) for role in OF_A_WINDOW}  # where it is not said: in files of version 0.1
    numbers = {name: one.get("number", window.get(one["role"], 0)) for name, one in said.items()}
    slots = {name: Slot(one["role"], one.get("of", ""), numbers[name]) for name, one in said.items()}
    owners = dict.fromkeys(slot.of or name for name, slot in slots.items() if slot.role in NAMED)
    names = renamed(owners, rename, "load_checkpoint")
    fixed = meta["scaling"] and training_step(program).checks and not scaler_settings(program)
    stored: dict[Key, Stored] = {}
    for name, slot in slots.items():
        of = names.get(slot.of or name, slot.of) if slot.role in NAMED or slot.of in owners else slot.of
        if of is None or (fixed and slot.role == SCALING):
            continue
        one, key = said[name], Slot(slot.role, of, slot.number).key(name)
        if key in stored:
            raise CheckpointError(
                f"{what}: the tensors {stored[key].name!r:.200} and {name!r:.200} are for the same "
                f"state, {' '.join(map(str, key)).strip()!r:.200}"
            )
        stored[key] = Stored(name, one["dtype"], tuple(one["shape"]), slot.role, functools.partial(file.read, name))
    return stored


def _runs(program: Program) -> int:
    """The runs of a window of accumulation; 0 where there is none."""
    return 0 if program.accumulation is None else program.accumulation.steps


def warn_of_window(program: Program, stored: Mapping[Key, Stored], what: str) -> None:
    """One warning where the checkpoint was saved inside of a window that the program cannot go on with."""
    for (role, _, runs), tensor in stored.items():
        if role != MICRO_STEP or runs == _runs(program) or not training_step(program).updates:
            continue
        if (at := tensor.read()).any():
            has = f"has windows of {_runs(program)}" if _runs(program) else "has none"
            warn_user(
                f"{what} was saved after {at} of the {runs} runs of a window of gradient accumulation, and "
                f"program '{program.name}' {has}: the gradients of these runs are left out"
            )


@dataclass
class Restored:
    """What makes values for variables of a program. ``converted``: some of others; it is not the same program.

    ``others``: variables whose values other ranks take, and which. ``begun``: moving averages, by the names of the
    variables whose values they begin with.
    """

    values: dict[str, Callable[[], Any]] = field(default_factory=dict)
    others: dict[str, int] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    wrong: dict[str, str] = field(default_factory=dict)
    converted: bool = False
    begun: dict[str, str] = field(default_factory=dict)

    def put(self, program: Program, scope: Scope) -> None:
        """Let the scope have the values; the memory of those that it had goes back.

        Each is made when the one before it has gone, so that memory holds the state once. Where that ends half way,
        the scope has none of them: a mixture would train on without a word.
        """
        with scope.writing():
            scope.leave(self.others)
            try:
                replaced = 0
                for name, make in self.values.items():
                    _drop(scope, [name])
                    scope.hold({name: make()})
                    replaced += scope.ort_value(name).tensor_size_in_bytes()
                    if replaced > _ROOM:  # values of other sizes do not fit into what was freed
                        replaced = 0
                        trim()
                for average, of in self.begun.items():
                    dtype = numpy_dtype(device_tensors.dtype_of(scope.ort_value(average)))
                    scope.hold({average: device_tensors.from_array(scope.find_var(of).astype(dtype, copy=False))})
            except BaseException as error:  # Ctrl-C too
                _drop(scope, self.values)
                if isinstance(error, CheckpointError):
                    raise CheckpointError(
                        f"{error}; program '{program.name}' has no state in the scope any more: load a checkpoint "
                        "again, or run the startup program"
                    ) from None
                raise
            scope.deal(whole_rows(program), self.values)
        trim()


def _drop(scope: Scope, names: Iterable[str]) -> None:
    """Free what the scope has of these variables."""
    scope.drop(*filter(scope.has_var, names))


def restore(
    program: Program, stored: Mapping[Key, Stored], scope: Scope, what: str, *, strict: bool, weights_only: bool = False
) -> Restored:
    """Values for the state of ``program`` (with ``weights_only``, for its parameters, masters and buffers alone).

    What belongs to one precision only (loss scale and its counters) and is not stored keeps its value in ``scope``,
    or else takes that of the startup program; so does, without ``strict``, everything that is not stored. A window of
    accumulation of which nothing is stored starts anew.

    CheckpointMismatchError with every missing, extra and wrong tensor; PrecisionError where a value does not fit 16
    bit. ``what`` names the source in messages. Nothing is written. What a checkpoint has is read when it is put, since
    all of it is verified; of other files (``weights_only``) all is read here.
    """
    slots = {v: s for v, s in state_slots(program).items() if not weights_only or s.role in INFERENCE | {MASTER}}
    found = Restored()
    sources = {variable: _source(variable, slot, stored) for variable, slot in slots.items()}
    agreed = agreed_counts(program, stored)
    late = fit_counts(program, sources, agreed)
    for variable, source in sources.items():
        if source is not None:
            _check(variable, source, found.wrong, weights_only)
        elif slots[variable].role not in OF_A_MODE:
            found.missing.append(variable.name)
    taken = {slot.key(variable.name) for variable, slot in slots.items()}
    roles = INFERENCE if weights_only or not training_step(program).updates else None
    surplus = [s for key, s in stored.items() if key not in taken and s.role not in agreed]
    found.extra = [s.name for s in surplus if _is_surplus(s, roles)]
    found.converted = taken != set(stored) or any(v.dtype != source.dtype for v, source in sources.items() if source)
    if found.wrong or (strict and (found.missing or found.extra)):
        wrong = [(v, s) for v, s in sources.items() if v.name in found.wrong and s is not None]
        wrong = [(v, s) for v, s in wrong if not (weights_only and _is_turned(v, s))]
        unlike = dict.fromkeys(s.name if s.role in NAMED else slots[v].of for v, s in wrong)
        raise _mismatch(program, found, what, [name for name in unlike if name])
    if late:
        warn_user(
            f"{what}: {listed(late)} of program '{program.name}' begin there beside parameters that go on; with the "
            "beta powers of these, their first steps are up to three times as long. A group with a rate of its own has "
            "powers of its own: {'params': [...], 'learning_rate': 0.1}"
        )
    others = elsewhere(program)
    for variable, source in sources.items():
        if source is not None and variable.name in others:
            found.others[variable.name] = others[variable.name]
        elif source is not None:
            found.values[variable.name] = functools.partial(_value, variable, source)
            if weights_only:
                found.values[variable.name] = _given(_value(variable, source))
            elif source.dtype != variable.dtype:
                _converted(variable, source)
    if not weights_only:
        absent = [v for v, source in sources.items() if source is None]
        made = _unstored(program, absent, scope, found, what, slots)
        found.values |= {name: _given(value) for name, value in made.items()}
    found.values |= _due(program, found.values)
    found.begun = _beginnings(program, scope, found.values)
    return found


def _due(program: Program, values: Mapping[str, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
    """Counts of good steps that are beyond the one at which the program lets the scale grow, which it compares for
    equality: of a program with another rule. The next good step is the one."""
    found = {}
    for scaling in training_step(program).scale_updates:
        last, good = scaling.operator.attrs.get("incr_every_n_steps"), scaling.good
        if last is not None and good is not None and good.name in values:
            count = device_tensors.to_array(values[good.name]())
            if (count >= last).any():
                due = np.minimum(count, int(last) - 1).astype(count.dtype)
                found[good.name] = _given(device_tensors.from_array(due))
    return found


def _beginnings(program: Program, scope: Scope, loaded: Collection[str]) -> dict[str, str]:
    """The moving averages, without a stored value, of loaded parameters that are what those were: no step has moved
    them yet. By name the variables that they begin with."""
    slots = state_slots(program)
    masters = {slot.of: v.name for v, slot in slots.items() if slot.role == MASTER}
    found = {}
    for average, slot in slots.items():
        followed = masters.get(slot.of, slot.of)
        followed = followed if scope.has_var(followed) else slot.of
        wanted = slot.role == AVERAGED and average.name not in loaded and followed in loaded
        if wanted and all(map(scope.has_var, (average.name, followed))):
            value, before = scope.find_var(average.name), scope.find_var(followed)
            if np.array_equal(value.astype(before.dtype, copy=False), before):
                found[average.name] = followed
    return found


def _source(variable: Variable, slot: Slot, stored: Mapping[Key, Stored]) -> Stored | None:
    """What the variable's value is read from or made of."""
    exact = stored.get(slot.key(variable.name))
    if slot.role == BEFORE:
        return exact or stored.get(("value", slot.of, 0))
    if slot.role not in (PARAMETER, MASTER):
        return exact
    plain, master = stored.get(("value", slot.of, 0)), stored.get((MASTER, slot.of, 0))
    if exact is not None and exact.dtype == variable.dtype:
        return exact
    return master or plain


def _is_turned(variable: Variable, source: Stored) -> bool:
    """Whether a matrix would fit if it were transposed."""
    shape = variable.shape
    return shape is not None and len(shape) == 2 and fits(source.shape[::-1], shape)


def _check(variable: Variable, source: Stored, wrong: dict[str, str], transposes: bool) -> None:
    """``transposes``: the caller can ask for it."""
    shape = variable.shape
    if shape is not None and not fits(source.shape, shape):
        hint = ""
        if transposes and _is_turned(variable, source):
            hint = f"; if the file has it transposed, say so: transpose=['{source.name}']"
        wrong[variable.name] = f"has shape {list(source.shape)} and not {list(shape)}{hint}"
    elif source.dtype != variable.dtype and not {source.dtype, variable.dtype} <= FLOATS:
        wrong[variable.name] = f"is {source.dtype} and not {variable.dtype}"


def _is_surplus(stored: Stored, roles: frozenset[str] | None) -> bool:
    """Whether a tensor that the program has nothing for is one too many, and not what only training has."""
    return stored.role not in OF_A_MODE and (roles is None or stored.role in roles)


def _value(variable: Variable, source: Stored) -> Any:
    return device_tensors.from_array(own_rows(variable, _converted(variable, source)))


def _converted(variable: Variable, source: Stored) -> np.ndarray:
    """What is stored, in the element type of the variable. PrecisionError where it does not fit that."""
    array = source.read()
    if source.dtype != variable.dtype:
        array = device_tensors.rounded(variable.name, array, str(variable.dtype))
    return array


def _given(value: Any) -> Callable[[], Any]:
    return lambda: value


# -- what is not stored ----------------------------------------------------------------------------------
def _unstored(
    program: Program,
    variables: list[Variable],
    scope: Scope,
    found: Restored,
    what: str,
    slots: Mapping[Variable, Slot],
) -> dict[str, Any]:
    """Values for variables that nothing is stored for: none for those that keep theirs, else the initial ones."""
    kept = {v.name for v in variables if slots[v].role not in OF_A_WINDOW and _kept(v, scope)}
    for variable in variables:  # a parameter and its master keep their values together, or neither does
        slot = slots[variable]
        group = [v for v in variables if slots[v].of == slot.of and slots[v].role in (PARAMETER, MASTER)]
        if slot.role in (PARAMETER, MASTER) and not all(v.name in kept for v in group):
            kept.discard(variable.name)
    wanted = [v for v in variables if v.name not in kept and slots[v].role != UNUSED]
    others = elsewhere(program)
    found.others |= {v.name: others[v.name] for v in wanted if v.name in others}
    wanted = [v for v in wanted if v.name not in others]
    values = _initial(program, wanted)
    lacking = [v.name for v in wanted if v.name not in values]
    if lacking:
        found.missing = lacking
        raise _mismatch(program, found, what)
    return values


def _kept(variable: Variable, scope: Scope) -> bool:
    value = scope.ort_values.get(variable.name)
    if variable.name in scope.elsewhere:
        return True
    if value is None or device_tensors.dtype_of(value) != variable.dtype:
        return False
    shape = variable.shape if variable.dealt is None else held_shape(variable)
    return shape is None or fits(value.shape(), shape)


def _initial(program: Program, variables: list[Variable]) -> dict[str, Any]:
    """The values that the startup program gives to those variables that it initialises."""
    if not variables or program.startup is None:
        return {}
    startup = program.startup.clone()
    targets = [startup.var(v.name) for v in variables if startup.has_var(v.name)]
    keys = {op.key for op in needed(startup, targets)}
    for op in reversed(startup.operators):
        if op.key not in keys:
            startup.remove_operator(op)
    made = Scope()
    Executor().run(startup, scope=made)
    values = {}
    for variable in variables:
        if made.has_var(variable.name):
            array = made.find_var(variable.name)
            if array.dtype != numpy_dtype(str(variable.dtype)):
                array = device_tensors.rounded(variable.name, array, str(variable.dtype))
            values[variable.name] = device_tensors.from_array(array)
    return values


# -- messages --------------------------------------------------------------------------------------------
def _mismatch(program: Program, found: Restored, what: str, unlike: Sequence[str] = ()) -> CheckpointMismatchError:
    """``unlike``: names in the file of what has another shape or element type."""
    lines = [
        f"{what} does not fit program '{program.name}' ({len(found.missing)} missing, {len(found.extra)} extra, "
        f"{len(found.wrong)} wrong); nothing was loaded"
    ]
    for name in found.missing[:_SHOWN]:
        near = difflib.get_close_matches(name, found.extra, 1, 0.7) if len(found.extra) < _SHOWN else []
        lines.append(f"  missing: {name}" + (f" (the file has '{near[0]}')" if near else ""))
    lines += [f"  extra:   {name}" for name in found.extra[:_SHOWN]]
    lines += [f"  wrong:   {name} {why}" for name, why in list(found.wrong.items())[:_SHOWN]]
    if max(len(found.missing), len(found.extra), len(found.wrong)) > _SHOWN:
        lines.append(f"  … (only the first {_SHOWN} of each; the error has all: .missing, .extra, .wrong)")
    if found.missing and found.extra:
        lines.append(
            "  Where only names differ, map them with rename={'pattern': 'replacement'}; a program built "
            "under amp.unique_name.guard() has the same names each time"
        )
    if (found.missing or found.extra) and not found.wrong:
        lines.append("  strict=False loads what fits")
    if unlike:
        without = ", ".join(f"{name!r}: None" for name in unlike[:4]) + ", …" * (len(unlike) > 4)
        lines.append(f"  strict=False with rename={{{without}}} leaves out what is wrong, such as another head")
    return CheckpointMismatchError("\n".join(lines), tuple(found.missing), tuple(found.extra), found.wrong)
