"""The shapes that tensors count as having where bytes are weighed before anybody knows what a program will be fed."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from amp_transpiler.errors import GraphError
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.infer import Shapes, static
from amp_transpiler.ir.nodes import Shape, Variable
from amp_transpiler.ir.size_names import size_of

#: Size that an open dimension of an input counts as, and one that nothing tells: an image of which deep networks leave
#: something.
NOMINAL = 128


def counted(shape: Shape | None) -> tuple[int, ...]:
    """A shape for the traffic: an open dimension is :data:`NOMINAL`, an unknown rank that of a matrix."""
    return tuple(size if isinstance(size, int) else NOMINAL for size in ((None, None) if shape is None else shape))


def counted_shapes(program: Graph) -> Callable[[Variable], Shape | None]:
    """The shape of each variable where open sizes of the program's inputs are :data:`NOMINAL`, for :func:`counted`.

    Behind a convolution of stride 2 half of it is left, so that what computes on small images costs less than what
    computes on large ones. Shapes are as declared where a program does not fit such inputs.
    """
    if all(static(v.shape) is not None for v in program.inputs):
        return attrgetter("shape")
    return _Counted()


class _Counted:
    """The shapes of a program for inputs of nominal sizes; inferred when the first open one is asked for."""

    def __init__(self) -> None:
        self.known: dict[Graph, Shapes | None] = {}

    def __call__(self, variable: Variable) -> Shape | None:
        if static(variable.shape) is not None:
            return variable.shape
        known = self._of(variable.program)
        return variable.shape if known is None else known[variable][1]

    def _of(self, graph: Graph) -> Shapes | None:
        if graph not in self.known:
            self.known[graph] = self._inferred(graph)
        return self.known[graph]

    def _inferred(self, graph: Graph) -> Shapes | None:
        if graph.parent is not None:
            around = self._of(graph.parent.program)
            return None if around is None else around.within(graph)
        sizes = {v.name: tuple(size_of(d, lambda _: NOMINAL) for d in v.shape) for v in graph.inputs if v.shape}
        try:
            return Shapes(graph, sizes)
        except GraphError:
            return None
