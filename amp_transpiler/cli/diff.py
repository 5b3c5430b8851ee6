"""``amp-transpile diff``: what changed between two models."""

from __future__ import annotations

import argparse
from collections import Counter

from amp_transpiler.cli.terminal import printable
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.passes.view.constants import stored_bytes
from amp_transpiler.passes.view.names import label
from amp_transpiler.passes.view.typing import is_float, programs
from amp_transpiler.program import Program

_FEW = 5


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("before", metavar="A.onnx")
    parser.add_argument("after", metavar="B.onnx")
    parser.add_argument("--all", action="store_true", help="list every operator that changed, not the first few")


def run(options: argparse.Namespace) -> int:
    """Print the differences: opset, inputs and outputs, precisions, casts, operators, weights."""
    before, after = Program.from_onnx(options.before), Program.from_onnx(options.after)
    lines = [*_interface(before, after), *_operators(before, after, options.all), *_weights(before, after)]
    print("\n".join(map(printable, lines)) if lines else "no difference in opset, types, operators and weights")
    return 0


def _interface(before: Program, after: Program) -> list[str]:
    lines = []
    if before.opset() != after.opset():
        lines.append(f"opset {before.opset()} -> {after.opset()}")
    for kind in ("inputs", "outputs"):
        old = {v.name: v.dtype or "no tensor" for v in getattr(before, kind)}
        new = {v.name: v.dtype or "no tensor" for v in getattr(after, kind)}
        for name in [*old, *(n for n in new if n not in old)]:
            if old.get(name) != new.get(name):
                lines.append(f"{kind[:-1]} '{name}': {old.get(name, 'absent')} -> {new.get(name, 'absent')}")
    return lines


def _precision(op: Operator) -> str:
    kinds = [str(v.dtype) for v in (*op.outputs, *op.inputs) if v is not None and is_float(v)]
    return kinds[0] if kinds else "no float"


def _keyed(program: Program) -> dict[tuple[str, str], Operator]:
    """Operators by type and name; without a name, by what they were written to make. Inserted casts left out."""
    return {(op.full_type, op.name or label(op)): op for op in program.walk() if not op.inserted}


def _operators(before: Program, after: Program, every: bool) -> list[str]:
    old, new = _keyed(before), _keyed(after)
    lines = []
    changed: dict[tuple[str, str, str], list[str]] = {}
    for key, op in new.items():
        if key in old and _precision(old[key]) != _precision(op):
            changed.setdefault((op.full_type, _precision(old[key]), _precision(op)), []).append(key[1])
    for (type_, was, now), names in sorted(changed.items()):
        lines.append(f"{len(names)} {type_}: {was} -> {now}: {_some(names, every)}")
    for title, here, there in (("gone", old, new), ("new", new, old)):
        missing: dict[str, list[str]] = {}
        for type_, name in here:
            if (type_, name) not in there:
                missing.setdefault(type_, []).append(name)
        lines += [f"{len(names)} {type_} {title}: {_some(names, every)}" for type_, names in sorted(missing.items())]
    casts = [sum(op.inserted for op in program.walk()) for program in (before, after)]
    if casts[0] != casts[1]:
        lines.append(f"inserted casts: {casts[0]} -> {casts[1]}")
    return lines


def _some(names: list[str], every: bool) -> str:
    return ", ".join(names) if every or len(names) <= _FEW else f"{', '.join(names[:_FEW])}, ... (--all lists them)"


def _weights(before: Program, after: Program) -> list[str]:
    old, new = sizes(before), sizes(after)
    return [
        f"weights in {kind}: {old[kind]:,} -> {new[kind]:,} bytes"
        for kind in sorted(old.keys() | new.keys())
        if old[kind] != new[kind]
    ]


def sizes(program: Program) -> Counter[str]:
    """Bytes of weights and constants by element type."""
    sizes: Counter[str] = Counter()
    for each in programs(program):
        for variable in each.variables:
            if variable.outer is None:
                sizes.update(stored_bytes(variable))
    return sizes
