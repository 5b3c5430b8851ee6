"""Emission: a graph as the ONNX model that a place runs.

CUDA gets real 16-bit operators. The CPU has no 16-bit arithmetic, and stock onnxruntime drops the rounding between the
fp32 operators that stand in; there a 16-bit variable is an fp32 tensor, and ``Cast -> 16 bit -> Cast -> fp32`` follows
every operator that stores 16 bit and can make a new value. Both round at the same points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import zip_longest

import numpy as np
import onnx

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.constant_data import constant_array
from amp_transpiler.ir.decided_sizes import DecidedSizes
from amp_transpiler.ir.decompose import RUNTIME_DOMAINS
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import Shapes, static, type_proto
from amp_transpiler.ir.nodes import OWN, Operator, Variable
from amp_transpiler.ir.opdef import group_inputs, has_lowering_rule, lookup, lowering_rule_of, traits_of
from amp_transpiler.ir.rule_errors import rule_of
from amp_transpiler.ir.signature import signature
from amp_transpiler.ir.types import HALF
from amp_transpiler.lists import TARGET_IR_VERSION, TARGET_OPSET
from amp_transpiler.ops.gpu_kernels import remember_product
from amp_transpiler.ops.training.exchange import meets
from amp_transpiler.ops.training.initializers import drawn_together
from amp_transpiler.ops.training.rows import joined, remember_state
from amp_transpiler.ops.training.seeds import SEED, STEP
from amp_transpiler.passes.lowering.arithmetic import Arithmetic, kernels_of
from amp_transpiler.passes.lowering.biases import biased_products, emit_biased, emit_biased_softmax
from amp_transpiler.passes.lowering.by_address import by_address
from amp_transpiler.passes.lowering.cast_emission import emit_cast
from amp_transpiler.passes.lowering.channel_layout import as_image, by_channel, exchange
from amp_transpiler.passes.lowering.columns import emit_column
from amp_transpiler.passes.lowering.emulated_storage import EmulatedStorage
from amp_transpiler.passes.lowering.flat_layout import FlatState, flat_layout
from amp_transpiler.passes.lowering.gradient_sums import running_sums
from amp_transpiler.passes.lowering.known_integers import emit_known
from amp_transpiler.passes.lowering.late_readers import waiting
from amp_transpiler.passes.lowering.lowered import (
    Lowered,
    Port,
    half_sequence,
    live,
    needed,
    nested_type,
    output_type,
    renamed,
    row,
)
from amp_transpiler.passes.lowering.multiples import emit_multiple
from amp_transpiler.passes.lowering.narrow_kernels import emit_narrow, narrow_kernels
from amp_transpiler.passes.lowering.node_order import arranged
from amp_transpiler.passes.lowering.own_rows import left_to_others, met_at
from amp_transpiler.passes.lowering.rule_results import check_results
from amp_transpiler.passes.lowering.scatters import emit_scatter
from amp_transpiler.passes.lowering.table_lookups import emit_lookup, looks_up_dealt
from amp_transpiler.passes.lowering.tensor_types import foreign_types, unpooled_types
from amp_transpiler.passes.lowering.wanted import Wanted
from amp_transpiler.passes.view.feed_shapes import has_open_feeds

_RUNTIME = {"seed": SEED, "step": STEP}
_Sizes = Mapping[str, tuple[int, ...]]
_INSTEAD = (emit_known, emit_biased_softmax, emit_column, emit_multiple, emit_lookup, emit_scatter)


def emit(graph: Graph, place: str, feed_shapes: _Sizes, wanted: Wanted, above: float = 1.0) -> list[Lowered]:
    """The model that ``place`` runs; only operators that the fetches and the updates need are in it.

    Where data decide sizes there are several, each with other numbers for these, from ``above`` times what there can be
    on. GraphError where a rule needs a shape that is not fixed.
    """
    emission = partial(_Emission, graph, place, feed_shapes, wanted)
    first = emission(lambda decided: DecidedSizes(graph, feed_shapes, above) if decided else Shapes(graph, feed_shapes))
    others = () if first.shapes is None else first.shapes.times[1:]
    return [first.run(), *map(lambda shapes: emission(lambda _: shapes).run(), others)]


class _Emission(EmulatedStorage):
    def __init__(
        self, program: Graph, place: str, feed_shapes: _Sizes, wanted: Wanted, shapes: Callable[[bool], Shapes]
    ) -> None:
        super().__init__(Emitter(place, program.opset()), wanted.keep_fp32)
        self.declared, self.stateless, self.replays = wanted.declared, wanted.updates is False, wanted.replays
        self.program, self.updates = program, wanted.written(program)
        fetches = [program.var(name) for name in wanted.fetches] or ([] if self.updates else program.outputs)
        self.fetches = list(dict.fromkeys(fetches))
        targets = [*self.fetches, *self.updates.values()]
        self.order = needed(program, [*targets, *map(program.var, wanted.others)])
        self.left = left_to_others(self.order, targets) if wanted.others else frozenset()
        ruled = any(has_lowering_rule(op, self.e.at) for op in self.order) or looks_up_dealt(self.order)
        # A branch that these shapes never take may not even fit them: then the declared shapes stay.
        self.feed_shapes = {} if any(op.attrs.programs for op in self.order) and not ruled else feed_shapes
        self.e.kernels = kernels_of(wanted.arithmetic or Arithmetic(place))
        if ruled or self.e.kernels is not None:
            self.shapes = shapes(any(map(self.needs_sizes, self.order)))
            self.e.hangs = self.shapes.hangs
        self.e.reserve(v.name for v in program.variables)
        self.e.runtime_scalar, self.e.known_values = self._runtime_scalar, self._known
        self.e.ranked = any(map(meets, program.operators))
        self.opens = self.e.at.host and has_open_feeds(program)
        self.inputs: list[onnx.ValueInfoProto] = []
        self.result = Lowered(onnx.ModelProto(), place, given=self.e.given)
        self.layout = flat_layout(self.order, self.updates, self.shapes, place, self.left, wanted.cores)
        self.e.rows, self.e.together = self.layout.rows, drawn_together(self.order)
        self.biased = biased_products(self.order, place, wanted.keep_fp32, self.fetches)
        self.narrow = narrow_kernels(self.order, self.e.at, targets)
        self.sums = running_sums(self.order, place, wanted.keep_fp32, self.fetches)
        self.domains = {"": self.e.opset}

    def run(self) -> Lowered:
        for variable in self._sources():
            self._source(variable)
        for flat in self.layout.states:
            self._flat_source(flat)
        self.result.origins = [None] * len(self.e.nodes)
        for op in self.order:
            self.operator(op)
            self.result.origins += [op] * (len(self.e.nodes) - len(self.result.origins))
        outputs, rename = self._ports()
        wanted, updates = {info.name for info in outputs}, {port.tensor for port in self.result.updates}
        feeds = {port.tensor: port.shape for port in self.result.feeds}
        nodes = by_address(self.e, zip_longest(self.e.nodes, self.result.origins), feeds)
        rows = renamed([row(*pair) for pair in nodes], rename)
        met = met_at(rows) if self.left else set()
        self.result.decided = [rename.get(name, name) for name in self.decided()]
        asked = wanted.union(met, self.result.decided)
        rows = arranged(self.e, waiting(self.e, self.result, live(rows, asked)), updates | met, feeds)
        self.result.origins = [each.origin for each in rows]
        model, graph = self.result.model, self.result.model.graph
        graph.name = self.program.graph_name
        graph.node.extend(each.node for each in rows)
        used = {name for each in rows for name in each.reads}  # a rule may have read a constant, and not emitted it
        graph.initializer.extend(t for name, t in self.e.initializers.items() if name in used | wanted)
        unread = self.layout.unread(self.result.states, used | wanted)
        self.result.states = [port for port in self.result.states if port.variable not in unread]
        graph.input.extend(info for info in self.inputs if info.name not in unread)
        graph.output.extend(outputs)
        graph.value_info.extend((*foreign_types(graph, self.e.foreign), *unpooled_types(graph)))
        own = min(self.program.info.ir_version, TARGET_IR_VERSION)
        model.ir_version = max(8, own) if self.e.opset < TARGET_OPSET else TARGET_IR_VERSION
        model.producer_name = "amp_transpiler"
        for domain, version in sorted((dict.fromkeys(self.e.domains, 1) | self.domains).items()):
            model.opset_import.append(onnx.helper.make_opsetid(domain, version))
        return self.result

    def _sources(self) -> list[Variable]:
        """Variables without a producer that the needed operators (nested ones too) or the targets read."""
        seen: dict[int, Variable] = {}
        for op in self.order:
            for v in (*op.inputs, *op.captures):
                if v is not None and v.producer is None and v not in self.left:
                    seen.setdefault(v.key, v)
        seen |= {v.key: v for v in (*self.fetches, *self.updates.values()) if v.producer is None}
        return [seen[key] for key in sorted(seen)]

    def _source(self, variable: Variable) -> None:
        if variable.is_constant:
            if self.declared and self.cpu and variable.dtype in HALF and variable in self.fetches:
                self.named[variable] = self.e.name(f"{variable.name}@HELD")  # the output has the name
            value = self.constant(variable)
            if variable.grad_of is not None and self.opens:  # what hangs on sizes would be fused where they are known
                value = self.e.Add(value, self.e.cast(self.e.scalar("zero"), value.dtype))
            self.env[variable.key] = value
            return
        if not variable.is_input and not variable.persistable:
            raise GraphError(
                f"variable '{variable.name}' of program '{self.program.name}' is read but never written, fed "
                "or initialised"
            )
        if variable.dtype is None and variable.type_proto is None:
            raise GraphError(f"variable '{variable.name}' of program '{self.program.name}' has no element type")
        shape = self.feed_shapes.get(variable.name, variable.shape)
        info = onnx.ValueInfoProto(name=variable.name)
        info.type.CopyFrom(variable.type_proto if variable.dtype is None else type_proto(variable.dtype, shape))
        self.inputs.append(info)
        port = Port(variable.name, variable.name, variable.dtype or "", shape)
        (self.result.states if variable.persistable else self.result.feeds).append(port)
        self.env[variable.key] = self.emulated(Value(variable.name, variable.dtype or "", static(shape)))

    def _flat_source(self, flat: FlatState) -> None:
        """The flat state, of which the tensors of its variables are the parts."""
        name, dtype, shape = flat.name, flat.dtype, flat.rows.shape
        self.inputs.append(onnx.ValueInfoProto(name=name, type=type_proto(dtype, shape)))
        self.result.states.append(Port(name, name, dtype, shape, flat.segments))
        whole = self.emulated(Value(name, dtype, shape))
        remember_state(self.e, [self.env[v.key] for v in flat.states], whole, flat.cast_whole)

    def _known(self, variable: Variable) -> np.ndarray | None:
        return self.shapes.ruled(variable) if self.shapes is not None else constant_array(variable)

    def _runtime_scalar(self, what: str) -> Value:
        if what in _RUNTIME:
            if not self.program.has_var(_RUNTIME[what]):
                return self._unseeded()
            variable = self.program.var(_RUNTIME[what])
            if variable.key not in self.env:
                self._source(variable)
            return self.env[variable.key]
        name = f"@{what}"
        if name not in self.result.scalars:
            self.result.scalars.append(name)
            self.inputs.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, []))
        return Value(name, "float32", ())

    def _unseeded(self) -> Value:
        """Randomness of an import, which has no state for it: a run that measures draws the same each time."""
        if not self.stateless:
            raise GraphError(
                f"program '{self.program.name}' draws random numbers (Dropout in training mode), and has "
                "no state for them before minimize or append_backward; clone(for_test=True) gives a "
                "program that draws none"
            )
        return self.e.const(0, "uint32")

    def operator(self, op: Operator) -> None:
        self.e.prefix = next((v.name for v in op.outputs if v is not None), op.type)
        if op.full_type == "Identity" and op.inputs[0] is not None and op.outputs[0] is not None:
            self.env[op.outputs[0].key] = self.env[op.inputs[0].key]
        elif op.full_type in ("Cast", "CastLike"):
            emit_cast(self, op)
        elif lowering_rule_of(op, self.e.at) is None or self.unsized(op) or not self._body(op):
            if op.domain == OWN:
                raise GraphError(f"operator '{op.label}' ({op.full_type}) has no lowering rule; it cannot be run")
            special = emit_biased(self, self.biased.get(op), op) or emit_narrow(self, op, self.narrow)
            if not (special or any(emit(self, op) for emit in _INSTEAD)):
                self._standard(op)

    def _body(self, op: Operator) -> bool:
        """What the operator's rule writes; False where it leaves the operator as it stands to this place."""
        found, function = lookup(op), lowering_rule_of(op, self.e.at)
        assert found is not None and function is not None and self.shapes is not None
        self.e.wanted = [v is not None and v not in self.left for v in op.outputs]
        self.e.output_shapes = [
            self.shapes.shape(v) if v is not None and v.grad_of is not None else None for v in op.outputs
        ]
        variables = self.sums.left.get(op, op.inputs)
        inputs = [None if v is None or v in self.left else self.shaped(op, v) for v in variables]
        self.e.summand = self.added(op, self.sums.before.get(op))
        if not found.native:
            inputs = [None if v is None else self.e.f32(v) for v in inputs]
        unrounded = any(v is not None and v.name in self.keep_fp32 for v in op.outputs)
        emulation = self.cpu and found.native and not unrounded
        if emulation:
            pairs = zip(variables, inputs, strict=True)
            inputs = [None if v is None or not i else self.stands_for(v, i) for v, i in pairs]
        sizes = self.e.output_shapes
        turned, first = exchange(self.e, op, inputs, sizes), len(self.e.nodes)
        if turned is not None:
            inputs, self.e.output_shapes = turned
        with rule_of(op), self.e.emulation() if emulation else nullcontext():
            results = function(self.e, op, *group_inputs(op, inputs))
            if results is None and op.domain != OWN:
                return False
            results = check_results(self.e, op, function, results, inputs, first)
        for variable, value, size in zip_longest(op.outputs, results, sizes):
            if variable is not None and variable not in self.left:
                held = self.finished(variable, value, found.exact)
                self.env[variable.key] = held if turned is None else as_image(self.e, held, size)
        return True

    def _standard(self, op: Operator) -> None:
        found = lookup(op)
        exact = found is not None and found.exact
        # On CPU onnxruntime computes its own operators in fp32 just as well as in 16 bit; nobody knows of others.
        real = self.cpu and (op.domain not in RUNTIME_DOMAINS or traits_of(op).bits or self._looks_up(op))
        inputs = [None if v is None else self.read(op, v) for v in op.inputs]
        if real:
            inputs = [self.real(v, i) if v and i else None for v, i in zip(op.inputs, inputs, strict=True)]
        first = op.outputs[0] if op.outputs else None
        if self.shapes is not None and first is not None:
            made = by_channel(self.e, op, inputs, self.fixed(first))
            if made is not None:
                self.env[first.key] = self.finished(first, made, exact)
                return
        if not real and self.as_kernels(op, inputs, exact):
            return
        names = ["" if v is None else v.name for v in inputs]
        node = onnx.NodeProto(op_type=op.type, domain=op.domain, name=op.name or self.e.name(op.type), input=names)
        raw: list[Value | None] = []
        for v in op.outputs:
            if v is None:
                raw.append(None)
                continue
            rounded = self.cpu and v.dtype in HALF
            kind = "float32" if rounded and not real else (v.dtype or "")
            raw.append(Value(self.e.name(op.type) if rounded else self.named.get(v, v.name), kind, self.fixed(v)))
        node.output.extend("" if v is None else v.name for v in raw)
        node.attribute.extend(self.attributes(op, real))
        for name, nested in op.attrs.graphs.items():
            node.attribute.append(self._nested(name, nested))
        if op.domain:
            self.domains.setdefault(op.domain, self.program.opset(op.domain))
        self.e.nodes.append(node)
        for v, value in zip(op.outputs, raw, strict=True):
            if v is not None and value is not None:
                self.e.given[value.name] = value
                if value.dtype and signature(op.type, self.e.opset, op.domain) is None:
                    self.e.foreign.append(value)
                self.env[v.key] = self.emulated(value) if real else self.finished(v, value, exact)
        if op.full_type == "MatMul":
            remember_product(self.e, raw[0], *inputs)

    # -- nested graphs ----------------------------------------------------------------------------------
    def _nested(self, name: str, nested: Graph | list[Graph]) -> onnx.AttributeProto:
        if isinstance(nested, list):
            return onnx.helper.make_attribute(name, [self._graph(item) for item in nested])
        return onnx.helper.make_attribute(name, self._graph(nested))

    def _graph(self, nested: Graph) -> onnx.GraphProto:
        e, env, shapes = self.e, self.env, self.shapes
        if shapes is not None:  # a branch whose operators all stand for themselves may not fit what it is not taken for
            ruled = any(has_lowering_rule(op, self.e.at) for op in nested.operators)
            self.shapes = Shapes(nested, around=shapes) if ruled else shapes.within(nested) if self.replays else None
        self.named |= {v: e.own(v.name) for v in nested.variables if v.outer is None}
        graph, inner = onnx.GraphProto(name=nested.name or "body"), dict[int, Value]()
        self.env = inner
        with e.nested():
            for v in nested.variables:
                if v.outer is not None:
                    inner[v.key] = env[v.outer.key]
                elif v.is_input:
                    kind = "float32" if self.cpu and v.dtype in HALF else (v.dtype or "")
                    info = graph.input.add(name=self.named[v])
                    info.type.CopyFrom(nested_type(v, self.cpu))
                    inner[v.key] = Value(info.name, kind, static(v.shape))
                    if v.dtype in HALF and nested.parent is not None:
                        self.result.inner[info.name] = nested.parent
                elif v.producer is None and v.data is not None:
                    inner[v.key] = self.constant(v)
            for op in needed(nested, nested.outputs):
                count = len(e.nodes)
                self.operator(op)
                self.result.inner.update((name, op) for node in e.nodes[count:] for name in node.output)
            for v in nested.outputs:
                value = inner[v.key]
                out = e.op("Identity", value, dtype=value.dtype or "float32")
                info = graph.output.add(name=out.name)
                info.type.CopyFrom(nested_type(v, self.cpu))
            graph.node.extend(e.nodes)
        self.env, self.shapes = env, shapes
        return graph

    # -- outputs ------------------------------------------------------------------------------------------
    def _ports(self) -> tuple[list[onnx.ValueInfoProto], dict[str, str]]:
        """The outputs, and the tensors that are to be renamed for them."""
        self.e.prefix = ""
        taken = {i.name for i in self.inputs} | set(self.e.initializers)
        rename, outputs = dict[str, str](), list[onnx.ValueInfoProto]()
        ports: dict[tuple[int, str | None], str] = {}
        wanted = [(v, v, (self.declared and v.declared) or v.dtype, self.result.fetches) for v in self.fetches]
        flat = self.layout.variables
        states = [(state, v) for state, v in self.updates.items() if state.name not in flat]
        wanted += [(state, v, v.dtype, self.result.updates) for state, v in states]
        for target, variable, dtype, ports_list in wanted:
            shape = self.shape(variable)
            if (variable.key, dtype) not in ports:
                value = self._output_value(variable, dtype)
                itself = self.declared and not variable.persistable and value.name == variable.name
                itself = itself and value.name not in rename  # a copy of it comes before
                if not itself and (value.name in taken or value.name in rename):
                    value = self.e.op("Identity", value, dtype=value.dtype or "float32")
                free = itself or variable.name not in taken
                name = variable.name if free else self.e.name(f"{variable.name}@OUT")
                if (held := self.env[variable.key].name) == name != value.name:  # what the output was cast from
                    rename.setdefault(held, self.e.name(f"{name}@HELD"))
                rename[value.name] = name
                taken.add(name)
                ports[variable.key, dtype] = name
                outputs.append(onnx.ValueInfoProto(name=name, type=output_type(variable, dtype, shape, self.cpu)))
            tensor, holds = ports[variable.key, dtype], half_sequence(variable, self.cpu)
            ports_list.append(Port(target.name, tensor, dtype or "", shape, holds=holds))
        outputs += [self._flat_output(state, rename) for state in self.layout.states]
        self.result.joined_through = {
            rename.get(name, name): (rename.get(whole, whole), tuple(rename.get(n, n) for n in made_of))
            for name, (whole, made_of) in self.e.joined_through.items()
        }
        for v in self.program.variables:
            if v.key in self.env:
                value = self.env[v.key]
                shape = self.fixed(v) if value.shape is None else value.shape
                self.result.tensors[v.name] = Value(rename.get(value.name, value.name), value.dtype, shape)
        return outputs, {old: new for old, new in rename.items() if old != new}

    def _flat_output(self, flat: FlatState, rename: dict[str, str]) -> onnx.ValueInfoProto:
        """The output of the new values of a flat state."""
        value = joined(self.e, flat.rows, [self.env[new.key] for new in flat.news])
        name = rename[self._held_as(value, flat.dtype).name] = self.e.name(f"{flat.name}@NEW")
        self.result.updates.append(Port(flat.name, name, flat.dtype, flat.rows.shape, flat.segments))
        return onnx.ValueInfoProto(name=name, type=type_proto(flat.dtype, flat.rows.shape))
