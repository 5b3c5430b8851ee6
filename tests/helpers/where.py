"""Where the tests find what they compare with."""

import json
import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: Recorded results and specification, part of the project.
ORACLES = ROOT / "tests" / "oracles"
RECORDED = ROOT / "tests" / "data"
PADDLE, TRAPS = ORACLES / "paddle", ORACLES / "traps"
#: Tells where each node of a model would land on CUDA, on a machine without a GPU.
PLACEMENT = ROOT / "tests" / "tools" / "cuda_placement.py"
#: Real data (MNIST, SQuAD, spoken digits, trained models), which is too large to be part of the project.
DATA = Path(os.environ.get("AMP_TEST_DATA", ROOT.parent / "shared" / "data"))
NO_DATA = "no real data: set AMP_TEST_DATA to its folder (CONTRIBUTING.md, What some tests need)"


def oracle(name: str) -> Any:
    """What Paddle's own code was recorded to do."""
    return json.loads((PADDLE / name).read_text(encoding="utf-8"))
