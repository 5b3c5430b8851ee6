"""The model that is served: the outputs with their weights inside, and where in the file these lie.

It has real 16-bit operators and batches of any size, as ``amp.save_inference_model`` writes it. A runner in any
language puts the weights of its state in their places, and has the trained model: nothing but bytes has to be copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx

from amp_transpiler.export.step_programs import StepPrograms
from amp_transpiler.ir.nodes import OWN
from amp_transpiler.ir.wire import contents
from amp_transpiler.passes.lowering.lowered import needed
from amp_transpiler.runtime.inference_model import pruned
from amp_transpiler.runtime.scope import Scope

#: The file of the model in an exported step.
SERVED = "model.onnx"


def serving_model(programs: StepPrograms, scope: Scope) -> onnx.ModelProto | None:
    """The model that gives ``programs.outputs``, with weights from ``scope``.

    None where they need an operator of this package, which onnxruntime alone does not have.
    """
    test = programs.test.clone(for_test=True)
    kept = needed(test, [test.var(name) for name in programs.outputs])
    if any(op.domain == OWN for op in kept):
        return None
    read = {v.name for op in kept for v in (*op.inputs, *op.captures) if v is not None}
    feeds = [v.name for v in test.inputs if v.name in read]
    return pruned(test, feeds, list(programs.outputs)).to_onnx(scope=scope)


def places_of(model: onnx.ModelProto, content: bytes, states: Sequence[str]) -> list[dict[str, Any]]:
    """Where the bytes of each state lie that a model reads: :data:`SERVED`, or that of its data, offset and length.

    ``content`` is the model as it stands in the file.
    """
    inside = contents(content)
    outside = {tensor.name: tensor for tensor in model.graph.initializer if tensor.external_data}
    found = []
    for state in states:
        if state in outside:
            said: Mapping[str, str] = {entry.key: entry.value for entry in outside[state].external_data}
            found.append(_place(state, said["location"], int(said["offset"]), int(said["length"])))
        elif state in inside:
            found.append(_place(state, SERVED, *inside[state]))
    return found


def _place(state: str, file: str, offset: int, length: int) -> dict[str, Any]:
    return {"state": state, "file": file, "offset": offset, "bytes": length}
