"""``amp-transpile explain``: why each operator has its precision."""

from __future__ import annotations

import argparse

from amp_transpiler.cli import pass_tables
from amp_transpiler.cli.conversion_arguments import add_precision_options
from amp_transpiler.cli.terminal import printable, typed
from amp_transpiler.conversion.conversion_options import ConversionOptions
from amp_transpiler.conversion.converting import convert_with
from amp_transpiler.conversion.report.summary import group
from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.patterns import matching, pattern_of
from amp_transpiler.passes.view.names import label as plain_label
from amp_transpiler.program import Program
from amp_transpiler.spelling import near_names

_EXAMPLES = 3


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("model", metavar="MODEL.onnx", nargs="?")
    parser.add_argument("nodes", metavar="NODE", nargs="*", help="operator or tensor names, globs, or re:EXPRESSION")
    add_precision_options(parser)
    parser.add_argument(
        "--passes",
        metavar="PASSES",
        nargs="?",
        const="",
        help="which passes of a list such as 'inline-functions,opset' change the model (without a list, of a "
        "conversion's); without a model, every pass with what it does, and those of convert, decorate and lower",
    )


def run(options: argparse.Namespace) -> int:
    """Print the reasons of all operators in groups, or all that is known of some; or what passes do."""
    if options.passes is not None:
        return pass_tables.run(options)
    if options.model is None:
        raise ArgumentError("explain takes a model, or --passes")
    head, program = "", Program.from_onnx(options.model)
    if not any(op.reason for op in program.walk()):
        asked = ConversionOptions(mode=options.mode, dtype=options.dtype, flags=True)
        done = f"convert {asked.said('mode')} {asked.said('dtype')}"
        head = f"{options.model} carries no reasons; {done} would do this:\n"
        program = convert_with(asked, options.model)
    ops = _chosen(program, list(map(typed, options.nodes))) if options.nodes else []
    print(head + ("\n\n".join(_operator(op) for op in ops) if options.nodes else _groups(program)))
    return 0


def label(op: Operator) -> str:
    """The operator's name as it is shown."""
    return printable(plain_label(op))


def _chosen(program: Program, nodes: list[str]) -> list[Operator]:
    ops = list(program.walk())
    made = {v.name: op for op in ops for v in op.outputs if v is not None}
    labels = {plain_label(op): op for op in ops}
    found: dict[Operator, None] = {}
    for node in nodes:
        if node in made or node in labels:
            found[made.get(node) or labels[node]] = None
            continue
        pattern_of(node, "explain")  # a broken expression is told as that
        try:
            found.update(dict.fromkeys(matching(ops, [node], "explain")))
        except ArgumentError:
            hint = near_names(node, [*made, *(op.name for op in ops if op.name)], "; ")
            raise ArgumentError(f"explain: the model has no operator or tensor {node!r}{hint}") from None
    return list(found)


def _groups(program: Program) -> str:
    groups: dict[str, list[Operator]] = {}
    casts = 0
    for op in program.walk():
        if op.inserted:
            casts += 1
        else:
            groups.setdefault(printable(group(op.why)) or "no reason recorded", []).append(op)
    lines = []
    for reason, ops in sorted(groups.items(), key=lambda item: -len(item[1])):
        some = ", ".join(label(op) for op in ops[:_EXAMPLES])
        lines.append(f"{len(ops):>6}  {reason}\n        {some}{', ...' if len(ops) > _EXAMPLES else ''}")
    return "\n".join([*lines, f"{casts:>6}  casts inserted"])


def _operator(op: Operator) -> str:
    lines = [
        label(op),
        f"  type       {printable(op.full_type)}",
        f"  precision  {printable(op.precision) or '-'}",
        f"  reason     {printable(op.reason) or 'none recorded'}",
    ]
    if op.scope:
        lines.append(f"  scope      {printable(op.scope)}")
    if op.program.parent is not None:
        lines.append(f"  inside     {label(op.program.parent)}")
    lines += [f"  reads      {_tensor(v)}" for v in op.inputs if v is not None]
    lines += [f"  makes      {_tensor(v)}" for v in op.outputs if v is not None]
    return "\n".join(lines)


def _tensor(variable: Variable) -> str:
    sizes = "?" if variable.shape is None else ",".join("?" if s is None else str(s) for s in variable.shape)
    maker = variable.producer
    if maker is not None:
        origin = f"made by {label(maker)}"
    else:
        origin = "a constant" if variable.data is not None else "an input" if variable.is_input else "of an outer graph"
    readers = [label(op) for op, _ in variable.readers]
    read = f", read by {', '.join(readers[:_EXAMPLES])}{', ...' if len(readers) > _EXAMPLES else ''}" if readers else ""
    return f"{printable(variable.name)}: {variable.dtype or '?'}[{printable(sizes)}], {origin}{read}"
