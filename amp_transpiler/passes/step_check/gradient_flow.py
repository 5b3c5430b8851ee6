"""Where gradients flow in a training step: scaled ones, unscaled ones, and whose they are."""

from __future__ import annotations

from amp_transpiler.ir.nodes import OWN, Operator, Variable
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.ops.training.recompute_barrier import TOKEN
from amp_transpiler.passes.view.training_step import TrainingStep

#: Bits of a mask; the bits above say whose gradient it is.
SCALED, UNSCALED, CLIPPED = 1, 2, 4
_OWNERS = 3
_CLIPS = frozenset({"Clip"})


class GradientFlow:
    """Masks by variable: which gradients a value is made of, and what has been done to them. One sweep.

    ``unscaled_outside`` lists (operator, gradient) where an operator other than the finite check combines a scaled
    gradient with what is computed from a loss scale alone.
    """

    def __init__(self, step: TrainingStep) -> None:
        program = step.program
        self._checks = {check.operator.key: check for check in step.checks}
        self._clipping = {clip.operator.key for clip in step.clips}
        self._scaling = {part.operator.key for part in (*step.checks, *step.scale_updates, *step.counters)}
        self._masks: dict[int, int] = {}
        self._owners: dict[int, int] = {}
        self._clips: dict[int, Operator] = {}
        scales = [*(check.scale for check in step.checks), *(scaling.scale for scaling in step.scale_updates)]
        self._from_scale = {scale.key for scale in scales if scale is not None}
        self.unscaled_outside: list[tuple[Operator, Variable]] = []
        for variable in program.variables:
            if variable.producer is None and variable.grad_of is not None:
                self._masks[variable.key] = self._gradient(variable)
        for op in program.operators:
            self._operator(op)

    def mask(self, variable: Variable) -> int:
        """The mask of a variable."""
        return self._masks.get(variable.key, 0)

    def owned(self, gradient: Variable, parameter: Variable) -> bool:
        """Whether ``gradient`` is made of a gradient of ``parameter``."""
        return bool(self.mask(gradient) & self._owners.get(parameter.key, 0))

    def clip(self, variable: Variable) -> Operator | None:
        """The operator that clips scaled gradients on the way to ``variable``."""
        return self._clips.get(variable.key)

    def _gradient(self, variable: Variable) -> int:
        assert variable.grad_of is not None
        bit = self._owners.setdefault(variable.grad_of.key, 1 << (len(self._owners) + _OWNERS))
        return SCALED | bit

    def _operator(self, op: Operator) -> None:
        inputs = [v for v in op.inputs if v is not None]
        if op.type == TOKEN and op.domain == OWN:
            return  # it waits for a gradient, and nothing of that is in what it makes
        self._scale(op, inputs)
        if op.key in self._checks:
            for raw, new in self._checks[op.key].gradients:
                if raw is not None and new is not None:
                    self._masks[new.key] = self.mask(raw) & ~(SCALED | CLIPPED) | UNSCALED
            return
        together = 0
        for read in inputs:
            together |= self.mask(read)
        by_slot = op.key in self._clipping
        clips = by_slot or (op.full_type in _CLIPS)
        for slot, made in enumerate(op.outputs):
            if made is None or made.dtype not in FLOATS:
                continue
            source = op.input(slot) if by_slot else None
            mask = (self.mask(source) if source is not None else 0) if by_slot else together
            if not mask & (SCALED | UNSCALED):
                mask = 0
            if made.grad_of is not None and not mask & UNSCALED:
                mask = self._gradient(made) | (mask & CLIPPED)
            if clips and mask & SCALED:
                mask |= CLIPPED
                self._clips.setdefault(made.key, op)
            if not mask:
                continue
            self._masks[made.key] = mask
            if mask & CLIPPED and made.key not in self._clips:
                self._clips[made.key] = next(self._clips[v.key] for v in inputs if v.key in self._clips)

    def _scale(self, op: Operator, inputs: list[Variable]) -> None:
        """Follow what is computed from the scale alone, and find gradients that it is applied to."""
        if op.key in self._scaling or not any(v.key in self._from_scale for v in inputs):
            return
        rest = [v for v in inputs if v.key not in self._from_scale and not v.is_constant]
        if not rest:
            self._from_scale.update(v.key for v in op.outputs if v is not None)
        self.unscaled_outside += [(op, v) for v in rest if self.mask(v) & SCALED]
