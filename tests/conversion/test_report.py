"""Reports: what a record holds, what is read off it, and its JSON."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.conversion.report import summary
from amp_transpiler.conversion.report.html import to_html
from amp_transpiler.conversion.report.json import FORMAT, to_json
from amp_transpiler.conversion.report.layout import layout, spread
from amp_transpiler.conversion.report.record import Conversion, record_program
from amp_transpiler.conversion.verdict import Verdict
from amp_transpiler.ir.reasons import Kind, Reason
from tests.helpers import golden
from tests.helpers.reports import conversion, measured

# -- the record ----------------------------------------------------------------------------------------


def test_a_record_names_tensors_of_nested_graphs_by_index():
    record = conversion().after
    by_name = {op.name: op for op in record.operators}
    branch = next(op for op in record.operators if op.type == "Add")
    holder = by_name["If -> q"]
    assert branch.holder == holder.index and holder.holder is None and branch.program == "other"
    for op in record.operators:
        assert [record.tensors[t].producer for t in op.makes] == [op.index] * len(op.makes)
        assert len(op.reads) == len(op.inputs) and len(op.makes) == len(op.outputs)
    captured = record.tensors[branch.reads[0]]
    assert captured.producer is not None and record.operators[captured.producer].type in ("Exp", "Cast")
    constant = next(t for t in record.tensors if t.name == "k")
    assert constant.constant and constant.bytes == 16


def test_the_headline_accounts_for_every_operator():
    told = (
        "3 of 11 operators run in 16 bit, 5 stay in fp32, 3 are untouched (integers, shapes, nested graphs), 2 casts "
    )
    assert summary.headline(conversion()).startswith(told)


def test_counts_casts_and_reasons_follow_from_the_record():
    record = conversion()
    found = summary.kinds(record.after)
    assert found["16 bit"] + found["fp32"] + found["untouched"] == len(record.before.operators)
    casts = summary.casts(record.after)
    assert sum(c.inserted for c in casts) == found["cast"] > 0
    assert [c.tensor for c in casts if not c.inserted] == ["s"]
    own = next(c for c in casts if not c.inserted)
    assert (own.source, own.target, own.bytes) == ("int64", "float32", 128 * 2 * (8 + 4)), "128 stands for N"
    to_half = next(c for c in casts if c.tensor == "x")
    assert to_half.bytes == 8 * (4 + 2)
    assert sum(summary.reasons(record.after).values()) == sum(bool(op.reason) for op in record.after.operators)


@pytest.mark.parametrize(
    "reason, expected",
    [
        (Reason(Kind.FOLLOWS, "a/b -> c", runs="fp32"), "fp32: follows …"),
        (
            Reason(Kind.REACHES, "a.b c", ("1.5e+05", "float16", "65504"), runs="fp32"),
            "fp32: measured: '…' reaches …, and float16 ends at …",
        ),
        (
            Reason(Kind.AFTER, "Exp -> e", cause=Reason(Kind.CONSTANT_BEYOND, "c", ("1e+05", "fp16"))),
            "after …: constant '…' holds …, beyond fp16",
        ),
        (Reason(Kind.SUMS, detail=("12",)), "sums 12 elements"),
        (Reason(Kind.CAST, "x y", ("float16",)), "cast: … to float16"),
        (Reason(Kind.BETWEEN, runs="fp16"), "fp16: between 16-bit operators"),
        (None, ""),
    ],
)
def test_reasons_are_grouped_without_names_and_numbers(reason, expected):
    assert summary.group(reason) == expected


def test_facts_say_what_the_cut_proves():
    facts = dict(summary.facts(conversion(**measured())))
    assert facts["traffic"] == (
        "casts and operators move 1,234,567 bytes; no assignment of the 3 free operators moves fewer; "
        "all in fp32: 3,456,789; all in 16 bit: 2,345,678"
    )
    assert facts["largest error"] == "nan at output 'z' (tolerance 0.01: not met)"
    rounded = dataclasses.replace(measured()["cut"], exact=False, rounding="to 1/1000")
    assert "fewer, up to rounding (to 1/1000);" in dict(summary.facts(conversion(cut=rounded)))["traffic"]
    assert "traffic" not in dict(summary.facts(conversion()))


# -- the layout ----------------------------------------------------------------------------------------


def test_layers_go_down_and_columns_keep_apart():
    record = conversion().after
    places = layout(record)
    taken = set()
    for op in record.operators:
        for t in op.reads:
            maker = record.tensors[t].producer
            assert maker is None or places.layer[maker] < places.layer[op.index]
        assert op.holder is None or places.layer[op.holder] < places.layer[op.index]
        taken.add((places.layer[op.index], round(places.column[op.index], 6)))
    assert len(taken) == len(record.operators)
    for row in range(max(places.layer) + 1):
        columns = sorted(c for c, r in zip(places.column, places.layer, strict=True) if r == row)
        assert columns and all(b - a >= 1 - 1e-9 for a, b in itertools.pairwise(columns))


def test_a_constant_stands_above_its_first_reader():
    record = conversion().before
    places = layout(record)
    made = {op.type: places.layer[op.index] for op in record.operators}
    assert made["Constant"] == made["Add"] - 1 > made["If"]


def test_spread_is_the_least_squares_answer():
    optimize = pytest.importorskip("scipy.optimize")
    rng = np.random.default_rng(0)

    def off(places, wanted):
        return ((places - wanted) ** 2).sum()

    for _ in range(20):
        wanted = np.sort(rng.normal(0, 2, 6))
        apart = {"type": "ineq", "fun": lambda x: np.diff(x) - 1}
        best = optimize.minimize(off, wanted + np.arange(6), args=(wanted,), constraints=apart, tol=1e-12)
        assert np.allclose(spread(list(wanted)), best.x, atol=1e-4)


def test_empty_programs_have_a_report():
    model = golden.model("g (float[2] x) => (float[2] x) {}")
    record = record_program(amp.Program.from_onnx(model))
    empty = Conversion("empty.onnx", "mixed", "float16", record, record)
    assert "<html" in to_html(empty)
    assert layout(record).layer == []


# -- JSON ----------------------------------------------------------------------------------------------


def refuse(word: str):
    raise AssertionError(f"{word} is not JSON")


def test_json_round_trip():
    record = conversion(**measured())
    read = json.loads(to_json(record), parse_constant=refuse)
    fields = [f.name for f in dataclasses.fields(record)]
    place = fields.index("verdict")
    assert list(read) == ["format", *fields[:place], "outputs", "tolerance", *fields[place + 1 :]]
    assert read["format"] == FORMAT
    assert read["outputs"] == {"y": 1e-3, "z": "NaN"}
    assert read["ranges"][1]["largest"] == "Infinity" and read["constants"][0]["worst"] == "-Infinity"
    for which in ("before", "after"):
        program = getattr(record, which)
        assert len(read[which]["operators"]) == len(program.operators)
        for op, line in zip(program.operators, read[which]["operators"], strict=True):
            shown = vars(op) | {"reason": op.reason, "kind": summary.kind(op)}
            del shown["why"]
            assert line == json.loads(json.dumps(shown))
        assert [t["name"] for t in read[which]["tensors"]] == [t.name for t in program.tensors]
        assert read[which]["kinds"] == summary.kinds(program)
        assert len(read[which]["cast_list"]) == program.casts
    assert read["cut"] == vars(record.cut)
    text = to_json(record)
    assert max(map(len, text.splitlines())) < 1000, "an operator a line"


def test_json_without_programs_and_with_a_foreign_value():
    bare = Conversion("m.onnx", "mixed", "float16")
    assert json.loads(to_json(bare))["before"] is None
    with pytest.raises(amp.AmpError, match=r"notes\[0\] is a object"):
        to_json(dataclasses.replace(bare, notes=(object(),)))


@pytest.mark.parametrize("written", [to_html, to_json])
def test_what_no_report_can_hold(written):
    with pytest.raises(amp.AmpError, match="tolerance"):
        written(dataclasses.replace(conversion(), verdict=Verdict({}, tolerance=object())))


def test_conversions_that_no_page_can_show():
    with pytest.raises(amp.AmpError, match="holds no record of its programs"):
        to_html(Conversion("m.onnx", "mixed", "float16"))
    with pytest.raises(amp.AmpError, match="dtype is 'float16' or 'bfloat16'"):
        to_html(dataclasses.replace(conversion(), dtype="int8"))
