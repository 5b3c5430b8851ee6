"""The page of a conversion holds all of it, alone, works in a browser, and nothing that a model's names smuggle in."""

import base64
import dataclasses
import hashlib
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import pytest

import amp_transpiler as amp
from amp_transpiler.conversion.report import summary
from amp_transpiler.conversion.report.html import to_html
from amp_transpiler.conversion.report.json import to_json
from amp_transpiler.conversion.report.layout import layout
from amp_transpiler.conversion.report.record import Conversion, RangeRecord, record_program
from tests.helpers import golden
from tests.helpers.reports import SMALL, conversion, measured
from tests.helpers.where import TRAPS

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)><!--%%DATA%%\u2028 é"


class Page(HTMLParser):
    """The scripts, styles and attributes of a page as a browser's parser finds them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {"script": [], "style": [], "title": []}
        self.attributes: list[tuple[str, str, str | None]] = []
        self.inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, *pair) for pair in attrs]
        self.inside = tag
        if tag in self.texts:
            self.texts[tag].append("")

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside in self.texts:
            self.texts[self.inside][-1] += data

    @property
    def data(self) -> dict:
        return json.loads(self.texts["script"][0])


def unpacked(packed: dict, strings: list[str], key: str) -> list[str]:
    return [strings[i] for i in packed[key]]


# -- the page ------------------------------------------------------------------------------------------


def test_the_page_holds_everything():
    record = conversion(**measured())
    data = Page(to_html(record)).data
    strings = data["strings"]
    for which in ("before", "after"):
        program, packed = getattr(record, which), data[which]
        assert unpacked(packed, strings, "name") == [op.name for op in program.operators]
        assert unpacked(packed, strings, "type") == [op.type for op in program.operators]
        assert unpacked(packed, strings, "reason") == [op.reason for op in program.operators]
        assert unpacked(packed, strings, "precision") == [op.precision for op in program.operators]
        assert [data["kinds"][k] for k in packed["kind"]] == [summary.kind(op) for op in program.operators]
        assert unpacked(packed["tensors"], strings, "name") == [t.name for t in program.tensors]
        assert {"2 × 4", "N × 2"} <= set(unpacked(packed["tensors"], strings, "shape"))
        assert [c[4] for c in packed["casts"]] == [c.bytes for c in summary.casts(program)]
        assert packed["reads"] == [list(op.reads) for op in program.operators]
    assert dict(map(tuple, data["facts"])) == dict(summary.facts(record))
    assert data["limits"] == {"dtype": "float16", "largest": 65504.0, "normal": 2.0**-14, "smallest": 2.0**-24}
    assert data["ranges"][0]["largest"] == 3e5 and data["ranges"][1]["rounding"] == "NaN"
    assert data["notes"] == list(record.notes) and data["rounds"] == list(record.rounds)
    assert data["outputs"] == [["y", 1e-3], ["z", "NaN"]] and data["tolerance"] == 1e-2
    assert data["constants"][0]["action"] == "kept in fp32"


def test_the_page_needs_no_network_and_admits_only_itself():
    text = to_html(conversion(**measured()))
    page = Page(text)
    assert "//" not in re.sub(r"(?m)^\s*//.*$|[^:]// .*$", "", text).replace("*/", ""), "no address of any kind"
    assert not re.search(r"https?:|@import|url\(", text)
    assert not [a for a in page.attributes if a[1] in ("src", "href", "srcset", "style") or a[1].startswith("on")]
    policy = next(value for tag, name, value in page.attributes if name == "content" and "default-src" in value)
    script, style = page.texts["script"][1], page.texts["style"][0]
    for kind, content in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)


def hostile() -> Conversion:
    model = golden.model(SMALL)
    model.graph.node[0].name = HOSTILE
    model.graph.node[1].output[0] = HOSTILE
    for node in (model.graph.node[2], model.graph.node[5]):
        node.input[0] = HOSTILE
    record = conversion(model, **measured())
    return dataclasses.replace(record, source=HOSTILE, notes=(HOSTILE,))


def test_hostile_names_stay_text():
    text = to_html(hostile())
    page = Page(text)
    assert text.lower().count("<script") == 2 and text.lower().count("</script") == 2 and "<!--" not in text
    assert not [a for a in page.attributes if a[0] == "img"]
    names = unpacked(page.data["after"], page.data["strings"], "name")
    assert HOSTILE in names and page.data["notes"] == [HOSTILE]
    assert page.texts["title"] == [f"{HOSTILE} in float16"]
    assert json.loads(to_json(hostile()))["notes"] == [HOSTILE]


def test_reports_are_deterministic():
    assert to_html(conversion(**measured())) == to_html(conversion(**measured()))
    assert to_json(conversion(**measured())) == to_json(conversion(**measured()))


def test_bfloat16_has_its_own_limits():
    record = dataclasses.replace(conversion(), dtype="bfloat16")
    limits = Page(to_html(record)).data["limits"]
    assert limits["largest"] > 3.3e38 and limits["smallest"] == 2.0**-133


@pytest.mark.parametrize("path", sorted(TRAPS.glob("*.onnx")), ids=lambda path: path.stem)
def test_every_trap_has_a_report(path):
    before = record_program(amp.Program.from_onnx(path), path)
    after = record_program(amp.convert(path, mode="mixed"))
    made = [t.name for t in before.tensors if t.producer is not None]
    ranges = tuple(RangeRecord(name, 2.0 ** (5 * i), 2.0 ** (-9 * i), 1e-4, 1e-3, True) for i, name in enumerate(made))
    record = Conversion(path.name, "mixed", "float16", before, after, ranges=ranges)
    data = Page(to_html(record)).data
    assert len(data["after"]["name"]) == len(after.operators) and len(data["ranges"]) == len(made)
    assert json.loads(to_json(record))["before"]["file"] == path.stat().st_size


# -- the script ----------------------------------------------------------------------------------------


def script(page: str, body: str) -> dict:
    """Run the script's pure part and ``body``, which sets ``result``, on a page's data."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    pure = (resources.files("amp_transpiler.conversion.report") / "page" / "data.js").read_text(encoding="utf-8")
    source = f"{pure}\nconst data = {json.dumps(Page(page).data)};\nlet result;\n{body}\nconsole.log(JSON.stringify(result));"
    done = subprocess.run([node, "-"], input=source, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_script_unpacks_what_was_packed():
    record = conversion(**measured())
    found = script(
        to_html(record),
        """
        const p = unpackProgram(data.after, data.strings);
        const none = { text: "", kind: "", type: "", group: "" };
        const count = (filter) => p.ops.filter((op) => passes(op, { ...none, ...filter })).length;
        const cast = p.ops.find((op) => op.kind === CAST && op.feeds.includes("x"));
        result = {
          names: p.ops.map((op) => op.name), producers: p.tensors.map((t) => t.producer), edges: p.edges.length,
          layers: p.rows.length, all: count({}), casts: count({ kind: CAST }), matmul: count({ type: "MatMul" }),
          search: count({ text: "matmul white" }), nothing: count({ text: "matmul nowhere" }),
          source: sourceName(p, cast.makes[0]), fetches: p.ops.flatMap((op) => op.fetches).sort(),
          verdicts: data.ranges.map((range) => verdict(range, data.limits)), reasons: countBy(p.ops, (op) => op.group),
        };
        """,
    )
    after = record.after
    assert found["names"] == [op.name for op in after.operators]
    assert found["producers"] == [-1 if t.producer is None else t.producer for t in after.tensors]
    assert found["layers"] == max(layout(after).layer) + 1
    assert found["all"] == len(after.operators) and found["casts"] == summary.kinds(after)["cast"]
    products = [op for op in after.operators if op.type == "MatMul"]
    assert found["matmul"] == len(products) == 2 and found["nothing"] == 0
    assert found["search"] == sum("white" in op.reason for op in products) > 0
    assert found["source"] == "x" and found["fetches"] == ["y", "z"]
    assert found["verdicts"] == ["overflows", "not finite"]
    assert {text: n for text, n in found["reasons"] if text} == summary.reasons(after)


def test_the_script_groups_what_stayed_fp32_and_names_the_parts():
    record = conversion()
    found = script(
        to_html(record),
        """
        const p = unpackProgram(data.after, data.strings);
        const row = (scope) => [{ scope: "" }, { scope }];
        const rows = [row("net/stem"), row(""), row("net/body/a"), row("net/body/b"), row("net/head")];
        result = {
          kept: keptBy(p.ops).map(([group, ops]) => [group, ops.map((op) => op.name)]),
          fine: partsOf(rows, 9), coarse: partsOf(rows, 3), none: partsOf([row("")], 3),
        };
        """,
    )
    kept = [op for op in record.after.operators if summary.kind(op) == "fp32"]
    assert sorted(name for _, names in found["kept"] for name in names) == sorted(op.name for op in kept) != []
    groups = {op.name: summary.group(op.why) for op in kept}
    assert all(groups[name] == group for group, names in found["kept"] for name in names)
    sizes = [len(names) for _, names in found["kept"]]
    assert sizes == sorted(sizes, reverse=True)
    assert [(part["layer"], part["name"]) for part in found["fine"]] == [(0, "stem"), (2, "a"), (3, "b"), (4, "head")]
    assert [(part["layer"], part["name"]) for part in found["coarse"]] == [(0, "stem"), (2, "body"), (4, "head")]
    assert found["none"] == []


def test_the_script_places_magnitudes_on_the_axis():
    found = script(
        to_html(conversion()),
        """
        const axis = axisOf([{ largest: 2 ** 30, smallest: 2 ** -40 }], data.limits);
        const kind = (largest, smallest) => verdict({ largest, smallest, finite: true }, data.limits);
        result = {
          axis, ends: [placeOn(axis, 0), placeOn(axis, "Infinity"), placeOn(axis, 2 ** -42), placeOn(axis, 2 ** 32)],
          middle: placeOn(axis, 2 ** -5),
          kinds: [kind(1, 0.5), kind(65505, 1), kind(1, 2 ** -20), kind(1, 2 ** -30), kind(2 ** -25, 2 ** -30), kind(0, 0)],
          numbers: [number(0), number(1234.5), number(1e-9), number("NaN")], bytes: [bytes(0), bytes(1500), bytes(2.4e9)],
        };
        """,
    )
    assert found["axis"] == {"low": -42, "high": 32}
    assert found["ends"] == [0, 100, 0, 100] and found["middle"] == 50
    assert found["kinds"] == [
        "fits",
        "overflows",
        "some subnormal",
        "some below the smallest number",
        "all below the smallest number",
        "all zero",
    ]
    assert found["numbers"] == ["0", "1235", "1.00e-9", "NaN"] and found["bytes"] == ["0 B", "1.5 kB", "2.4 GB"]


def in_browser(page: Path, size: str) -> tuple[str, str]:
    """The document after its script ran, and what the browser logged."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("needs Chromium")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={page.parent / 'profile'}",
        "--enable-logging=stderr",
        "--virtual-time-budget=3000",
        f"--window-size={size}",
        "--dump-dom",
    ]
    done = subprocess.run([browser, *flags, page.as_uri()], capture_output=True, text=True, timeout=90)
    return done.stdout, done.stderr


def test_the_page_runs_in_a_browser(tmp_path):
    """The whole script, on hostile names, under the page's own security policy."""
    record = hostile()
    (tmp_path / "page.html").write_text(to_html(record), encoding="utf-8")
    document, log = in_browser(tmp_path / "page.html", "1200,800")
    assert "CONSOLE" not in log, log
    shown = Page(document)
    assert not [a for a in shown.attributes if a[0] == "img" or a[1] == "onerror"]
    count = len(record.after.operators)
    assert f"{count} of {count} operators" in document
    assert f"Operators ({count})" in document and f"Casts ({record.after.casts})" in document
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in document


@pytest.mark.parametrize("name, narrow", [("page.html", False), ("frame.html", True)])
def test_the_page_opens_on_what_stayed_fp32_and_leaves_room_for_it(name, narrow, tmp_path):
    """Wide and at 420 pixels; a script of the test, which the page's policy would refuse, measures it."""
    record = conversion()
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", to_html(record))
    measure = """setTimeout(() => {
      graph.resize(); showTab("graph"); graph.resize(); graph.fit(); const folds = graph.offsets.length; showTab("kept");
      const top = $("panels").getBoundingClientRect().top / innerHeight;
      const shown = document.querySelectorAll("#panels > section:not([hidden])");
      const said = JSON.stringify([top, folds, shown.length, shown[0].id, $("details").hidden, $("filters").open]);
      parent.postMessage(said, "*"); document.title = said;
    }, 400)"""
    (tmp_path / "page.html").write_text(page.replace("</body>", f"<script>{measure}</script></body>"), encoding="utf-8")
    frame = "<iframe src='page.html' width=420 height=900></iframe><script>onmessage = (e) => document.title = e.data</script>"
    (tmp_path / "frame.html").write_text(f"<head><title></title></head><body>{frame}</body>", encoding="utf-8")
    document, _ = in_browser(tmp_path / name, "1400,900")
    top, folds, panels, first, no_details, filters = json.loads(
        html.unescape(re.findall("<title>(.*?)</title>", document)[0])
    )
    assert top < (0.35 if narrow else 0.25) and (panels, first, no_details) == (1, "panel-kept", True)
    assert filters is not narrow and folds >= 1
    if not narrow:
        kept = summary.kinds(record.after)["fp32"]
        assert f"{kept} operators stay in fp32" in document and f"Stayed fp32 ({kept})" in document
