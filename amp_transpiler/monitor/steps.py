"""Where the parts of a training step are in a program: losses, gradients, the check, the scale, learning rates."""

from __future__ import annotations

from dataclasses import dataclass, field

from amp_transpiler.errors import ArgumentTypeError
from amp_transpiler.ir.metadata import inserted
from amp_transpiler.ir.nodes import FORWARD, OWN, SCALING, Operator, Variable
from amp_transpiler.ops.training.clip import CLIPS
from amp_transpiler.ops.training.scaling import CHECK, UPDATE_SCALE
from amp_transpiler.ops.training.update import LAYOUTS
from amp_transpiler.program import Program


@dataclass
class TrainingStep:
    """The parts of one program's step; what is absent is None or empty.

    ``gradients`` are (parameter, its gradient): unscaled where there is a finite check, and not clipped.
    """

    program: Program
    losses: list[Variable] = field(default_factory=list)
    gradients: list[tuple[Variable, Variable]] = field(default_factory=list)
    checks: list[Operator] = field(default_factory=list)
    scalings: list[Operator] = field(default_factory=list)
    rates: list[Variable] = field(default_factory=list)

    @property
    def found_inf(self) -> Variable | None:
        """The verdict that gates the updates."""
        for op in self.program.operators:
            if op.domain == OWN and op.type in LAYOUTS:
                return op.input(0)
        return self.checks[0].output(0) if self.checks else None

    @property
    def scale(self) -> Variable | None:
        """The loss scale that gradients are divided by."""
        return self.checks[0].input(0) if self.checks else None

    @property
    def counters(self) -> tuple[Variable | None, Variable | None]:
        """The counters of good and of bad steps."""
        op = self.scalings[0] if self.scalings else None
        return (None, None) if op is None else (op.input(2), op.input(3))

    @property
    def verdicts(self) -> list[Variable]:
        """What tells whether the step is bad: the finite checks' results, or gradients, and losses; else outputs."""
        checked = [v for op in self.checks for v in op.outputs if v is not None]
        gradients = [gradient for _, gradient in self.gradients]
        return list(dict.fromkeys([*(checked or gradients), *self.losses])) or list(self.program.outputs)


def training_step(program: Program) -> TrainingStep:
    """The parts of ``program``'s step. ArgumentTypeError: no program."""
    if not isinstance(program, Program):
        raise ArgumentTypeError(f"expected the training program, a Program, got {program!r}")
    step = TrainingStep(program)
    for op in program.operators:
        if op.domain != OWN:
            continue
        if op.type == CHECK:
            step.checks.append(op)
        elif op.type == UPDATE_SCALE:
            step.scalings.append(op)
        elif op.type in LAYOUTS:
            _read_update(op, step)
    ends = [v.grad_of for v in program.variables if v.grad_of is not None and v.is_constant]
    step.losses = list(dict.fromkeys(loss for end in ends for loss in unscaled_losses(end)))
    if not step.gradients:
        step.gradients = [(v.grad_of, v) for v in program.variables if v.grad_of is not None and v.grad_of.is_parameter]
    return step


def _read_update(op: Operator, step: TrainingStep) -> None:
    rate = op.input(1)
    if rate is not None and rate not in step.rates:
        step.rates.append(rate)
    for row in LAYOUTS[op.type].read(op.inputs):
        if row.parameter is not None and row.gradient is not None:
            step.gradients.append((row.parameter, _unclipped(row.gradient)))


def _unclipped(gradient: Variable) -> Variable:
    while gradient.producer is not None and gradient.producer.domain == OWN and gradient.producer.type in CLIPS:
        source = gradient.producer.input(gradient.producer_slot)
        if source is None:
            break
        gradient = source
    return gradient


def unscaled_losses(loss: Variable) -> list[Variable]:
    """The losses that the user built, from the one that gradients were taken of: widened, added, shared out, scaled."""
    op = loss.producer
    if op is None or op.role != SCALING or op.type not in ("Mul", "Cast", "Div", "Sum"):
        return [loss]
    terms = op.inputs if op.type == "Sum" else op.inputs[:1]
    return [each for term in terms if term is not None for each in unscaled_losses(term)]


def scope_group(parameter: Variable) -> str:
    """The part of the model that a parameter belongs to: the outermost scope of the operator that reads it, else what
    its name has before the last point (``fc_0`` of ``fc_0.w_0``), as a pattern."""
    readers = [op for op, _ in parameter.readers if op.role == FORWARD and not inserted(op)]
    for op, _ in parameter.readers:
        if inserted(op) and op.outputs[0] is not None:
            readers += [reader for reader, _ in op.outputs[0].readers if reader.role == FORWARD]
    scope = next((op.scope for op in readers if op.scope), "")
    if scope:
        return f"{scope.split('/')[0]}/*"
    head, _, _ = parameter.name.rpartition(".")
    return f"{head}.*" if head else parameter.name
