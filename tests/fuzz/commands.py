"""What each command makes of one model: a valid result, or one clear error and nothing written."""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx.reference
import scipy.sparse.csgraph  # noqa: F401 - which is loaded when it is asked for, too

import amp_transpiler as amp
from amp_transpiler.cli.main import COMMANDS as SUBCOMMANDS, load, main

#: Arguments of each command; {m} is the model, {o} a file to write.
COMMANDS: dict[str, list[str]] = {
    "convert": ["convert", "{m}", "{o}", "--report", "{o}.html", "--json", "{o}.json"],
    "mixed": ["convert", "{m}", "{o}", "--mode", "mixed", "--dtype", "bfloat16"],
    "auto": ["convert", "{m}", "{o}", "--mode", "auto"],
    "check": ["convert", "{m}", "{o}", "--check", "--time-budget", "3"],
    "info": ["info", "{m}"],
    "explain": ["explain", "{m}"],
    "diff": ["diff", "{m}", "{m}"],
}
#: Longer than this, a message is no clear one.
_LONGEST = 3000
#: Control characters, and those that turn the direction of text.
_FORBIDDEN = frozenset(
    [
        *map(chr, range(32)),
        *map(chr, range(127, 160)),
        *map(chr, range(0x202A, 0x202F)),
        *map(chr, range(0x2066, 0x206A)),
    ]
) - {"\n"}


def load_all() -> None:
    """Load what commands load when it is asked for: a case begins with it, being a process that parts from this one."""
    for name in dir(amp):
        getattr(amp, name)
    for command in SUBCOMMANDS:
        load(command)


def violation(command: str, model: Path, folder: Path) -> str:
    """What is wrong with what a command (or "prepare") makes of a model; "" where nothing is.

    ``folder`` is made, and removed at the end.
    """
    folder.mkdir()
    try:
        with warnings.catch_warnings(record=True) as warned, quiet():
            warnings.simplefilter("always")
            found = (
                prepared(model)
                if command == "prepare"
                else ran([a.format(m=model, o=folder / "out.onnx") for a in COMMANDS[command]], folder)
            )
        noise = [str(w.message) for w in warned if issubclass(w.category, RuntimeWarning | DeprecationWarning)]
        return found or (f"warning: {noise[0]}" if noise else "")
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def quiet():  # type: ignore[no-untyped-def]
    """Notes that the package logs are no part of what is judged."""
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def prepared(model: Path) -> str:
    """``prepare_training`` on the program of a model."""
    return raised(lambda: amp.prepare_training(amp.Program.from_onnx(model)))


def raised(call: Callable[[], object]) -> str:
    """What is wrong with the error of a call."""
    try:
        call()
    except amp.AmpError as error:
        return unclear(f"{error}")
    except Exception:
        return "traceback: " + _last(traceback.format_exc())
    return ""


def ran(arguments: list[str], folder: Path) -> str:
    """What is wrong with how the command line did; it may write into ``folder``, and nothing on an error."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(arguments)
    except SystemExit as done:  # argparse
        status = done.code if isinstance(done.code, int) else 1
        if status != 2 or "error:" not in err.getvalue():
            return f"left with {done.code!r}: {err.getvalue()[-300:]}"
        return ""
    except Exception:
        return "traceback: " + _last(traceback.format_exc())
    written = sorted(path.name for path in folder.iterdir())
    text = err.getvalue()
    for which, printed in (("printed", out.getvalue()), ("error", text)):
        if bad := _FORBIDDEN & set(printed):
            return f"{which} control character {min(bad)!r}"
    if status not in (0, 1, 2, 3):
        return f"exit status {status}"
    if status in (1, 2):
        if not text.startswith("amp-transpile: ") or text.count("\n") != 1:
            return f"not one line: {text[:300]!r}"
        return f"wrote {written} on an error" if written else unclear(text)
    if status == 0 and text:
        return f"said something on stderr though all went well: {text[:300]!r}"
    if status == 0 and arguments[0] == "convert" and (folder / "out.onnx").exists():
        return unusable(folder / "out.onnx")
    return ""


def unclear(text: str) -> str:
    """What is wrong with a message."""
    if len(text) > _LONGEST:
        return f"a message of {len(text)} characters: {text[:200]!r}"
    if not text.strip() or "Traceback" in text or "\n\n" in text:
        return f"no clear message: {text[:300]!r}"
    return ""


def unusable(path: Path) -> str:
    """What is wrong with a model that was written."""
    try:
        model = onnx.load(path)
        amp.Program.from_onnx(path)
    except Exception:
        return "the result cannot be read again: " + _last(traceback.format_exc())
    return "" if len(model.graph.output) else "the result has no outputs"


def _last(text: str) -> str:
    """The last frames of a traceback, in one line."""
    lines = [line.strip() for line in text.strip().splitlines()]
    return " | ".join([*lines[-7:-1], lines[-1][:300]])
