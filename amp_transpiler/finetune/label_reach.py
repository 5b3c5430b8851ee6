"""Labels that float16 does not hold: what makes the prediction that is to reach them computes in fp32."""

from __future__ import annotations

from collections.abc import Iterable

from amp_transpiler.conversion.auto import MARGIN
from amp_transpiler.ir.metadata import FULL
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.types import LIMITS
from amp_transpiler.lists import AutoMixedPrecisionLists

_END = LIMITS["float16"].largest


def reaches_beyond(reach: float) -> bool:
    """Whether labels as large as that come near the end of float16; a model before its training shows nothing of it."""
    return reach * MARGIN > _END


def keep_reach(predictions: Iterable[Variable], label: str, reach: float) -> None:
    """Keep fp32 what makes these, back to the last products."""
    why = str(Reason(Kind.REACHES, label, (f"{reach:.3g}", "float16", f"{_END:.5g}")))
    products = AutoMixedPrecisionLists().white_list
    behind, seen = [prediction.producer for prediction in predictions], set[Operator]()
    while behind:
        op = behind.pop()
        if op is None or op in seen:
            continue
        seen.add(op)
        op.metadata.setdefault(FULL, why)
        if op.full_type not in products:
            behind += [v.producer for v in op.inputs if v is not None]
