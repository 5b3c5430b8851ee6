"""The node tests of the onnx package, which takes five seconds to make them."""

from __future__ import annotations

import pickle
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from tests.helpers.made_once import made_once


@cache
def node_tests() -> list[Any]:
    """Name, model and data sets of each, as ``onnx.backend.test`` has them."""
    found: list[Any] = pickle.loads((made_once("onnx_node_tests", _make) / "pickle").read_bytes())
    return found


def _make(folder: Path) -> None:
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (folder / "pickle").write_bytes(pickle.dumps(collect_testcases(None)))
