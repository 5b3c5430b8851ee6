"""The opset at which most operators can run in 16 bit: bfloat16 came to ONNX an operator at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import cache, partial

from amp_transpiler.conversion.conversion_options import OPTIONS, ConversionOptions
from amp_transpiler.conversion.io_types import io_to_narrow
from amp_transpiler.conversion.simplification import protected
from amp_transpiler.conversion.write_lacking import formed
from amp_transpiler.errors import GraphError
from amp_transpiler.ir.annotate import annotate
from amp_transpiler.ir.clone import clone
from amp_transpiler.ir.contrib_types import WITHDRAWN, WITHDRAWN_AT
from amp_transpiler.ir.decompose import write_instead
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.kernel_cost import moved_bytes
from amp_transpiler.ir.nodes import Operator, Variable, origin
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.lists import TARGET_OPSET, USUAL_PLACE, has_kernel, place_traits
from amp_transpiler.ops.place_gaps import LOST
from amp_transpiler.option_checks import counted
from amp_transpiler.passes.canonicalize.fuse_norm import LAYER_NORM, MEANS, fuse_layer_norms, has_layer_norms
from amp_transpiler.passes.canonicalize.opset import convert_opset
from amp_transpiler.passes.numerics.quantised import latest_opset
from amp_transpiler.passes.partition.cut import FULL, Tensor, solve
from amp_transpiler.passes.partition.problem import counted_bytes, counted_cast
from amp_transpiler.passes.pipeline import Context, Pass, Property
from amp_transpiler.passes.view.counted_shapes import counted_shapes
from amp_transpiler.passes.view.typing import Obstacle, has_float, narrowed

#: The opset of bfloat16 convolutions, at which kernels of CUDA are lost.
_LATER = TARGET_OPSET + 1
#: The opset of casts to a type and from it; 7 is the oldest that is converted.
_CASTS = {"float16": 7, "bfloat16": 13}
#: The opset of scales in 16 bit.
_SCALES = 19
_EARLIER = (13, LAYER_NORM, _SCALES)
#: What is not counted: what is cast or held, and what no list has.
_APART = frozenset({"Cast", "CastLike", "Constant", *WITHDRAWN})
_HasKernel = Callable[..., bool]


def raise_for(
    program: Graph,
    dtype: str,
    place: str = USUAL_PLACE,
    binds_full: Callable[[str], bool] = lambda name: False,
    kept: Collection[str] = (),
) -> str:
    """Bring ``program`` to a later opset, in place, where more of it can then run in ``dtype``; a sentence on what was
    done, or on what would have been gained and was not worth it.

    That is the target opset, or 22 where even more can, or an earlier one where onnxruntime would not load it there.
    What has no kernel at 22 on the place is written in other operators; where it has no such form, is one of the types
    ``kept``, or that moves more bytes than is saved, 22 is not taken. A program that cannot be expressed there stays as
    it is. ``binds_full``: of which operators lists say that they run in fp32 anyway.
    """
    own, kernels = program.opset(), partial(has_kernel, place_traits(place).provider)
    bound = cache(binds_full)

    def able(name: str, dtype: str, opset: int, domain: str = "") -> bool:
        return not bound(name) and kernels(name, dtype, opset, domain)

    def moved(trial: Graph) -> int:
        return _traffic(trial, dtype, able, formed(trial, dtype, place, bound))

    targets = [target for target in _targets(program, dtype, able) if target > own]
    if not targets:
        return ""
    before = _able(program, dtype, able)
    best, count, trial, refused, written = own, before, program, "", Counter[str]()
    for target in targets:
        copy = clone(program)
        try:
            convert_opset(copy, target)
        except GraphError:
            continue
        found = _able(copy, dtype, able)
        if target >= LAYER_NORM > own:
            found += len(fuse_layer_norms(copy))
        lost = _lost(program, trial, copy, kernels) if target > TARGET_OPSET and found > count else []
        changed = _write_out(copy, [kind for kind in lost if kind not in kept])
        lost = [kind for kind in lost if kind not in changed]
        dearer = changed and not lost and moved(copy) >= moved(trial)
        if found > count and not lost and not dearer:
            best, count, trial, written = target, found, copy, changed
        elif found > count:
            gain = f"opset {target}, at which {_more(found - before)} could run in {dtype}"
            title = place_traits(place).title
            refused = f"{gain}, is not taken: {title} has no kernel for {', '.join(lost or changed)} there"
            refused += ", and what would stand for it moves more bytes than that saves" if dearer else ""
    if best == own:
        return refused
    convert_opset(program, best)
    annotate(program)  # what the newer forms of operators say of shapes
    _write_out(program, written)
    told = [f"opset {own} raised to {best}, at which {_more(count - before)} can run in {dtype}"]
    for kind, number in written.items():
        title = place_traits(place).title
        told.append(f"{number} {kind} written in other operators, as {title} has no kernel for it there")
    return "; ".join([*told, refused] if refused else told)


def _write_out(program: Graph, kinds: Iterable[str]) -> Counter[str]:
    """Write operators of these types in others; how many there were of the types of which that did with all."""
    forms = {kind: LOST[kind] for kind in kinds if kind in LOST}
    written = Counter[str]()
    for op in list(program.walk()):
        if op.type in forms and not op.domain:
            try:
                write_instead(op, forms[op.type])
            except GraphError:
                del forms[op.type]
            else:
                written[op.type] += 1
    return Counter({kind: written[kind] for kind in forms})


def _more(count: int) -> str:
    return counted(count, "more operator")


def _targets(program: Graph, dtype: str, has: _HasKernel) -> tuple[int, ...]:
    """The opsets to try: the first one at which what lacks a kernel now has one, at which layer norms are operators
    where some are written out, and at which operators that are on no list, since ONNX withdrew them, are what they are
    made of; for bfloat16 that of its convolutions as well."""
    own = program.opset()
    later = latest_opset(program)
    kinds = set[str]()
    for op in program.walk():
        if op.type not in kinds and not op.domain and has_float(op):
            kinds.add(op.type)
    lacking = [kind for kind in kinds if not has(kind, dtype, own)]
    gains = {t: sum(has(kind, dtype, t) for kind in lacking) for t in (*_EARLIER, later) if t > own}
    most = max(gains.values(), default=0)
    target = next((t for t, gain in gains.items() if gain == most), 0) if most else 0
    if own < WITHDRAWN_AT and kinds.intersection(WITHDRAWN):
        target = max(target, _EARLIER[0])
    if own < LAYER_NORM and kinds.intersection(MEANS) and has_layer_norms(program):
        target = max(target, LAYER_NORM)
    return (target, _LATER) if dtype == "bfloat16" and later == TARGET_OPSET else (target,)


def _traffic(program: Graph, dtype: str, has: _HasKernel, replaced: Collection[str]) -> int:
    """Bytes that operators and casts move in a least assignment of ``dtype`` to those that can run in it, or whose type
    is ``replaced`` by such."""
    shape_of = counted_shapes(program)

    def moved(op: Operator, narrow: str) -> int:
        sizes = (
            [counted_bytes(shape_of(v), narrow) if v is not None and v.dtype == "float32" else 0 for v in side]
            for side in (op.inputs, op.outputs)
        )
        return moved_bytes(op.type, op.domain, *sizes)

    costs, bound = list[tuple[int, int]](), 0
    tensors: dict[Variable, Tensor] = {}
    for op in program.walk():
        if op.type in _APART or traits_of(op).shape_only:
            continue
        able = _is_able(op, dtype, has) or (op.type in replaced and not op.domain)
        number: int | bool = len(costs) if able else FULL
        if number is FULL:
            bound += moved(op, "float32")
        else:
            costs.append((moved(op, dtype), moved(op, "float32")))
        for v in op.inputs:
            tensor = None if v is None else tensors.get(origin(v))
            if tensor is not None and number is FULL:
                tensor.read_full = True
            elif tensor is not None:
                tensor.readers.append(number)
        for v in op.outputs:
            if v is not None and v.dtype == "float32":
                tensors[v] = Tensor(number, [], False, False, counted_cast(shape_of(v), dtype))
    return bound + solve(costs, list(tensors.values())).value


def _able(program: Graph, dtype: str, has: _HasKernel) -> int:
    """Operators that could run in ``dtype`` at the program's opset on the place."""
    return sum(_is_able(op, dtype, has) for op in program.walk())


def _is_able(op: Operator, dtype: str, has: _HasKernel) -> bool:
    if op.domain or op.type in _APART or op.attrs.programs or not has_float(op):
        return False
    return not isinstance(narrowed(op, dtype), Obstacle) and has(op.type, dtype, op.program.opset(op.domain), op.domain)


def _lost(program: Graph, before: Graph, after: Graph, has: _HasKernel) -> list[str]:
    """Operators with a kernel on the place at the opset of ``before`` that have none at that of ``after``."""
    old, new = before.opset(), after.opset()
    kinds = {op.type for op in program.walk() if not op.domain and has_float(op)}
    return sorted(kind for kind in kinds if has(kind, "float32", old) and not has(kind, "float32", new))


class RaiseOpset(Pass):
    """Operators of ai.onnx are rewritten to a later opset, where more of them can then run in 16 bit; what has no
    kernel there, in others."""

    name = "raise-opset"
    needs = (OPTIONS,)
    invalidates = (Property.TARGET_OPSET,)

    def run(self, graph: Graph, context: Context) -> None:
        options = context[OPTIONS]
        if options.mode != "mixed" or _has_neighbours(graph, options):
            kept = {op.type for op in protected(graph, options)[1]}
            note = raise_for(graph, options.dtype, options.kind, options.binds_full, kept)
            context.notes += [note] if note else []
        if graph.opset() < _CASTS[options.dtype] and io_to_narrow(graph, options):
            convert_opset(graph, _CASTS[options.dtype])  # inputs and outputs are cast, whatever else runs in 16 bit


def _has_neighbours(graph: Graph, options: ConversionOptions) -> bool:
    """Whether there is what gray operators, which mixed mode runs in 16 bit beside others alone, may follow."""
    white = options.lists.white_list
    ops = [op for op in graph.walk() if not op.inserted]  # nor what casts of inputs that were narrowed read
    return any(op.full_type in white or any(v and v.dtype == options.dtype for v in op.inputs) for op in ops)
