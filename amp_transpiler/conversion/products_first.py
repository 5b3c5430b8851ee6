"""A product with one matrix comes before the transposition that puts rows in another order.

``MatMul(Transpose(x), w)`` is ``Transpose(MatMul(x, w))`` bit for bit where the transposition leaves the last axis and
``w`` is a matrix, as behind a recurrent layer whose batch comes first. onnxruntime (1.31, 1.32) fuses the former into
one operator, and in float16 on CPU ends the process while it makes the session. Where the first axis becomes the last,
as the channels of one image do, no product comes first: the matrix then has as many axes as what it multiplies.
"""

from __future__ import annotations

from amp_transpiler.conversion.conversion_options import ConversionOptions
from amp_transpiler.conversion.simplification import Simplification
from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Operator
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.passes.view.of_type import of_type
from amp_transpiler.passes.view.typing import programs


class ProductsFirst(Simplification):
    """A product with one matrix comes before the transposition of its rows, which onnxruntime fails at in float16."""

    name = "products-first"

    def wanted(self, graph: Graph, options: ConversionOptions) -> bool:
        return options.dtype == "float16"

    def simplify(
        self, graph: Graph, names: frozenset[str], keep: frozenset[Operator], options: ConversionOptions
    ) -> None:
        for product in [op for each in programs(graph) for op in of_type(each, "MatMul")]:
            turn = _turned(product)
            if turn is None or keep & {product, turn} or names & _written(product, turn):
                continue
            order = list(turn.attrs["perm"])
            if order[-1] == len(order) - 1:
                _turn_afterwards(product, turn)
            elif order == [*range(1, len(order)), 0]:
                _add_axes(product, len(order))


def _turned(product: Operator) -> Operator | None:
    """The transposition of what a product with one matrix reads, of three axes or more."""
    rows, matrix, made = product.input(0), product.input(1), product.output(0)
    turn = None if rows is None else rows.producer
    if turn is None or matrix is None or made is None or turn.full_type != "Transpose":
        return None
    order = list(turn.attrs.get("perm", ()))
    if rows is None or matrix.shape is None or len(matrix.shape) != 2 or len(order) < 3:
        return None
    return None if order == sorted(order) else turn


def _written(product: Operator, turn: Operator) -> set[str]:
    return {v.name for v in (*product.outputs, *turn.outputs) if v is not None}


def _add_axes(product: Operator, rank: int) -> None:
    program, matrix = product.program, product.inputs[1]
    if matrix is None or matrix.data is None:
        return
    array = as_array(matrix.data)
    whole = array.reshape([1] * (rank - array.ndim) + list(array.shape))
    product.set_input(1, program.add_constant(f"{matrix.name}.matrix", whole))


def _turn_afterwards(product: Operator, turn: Operator) -> None:
    program, data, matrix, made = product.program, turn.inputs[0], product.inputs[1], product.outputs[0]
    assert data is not None and matrix is not None and made is not None
    shape = None if data.shape is None else (*data.shape[:-1], (matrix.shape or (None,))[-1])
    straight = program.fresh_variable(f"{made.name}.product", made.dtype, shape)
    product.set_input(0, data)
    product.set_output(0, straight)
    program.add_operator("Transpose", [straight], [made], attrs={"perm": list(turn.attrs["perm"])}, like=product)
