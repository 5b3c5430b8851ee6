"""Lowering: the passes that bring a program to what a place runs, and the ONNX model that comes of it."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from amp_transpiler.ir.dealt_rows import held_shapes
from amp_transpiler.ir.decompose import has_decomposition
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.oldest_forms import OLDEST
from amp_transpiler.ir.opdef import lowering_rule_of
from amp_transpiler.ir.types import FLOATS, HALF
from amp_transpiler.lists import NEWEST_OPSET, TARGET_OPSET, place_kinds, place_traits, unsupported_reason
from amp_transpiler.passes.canonicalize.control_flow import FEED_SHAPES, ExpandControlFlow
from amp_transpiler.passes.canonicalize.inlining import InlineFunctions
from amp_transpiler.passes.canonicalize.opset import can_convert, convert_opset
from amp_transpiler.passes.canonicalize.sequences import ExpandSequences
from amp_transpiler.passes.canonicalize.standard_form import DecomposeForRuntime
from amp_transpiler.passes.lowering.arithmetic import Arithmetic, kernels_of
from amp_transpiler.passes.lowering.computed_sizes import decided_error, with_computed_sizes
from amp_transpiler.passes.lowering.emission import emit
from amp_transpiler.passes.lowering.fitting import fitted
from amp_transpiler.passes.lowering.lowered import Lowered
from amp_transpiler.passes.lowering.place import Place, arithmetic_of, check_place
from amp_transpiler.passes.lowering.place_parts import DecomposeForPlace
from amp_transpiler.passes.lowering.room_for_rows import RoomForRows
from amp_transpiler.passes.lowering.wanted import WANTED, Cores, Wanted
from amp_transpiler.passes.lowering.wide_products import widened
from amp_transpiler.passes.numerics.mixed_norms import MixedNorms
from amp_transpiler.passes.pipeline import Context, Pass, Pipeline, Property, Value, apply_to_copy, option
from amp_transpiler.passes.view.feed_shapes import checked_fetches, checked_shapes

#: The model that a place runs.
LOWERED: Value[Lowered] = Value("lowered", Lowered)
#: How far above what there can be the numbers for sizes that data decide begin: where some of them are written in
#: other operators than others, because they lie on both sides of a limit, the next ones may not.
_ABOVE = (1.0, 1.3, 1.7, 2.2)
#: The first opset whose reductions all read their axes, as what stands for inner roundings has them.
_AXES_READ = 18
#: The opset of Identity for sequences.
_SEQUENCES = 14


class RuntimeOpset(Pass):
    """Operators are at the target opset where lowering rules ask for it, or where the place lacks later kernels.

    So they are where kernels' inner roundings are written out that need later forms of operators. Others are at the
    newest opset that onnxruntime takes, unless it has no form of them, and at the oldest that it runs.
    """

    name = "runtime-opset"
    takes = (WANTED,)

    place: str = option("cpu", *place_kinds())

    def applies(self, graph: Graph, context: Context) -> bool:
        return self._opset(graph, context) != graph.opset()

    def run(self, graph: Graph, context: Context) -> bool:
        return convert_opset(graph, self._opset(graph, context))

    def _opset(self, graph: Graph, context: Context) -> int:
        """At which the operators are to be."""
        version = graph.opset()
        # A conversion goes beyond the target version only for bfloat16 operators that the target does not have.
        stays = version > TARGET_OPSET and any(v.dtype == "bfloat16" for v in graph.variables)
        traits = place_traits(self.place)
        arithmetic = context.get(WANTED, Wanted()).arithmetic
        emulated = version < _AXES_READ and arithmetic is not None and kernels_of(arithmetic) is not None
        later = traits.bodies or emulated or (version > TARGET_OPSET and traits.device)
        lacks = self._lacks(graph, version) or _hands_on_sequences(graph, version)
        if lacks or (not stays and (later or any(lowering_rule_of(op, traits) for op in graph.walk()))):
            return TARGET_OPSET
        return NEWEST_OPSET if version > NEWEST_OPSET and can_convert(graph, NEWEST_OPSET) else max(version, OLDEST)

    def _lacks(self, graph: Graph, version: int) -> bool:
        """Whether the host computes an operator by its parts alone, and onnxruntime does not take it apart itself, or
        has a kernel at the target opset alone.

        It computes 16-bit ones in fp32.
        """
        host, newest = version > TARGET_OPSET and place_traits(self.place).host, min(version, NEWEST_OPSET)

        def lacks(op: Operator, opset: int) -> bool:
            data = next((v.dtype for v in (*op.outputs, *op.inputs) if v is not None and v.dtype in FLOATS), None)
            kind = "float32" if data in HALF else data
            return kind is not None and unsupported_reason(op.type, kind, opset, self.place) is not None

        return host and any(
            lacks(op, newest) and (has_decomposition(op) or not lacks(op, TARGET_OPSET))
            for op in graph.walk()
            if not op.domain
        )


def _hands_on_sequences(graph: Graph, version: int) -> bool:
    """Whether nested graphs give sequences, before Identity takes them, which is put before what a graph gives."""
    made = (v for op in graph.walk() if op.attrs.programs for v in op.outputs) if version < _SEQUENCES else ()
    return any(v is not None and v.type_proto is not None and v.type_proto.HasField("sequence_type") for v in made)


class Emit(Pass):
    """The ONNX model that the place runs is written: gradients and updates as standard operators, and rounding."""

    name = "emit"
    needs = (Property.INLINED,)
    takes = (FEED_SHAPES, WANTED)
    guarantees = (LOWERED,)
    reads = True

    place: str = option("cpu", *place_kinds())

    def run(self, graph: Graph, context: Context) -> bool:
        for above in _ABOVE:
            times = emit(graph, self.place, context.get(FEED_SHAPES) or {}, context.get(WANTED, Wanted()), above)
            traits = place_traits(self.place)
            if traits.bodies:
                times = [fitted(lowered) for lowered in times]
            if traits.tensor_cores:
                times = [widened(lowered) for lowered in times]
            found = times[0] if len(times) == 1 else with_computed_sizes(times)
            if found is not None:
                context[LOWERED] = found
                return False
        raise decided_error(times[0], "it is written in other operators for some sizes than for others")


def lowering(place: str) -> Pipeline:
    """The passes that make the model that ``place`` runs."""
    opset, expanded = RuntimeOpset(place), ExpandControlFlow(place)
    straight = InlineFunctions(), DecomposeForRuntime(), opset, DecomposeForPlace(place), expanded, ExpandSequences()
    return Pipeline((*straight, MixedNorms(place), RoomForRows(), Emit(place)))


def lower(
    program: Graph,
    place: str,
    feed_shapes: dict[str, tuple[int, ...]] | None = None,
    fetches: Sequence[Variable] = (),
    *,
    updates: bool | Mapping[Variable, Variable] = True,
    keep_fp32: Container[str] = frozenset(),
    others: Sequence[Variable] = (),
    declared: bool = False,
    arithmetic: Arithmetic | None = None,
    cores: Cores | None = None,
    largest: Mapping[str, tuple[int, ...]] | None = None,
) -> Lowered:
    """The model that a place of kind "cpu", "cuda" or "webgpu" runs for these feed shapes; ``program`` stays as it is.

    Of variables whose rows are dealt out it has what a rank holds. What it gives: see :class:`~.wanted.Wanted`.
    GraphError where a rule needs a shape that is not fixed.
    """
    feed_shapes = {**held_shapes(program), **(feed_shapes or {})}
    named = {state.name: new.name for state, new in updates.items()} if isinstance(updates, Mapping) else updates
    given, beside = (tuple(v.name for v in each) for each in (fetches, others))
    wanted = Wanted(given, named, keep_fp32, beside, declared, arithmetic, cores or Cores(), largest or {})
    context = Context({FEED_SHAPES: feed_shapes, WANTED: wanted})
    apply_to_copy(lowering(place), program, context)
    return context[LOWERED]


def lower_for(
    program: Graph,
    place: Place | str,
    feed_shapes: Mapping[str, Sequence[int]] | None = None,
    fetches: Sequence[Variable | str] = (),
) -> Lowered:
    """The model that ``place`` runs, the arguments checked; see ``Program.lower``."""
    place = check_place(place, "lower: place")
    shapes, targets = checked_shapes("lower", program, feed_shapes), checked_fetches("lower", program, fetches)
    return lower(program, place.kind, shapes, targets, declared=True, arithmetic=arithmetic_of(place))
