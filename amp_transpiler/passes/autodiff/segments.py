"""``amp.recompute``: which parts of the forward pass the gradients compute again, asked for before the gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from amp_transpiler.errors import ArgumentError, ArgumentTypeError, OrderError
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import BACKWARD, FORWARD, Operator, Variable
from amp_transpiler.ir.patterns import matching, pattern_of
from amp_transpiler.option_checks import is_whole
from amp_transpiler.passes.autodiff.memory_budget import within_budget
from amp_transpiler.passes.autodiff.recompute import Made, Segment, insert
from amp_transpiler.passes.lowering.place import CPUPlace, Place, check_place
from amp_transpiler.passes.view.feed_shapes import given_shapes


@dataclass(frozen=True)
class Request:
    """What :func:`recompute` was asked for: ``names`` of checkpoints and patterns, or a budget in bytes."""

    names: tuple[str, ...] = ()
    memory_budget: int | None = None
    feed_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    place: str = "cpu"


def recompute(
    program_or_loss: Graph | Variable,
    segments: Sequence[Variable | str] | None = None,
    *,
    memory_budget: int | None = None,
    feed_shapes: Mapping[str, Sequence[int]] | None = None,
    place: Place | str | None = None,
) -> None:
    """Let the backward pass compute activations again instead of keeping them (activation checkpointing).

    Call it before ``append_backward`` or ``minimize`` (decorated or not), with the program or its loss. It costs up to
    one more forward pass a step and changes no gradient: dropout masks are the same, running statistics are updated
    once. Gradients are equal bit for bit where onnxruntime uses the same kernels for both forward passes: up to
    optimization level "basic"; from "extended" on it may fuse operators in one of them.

    Args:
        segments: what bounds or makes the segments, variables or strings.
            A variable (or the name of one) is a checkpoint: it stays, and what lies between checkpoints is computed
            again; what follows the last one is kept, as the backward pass begins there.
            Any other string is a pattern of scopes, a glob such as ``"encoder/layer_*"`` or, after ``re:``, a regular
            expression: every scope that fits is a segment with all that lies in it. A pattern that fits the names of
            operators without a scope makes one segment of them.
        memory_budget: instead of ``segments``, the bytes that the tensors of the forward and backward pass may take at
            their peak, as ``Program.memory_estimate`` forecasts it, state (parameters, masters, moments) and feeds not
            counted. The segments are chosen when the gradients are appended, no more of them than needed; that takes
            about ten forecasts.
        feed_shapes, place: with ``memory_budget``, the shapes of feeds whose declared shape is not fixed, and where
            the program will run (default ``CPUPlace()``; a forecast for CUDA needs no GPU).

    Raises:
        ArgumentTypeError, ArgumentError: neither segments nor a budget, or both; a pattern or name that fits nothing;
            a feed without a shape; later, from the call that appends the gradients: a budget that cannot be reached,
            with the least that can. OrderError: the gradients are there already.
    """
    program = program_or_loss.program if isinstance(program_or_loss, Variable) else program_or_loss
    if not isinstance(program, Graph):
        raise ArgumentTypeError(f"recompute takes a Program or its loss, not {type(program).__name__}")
    if any(op.role == BACKWARD for op in program.operators):
        raise OrderError(
            f"recompute: program '{program.name}' has its gradients already; call recompute before "
            "append_backward or minimize"
        )
    if (segments is None) == (memory_budget is None):
        raise ArgumentError("recompute takes segments, or a memory_budget in bytes; one of the two")
    if segments is None:
        program.recompute = _budget(program, memory_budget, feed_shapes, place)
        return
    if feed_shapes is not None or place is not None:
        raise ArgumentError("recompute: feed_shapes and place belong to memory_budget; named segments need neither")
    names = _names(program, segments)
    named_segments(program, names, program.operators)
    program.recompute = Request(names)


def _budget(
    program: Graph, budget: object, feed_shapes: Mapping[str, Sequence[int]] | None, place: Place | str | None
) -> Request:
    kind = CPUPlace().kind if place is None else check_place(place, "recompute: place").kind
    if not is_whole(budget):
        raise ArgumentTypeError(f"recompute: memory_budget is a number of bytes, got {budget!r}")
    if budget < 1:
        raise ArgumentError(f"recompute: memory_budget is a number of bytes, at least 1; got {budget}")
    return Request(memory_budget=budget, feed_shapes=given_shapes("recompute", program, feed_shapes), place=kind)


def _names(program: Graph, segments: Sequence[Variable | str]) -> tuple[str, ...]:
    if isinstance(segments, (str, Variable)) or not isinstance(segments, Iterable):
        raise ArgumentTypeError(f"recompute: segments is a list of variables, names or patterns, not {segments!r}")
    names = []
    for item in segments:
        if not isinstance(item, (str, Variable)):
            raise ArgumentTypeError(f"recompute: segments holds {item!r}; expected variables, names or patterns")
        if isinstance(item, Variable):
            program.must_own(item)
        names.append(item.name if isinstance(item, Variable) else item)
    if not names:
        raise ArgumentError(
            "recompute: segments is empty; name variables that stay, or scopes such as 'encoder/layer_*'"
        )
    return tuple(names)


def recompute_activations(program: Graph, loss: Variable, made: Made, gradients: Sequence[Variable]) -> None:
    """Do what the program was asked for, once its ``gradients`` are appended; ``made`` as :func:`insert` takes it."""
    request = program.recompute
    assert isinstance(request, Request)
    stays = {v.key for v in gradients}

    def put(segments: Sequence[Segment]) -> None:
        insert(program, loss, segments, made, stays)

    if request.memory_budget is None:
        put(named_segments(program, request.names, program.operators))
    else:
        put(within_budget(loss, gradients, request.memory_budget, request.feed_shapes, request.place, put))


def named_segments(program: Graph, names: Sequence[str], order: Sequence[Operator]) -> list[Segment]:
    """The segments that checkpoints and patterns make of the forward operators, given in order.

    ArgumentError: a name or pattern that fits nothing.
    """
    forward = [op for op in order if op.role == FORWARD]
    checkpoints = [name for name in names if program.has_var(name)]
    by_scope: dict[str, Segment] = {}
    taken: set[int] = set()
    for name in names:
        if name not in checkpoints:
            for op, segment in _scoped(forward, name).items():
                if op.key not in taken:
                    taken.add(op.key)
                    by_scope.setdefault(segment, Segment(f"'{segment}'")).operators.append(op)
    found = list(by_scope.values())
    if checkpoints:
        rest = [op for op in forward if op.key not in taken]
        found += between(rest, [program.var(name) for name in checkpoints])
    return found


def _scoped(forward: Sequence[Operator], pattern: str) -> dict[Operator, str]:
    """The operators that a pattern takes, each with its segment: the shortest part of its scope that fits."""
    expression = pattern_of(pattern, "recompute")
    found: dict[Operator, str] = {}
    for op in forward:
        parts = op.scope.split("/") if op.scope else []
        prefixes = ("/".join(parts[: n + 1]) for n in range(len(parts)))
        fits = next((prefix for prefix in prefixes if expression.fullmatch(prefix)), None)
        if fits is not None:
            found[op] = fits
    return found or {op: pattern for op in matching(forward, [pattern], "recompute")}


def between(forward: Sequence[Operator], checkpoints: Sequence[Variable]) -> list[Segment]:
    """The segments that end at checkpoints; each operator belongs to the last checkpoint that it depends on.

    ArgumentError: a checkpoint that no forward operator makes.
    """
    position = {op.key: i for i, op in enumerate(forward)}
    for variable in checkpoints:
        if variable.producer is None or variable.producer.key not in position:
            raise ArgumentError(
                f"recompute: checkpoint '{variable.name}' is not made by the forward pass of program "
                f"'{variable.program.name}' (feeds and parameters stay in any case)"
            )
    ordered = sorted(checkpoints, key=lambda v: position[v.producer.key])  # type: ignore[union-attr]
    number = {v.key: i + 1 for i, v in enumerate(ordered)}
    segments = [Segment(f"'{v.name}'") for v in ordered]
    level: dict[int, int] = {}
    for op in forward:
        here = max((level.get(v.key, 0) for v in op.inputs if v is not None), default=0)
        if here < len(segments):
            segments[here].operators.append(op)
        level.update((v.key, max(here, number.get(v.key, 0))) for v in op.outputs if v is not None)
    return segments
