"""``amp-transpile info``: what a model holds."""

from __future__ import annotations

import argparse
from collections import Counter

from amp_transpiler.cli import cost, plan_ranks
from amp_transpiler.cli.diff import sizes
from amp_transpiler.cli.terminal import printable
from amp_transpiler.errors import ArgumentError
from amp_transpiler.option_checks import flag
from amp_transpiler.passes.canonicalize.inlining import TryInlineFunctions
from amp_transpiler.passes.pipeline import Pipeline
from amp_transpiler.passes.view.kernel_faults import is_foreign, leaves
from amp_transpiler.passes.view.typing import float_type
from amp_transpiler.program import Program


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("model", metavar="MODEL.onnx")
    cost.add_options(parser)
    plan_ranks.add_options(parser)


def run(options: argparse.Namespace) -> int:
    """Print operators by precision, casts, weights, inputs and outputs, what has no CUDA kernel, and costs."""
    _check(options)
    program = Program.from_onnx(options.model)
    print(_operators(program))
    casts = [op for op in program.walk() if op.type == "Cast"]
    print(f"casts: {len(casts)}, of which inserted by a conversion: {sum(op.inserted for op in casts)}")
    held = sizes(program)
    print(f"weights: {', '.join(f'{size:,} bytes {dtype}' for dtype, size in sorted(held.items())) or 'none'}")
    for kind, variables in (("input", program.inputs), ("output", program.outputs)):
        for v in variables:
            shape = "?" if v.shape is None else ",".join("?" if s is None else printable(str(s)) for s in v.shape)
            print(f"{kind}: {printable(v.name)} {v.dtype or 'no tensor'}[{shape}]")
    print(_placement(program))
    if options.cost:
        cost.show(program, options)
    if options.ranks:
        plan_ranks.show(options)
    return 0


def _check(options: argparse.Namespace) -> None:
    """ArgumentError for an option that says something of costs or of a plan where neither is asked for."""
    for names, wanted, what in (
        (("place",), options.cost, "--cost"),
        (("shape", "device"), options.cost or options.ranks, "--cost or --ranks"),
        (plan_ranks.OPTIONS, options.ranks, "--ranks"),
    ):
        for name in names:
            if not wanted and getattr(options, name) not in (None, False):
                raise ArgumentError(f"info: {flag(name)} goes with {what}, which is not given")


def _operators(program: Program) -> str:
    """A table: how many operators of each type work on each floating-point type."""
    counts: Counter[tuple[str, str]] = Counter()
    for op in program.walk():
        counts[printable(op.full_type), float_type(op, "no float")] += 1
    kinds = sorted({kind for _, kind in counts})
    types = sorted({type_ for type_, _ in counts})
    width = max([len(t) for t in types], default=8)
    lines = [f"{'operator':<{width}} " + " ".join(f"{kind:>9}" for kind in kinds)]
    for type_ in types:
        lines.append(f"{type_:<{width}} " + " ".join(f"{counts[type_, kind] or '':>9}" for kind in kinds))
    total = " ".join(f"{sum(n for (_, k), n in counts.items() if k == kind):>9}" for kind in kinds)
    lines.append(f"{'total':<{width}} {total}")
    lines.append(f"opset {program.opset()}, {sum(counts.values())} operators")
    return "\n".join(lines)


def _placement(program: Program) -> str:
    program = program.clone()
    Pipeline((TryInlineFunctions(),)).run(program)
    leaving, foreign = Counter[str](), Counter[str]()
    for op in program.walk():
        if is_foreign(op):
            foreign[printable(op.full_type)] += 1
        elif reason := leaves(op, "cuda"):
            leaving[f"{printable(op.full_type)} ({reason})"] += 1
    unknown = f"; nobody here knows {_listed(foreign)}" if foreign else ""
    if not leaving:
        return f"CUDA: a kernel for every {'other ' if foreign else ''}operator{unknown}"
    return f"CUDA: {sum(leaving.values())} operators would leave it: {_listed(leaving)}{unknown}"


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
