"""What follows from a record: how operators run, casts and their bytes, reasons in groups, the facts in words."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from amp_transpiler.conversion.report.record import Conversion, OperatorRecord, ProgramRecord
from amp_transpiler.errors import OrderError
from amp_transpiler.ir.reasons import Reason
from amp_transpiler.ir.tensors import byte_size
from amp_transpiler.ir.types import SHORT

#: How an operator runs: in 16 bit, in fp32, as the model has it, or as a cast that the conversion inserted.
HALF_KIND, FULL_KIND, UNTOUCHED_KIND, CAST_KIND = KINDS = ("16 bit", "fp32", "untouched", "cast")


@dataclass(frozen=True)
class CastRecord:
    """A cast. ``bytes``: what it reads and writes, open sizes counting as in the minimum cut."""

    index: int  # of its OperatorRecord
    tensor: str
    source: str
    target: str
    bytes: int
    inserted: bool


def kind(op: OperatorRecord) -> str:
    """Which of :data:`KINDS` an operator is: by its reason, without one by its type."""
    if op.inserted:
        return CAST_KIND
    runs = SHORT.get(op.precision, "") if op.why is None else op.why.runs
    if runs in (SHORT["float16"], SHORT["bfloat16"]):
        return HALF_KIND
    return FULL_KIND if runs == SHORT["float32"] else UNTOUCHED_KIND


def kinds(program: ProgramRecord) -> dict[str, int]:
    """Operators by kind, every kind of :data:`KINDS` in its order."""
    found = Counter(kind(op) for op in program.operators)
    return {each: found[each] for each in KINDS}


def casts(program: ProgramRecord) -> list[CastRecord]:
    """Every cast, the model's own included, in program order."""
    found = []
    for op in program.operators:
        if op.type == "Cast" and op.reads and op.makes:
            read, made = program.tensors[op.reads[0]], program.tensors[op.makes[0]]
            moved = sum(byte_size(dtype, (read.elements,)) for dtype in (read.dtype, made.dtype) if dtype)
            found.append(CastRecord(op.index, read.name, read.dtype, made.dtype, moved, op.inserted))
    return found


def group(why: Reason | None) -> str:
    """A reason without the names and the measured numbers in it; "" for none."""
    return "" if why is None else why.group()


def reasons(program: ProgramRecord) -> dict[str, int]:
    """Groups of reasons with the number of operators, the largest first; "" (no reason) left out."""
    found = Counter(group(op.why) for op in program.operators if op.why)
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def recorded(conversion: Conversion) -> tuple[ProgramRecord, ProgramRecord]:
    """The programs before and after; OrderError where the conversion keeps no record of them."""
    if conversion.before is None or conversion.after is None:
        raise OrderError(
            f"report: the conversion of '{conversion.source}' holds no record of its programs; convert "
            "with record=True, or set 'before' and 'after' with record_program"
        )
    return conversion.before, conversion.after


def facts(conversion: Conversion) -> list[tuple[str, str]]:
    """The conversion in short: pairs of a label and a text. OrderError where it holds no programs."""
    before, after = recorded(conversion)
    cut = conversion.cut
    found = kinds(after)
    count = sum(found.values()) - found[CAST_KIND]
    own = after.casts - found[CAST_KIND]
    lines = [
        ("model", conversion.source),
        ("mode", f"{conversion.mode}, {conversion.dtype}"),
        ("opset", _change(str(before.opset), str(after.opset))),
        ("in 16 bit", f"{found[HALF_KIND]:,} of {count:,} operators ({_share(found[HALF_KIND], count)})"),
        ("in fp32", f"{found[FULL_KIND]:,} operators"),
        ("untouched", f"{found[UNTOUCHED_KIND]:,} operators"),
        ("casts", f"{found[CAST_KIND]:,} inserted, {own:,} of the model's own"),
        ("weights", f"{_change(size(before.weights), size(after.weights))}{_ratio(before.weights, after.weights)}"),
    ]
    if before.file or after.file:
        lines.append(("file", f"{_size(before.file)} → {_size(after.file)}{_ratio(before.file, after.file)}"))
    if cut is not None:
        near = "" if cut.exact else f", up to rounding ({cut.rounding})"
        text = f"casts and operators move {cut.value:,} bytes; no assignment of the {cut.free:,} free operators moves "
        text += f"fewer{near}; all in fp32: {cut.all_full:,}; all in 16 bit: {cut.all_half:,}"
        lines.append(("traffic", text))
    verdict = conversion.verdict
    if verdict is not None and verdict.errors:
        name, error = verdict.worst
        met = f"tolerance {verdict.tolerance or 0:.3g}: {'met' if verdict.met else 'not met'}"
        lines.append(
            ("largest error", f"{error:.3g} at output '{name}'{'' if verdict.tolerance is None else f' ({met})'}")
        )
    return lines


def headline(conversion: Conversion) -> str:
    """The conversion in one sentence. OrderError where it holds no programs."""
    before, after = recorded(conversion)
    found = kinds(after)
    count = sum(found.values()) - found[CAST_KIND]
    text = f"{found[HALF_KIND]:,} of {count:,} operators run in 16 bit, {found[FULL_KIND]:,} stay in fp32, "
    if found[UNTOUCHED_KIND]:
        text += f"{found[UNTOUCHED_KIND]:,} are untouched (integers, shapes, nested graphs), "
    text += f"{found[CAST_KIND]:,} casts were put in"
    if before.weights and after.weights:
        text += f"; weights {_change(size(before.weights), size(after.weights))}"
    return text + "."


def size(count: int) -> str:
    """Bytes for people: ``1.5 MB``, in powers of 1,000."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{count} B" if unit == "B" else f"{value:.3g} {unit}"


def _size(count: int) -> str:
    return size(count) if count else "unknown"


def _change(before: str, after: str) -> str:
    return before if before == after else f"{before} → {after}"


def _ratio(before: int, after: int) -> str:
    return f" ({_share(after, before)})" if before and after and before != after else ""


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"
