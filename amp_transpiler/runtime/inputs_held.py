"""What a kernel would write over before it has read it is kept until the end of a run: "held" in lists/faults.toml."""

from __future__ import annotations

import onnx

from amp_transpiler.lists import faults, full_name


def inputs_held(model: onnx.ModelProto, kind: str) -> onnx.ModelProto:
    """The model, for a place of this kind; where it has operators whose kernels write their result over an input that
    nobody reads after them, and fail so, a copy in which those inputs are outputs as well: no kernel is given these."""
    held = {name for name, rows in faults(kind).items() if any(row.around == "held" for row in rows)}
    read = {n.input[0] for n in model.graph.node if held and full_name(n.op_type, n.domain) in held}
    made = {name for node in model.graph.node for name in node.output} if read else set()
    names = sorted(read & made - {info.name for info in model.graph.output})
    if not names:
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return copy
