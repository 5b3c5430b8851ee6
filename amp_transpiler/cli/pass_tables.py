"""What passes say of themselves, and the pipelines behind the calls of the package."""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import fields

from amp_transpiler.cli.terminal import printable, typed
from amp_transpiler.conversion.conversion_options import ConversionOptions
from amp_transpiler.conversion.converting import conversion
from amp_transpiler.conversion.known_passes import PASSES, Pipeline, pipelines
from amp_transpiler.errors import ArgumentError
from amp_transpiler.passes.pipeline import Pass
from amp_transpiler.passes.pipeline_text import key_of, values_of
from amp_transpiler.program import Program

#: What :func:`cells` gives of a pass.
HEAD = ("pass", "does", "options", "needs", "guarantees")
_WIDTH = 110


def cells(each: type[Pass]) -> tuple[str, ...]:
    """A pass under :data:`HEAD`."""
    options = [f"{key_of(option)}: {values_of(each, option)}" for option in fields(each)]
    needs, guarantees = (", ".join(map(str, items)) for items in (each.needs, each.guarantees))
    return each.name, each.sentence(), "; ".join(options), needs, guarantees


def run(options: argparse.Namespace) -> int:
    """Print the pipelines and every pass; of a model, what the passes of a text change in it."""
    if options.model is None:
        if options.passes:
            raise ArgumentError(
                f"explain: --passes {typed(options.passes)!r} is a list of passes to try on a model; give the model "
                "before it, or --passes alone for what all passes do"
            )
        print("\n".join([*(f"{call:9} {pipeline}" for call, pipeline in pipelines().items()), *_listing()]))
        return 0
    if options.nodes:
        raise ArgumentError("explain: nodes, or --passes; what passes do is said of the whole model")
    program = Program.from_onnx(options.model)
    before = len(list(program.walk()))
    if options.passes:
        ran = Pipeline(typed(options.passes)).run(program)
    else:
        asked = ConversionOptions(mode=options.mode, dtype=options.dtype, flags=True)
        ran = conversion(asked).run(program, options=asked)
    print("\n".join([str(ran), *(f"note: {printable(note)}" for note in ran.notes)]))
    print(f"{before} operators before, {len(list(program.walk()))} after")
    return 0


def _listing() -> list[str]:
    lines = []
    for name, each in sorted(PASSES.items()):
        _, *rest = cells(each)
        lines += ["", name]
        for what, text in zip(HEAD[1:], rest, strict=True):
            if text:
                lines += textwrap.wrap(text, _WIDTH, initial_indent=f"  {what:11} ", subsequent_indent=" " * 14)
    return lines
