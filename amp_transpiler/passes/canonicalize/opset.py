"""Move a program's ai.onnx operators to another opset, in place.

Gradient and lowering rules are written once, for :data:`~amp_transpiler.lists.TARGET_OPSET`. Imported programs keep the
version they were written in until they are trained, or lowered for a place that needs the target version.
``onnx.version_converter`` is not used: it drops model functions and node metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import onnx

from amp_transpiler.errors import ArgumentError, GraphError
from amp_transpiler.ir.contrib_types import WITHDRAWN, WITHDRAWN_AT
from amp_transpiler.ir.decompose import decompose_operator, has_decomposition
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.oldest_forms import OLDEST, bring_to_oldest
from amp_transpiler.lists import TARGET_OPSET
from amp_transpiler.option_checks import whole
from amp_transpiler.passes.canonicalize.older_forms import ADAPTERS
from amp_transpiler.passes.pipeline import Context, Pass, Property


def convert_opset(program: Graph, target: int = TARGET_OPSET) -> bool:
    """Rewrite every ai.onnx operator (nested programs too) to ``target``; True where anything changed.

    GraphError names an operator that the target does not have, or whose newer form it cannot express. ArgumentError
    where ``target`` is no operator set that onnx knows, from 7 on.
    """
    whole("convert_opset: target", target, OLDEST)
    if target > (newest := onnx.defs.onnx_opset_version()):
        raise ArgumentError(
            f"convert_opset: target is {target}, and onnx {onnx.__version__} knows operator sets up to {newest}"
        )
    brought = bring_to_oldest(program)
    version = program.opset()
    if version == target:
        return brought
    later = []
    for op in list(program.walk()):
        withdrawn = op.type in WITHDRAWN and version < WITHDRAWN_AT <= target
        if not op.domain and (withdrawn or _is_later(op, version, target)) and has_decomposition(op):
            later.append(op)
        elif not op.domain:
            _convert(op, version, target)
    program.info.opsets[""] = target
    for op in later:  # what they are made of has the target's form
        decompose_operator(op)
    imports = [onnx.helper.make_opsetid("", target)]
    program.info.ir_version = max(program.info.ir_version, onnx.helper.find_min_ir_version_for(imports))
    program.touch()
    return True


@cache
def _since(kind: str, version: int) -> int | None:
    """The version in which ai.onnx gave a type of operator its form at ``version``; None where it has none."""
    try:
        return int(onnx.defs.get_schema(kind, version, "").since_version)
    except onnx.defs.SchemaError:
        return None


def _is_later(op: Operator, version: int, target: int) -> bool:
    """Whether the opset ``target`` has an earlier form of an operator, or none."""
    return (_since(op.type, version) or 0) > (_since(op.type, target) or 0)


def keeps_form(kind: str, version: int, target: int) -> bool:
    """Whether ai.onnx takes a type of operator at the opset ``target`` as it was written at ``version``."""
    old, new = _since(kind, version), _since(kind, target)
    if old == new or old is None:  # written by onnxruntime before ONNX had it, or a function's own name
        return True
    return new is not None and old < new and not any(old < upto <= target for upto, _ in ADAPTERS.get(kind, ()))


def can_convert(program: Graph, target: int) -> bool:
    """Whether the opset ``target``, an earlier one, has a form of every operator."""
    version = program.opset()
    return not any(_obstacle(op, version, target) for op in program.walk() if not op.domain)


def _obstacle(op: Operator, version: int, target: int) -> str | None:
    """Why an operator of one opset has no form at another; None where it has."""
    new, old = _since(op.type, target), _since(op.type, version)
    if new is None and not has_decomposition(op):
        return (
            f"operator '{op.label}' ({op.type}, opset {version}) does not exist at opset {target}, which this "
            "place or the training of this program needs"
        )
    if new is None or not _is_later(op, version, target) or has_decomposition(op):
        return None
    known = {*onnx.defs.get_schema(op.type, target, "").attributes, *_said_anyway(op, version, target)}
    unknown = next((name for name in op.attrs if name not in known), None)
    if unknown is None:
        return None
    return (
        f"operator '{op.label}' ({op.type}) uses attribute '{unknown}' of opset {old}, which opset {target} cannot "
        "express"
    )


def _said_anyway(op: Operator, version: int, target: int) -> list[str]:
    """The attributes that the opset ``target`` does not have, and that say at ``version`` what is so without them."""
    own, known = (onnx.defs.get_schema(op.type, opset, "").attributes for opset in (version, target))
    return [
        a.name for a in op.attrs.protos() if a.name not in known and a.name in own and own[a.name].default_value == a
    ]


def _convert(op: Operator, version: int, target: int) -> None:
    obstacle = _obstacle(op, version, target)
    if obstacle is not None:
        raise GraphError(obstacle)
    new, old = _since(op.type, target), _since(op.type, version)
    if old is None:
        return  # written by onnxruntime before ONNX had the operator, in the form that ONNX took over
    for name in _said_anyway(op, version, target) if _is_later(op, version, target) else ():
        del op.attrs[name]
    if old == new and not onnx.defs.get_schema(op.type, target, "").deprecated:
        return
    for upto, adapter in ADAPTERS.get(op.type, []):
        if old < upto <= target:
            adapter(op)


def add_operator(
    like: Operator, type_: str, inputs: Sequence[Variable | None], outputs: Sequence[Variable | None], **attrs: Any
) -> Operator:
    """An operator beside another one, given as the oldest opset has it, in the form of its program's opset."""
    op = like.program.add_operator(type_, inputs, outputs, attrs=attrs, like=like)
    for since, adapter in ADAPTERS.get(type_, []):
        if since <= op.program.opset():
            adapter(op)
    return op


class Opset(Pass):
    """Operators of ai.onnx are rewritten to the form that they have at the target opset."""

    name = "opset"
    guarantees = (Property.TARGET_OPSET,)

    def run(self, graph: Graph, context: Context) -> bool:
        return convert_opset(graph)
