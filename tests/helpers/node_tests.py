"""The node tests of the onnx package, which takes five seconds to make them: once in a run, for all its processes."""

from __future__ import annotations

import os
import pickle
import warnings
from functools import cache
from pathlib import Path
from typing import Any

_shared: list[Path] = []


def share(folder: Path) -> None:
    """Keep them in a folder that the processes of this run share."""
    _shared[:] = [folder / "onnx_node_tests.pickle"]


@cache
def node_tests() -> list[Any]:
    """Name, model and data sets of each, as ``onnx.backend.test`` has them."""
    if _shared and _shared[0].exists():
        found: list[Any] = pickle.loads(_shared[0].read_bytes())
        return found
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = collect_testcases(None)
    if _shared:
        own = _shared[0].with_suffix(f".{os.getpid()}")
        own.write_bytes(pickle.dumps(found))
        own.replace(_shared[0])
    return found
