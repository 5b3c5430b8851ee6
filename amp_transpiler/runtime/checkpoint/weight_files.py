"""Weights from files of other systems: safetensors, npz, and ONNX models. No pickle is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, CheckpointError, CheckpointNotFoundError
from amp_transpiler.ir.patterns import matching_names
from amp_transpiler.ir.tensors import as_array, tensor_type
from amp_transpiler.ir.types import ONNX_TYPES, element_type
from amp_transpiler.option_checks import switch
from amp_transpiler.program import Program
from amp_transpiler.runtime.arrays import read_arrays
from amp_transpiler.runtime.checkpoint.renaming import Renames, renamed
from amp_transpiler.runtime.checkpoint.restore import restore
from amp_transpiler.runtime.checkpoint.state_slots import PARAMETER, UNUSED, Key, Stored
from amp_transpiler.runtime.checkpoint.writing import SAFETENSORS_TYPES
from amp_transpiler.runtime.scope import Scope, check_scope

_CALL = "load_weights"


@dataclass(frozen=True)
class LoadedWeights:
    """What was loaded: the file, names of variables that got a value, those that got none, tensors left over."""

    path: Path
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]


def load_weights(
    path: str | os.PathLike[str],
    program: Program,
    scope: Scope | None = None,
    *,
    rename: Renames | None = None,
    strict: bool = True,
    transpose: Sequence[str] = (),
) -> LoadedWeights:
    """Set the parameters, statistics and buffers of ``program`` in ``scope`` (default: the global one) from a file.

    Master weights get the values as they are, 16-bit parameters get them rounded, moving averages that no step has
    moved yet begin with them; other training state stays as it is. Call it after the startup program, which would set
    the parameters anew; ``amp_init`` may come before or after.
    The scope changes when everything has been read and found to fit.

    Args:
        path: ``.safetensors`` (as torch and others export it), ``.npz``, or ``.onnx`` (its initializers; those that
            are no weights, such as shapes, may be left over).
        rename: names in the file to names in the program: ``{pattern: replacement}``, where a pattern is a glob or,
            after ``re:``, a regular expression, ``*`` in the replacement of a glob is what the wildcard of that number
            matched, and None leaves tensors out. The first pattern that fits a name counts.
        strict: False loads what is there, and leaves what goes nowhere. Wrong shapes are errors in any case.
        transpose: patterns of names in the file of matrices that are stored transposed, such as the weights of
            ``torch.nn.Linear`` [out, in] for ``amp.nn.fc`` [in, out]; ``"*.weight"`` passes over those of norms and
            convolutions, but no table of an embedding. No matrix is transposed because of its shape.

    Raises:
        CheckpointNotFoundError, CheckpointError: no file, or one that cannot be read.
        CheckpointMismatchError: it does not fit; lists every missing, extra and wrong tensor.
        PrecisionError: a value does not fit the 16-bit type of its parameter.
        ArgumentError, ArgumentTypeError: another kind of file, a pattern that fits nothing.
    """
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise ArgumentTypeError(f"{_CALL} takes a path first, got {path!r}")
    if not isinstance(program, Program):
        raise ArgumentTypeError(f"{_CALL} takes a program as second argument, got {program!r}")
    scope, file = check_scope(scope), Path(path)
    tensors = _read(file)
    named = transpose if isinstance(transpose, Collection) else ()
    matrices = [one for one in tensors if len(one.shape) == 2 or one.name in named]
    turned = matching_names(matrices, transpose, f"{_CALL}: transpose", lambda one: [one.name], "matrix of the file")
    names = renamed([one.name for one in tensors], rename, _CALL)
    stored: dict[Key, Stored] = {}
    for one in tensors:
        name = names[one.name]
        if name is not None:
            stored[("value", name, 0)] = _transposed(one) if one in turned else one
    found = restore(program, stored, scope, f"'{file}'", strict=switch(f"{_CALL}: strict", strict), weights_only=True)
    found.put(program, scope)
    return LoadedWeights(file, (*found.values, *found.others), tuple(found.missing), tuple(found.extra))


def _transposed(one: Stored) -> Stored:
    if len(one.shape) != 2:
        raise ArgumentError(f"{_CALL}: transpose names '{one.name}', of shape {list(one.shape)}, which is no matrix")
    return Stored(one.name, one.dtype, one.shape[::-1], one.role, lambda: one.read().T)


# -- files -----------------------------------------------------------------------------------------------
def _read(path: Path) -> list[Stored]:
    readers: dict[str, Callable[[Path], list[Stored]]] = {".safetensors": _safetensors, ".npz": _npz, ".onnx": _onnx}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ArgumentError(
            f"{_CALL} reads {', '.join(readers)}; '{path}' is something else. A state dict of torch is "
            "written as safetensors by safetensors.torch.save_file(model.state_dict(), path); a "
            "checkpoint of this package is read by load_checkpoint"
        )
    if not os.path.exists(path):
        raise CheckpointNotFoundError(f"there is no file '{path}'")
    return reader(path)


def _safetensors(path: Path) -> list[Stored]:
    try:
        file = safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"'{path}' is no safetensors file that can be read, or is cut short: {error}") from None
    found = []
    for name in file.keys():  # noqa: SIM118 (it is no mapping)
        piece = file.get_slice(name)
        dtype = SAFETENSORS_TYPES.get(piece.get_dtype())
        if dtype is None:
            raise CheckpointError(f"tensor '{name}' of '{path}' is {piece.get_dtype()}, which no parameter can have")
        found.append(Stored(name, dtype, tuple(piece.get_shape()), PARAMETER, _getter(file.get_tensor, name)))
    return found


def _npz(path: Path) -> list[Stored]:
    try:
        arrays = read_arrays(path)
    except ArgumentError as error:
        raise CheckpointError(str(error)) from None
    for name, array in arrays.items():
        if array.dtype.kind not in "biufc" or array.dtype.name not in ONNX_TYPES:
            raise CheckpointError(
                f"array '{name}' of '{path}' has element type {array.dtype}, which is no "
                "number of ONNX (numpy writes bfloat16 so); store float32, or safetensors"
            )
    return [Stored(n, element_type(a.dtype), a.shape, PARAMETER, _getter(arrays.get, n)) for n, a in arrays.items()]


def _onnx(path: Path) -> list[Stored]:
    """What has content in the file; only what an import takes for state counts as left over."""
    found = []
    for variable in Program.from_onnx(path).variables:
        if variable.data is not None:
            dtype, shape = tensor_type(variable.data)
            own = variable.name.startswith("@")  # the seed of a program of this package
            role = PARAMETER if variable.persistable and not own else UNUSED
            found.append(Stored(variable.name, dtype, shape, role, _getter(as_array, variable.data)))
    return found


def _getter(read: Callable[[Any], Any], what: Any) -> Callable[[], np.ndarray]:
    return lambda: np.asarray(read(what))
