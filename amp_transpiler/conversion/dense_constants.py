"""Sparse constants become dense: guards look at every element of a constant, and 16 bit stores it.

onnxruntime makes them dense when it loads a model, so that only the file grows; and onnx's type inference takes no
sparse value for what a Cast reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx

from amp_transpiler.ir.graph import Graph
from amp_transpiler.ir.nodes import Variable
from amp_transpiler.ir.reasons import Kind, Reason
from amp_transpiler.ir.tensors import as_array, held, tensor_type
from amp_transpiler.ir.types import FLOATS
from amp_transpiler.passes.numerics.constraints import Constraints
from amp_transpiler.passes.pipeline import Context, Pass, Property
from amp_transpiler.passes.view.names import written_name
from amp_transpiler.passes.view.typing import programs

#: Elements up to which a sparse constant becomes dense: 256 MiB of float32.
DENSE = 1 << 26


def keep_sparse(program: Graph, constraints: Constraints) -> None:
    """Keep fp32 what reads sparse constants that are too large to become dense: nobody has looked at their values."""
    for variable, _ in _sparse(program):
        constraints.keep_tensor(variable, Reason(Kind.SPARSE, written_name(variable)))


class DenseConstants(Pass):
    """Sparse constants of floats become dense; what reads one of more than 2^26 elements stays float32, with a note."""

    name = "dense-constants"
    needs = (Property.TYPED,)

    def run(self, graph: Graph, context: Context) -> bool:
        found = list(_sparse(graph))
        for variable, sparse in found:
            if math.prod(sparse.dims) > DENSE:
                context.notes.append(
                    f"sparse constant '{variable.name}' of {math.prod(sparse.dims):,} elements is too large to be made "
                    f"dense, above {DENSE:,}: what reads it stays float32"
                )
                continue
            variable.dtype, variable.shape = tensor_type(sparse)
            dense, producer = as_array(sparse), variable.producer
            if producer is None:
                variable.data = held(dense, variable.name, None)
            else:
                producer.attrs.pop("sparse_value")
                producer.attrs["value"] = dense
        if found:
            graph.touch()
        return bool(found)


def _sparse(program: Graph) -> Iterator[tuple[Variable, onnx.SparseTensorProto]]:
    """The sparse constants of floats, of initializers and Constant operators, with what they hold."""
    for each in programs(program):
        for variable in each.variables:
            data = variable.data
            if data is None:
                producer = variable.producer
                if producer is None or producer.full_type != "Constant":
                    continue  # as most
                data = producer.attrs.get("sparse_value")
            if isinstance(data, onnx.SparseTensorProto) and tensor_type(data)[0] in FLOATS:
                yield variable, data
