"""What a training is to use and to write, refused before anything is read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from amp_transpiler.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointWriteError,
    ModelFileWriteError,
    PlaceError,
)
from amp_transpiler.file_targets import check_space, folder_path, same_file
from amp_transpiler.files import array_files, check_outputs, probe
from amp_transpiler.finetune.log import EPOCHS, STEPS
from amp_transpiler.finetune.options import FitOptions
from amp_transpiler.ir.external import check_unnamed
from amp_transpiler.ir.locations import model_files, model_size
from amp_transpiler.passes.lowering.place import Place, no_faster
from amp_transpiler.runtime.collective.current import own_place
from amp_transpiler.runtime.missing import what_is_missing

#: Bytes of a model from which on what is trained of it may get a data file beside it.
_LARGE = 1 << 30


def chosen_place(place: Place | str, options: FitOptions) -> Place:
    """The place, which is there. ArgumentError: what is none; PlaceError: no such device."""
    place = own_place(place, options.called("place"))
    missing = what_is_missing(place)
    if missing is not None:
        device, cpu = options.said("place", place.kind), options.said("place", "cpu")
        raise PlaceError(f"{device}: {missing}. Train on the processor instead: {cpu}")
    return place


def remarks(places: Iterable[Place], options: FitOptions) -> list[str]:
    """What there is to say of the mode on these places."""
    slow = [said for place in places if options.mode != "fp32" and (said := no_faster(place.kind))]
    return [f"{said}; {options.said('mode', 'fp32')} moves fewer bytes" for said in slow]


def check_files(model: Any, output: Any, data: Any, test: Any, log: Any, options: FitOptions) -> None:
    """Refuse before the work what could not be written after it, or would overwrite what is read."""
    if not isinstance(output, str | os.PathLike):
        raise ArgumentTypeError(f"fit: output is {output!r}; expected the path of a file")
    inputs: dict[str, list[Any]] = {
        options.called(name): array_files(source)
        for name, source in (("data", data), ("test", test))
        if isinstance(source, str | os.PathLike)
    }
    outputs: dict[str, Any] = {"OUT.onnx" if options.flags else "output": output}
    if isinstance(model, str | os.PathLike):
        inputs["IN.onnx" if options.flags else "model"] = list(model_files(model))
    if log is not None:
        check_folder(log, output, options.called("log"))
        if os.path.isdir(log):
            outputs |= {f"{options.called('log')} {name}": Path(log) / name for name in (STEPS, EPOCHS)}
    check_outputs(outputs, inputs)
    if isinstance(model, str | os.PathLike):
        check_space(output, model_size(model) // 2)
        if model_size(model) > _LARGE:
            check_unnamed(Path(output), Path(f"{os.fspath(output)}.data"))


def check_folder(path: Any, output: Any, what: str) -> None:
    """A folder that is there, or can be made where it is to be, and be written to; rid of what killed runs left.

    It is not ``output``, which is a file.
    """
    folder = folder_path(path, what)
    kind = CheckpointWriteError if what.endswith("checkpoint") else ModelFileWriteError
    try:
        folder.lstat()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise kind(f"{what} '{path}' cannot be written: {error.strerror or error}") from None
    if folder.exists() and not folder.is_dir():
        raise kind(f"{what} '{path}' is a file; give the name of a folder")
    if isinstance(output, str | os.PathLike) and same_file(folder, output):
        raise ArgumentError(
            f"{what} '{path}' is a folder, and the model that is written has the same name; choose another"
        )
    place = folder if folder.exists() else folder.parent
    if not place.is_dir():
        raise kind(f"{what} '{path}' cannot be made: there is no folder '{place}'")
    probe(place, f"{what} '{path}'", kind)
