"""What a provider makes of a case, beside what the operator means: one line of text."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
from onnx.reference import ReferenceEvaluator

from tests.helpers.operator_cases import Array, Case
from tests.helpers.reference_ops import CORRECTED
from tests.helpers.webgpu_sessions import session

EXACT, ELSEWHERE, KILLED = "exact", "not on WebGPU", "kills the process"


def expected(case: Case) -> list[Array]:
    """The results in float64, or as exact as there is a kernel for; integers as onnxruntime has them on CPU.

    CPU's ReduceMax and ReduceMin pass NaN over, so reductions are onnx's evaluator's.
    """
    floats = any(a is not None and a.dtype.kind == "f" for a in case.inputs)
    by_reference = [lambda: _reference(case, "double")]
    by_cpu = [lambda: _on_cpu(case, "double"), lambda: _on_cpu(case, "float")]
    if not floats:
        ways = [lambda: _on_cpu(case, ""), lambda: _reference(case, "")]
    elif case.pointwise or case.op_type.startswith(("Reduce", "Arg", "Trilu")):
        ways = [*by_reference, *by_cpu]
    else:
        ways = [*by_cpu, *by_reference]
    for way in ways[:-1]:
        try:
            return way()
        except Exception:  # neither of them has everything, and each says so in its own way
            continue
    return ways[-1]()


def _reference(case: Case, widen: str) -> list[Array]:
    evaluator = ReferenceEvaluator(case.model(widen), new_ops=CORRECTED)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [np.asarray(each) for each in evaluator.run(None, case.feeds(widen))]


def _on_cpu(case: Case, widen: str) -> list[Array]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    model = case.model(widen).SerializeToString()
    made = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return list(made.run(None, case.feeds(widen)))


def verdict(case: Case) -> str:
    """How WebGPU's results are: exact, so many ulps off, other than they should be, or a failure."""
    try:
        made = session(case.model(), strict=True)
        got = made.run(None, case.feeds())
    except Exception as error:  # onnxruntime's errors have no common base
        said = " ".join(str(error).split())
        if "fallback to CPU EP has been explicitly disabled" in said or "Provider type for" in said:  # nor on CPU
            return ELSEWHERE
        return f"fails: {_told(said)}"
    try:
        want = expected(case)
    except Exception as error:
        return f"gives {_plain(got[0].flat[0])} …, where CPU says: {' '.join(str(error).split())[:80]}"
    with np.errstate(all="ignore"):
        told = [_compared(case, g, w) for g, w in zip(got, want, strict=True)]
    ulps = max((each.ulps for each in told), default=0.0)
    others = list(dict.fromkeys(text for each in told for text in each.others))
    parts = ([f"{ulps:.2g} ulps"] if ulps > 0.5 else []) + others
    return "; ".join(parts) or EXACT


def _told(error: str) -> str:
    """An error of onnxruntime without its place in the source and the node's name."""
    text = re.sub(
        r"(?:virtual )?[\w:<>&* ]*\bonnxruntime::[^()]*\([^()]*\)(?: const)?(?: \[with [^\]]*\])?:? ?", "", error
    )
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ", "", text)
    text = re.sub(r"/onnxruntime_src/\S+ |Non-zero status code returned while running \w+ node\. ?", "", text)
    text = re.sub(r"Name:'[^']*' ?Status Message: ?", "", text)
    return text[:160].strip()


@dataclass
class _Told:
    ulps: float
    others: list[str]


def _compared(case: Case, got: Array, want: Array) -> _Told:
    if got.shape != want.shape:
        return _Told(0.0, [f"shape {list(got.shape)} for {list(want.shape)}"])
    if got.dtype.kind != "f":
        return _Told(0.0, _examples(case, "", got != want.astype(got.dtype), got, want))
    rounded = want.astype(got.dtype)
    ulps, wide = _ulps(got, want, rounded, case.pointwise)
    others: list[str] = []
    if case.pointwise:
        for name, mask in _aspects(case, rounded, want).items():
            others += _examples(case, name, mask & ~_alike(got, rounded), got, rounded)
        return _Told(ulps, others)
    lost = (np.isnan(got) != np.isnan(rounded)) | (np.isinf(got) != np.isinf(rounded))
    lost |= np.isinf(rounded) & (got != rounded)
    return _Told(ulps, _examples(case, "", lost | (wide > 1e5), got, rounded))


def _ulps(got: Array, want: Array, rounded: Array, pointwise: bool) -> tuple[float, Array]:
    """The largest distance in steps of the type; a sum's step is that of a value of the tensor's usual size."""
    info = np.finfo(got.dtype)
    exact = want.astype(np.float64)
    usual = (
        0.0 if pointwise else np.sqrt(np.mean(np.square(exact[np.isfinite(exact)]))) if np.isfinite(exact).any() else 0
    )
    size = np.maximum(np.maximum(np.abs(exact), usual), float(info.tiny))
    step = float(info.eps) * 2.0 ** np.floor(np.log2(size))
    far = np.abs(got.astype(np.float64) - exact) / step
    counts = np.isfinite(rounded) & np.isfinite(got)
    if pointwise:
        counts &= np.abs(rounded) >= info.tiny
    far = np.where(counts, far, 0.0)
    kept = far[far <= 1e5] if not pointwise else far
    return float(kept.max(initial=0.0)), far


def _alike(got: Array, want: Array) -> Array:
    """Equal in kind: both NaN, the same infinity, the same zero, or numbers a step apart."""
    info = np.finfo(got.dtype)
    near = np.abs(got.astype(np.float64) - want.astype(np.float64)) <= 16 * float(info.smallest_subnormal)
    same = (got == want) & (np.signbit(got) == np.signbit(want))
    small = (want != 0) & (np.abs(want) < info.tiny)
    return (np.isnan(got) & np.isnan(want)) | same | (near & small & (got != 0))


def _aspects(case: Case, rounded: Array, want: Array) -> dict[str, Array]:
    """Masks of the results that follow from, or are, numbers of a special kind."""
    floats = [np.broadcast_to(a, want.shape) for a in case.inputs if a is not None and a.dtype.kind == "f"]
    nan_in = np.any([np.isnan(a) for a in floats], axis=0)
    inf_in = np.any([np.isinf(a) for a in floats], axis=0) & ~nan_in
    small_in = np.any([(a != 0) & (np.abs(a) < np.finfo(a.dtype).tiny) for a in floats], axis=0)
    tame = ~(nan_in | inf_in)
    tiny = np.finfo(rounded.dtype).tiny
    small_out = (np.abs(want) < tiny) & (want != 0)
    return {
        "NaN": nan_in,
        "infinity": inf_in,
        "domain": tame & np.isnan(rounded),
        "overflow": tame & np.isinf(rounded) & ~small_in,
        "zero": tame & (want == 0) & ~small_in,
        "subnormal result": tame & small_out & ~small_in,
        "subnormal input": tame & small_in & ((np.abs(rounded) < tiny) | ~np.isfinite(rounded)),
    }


def _examples(case: Case, name: str, wrong: Array, got: Array, want: Array) -> list[str]:
    """What stands where results are other than they should be: the first few of them, and how many."""
    if not wrong.any():
        return []
    count, places = int(wrong.sum()), np.argwhere(wrong)
    at = tuple(places[len(places) // 2])
    shown = f"{_plain(got[at])} for {_plain(np.asarray(want).astype(got.dtype)[at])}"
    if case.pointwise:
        fed = [np.broadcast_to(a, got.shape)[at] for a in case.inputs if a is not None]
        shown = f"({', '.join(_plain(each) for each in fed)}) gives {shown}"
    of = "" if count == 1 else f", and {count - 1} more of {got.size}"
    return [f"{name + ': ' if name else ''}{shown}{of}"]


def _plain(value: Any) -> str:
    return f"{value:.4g}" if np.asarray(value).dtype.kind == "f" else str(value)
