"""``python -m tests.fuzz --cases 2000 --seed 0``: judges so many mutations, prints each violation, and the count.

``python -m tests.fuzz --serve`` takes such arguments from standard input, a JSON list a line, and prints ``DONE`` after
each: one process, which loads everything once.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from amp_transpiler.ir.gc_pause import leave_at_exit
from tests.fuzz.cases import KINDS, Case, Given, judged
from tests.fuzz.commands import load_all
from tests.fuzz.models import models
from tests.fuzz.workers import judge

DONE = "done\n"


def main(arguments: Sequence[str]) -> int:
    """1 where a case was a violation."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=200, help="of all kinds together (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--kind", choices=KINDS, action="append", help="default: all")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--again", nargs="+", metavar="KIND:NUMBER", help="judge these cases, instead")
    parser.add_argument("--models", metavar="FOLDER", help="judge the models there as they are, instead")
    parser.add_argument("--keep", metavar="FOLDER", help="write the models of violations there")
    options = parser.parse_args(arguments)
    models(), load_all()  # once, before the processes part
    kinds = options.kind or KINDS
    if options.models:
        return _report([Given(path) for path in sorted(Path(options.models).glob("*.onnx"))], options)
    if options.again:
        numbered = [one.partition(":") for one in options.again]
        return _report([Case(kind, options.seed, int(number)) for kind, _, number in numbered], options)
    cases = [
        Case(kinds[i % len(kinds)], options.seed, i // len(kinds))
        for i in range(options.first, options.first + options.cases)
    ]
    return _report(cases, options)


def _report(cases: Sequence[Case | Given], options: argparse.Namespace) -> int:
    started, slowest, found = time.monotonic(), 0.0, 0
    with tempfile.TemporaryDirectory(prefix="fuzz_") as folder:
        for case, wrong, seconds in judge(cases, lambda case: judged(case, Path(folder)), options.workers):
            slowest = max(slowest, seconds)
            if wrong:
                found += 1
                print(f"{case}: {wrong} ({seconds:.1f} s)", flush=True)
                if options.keep:
                    Path(options.keep).mkdir(exist_ok=True)
                    (Path(options.keep) / f"{str(case).replace(' ', '_')}.onnx").write_bytes(case.content())
    print(
        f"{len(cases)} cases, {found} violations; {time.monotonic() - started:.0f} s, the slowest case {slowest:.1f} s"
    )
    return 1 if found else 0


def serve() -> int:
    for line in sys.stdin:
        main(json.loads(line))
        print(DONE, end="", flush=True)
    return 0


if __name__ == "__main__":
    leave_at_exit()
    given = sys.argv[1:]
    sys.exit(serve() if given == ["--serve"] else main(given))
