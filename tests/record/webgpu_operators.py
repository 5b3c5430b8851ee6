"""Records in ``tests/data/webgpu_operators.json`` how WebGPU's kernels compute, in software.

    python -m tests.record.webgpu_operators --plugin PYTHON --wheel PYTHON [--again TEXT]

Each operator and element type that has a kernel runs through its cases (``tests/corpora/webgpu_*.py``), beside what the
operator means. ``--plugin`` and ``--wheel``: interpreters as in :mod:`tests.record.webgpu_kernels`. Without them,
``--only OPERATOR`` prints the verdicts on one operator's cases in this interpreter.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any

from onnx import defs

from amp_transpiler.lists import TARGET_OPSET, kernel_types
from tests.corpora.webgpu_moves import MOVES
from tests.corpora.webgpu_pointwise import POINTWISE
from tests.corpora.webgpu_sums import SUMS
from tests.helpers.kernel_registry import installed_version
from tests.helpers.one_node import allowed
from tests.helpers.operator_cases import DTYPES, Case, Cases
from tests.helpers.verdicts import KILLED, verdict
from tests.helpers.webgpu_sessions import PROVIDER, software_allowed
from tests.helpers.where import ROOT

FILE = ROOT / "tests" / "data" / "webgpu_operators.json"
ALL: dict[str, Cases] = POINTWISE | SUMS | MOVES
_OPSETS = {"GridSample": 16, "RMSNormalization": 23}
_DATA = ("T", "T1", "V")
"""What the parameter of an operator's data is called."""


def elements(op_type: str) -> list[str]:
    """The element types of its data that WebGPU has kernels for, in the plugin or the wheel."""
    opset = _OPSETS.get(op_type, TARGET_OPSET)
    kernel, schema = kernel_types(f"{PROVIDER}/plugin", op_type, opset) or {}, defs.get_schema(op_type, opset)
    param = next(param for param in _DATA if param in kernel)
    return [element for element in DTYPES if element in kernel[param] and element in allowed(schema, param)]


def cases(op_type: str) -> Iterator[Case]:
    """The cases of an operator at each of its element types."""
    for element in elements(op_type):
        yield from ALL[op_type](element)


def numbered() -> list[Case]:
    return [case for op_type in sorted(ALL) for case in cases(op_type)]


def asked(kind: str, again: str | None) -> list[Case]:
    """All cases, or those that are not recorded or whose recorded verdict has ``again`` in it."""
    if again is None:
        return numbered()
    told = recorded(kind)
    return [case for case in numbered() if str(case) not in told or re.search(again, told[str(case)])]


def answers(python: str, kind: str, again: str | None) -> tuple[str, dict[str, str]]:
    """Versions, and the verdict on each case, of an interpreter; one that a case kills is started again behind it."""
    every, told, source = asked(kind, again), dict[str, str](), ""
    while len(told) < len(every):
        command = [python, "-m", "tests.record.webgpu_operators", "--kind", kind, "--from", str(len(told))]
        command += ["--again", again] if again is not None else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=software_allowed())
        for line in done.stdout.splitlines():
            if line.startswith("# "):
                source = line[2:]
            elif line.startswith("{"):
                told |= json.loads(line)
        if len(told) < len(every):
            told[str(every[len(told)])] = KILLED
    return source, told if again is None else recorded(kind) | told


def table(plugin: dict[str, str], wheel: dict[str, str]) -> dict[str, Any]:
    """By operator, element type and case: one verdict, or the plugin's and the wheel's."""
    rows: dict[str, Any] = {}
    for case in numbered():
        both = plugin[str(case)], wheel[str(case)]
        shown = both[0] if both[0] == both[1] else list(both)
        rows.setdefault(case.op_type, {}).setdefault(case.element, {})[case.what] = shown
    return rows


def recorded(kind: str) -> dict[str, str]:
    """The verdict on each case, by its text; ``kind``: ``plugin`` or ``wheel``."""
    rows = json.loads(FILE.read_text())["operators"]
    return {
        f"{op_type} {element} {what}": told if isinstance(told, str) else told[kind == "wheel"]
        for op_type, types in rows.items()
        for element, by_case in types.items()
        for what, told in by_case.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--from", dest="start", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=("plugin", "wheel"), help=argparse.SUPPRESS)
    parser.add_argument("--plugin", metavar="PYTHON")
    parser.add_argument("--wheel", metavar="PYTHON")
    parser.add_argument(
        "--again", metavar="TEXT", help="only cases whose recorded verdict has this regular expression in it"
    )
    parser.add_argument("--only", metavar="OPERATOR", help="print the verdicts on this operator's cases, here")
    args = parser.parse_args()
    if args.only:
        for case in cases(args.only):
            print(f"{case}: {verdict(case)}")
    elif args.start is not None:
        print(f"# {installed_version()}", flush=True)
        for case in asked(args.kind, args.again)[args.start :]:
            print(json.dumps({str(case): verdict(case)}), flush=True)
    elif args.plugin and args.wheel:
        of_plugin, plugin = answers(args.plugin, "plugin", args.again)
        of_wheel, wheel = answers(args.wheel, "wheel", args.again)
        lines = [f"{json.dumps(op)}: {json.dumps(rows)}" for op, rows in table(plugin, wheel).items()]
        source = f"{of_plugin}, and {of_wheel} where a second verdict stands; llvmpipe, Mesa's Vulkan on the processor"
        FILE.write_text(f'{{\n"source": {json.dumps(source)},\n"operators": {{\n' + ",\n".join(lines) + "\n}\n}\n")
    else:
        parser.error("--plugin and --wheel are needed, or --only")


if __name__ == "__main__":
    main()
