"""How far a decorated optimizer has built its training step, and the errors of calls in the wrong order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from amp_transpiler.errors import OrderError
from amp_transpiler.ir.nodes import BACKWARD, Variable
from amp_transpiler.optimizer.scale_state import ScaleState
from amp_transpiler.program import Program


class Stage(Enum):
    """What was done last. Losses may be scaled, and gradients unscaled, by several calls, until all is applied.

    ``READY``: nothing. ``SCALED``: the program is in its precision, and has the product of loss and scale.
    ``UNSCALED``: it has a finite check as well. ``APPLIED``: it has updates, of all parameters or of some.
    """

    READY = "ready"
    SCALED = "scaled"
    UNSCALED = "unscaled"
    APPLIED = "applied"


class Ready:
    """An optimizer that no program was given to."""

    stage = Stage.READY

    def built(self, call: str) -> Step:
        """OrderError: ``call`` needs a step."""
        raise OrderError(f"{call} before minimize: call minimize(loss), backward(loss) or get_scaled_loss(loss) first")

    def of(self, program: Program) -> Step | None:
        """None: the step of ``program`` begins here. OrderError: the program has gradients."""
        if any(op.role == BACKWARD for op in program.operators):
            raise OrderError(
                f"program '{program.name}' has gradients already, and takes no other precision; minimize a program "
                "once, or build it anew. Several optimizers of one program are decorated together, and share the loss "
                "scale: optimizer = decorate([one, other]); pairs = optimizer.backward(loss) + "
                "optimizer.backward(other_loss); optimizer.apply_gradients(pairs)"
            )
        return None


@dataclass(frozen=True)
class Step:
    """What the calls up to now have appended. It never changes: a call that succeeds puts another in its place.

    Attributes:
        program, startup: what is trained, and what initialises its state.
        scale: the loss scale and its counts.
        narrowed: names of the variables that enter the 16-bit part, as ``cast_model_to_fp16`` gave them.
        losses: those to minimise, in fp32, not scaled.
        scaled_loss: what the gradients of the latest call start from.
        unscaled: scaled gradient -> unscaled one, of all that went through the finite check.
        found_inf: found_inf of that check, bool of shape [1]; None where there is no check.
    """

    program: Program
    startup: Program
    scale: ScaleState
    narrowed: set[str]
    losses: tuple[Variable, ...]
    scaled_loss: Variable
    unscaled: Mapping[Variable, Variable] = field(default_factory=dict)
    found_inf: Variable | None = None
    stage: Stage = Stage.SCALED

    def built(self, call: str) -> Step:
        """This step."""
        return self

    def of(self, program: Program) -> Step:
        """This step, to scale another loss of ``program``. OrderError: it is complete, or another program's."""
        if self.program is not program:
            raise OrderError(
                f"this optimizer works on program '{self.program.name}' already; decorate another one for another "
                "program"
            )
        if self.stage is Stage.APPLIED:
            raise OrderError(
                f"program '{program.name}' has its training step already, and a program takes one: "
                "give minimize all losses in one list, or build the program anew"
            )
        return self

    def scaled(self, losses: Sequence[Variable], scaled_loss: Variable) -> Step:
        """The step with further losses."""
        return replace(self, losses=(*self.losses, *losses), scaled_loss=scaled_loss)

    def check_unscaling(self, grads: Sequence[Variable]) -> None:
        """OrderError: the step is complete, or one of these gradients is unscaled."""
        if self.stage is Stage.APPLIED:
            raise OrderError("get_unscaled_gradients after apply_gradients: the step is complete; unscale first")
        for grad in grads:
            if grad in self.unscaled or grad in self.unscaled.values():
                raise OrderError(
                    f"get_unscaled_gradients: '{grad.name}' was unscaled by an earlier call of "
                    "get_unscaled_gradients; use what that returned"
                )

    def with_unscaled(
        self, grads: Sequence[Variable], unscaled: Sequence[Variable], found_inf: Variable | None
    ) -> Step:
        """The step whose finite check, where it has one, reads these gradients too."""
        pairs = dict(zip(grads, unscaled, strict=True))
        return replace(self, unscaled={**self.unscaled, **pairs}, found_inf=found_inf, stage=Stage.UNSCALED)

    def check_applying(self, parameters: Iterable[Variable]) -> None:
        """OrderError: one of these parameters is updated already, or an update is spread over a window of runs."""
        if self.stage is not Stage.APPLIED:
            return
        done = next((v.name for v in parameters if v in self.program.updates), None)
        if done is not None or self.program.accumulation is not None:
            what = f"program '{self.program.name}'" if done is None else f"parameter '{done}'"
            way = "with accumulate_steps give it all gradients at once" if done is None else "give it other parameters"
            raise OrderError(
                f"apply_gradients: {what} has its update already, from an earlier call of apply_gradients or minimize; "
                f"{way}"
            )

    def applied(self) -> Step:
        """The step, complete."""
        return replace(self, stage=Stage.APPLIED)
