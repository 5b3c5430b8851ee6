"""Constant branches and shape arithmetic are computed before the run, by running them.

Operators that read nothing but constants, and shapes that the program declares, are gathered and run in one onnxruntime
session; those whose size only those values tell come in the next. Nothing is run whose size is not known to be small:
a file may ask for more than any machine has. A result takes the place of its operators where the file does not grow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

import numpy as np

from amp_transpiler.conversion.conversion_options import OPTIONS
from amp_transpiler.conversion.declared_shapes import SHAPED, shape_of, shape_value
from amp_transpiler.conversion.file_room import Room, connected
from amp_transpiler.conversion.one_session import ran, range_of
from amp_transpiler.conversion.open_reshapes import infer_open_sizes
from amp_transpiler.conversion.simplification import converted, protected
from amp_transpiler.errors import GraphError
from amp_transpiler.ir.annotate import annotate, refine
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import infer_operator, static
from amp_transpiler.ir.nodes import CAPTURE, Operator, TensorType, Variable, origin
from amp_transpiler.ir.opdef import traits_of
from amp_transpiler.ir.proto_residue import listed_inputs
from amp_transpiler.ir.tensors import as_array, byte_size, tensor_type
from amp_transpiler.ir.types import INTEGERS
from amp_transpiler.passes.canonicalize.control_flow import inline_known_branches
from amp_transpiler.passes.canonicalize.loop_invariants import capture_invariants
from amp_transpiler.passes.canonicalize.sequences import expand_sequences
from amp_transpiler.passes.canonicalize.simplify import remove_dead, remove_identities, settle_casts
from amp_transpiler.passes.canonicalize.unread_statistics import forget_unread_statistics
from amp_transpiler.passes.pipeline import Context, Pass, Property
from amp_transpiler.passes.precision.rules import check_variables
from amp_transpiler.passes.view.constants import content
from amp_transpiler.passes.view.typing import programs
from amp_transpiler.runtime.budget import Budget, within

#: Bytes of the largest tensor that is read or computed, and of all that one program computes; one with large constants
#: so many times what they take, up to another limit.
LARGEST, MOST, MOST_OF_ALL, _TIMES = 16 << 20, 256 << 20, 1 << 30, 8
#: Multiplications of the largest product that is computed.
_WORK = 1 << 28
#: Seconds that one run may take.
_SECONDS = 10.0
#: Bytes that an operator takes in a file.
_NODE = 96
#: The part of its constants' bytes by which a file may grow for the sake of fewer operators, as lengths of rows take it
_GROWTH = 32
_TURNS = 8  # what was in a branch that is taken may make other conditions known
#: Small tensors whose content tells the sizes of others.
_SMALL = 1024
_TYPES = frozenset({*INTEGERS, "float16", "float32", "float64", "bool"})
#: Quantisation is what its author wants.
_QUANTISED = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})
#: What may take long, whatever the size, or makes no tensor of numbers.
_SLOW = frozenset({"Conv", "ConvTranspose", "DeformConv", "LSTM", "GRU", "RNN", "Einsum", "Attention", "Det", "DFT"})
_OTHER = frozenset({"Optional", "OptionalGetElement", "StringNormalizer", "TfIdfVectorizer", "NonMaxSuppression"})
_NEVER = _QUANTISED | _SLOW | _OTHER


def fold(program: Graph, names: frozenset[str] = frozenset(), keep: frozenset[Operator] = frozenset()) -> int:
    """Let what is known before the run be constants, in place, in nested graphs too; the number of operators that went.

    Args:
        program: typed, its weights constants.
        names: variables that stay what they are.
        keep: operators that stay what they are.
    """
    before = _count(program)
    forget_unread_statistics(program)
    capture_invariants(program, names, keep)
    for _ in range(_TURNS):
        _fold_graph(program, names, keep)
        branches = inline_known_branches(program)
        expand_sequences(program)
        infer_open_sizes(program, names, keep)
        remove_identities(program, names, keep)
        remove_dead(program, names, keep)
        if not branches:
            break
        annotate(program)
    gone = before - _count(program)
    if gone:
        annotate(program)  # what is a constant now may tell sizes
    return gone


def fold_values(program: Graph, keep: frozenset[Operator] = frozenset()) -> None:
    """Let what is computed of constants and of declared sizes be constants, in place, in nested graphs too, and read
    sequences of known pieces be tensors. What is computed of weights stays, and so do the operators ``keep`` and all
    else that :func:`fold` takes out."""
    before, unread = _count(program), {v.name for each in programs(program) for v in each.variables if not v.readers}
    with within(Budget(_SECONDS)):
        _fold_graph(program, frozenset(), keep)
    if expand_sequences(program) or _count(program) != before:
        remove_dead(program, frozenset(unread), keep)
        annotate(program)


def _count(program: Graph) -> int:
    return sum(len(each.added) for each in programs(program))


def _fold_graph(program: Graph, names: frozenset[str], keep: frozenset[Operator]) -> None:
    for each in list(programs(program)):
        settle_casts(each, keep)
        _Folding(each, names, keep).run()


def _eligible(op: Operator) -> bool:
    """Whether it is of a kind that may be computed."""
    if op.domain or op.attrs.programs:
        return False
    return op.type not in _NEVER and not traits_of(op).random


class _Known:
    """The types of what can be computed, and the content of what is known and small."""

    def __init__(self) -> None:
        self.types: dict[int, TensorType] = {}
        self.arrays: dict[Variable, np.ndarray] = {}

    def __getitem__(self, variable: Variable) -> TensorType:
        return self.types.get(variable.key, (variable.dtype, variable.shape))

    def value(self, variable: Variable) -> np.ndarray | None:
        """The content of a small tensor."""
        found = self.arrays.get(variable)
        return found if found is not None and found.size <= _SMALL else None


class _Folding:
    """One turn on one graph."""

    def __init__(self, program: Graph, names: frozenset[str], keep: frozenset[Operator]) -> None:
        self.program, self.names, self.keep = program, names, keep
        self.known = _Known()
        #: Constants that are read, by what holds them here: None for what is none.
        self.leaves: dict[Variable, np.ndarray | None] = {}
        self.folded: dict[Operator, None] = {}
        self.pending: dict[Operator, None] = {}
        self.left, self.bounded = MOST, False
        #: Operators by their place in the program, those that nothing is left to ask of, and those to be asked anew.
        self.place: dict[Operator, int] = {}
        self.settled: set[Operator] = set()
        self.stirred: set[Operator] = set()
        #: What must not become a constant.
        self.refused: set[Variable] = set()

    def run(self) -> None:
        """Compute what can be, and put it in."""
        if not any(map(self._asks, self.program.operators)):
            return  # nothing is known before the run
        outputs = {*self.program.outputs, *self.program.updates.values()}
        for op in self.program.operators:
            self.place[op] = len(self.place)
            held = any(v is not None and (v in outputs or v.name in self.names) for v in op.outputs)
            if op in self.keep or op.type == "Constant" or held or not _eligible(op):
                self.settled.add(op)
        heap = [(place, op) for op, place in self.place.items() if op not in self.settled and self._asks(op)]
        while heap:
            queued = {op for _, op in heap}
            while heap:
                op = heappop(heap)[1]
                queued.discard(op)
                if op not in self.settled and self._take(op):
                    self.settled.add(op)
                if op in self.pending or op in self.folded:
                    changed = [v for v in op.outputs if v is not None]
                else:
                    changed = self._reshaped(op) if op in self.stirred else []
                self._stir(changed, heap, queued)
            self._stir(self._compute(), heap, queued)
        self._replace()

    def _asks(self, op: Operator) -> bool:
        """Whether the operator may be known from the start: it reads constants alone, or a shape."""
        if op.type in SHAPED and (traits_of(op).shape_only or shape_of(op.input(0)) is not None):
            return True
        for variable in op.inputs:
            producer = None if variable is None else variable.producer
            if producer is not None and producer.type != "Constant":
                return False  # as most operators do: they read what others compute
        return all(v is None or self._leaf(v) is not None for v in op.inputs) and op.type != "Constant"

    def _stir(self, changed: Iterable[Variable], heap: list[tuple[int, Operator]], queued: set[Operator]) -> None:
        """More is known of these variables: who reads them is asked again."""
        for variable in changed:
            for op, slot in variable.readers:
                if slot != CAPTURE and op not in self.folded and op not in self.pending:
                    self.stirred.add(op)
                    if op not in queued:
                        queued.add(op)
                        heappush(heap, (self.place[op], op))

    def _reshaped(self, op: Operator) -> list[Variable]:
        """The outputs of which the shape of an operator's inputs now tells more than was known."""
        self.stirred.discard(op)
        if op.attrs.programs:
            return []
        try:
            infer_operator(op, self.known)
        except GraphError:
            self.refused.update(v for v in op.inputs if v is not None)
            return []
        found = []
        for variable in (v for v in op.outputs if v is not None and v.type_proto is None):
            dtype, shape = self.known.types.pop(variable.key, (None, None))
            before = variable.shape
            if dtype == variable.dtype:
                refine(variable, shape)
            if variable.shape != before:
                found.append(variable)
        return found

    # -- what can be computed ----------------------------------------------------------------------------
    def _take(self, op: Operator) -> bool:
        """Whether nothing is left to ask about the operator: it is computed, will be, or never can."""
        shape = shape_value(op, self._content)
        if shape is not None and op.outputs[0] is not None:
            self._put(op.outputs[0], shape)
            self.folded[op] = None
            return True
        read = [v for v in op.inputs if v is not None]
        states = [self._state(v) for v in read]
        if None in states or (op.type == "Range" and False in states):
            return False  # a later turn may know it
        if op.type == "Range":
            self._count(op, [self.known.arrays[v] for v in read])
            return True
        return self._sized(op, read, waits=False in states)

    def _state(self, variable: Variable) -> bool | None:
        """True: known; False: it will be computed; None: it is not known."""
        if variable in self.known.arrays:
            return True
        if variable.producer is not None and variable.producer in self.pending:
            return False
        return True if self._leaf(variable) is not None else None

    def _leaf(self, variable: Variable) -> np.ndarray | None:
        if variable not in self.leaves:
            self.leaves[variable] = found = _constant(variable)
            if found is not None:
                self._put(variable, found)
        return self.leaves[variable]

    def _content(self, variable: Variable) -> np.ndarray | None:
        found = self.known.arrays.get(variable)
        return self._leaf(variable) if found is None else found

    def _put(self, variable: Variable, array: np.ndarray) -> None:
        self.known.arrays[variable] = array
        self.known.types[variable.key] = (tensor_type(array)[0], array.shape)

    def _count(self, op: Operator, ends: Sequence[np.ndarray]) -> None:
        """Compute a Range. Its operands may have a dimension, which ONNX refuses where they are constants."""
        terms, out = range_of(ends, LARGEST), op.outputs[0]
        if terms is not None and out is not None:
            self._put(out, terms)
            self.folded[op] = None

    def _sized(self, op: Operator, read: Sequence[Variable], waits: bool) -> bool:
        """Let the operator be computed if its size is known and small; whether that is settled."""
        try:
            infer_operator(op, self.known)
        except GraphError:  # ONNX takes less than onnxruntime does, and would refuse the operator on such a constant
            self.refused.update(read)
            return True
        size = 0
        for variable in (v for v in op.outputs if v is not None):
            dtype, shape = self.known[variable]
            if dtype not in _TYPES:
                return True
            if shape is None or static(shape) is None:
                if waits:
                    return False
                if not traits_of(op).selects:
                    return True
                shape = (math.prod(self.known.arrays[read[0]].shape), max(self.known.arrays[read[0]].ndim, 1))
            size = max(size, byte_size(dtype, [int(d or 0) for d in shape]))
        self.left -= size * len(op.outputs)
        if self.left < 0 and not self.bounded:
            self.left, self.bounded = self.left + max(0, min(_TIMES * self._held(), MOST_OF_ALL) - MOST), True
        if size > LARGEST or self.left < 0 or self._work(op, read, size) > _WORK:
            return True
        self.pending[op] = None
        return True

    def _work(self, op: Operator, read: Sequence[Variable], size: int) -> int:
        shape = self.known[read[0]][1] if traits_of(op).product and read else None
        return size * max(int(d or 0) for d in shape) if shape else 0

    # -- computing ---------------------------------------------------------------------------------------
    def _compute(self) -> list[Variable]:
        """Run what is pending in one session (what fails with others is tried by itself); what is known then."""
        pending, self.pending = list(self.pending), {}
        results = self._ran(pending) if pending else {}
        parts = [(pending, results)] if results is not None else [(g, self._ran(g)) for g in connected(pending)]
        made = []
        for group, found in parts:
            if found is not None:
                self.folded |= dict.fromkeys(group)
                for variable, array in found.items():
                    self._put(variable, array)
                made += list(found)
        return made

    def _ran(self, operators: Sequence[Operator]) -> dict[Variable, np.ndarray] | None:
        return ran(self.program, operators, self.known.__getitem__, self.known.arrays)

    # -- putting it in -----------------------------------------------------------------------------------
    def _replace(self) -> None:
        """Put results in the place of their operators, from the last one on, where the file does not grow."""
        spare = self._spare()
        removed = [op for op in reversed(self.program.operators) if self._goes(op, spare)]
        for op in removed:
            made = [v for v in op.outputs if v is not None]
            self.program.remove_operator(op)
            for variable in made:
                if variable.readers:
                    array = self.known.arrays[variable]
                    variable.data, variable.shape, variable.type_proto = array, array.shape, None
                else:
                    self.program.remove_variable(variable)

    def _goes(self, op: Operator, spare: Room) -> bool:
        """Whether the operator goes: nothing that stays reads it, or what it makes is small enough for the file."""
        if op not in self.folded:
            return False
        needed = [
            v for v in op.outputs if v is not None and any(r not in self.folded or s == CAPTURE for r, s in v.readers)
        ]
        other = any(v in self.refused or tensor_type(self.known.arrays[v])[0] != v.dtype for v in needed)
        if other or not spare.take(op, sum(self.known.arrays[v].nbytes for v in needed)):
            del self.folded[op]
            return False
        return True

    def _spare(self) -> Room:
        spare = Room(self._held() // _GROWTH + _NODE * len(self.folded))
        for op in self.folded:
            for made in (v.producer for v in op.inputs if v is not None):
                if made in self.folded:
                    spare.join(op, made)
        listed = listed_inputs(self.program)  # which stay
        going = [
            (readers, array.nbytes)
            for variable, array in self.leaves.items()
            if array is not None and variable not in listed
            if (readers := [r for r, _ in variable.readers]) and all(r in self.folded for r in readers)
        ]
        for readers, _ in going:
            for reader in readers[1:]:
                spare.join(reader, readers[0])
        for readers, size in going:
            spare.add(readers[0], size)
        return spare

    def _held(self) -> int:
        """Bytes of the constants."""
        return sum(byte_size(*tensor_type(v.data)) for v in self.program.variables if v.data is not None)


def _constant(variable: Variable) -> np.ndarray | None:
    """The content of a constant of moderate size, of the graph around too."""
    variable = origin(variable)
    if variable.is_input or variable.persistable or variable.dtype not in _TYPES:
        return None
    data = content(variable)
    return as_array(data) if data is not None and byte_size(*tensor_type(data)) <= LARGEST else None


class FoldConstants(Pass):
    """Shape arithmetic and constant branches become their results; no-operations and what nobody reads go."""

    name = "fold-constants"
    needs = (Property.TYPED, Property.CONSTANTS, OPTIONS)

    def applies(self, graph: Graph, context: Context) -> bool:
        return not converted(graph)

    def run(self, graph: Graph, context: Context) -> None:
        options = context[OPTIONS]
        check_variables(graph, options.lists, "convert", options.called("black_varnames"))
        names, keep = protected(graph, options)
        with within(Budget(_SECONDS if options.time_budget is None else options.time_budget, options.memory_budget)):
            fold(graph, names, keep)
