"""Gradients as a pass."""

from __future__ import annotations

from amp_transpiler.errors import ArgumentError
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.passes.autodiff.backward import Wanted, append_gradients, check_loss, wanted_gradients
from amp_transpiler.passes.pipeline import Context, Pass, Property, Value
from amp_transpiler.passes.view.given import LOSS, losses_of

#: What gradients start from, where that is not the loss itself.
SCALED_LOSS: Value[Variable] = Value("scaled_loss", Variable)
#: What gradients are for, of losses that are checked, where options do not say it.
WANTED: Value[Wanted] = Value("wanted_gradients", Wanted)
#: Parameters with their gradients.
GRADIENTS: Value[list[tuple[Variable, Variable]]] = Value("gradients", list)


class Autodiff(Pass):
    """Known control flow is expanded, and gradients of the loss are appended in one reverse sweep."""

    name = "autodiff"
    needs = (Property.TYPED, Property.TARGET_OPSET)
    takes = (LOSS, SCALED_LOSS, WANTED)
    guarantees = (Property.GRADIENTS, GRADIENTS)
    invalidates = (Property.FORWARD,)

    loss: str = ""
    parameters: tuple[str, ...] = ()
    no_grad: tuple[str, ...] = ()

    def run(self, graph: Graph, context: Context) -> None:
        if self.loss:
            context[LOSS] = self.loss
        if LOSS not in context:
            raise ArgumentError(f"{self.name} differentiates a loss: pass loss= to run, or {self.name}{{loss=NAME}}")
        losses, wanted = losses_of(graph, context), context.get(WANTED)
        if wanted is None:
            for loss in losses:
                check_loss(loss)
            wanted = wanted_gradients(graph, self.parameters or None, self.no_grad)
        start = context.get(SCALED_LOSS)
        if start is None and len(losses) > 1:
            raise ArgumentError(f"{self.name} differentiates one loss; put scale-loss before it, which adds them up")
        context[GRADIENTS] = append_gradients(start or losses[0], wanted, losses)
