"""Records the signatures of what the NCCL engine calls: ``python -m tests.record.nccl4py``, where nccl4py is installed.

Neither a GPU nor NCCL itself is needed. The suite's stand-in for nccl4py accepts calls by these signatures alone.
"""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

RECORD = Path(__file__).resolve().parents[1] / "data" / "nccl4py.json"
#: Names in ``nccl.core`` that are called.
CALLED = (
    *("get_unique_id", "group", "UniqueId.from_bytes", "Communicator.init"),
    *(
        f"Communicator.{name}"
        for name in (
            *("allreduce", "reduce_scatter", "reduce", "allgather", "broadcast", "send", "recv"),
            *("create_pre_mul_sum", "get_async_error", "get_last_error", "abort", "destroy"),
        )
    ),
)
#: And those that are constants.
CONSTANTS = ("SUM", "MAX", "FLOAT16", "BFLOAT16", "FLOAT32", "FLOAT64")


def recorded() -> dict[str, Any]:
    """What is written: each name's arguments without ``self``, and the constants that are there."""
    module = importlib.import_module("nccl.core")
    calls = {}
    for name in CALLED:
        thing = module
        for part in name.split("."):
            thing = getattr(thing, part)
        found = [p for p in inspect.signature(thing).parameters.values() if p.name != "self"]
        calls[name] = [[p.name, p.kind.name, p.default is not p.empty] for p in found]
    return {"version": module.__version__, "calls": calls, "constants": [n for n in CONSTANTS if hasattr(module, n)]}


if __name__ == "__main__":
    found = recorded()
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(form)}" for name, form in found.pop("calls").items())
    head = json.dumps(found)[1:-1]
    RECORD.write_text(f'{{\n {head},\n "calls": {{\n{lines}\n }}\n}}\n', encoding="utf-8")
