"""Prove the gates of a training step on the ONNX model that a place runs (point 6 of ``check_step``).

Give it the model that lowering makes, or the one that a session wrote as its optimised form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

import onnx

from amp_transpiler.errors import StepError
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.opdef import lookup, traits_of
from amp_transpiler.ir.types import HALF
from amp_transpiler.lists import place_traits
from amp_transpiler.ops.training.all_reduce import ALL_REDUCE
from amp_transpiler.passes.lowering.lowered import Lowered, Port
from amp_transpiler.passes.step_check.bad_step import BadStep
from amp_transpiler.passes.view.training_step import kept_on_bad_step, training_step

#: What computes between a gate's condition and the sums that found_inf looks at.
_VERDICT = frozenset(
    {"Equal", "And", "Or", "IsNaN", "IsInf", "Mul", "Add", "Sum", "Concat", "Abs", "Max", "Min", ALL_REDUCE}
)
#: The sums themselves, as rules of the step write them.
_SUMS = frozenset({"ReduceSum", "ReduceMean", "ReduceL1", "ReduceSumSquare"})
#: Kernels of the CPU provider that lose a NaN among other numbers.
_DROPS_NAN = frozenset({"ReduceMax", "ReduceMin", "ArgMax", "ArgMin", "TopK"})


def check_lowered(program: Graph, lowered: Lowered) -> None:
    """Check that every gated state of ``program`` is its old value on a bad step in ``lowered``, with a sound verdict.

    It is ``Where(ok, new, old)``, the branch of an If, or a sum that a bad step makes ``old * 1 + 0 * -1``
    (:class:`~.bad_step.BadStep`).
    StepError lists every state that is not carried from step to step, that is written without a gate, through one with
    its branches swapped, through one whose condition goes through Not (which the runtime fuses by swapping branches);
    every found_inf that leaves a gradient out, or is taken with an operator that drops NaN on CPU; and, on CPU, every
    16-bit gradient that is looked at before it is rounded.
    """
    gates, step = _Gates(lowered), training_step(program)
    for state, new in program.updates.items():
        gates.carried(state.name)
        kept = kept_on_bad_step(new)
        if kept is not None and new.producer is not None and new.producer.input(0) is not None:
            gates.check(state.name, kept.name)
    gates.found_infs_agree()
    for check in step.checks:
        for raw, unscaled in check.gradients:
            if raw is not None and unscaled is not None:
                gates.looked_at(check.operator.label, raw.name, unscaled.name)
                gates.rounded(check.operator.label, raw)
    if gates.found:
        listed = "\n".join(f"  6: {violation}" for violation in dict.fromkeys(gates.found))
        raise StepError(
            f"the lowered step of program '{program.name}' ({lowered.place}) breaks the step protocol:\n{listed}"
        )


class _Gates:
    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered
        self.producers = {name: node for node in lowered.model.graph.node for name in node.output}
        self.states, self.updates = _tensors(lowered.states), _tensors(lowered.updates)
        inputs = frozenset(tensor for tensor, _ in self.states.values())
        self.bad_step = BadStep(lowered.model.graph, self.producers, inputs)
        self.outputs = {info.name for info in lowered.model.graph.output}
        self.found: list[str] = []
        #: What each condition follows: the tests for NaN, and the tensors whose sums they look at.
        self._found_infs: dict[str, frozenset[str]] = {}
        self._sums: set[str] = set()

    def carried(self, state: str) -> None:
        """Record a state whose new value is no output of the model."""
        tensor, place = self.updates.get(state, ("", 0))
        if tensor not in self.outputs or (tensor not in self.producers and (tensor, place) != self.states.get(state)):
            self.found.append(f"state '{state}' is not carried from step to step")

    def check(self, state: str, kept: str) -> None:
        """Record what is wrong with the gate of ``state``, which on a bad step takes the value of ``kept``."""
        if state not in self.updates:
            return
        (new, place), (old, held_at) = self.updates[state], self.states.get(kept, ("", 0))
        found = self.bad_step.held(new)
        whole = found.state == old and not found.rows
        if whole and place == held_at:
            for condition in sorted(found.conditions):
                self._condition(state, condition)
            return
        gate = self.producers.get(self._behind(new))
        if gate is None or gate.op_type != "Where":
            by = "" if gate is None else f", by {_said(gate)}"
            self.found.append(f"state '{state}' is written without a gate{by}")
        elif self._behind(gate.input[2]) != old:
            how = "has its branches swapped" if self._behind(gate.input[1]) == old else "does not keep the old value"
            self.found.append(f"the gate of state '{state}', {_said(gate)}, {how}")
        else:
            self._condition(state, gate.input[0])
            if self.bad_step.held(gate.input[0]).number:
                self.found.append(f"the gate of state '{state}', {_said(gate)}, is open on a bad step")

    def _behind(self, tensor: str) -> str:
        while tensor in self.producers and _hands_on(self.producers[tensor]):
            tensor = self.producers[tensor].input[0]
        return tensor

    def _condition(self, state: str, tensor: str) -> None:
        if tensor in self._found_infs:
            return
        tests = set()
        for node in self._walk(tensor, _behind_condition):
            if node.op_type == "Not":
                self.found.append(f"the gate of state '{state}' goes through Not, {_said(node)}")
            elif node.op_type in _DROPS_NAN:
                self.found.append(f"found_inf looks for NaN with {node.op_type}, {_said(node)}, which drops NaN on CPU")
            elif node.op_type in ("IsNaN", "IsInf"):
                tests.add(node.output[0])
            elif node.op_type in _SUMS:
                self._sums |= {node.input[0], self._behind(node.input[0])}
        if not tests:
            self.found.append(f"the gate of state '{state}' follows no test for NaN")
        self._found_infs[tensor] = frozenset(tests)

    def _walk(self, tensor: str, onward: Callable[[onnx.NodeProto], Iterable[str]]) -> Iterator[onnx.NodeProto]:
        """Nodes behind a tensor, each once; ``onward`` says from which inputs of one the walk goes on."""
        seen: set[str] = set()
        stack = [tensor]
        while stack:
            name = stack.pop()
            node = self.producers.get(name)
            if node is None or name in seen:
                continue
            seen.add(name)
            yield node
            stack.extend(onward(node))

    def found_infs_agree(self) -> None:
        """Record gates that follow different tests."""
        found_infs = {tests for tests in self._found_infs.values() if tests}
        if len(found_infs) > 1:
            listed = "; ".join(sorted(" and ".join(sorted(tests)) for tests in found_infs))
            self.found.append(f"gates follow {len(found_infs)} different found_inf: {listed}")

    def looked_at(self, check: str, raw: str, unscaled: str) -> None:
        """Record an unscaled gradient that no test looks at. An optimised model may not have its tensor any more.

        Of gradients in one flat tensor only the scaled ones are in the model by themselves.
        """
        values = [value for name in (unscaled, raw) if (value := self.lowered.tensors.get(name)) is not None]
        found = [self._is_looked_at(value.name) for value in values] if self._sums else []
        if False in found and True not in found:
            self.found.append(f"found_inf of '{check}' does not look at gradient '{unscaled}'")

    def _is_looked_at(self, tensor: str) -> bool | None:
        """Whether the sums look at a tensor, or at all that it was made of; None where the model has neither."""
        if tensor in self._joined or self._behind(tensor) in self._joined:
            return True
        whole, made_of = self.lowered.joined_through.get(tensor, ("", ()))
        if whole not in self.producers:
            return False if tensor in self.producers else None
        found = [self._is_looked_at(name) for name in made_of if name not in self.bad_step.constants]
        return False if False in found else True if True in found else None

    @cached_property
    def _joined(self) -> set[str]:
        """What the sums look at, and the tensors that were unscaled and put together for that."""
        seen: set[str] = set()
        wholes = {whole for whole, _ in self.lowered.joined_through.values()}
        stack = [(tensor, True) for tensor in self._sums]
        while stack:
            tensor, scaled = stack.pop()
            node = self.producers.get(tensor)
            if tensor in seen:
                continue
            seen.add(tensor)
            if node is not None and tensor in wholes:
                stack += [(name, scaled) for name in node.input]
            elif node is not None and (_hands_on(node) or node.op_type == "Concat"):
                stack += [(name, scaled) for name in (node.input if node.op_type == "Concat" else node.input[:1])]
            elif node is not None and node.op_type == "Mul" and scaled:
                stack.append((node.input[0], False))
        return seen

    def _is_rounded(self, tensor: str) -> bool:
        """Whether an fp32 tensor holds rounded values alone, perhaps behind operators that make no new ones."""
        for node in self._walk(tensor, _behind_moves):
            if node.op_type == "Cast":
                narrow = self.producers.get(node.input[0])
                if narrow is None or narrow.op_type != "Cast":
                    return False
            elif not traits_of(node.op_type, node.domain).exact:
                return False
        return True

    def rounded(self, check: str, raw: Variable) -> None:
        """Record, on CPU, a 16-bit gradient whose fp32 tensor is not what was rounded to 16 bit."""
        variable: Variable | None = raw
        while variable is not None and variable.dtype not in HALF:
            op = variable.producer
            variable = op.input(0) if op is not None and op.full_type == "Cast" else None
        if not place_traits(self.lowered.place).emulates or variable is None or variable.producer is None:
            return
        rule = lookup(variable.producer)
        value = self.lowered.tensors.get(variable.name)
        if (rule is not None and rule.exact) or value is None or value.name not in self.producers:
            return
        emulated = self.producers[value.name]
        if not self._is_rounded(value.name):
            self.found.append(
                f"'{check}' looks at gradient '{raw.name}' before {_said(emulated)} is rounded to "
                f"{variable.dtype}, as an infinity that the rounding makes is not found"
            )


def _tensors(ports: Sequence[Port]) -> dict[str, tuple[str, int]]:
    """Of each variable the tensor that holds it, the flat one where there is one, and its first element there."""
    found = {port.variable: (port.tensor, 0) for port in ports}
    return found | {part.variable: (port.tensor, part.offset) for port in ports for part in port.segments}


def _hands_on(node: onnx.NodeProto) -> bool:
    """Whether it hands a value on as it is, or in another element type or shape."""
    return node.op_type == "Cast" or traits_of(node.op_type, node.domain).view


def _behind_condition(node: onnx.NodeProto) -> Iterable[str]:
    """From a gate's condition down to the sums."""
    return node.input if node.op_type in _VERDICT or node.op_type == "Not" or _hands_on(node) else ()


def _behind_moves(node: onnx.NodeProto) -> Iterable[str]:
    """What an operator that makes no new values hands on."""
    traits = traits_of(node.op_type, node.domain)
    exact = traits.exact and node.op_type != "Cast"
    return [i for slot, i in enumerate(node.input) if exact and (not traits.moves or slot in traits.moves)]


def _said(node: onnx.NodeProto) -> str:
    return f"'{node.name or node.output[0]}' ({node.op_type})"
