"""What is known of places: what the data names is there, and half of it is enough."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from amp_transpiler.lists import _roundings, faults, place_kinds
from amp_transpiler.lists._schemas import read_tables, read_text
from amp_transpiler.ops.place_bodies import body_of
from amp_transpiler.passes.lowering import arithmetic
from amp_transpiler.passes.view import kernel_faults


def test_conditions_have_a_meaning_and_faults_a_way_around() -> None:
    found = [fault for kind in place_kinds() for each in faults(kind).values() for fault in each]
    assert {fault.where for fault in found} == set(kernel_faults._HOLDS)
    assert [f.operator for f in found if f.around == "body" and body_of(f.operator) is None] == []
    assert all(
        f.channels > 1 and f.operator == "Conv" for f in found if f.around not in ("body", "fp32", "left out", "held")
    )
    sums = [entry for kind in tomllib.loads(read_text("roundings.toml")).values() for entry in kind["float16"]["sums"]]
    assert {entry.get("where", "") for entry in sums} == set(arithmetic._HOLDS)


@pytest.mark.parametrize("file", ["faults.toml", "roundings.toml"])
def test_what_a_file_says_of_one_place_is_found(file: str) -> None:
    whole = tomllib.loads(read_text(file))
    assert "webgpu" in whole
    assert {kind: read_tables(file, kind) for kind in place_kinds()} == {k: whole.get(k, {}) for k in place_kinds()}
    assert whole.keys() <= set(place_kinds())


#: Kernels that end a run with an error, and that no body stands for: the largest of no numbers, and bytes of one number
#: that are expanded, which no model here has.
LEFT_ALONE = {"ReduceMax": "empty axis", "ReduceMin": "empty axis", "Expand": "rank 0"}


def test_kernels_that_were_seen_to_end_a_run_are_faults() -> None:
    recorded = json.loads((Path(__file__).parents[1] / "data" / "webgpu_operators.json").read_text(encoding="utf-8"))
    ended = [
        (operator, case)
        for operator, types in recorded["operators"].items()
        for cases in types.values()
        for case, verdicts in cases.items()
        if any(each.startswith(("fails", "kills")) for each in ([verdicts] if isinstance(verdicts, str) else verdicts))
    ]
    assert len(ended) > 20
    assert {pair for pair in ended if pair[0] not in faults("webgpu")} == set(LEFT_ALONE.items())


def test_a_place_may_round_in_sums_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    table = tomllib.loads('[[tpu.bfloat16.sums]]\norder = "in turn"\noperators = ["MatMul"]')
    monkeypatch.setattr(_roundings, "read_tables", lambda file, name: table[name])
    found = _roundings.roundings.__wrapped__("tpu", "bfloat16")
    assert found is not None and found.orders == {"MatMul": (("", "in turn"),)} and not found.inside
