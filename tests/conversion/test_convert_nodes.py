"""Every node test of the onnx package that onnxruntime runs on floats, converted."""

from __future__ import annotations

from functools import cache
from typing import Any

import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.types import numpy_dtype
from tests.helpers.converting import faithful, graphs, off
from tests.helpers.node_tests import node_tests
from tests.helpers.sessions import session

#: The largest error of 16-bit arithmetic in these small models.
TOLERANCE = {"float16": 0.02, "bfloat16": 0.06}

_LOWEST = "masked places of qk_matmul_output hold float32's lowest number, which has no 16-bit form"
_ONNX = "onnx's own full check refuses the original: the function body of MeanVarianceNormalization"
#: What cannot be right in any mode or type: the test fails where one of them comes right, or another goes wrong.
NAMED = {
    "test_attention_4d_with_past_and_present_qk_matmul_bias_3d_mask_causal": _LOWEST,
    "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask_causal": _LOWEST,
    "test_mvn": _ONNX,
}
MODES = [
    ("pure", "float16"),
    ("mixed", "float16"),
    ("auto", "float16"),
    ("pure", "bfloat16"),
    ("mixed", "bfloat16"),
]

Case = tuple[str, onnx.ModelProto, dict[str, Any], list[Any]]


@cache
def cases() -> list[Case]:
    """Name, model, feeds and expected outputs of the tests with float inputs or outputs that onnxruntime runs."""
    found = []
    for case in node_tests():
        graph = case.model.graph
        if not any(i.type.tensor_type.elem_type == onnx.TensorProto.FLOAT for i in (*graph.input, *graph.output)):
            continue
        feed = dict(zip([i.name for i in graph.input], case.data_sets[0][0], strict=False))
        try:
            expected = session(case.model).run(None, feed)
        except Exception:  # onnxruntime's errors have no common base; what it cannot run is no test of ours
            continue
        found.append((case.name, case.model, feed, expected))
    return found


def test_the_cases_are_all_there() -> None:
    assert len(cases()) >= 1074


#: By case and file, how far off it is: modes that write the same file, but for its reasons, need not prove it twice.
PROVED: dict[tuple[str, bytes], float] = {}


def proved(name: str, program: amp.Program, dtype: str, feed: dict[str, Any], expected: list[Any]) -> float:
    """The largest error of a converted model, which is valid and which onnxruntime loads."""
    converted = program.to_onnx()
    bare = onnx.ModelProto()
    bare.CopyFrom(converted)
    for node in (node for graph in graphs(bare.graph) for node in graph.node):
        del node.metadata_props[:]
    key = name, bare.SerializeToString(deterministic=True)
    if key not in PROVED:
        onnx.checker.check_model(converted, full_check=True)
        if dtype == "float16":
            session(converted)
        narrow = {v.name for v in program.inputs if v.dtype == dtype}
        given = {key: each.astype(numpy_dtype(dtype)) if key in narrow else each for key, each in feed.items()}
        errors = [off(g, w) for g, w in zip(faithful(program, given), expected, strict=True)]
        PROVED[key] = max(errors, default=0.0)
    return PROVED[key]


@pytest.mark.parametrize(("mode", "dtype"), MODES)
def test_node(mode: str, dtype: str) -> None:
    """Pure float16 takes all cases, where they only hand numbers on with inputs and outputs of its own. The modes that
    choose operators by what it and the lists do take every other one.

    An operator written out as its function is thirty nodes of operators that have cases of their own: of those each
    other mode takes a quarter, no two of them the same.
    """
    failures: dict[str, str] = {}
    turn, step = MODES.index((mode, dtype)), 1 if mode == "pure" or (mode, dtype) == ("mixed", "float16") else 2
    count = halves = written_out = 0
    for number, (name, model, feed, expected) in enumerate(cases()):
        written_out += "_expanded" in name
        taken = turn in (0, 1 + written_out % 4) if "_expanded" in name else number % step == 0
        if not taken and name not in NAMED:
            continue
        count += 1
        try:
            program = amp.convert(model, mode=mode, dtype=dtype)
            if mode == "pure" and any(op.why == Reason(Kind.NO_NEIGHBOUR, runs="fp32") for op in program.walk()):
                program = amp.convert(model, mode=mode, dtype=dtype, keep_io=False)
            error = proved(name, program, dtype, feed, expected)
            if not error <= TOLERANCE[dtype]:
                failures[name] = f"off by {error:.3g}"
        except Exception as error:  # whatever it is, it is a failure of this case
            failures[name] = f"{type(error).__name__}: {error}"
        halves += any(op.precision == dtype for op in program.walk())
    assert {n: f for n, f in failures.items() if n not in NAMED} == {}
    assert set(NAMED) - set(failures) == set(), "these come right now: take them off the list"
    assert halves >= {"pure": 0.45, "mixed": 0.1, "auto": 0.1}[mode] * count
