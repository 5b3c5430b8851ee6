"""Records what the benchmark programs cost on CUDA: ``python -m tests.record.costs`` writes ``tests/data/costs.json``.

A test compares. Run it when a change is meant to change a cost, and commit the difference with that change.
"""

from __future__ import annotations

import json
from typing import Any

import amp_transpiler as amp
from tests.helpers.benchmark_programs import LARGE, MODES, PROGRAMS, step, training
from tests.helpers.where import RECORDED

FILE = RECORDED / "costs.json"


def costs(name: str, mode: str) -> dict[str, Any]:
    """Kernels and casts, bytes by element type and of casts, and their share, arithmetic, and temporaries at the peak."""
    main, loss = step(name, mode)
    found = main.cost_estimate(amp.CUDAPlace(0), fetch_list=[loss])
    return {
        "kernels": found.kernels,
        "casts": found.casts,
        "bytes": found.bytes_by_type,
        "cast_bytes": found.cast_bytes,
        "cast_share": round(found.cast_bytes / found.bytes, 4),
        "flops": [found.flops_16, found.flops_32],
        "temporaries": found.temporaries,
    }


def temporaries(name: str, mode: str) -> int:
    """The bytes of activations, gradients and temporaries at the peak, where the program's sizes make them the most."""
    main, _, loss, _ = training(name, mode, **LARGE[name])
    return main.cost_estimate(amp.CUDAPlace(0), fetch_list=[loss]).temporaries


def main() -> None:
    """Write every program in every mode, a line each."""
    lines = [f'"{name} {mode}": {json.dumps(costs(name, mode))}' for name in PROGRAMS for mode in MODES]
    found = {name: {mode: temporaries(name, mode) for mode in ("fp32", "pure")} for name in LARGE}
    lines += [f'"large {name}": {json.dumps(sizes)}' for name, sizes in found.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
