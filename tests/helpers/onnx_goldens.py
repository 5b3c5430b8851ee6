"""Models made by hand for the import and export tests, and what compares and runs models."""

import copy

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from tests.helpers import sessions

ort.set_default_logger_severity(4)


def canonical(model):
    """The bytes of a model whose nodes are put into an order of their own."""
    model = copy.deepcopy(model)

    def sort(graph):
        for node in graph.node:
            for attribute in node.attribute:
                for nested in [attribute.g, *attribute.graphs]:
                    sort(nested)
        nodes = sorted(graph.node, key=lambda node: node.SerializeToString(deterministic=True))
        del graph.node[:]
        graph.node.extend(nodes)

    sort(model.graph)
    return model.SerializeToString(deterministic=True)


def run(model, feeds):
    return sessions.run(model, feeds, "DISABLE_ALL")


def text(source):
    return onnx.parser.parse_model(source)


def same(one, other):
    if isinstance(one, list):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return np.array_equal(one, other, equal_nan=np.asarray(one).dtype.kind == "f")


CAPTURES = """
<ir_version: 10, opset_import: ["" : 21]>
outer (bool c, float[N] x) => (float[N] y)
<float[2] w = {1.0, 2.0}>
{
    s = Mul(x, w)
    [if_0] y = If (c) <
        then_branch = then_g () => (float[N] t) {
            c2 = Not(c)
            t = If (c2) <
                then_branch = deep_a () => (float[N] a) { a = Add(s, w) },
                else_branch = deep_b () => (float[N] b) { b = Sub(s, x) }
            >
        },
        else_branch = else_g () => (float[N] e) { e = Neg(x) }
    >
}
"""


EVERYTHING = """
<ir_version: 10, opset_import: ["" : 21, "custom" : 3], producer_name: "p", producer_version: "1", domain: "d",
 model_version: 7, doc_string: "model doc", metadata_props: ["k": "v", "k2": ""]>
g (float[N, 2] x) => (float[N, 2] y, float[N, 2] z)
<float[2] w = {1.0, 2.0}, int64[1] i = {3}, float one = {1.0}, float[N, 2] mid>
{
    mid = Add(x, w)
    [named] y = custom.Thing <alpha: float = 0.5, names: strings = ["a", "b"], empty: ints = []> (mid, , one)
    z = Mul(mid, one)
}
"""


def everything():
    model = text(EVERYTHING)
    graph = model.graph
    graph.doc_string = "graph doc"
    graph.metadata_props.add(key="gk", value="gv")
    graph.node[0].doc_string = "node doc"
    graph.node[0].metadata_props.add(key="nk", value="nv")
    graph.node[0].metadata_props.add(key="empty", value="")
    graph.node[0].attribute.add(name="extra", type=onnx.AttributeProto.INT, i=1, doc_string="attribute doc")
    graph.node[2].domain = "ai.onnx"
    graph.node[2].name = ""
    graph.node[2].device_configurations.add(configuration_id="c")
    graph.input[0].doc_string = "input doc"
    graph.input[0].metadata_props.add(key="ik", value="iv")
    graph.input[0].type.denotation = "IMAGE"
    graph.input[0].type.tensor_type.shape.dim[0].denotation = "DATA_BATCH"
    graph.initializer[0].doc_string = "weight doc"
    graph.initializer[0].metadata_props.add(key="wk", value="wv")
    stale = graph.value_info.add(name="stale", doc_string="names nothing")
    stale.type.sequence_type.elem_type.tensor_type.elem_type = TensorProto.FLOAT
    annotation = graph.quantization_annotation.add(tensor_name="mid")
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="one")
    values = helper.make_tensor("sparse", TensorProto.FLOAT, [2], [1.0, 2.0])
    indices = helper.make_tensor("sparse_i", TensorProto.INT64, [2], [0, 3])
    graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [2, 2]))
    training = model.training_info.add()
    training.algorithm.name = "step"
    training.update_binding.add(key="w", value="w_new")
    model.configuration.add(name="c", num_devices=2)
    return model


IR3 = """
<ir_version: 3, opset_import: ["" : 8]>
g (float[2] w, float[2] x, float[2] v) => (float[2] y)
<float[2] v = {1.0, 2.0}, float[2] w = {3.0, 4.0}>
{ t = Mul(x, w)
  y = Add(t, v) }
"""


def ir3():
    model = text(IR3.replace("<float[2] v = {1.0, 2.0}, float[2] w = {3.0, 4.0}>", ""))
    for name, values in (("v", [1, 2]), ("w", [3, 4])):
        model.graph.initializer.append(numpy_helper.from_array(np.array(values, np.float32), name))
    return model


FUNCTIONS = """
<ir_version: 10, opset_import: ["" : 21, "local" : 1]>
g (bool c, float[2] x) => (float[2] y)
<float[2] w = {1.0, 2.0}>
{
    [first] a = local.outer <alpha = 2.0> (x, w)
    b = Relu(a)
    [second] y = local.outer <alpha = 3.0> (b, w)
}
<domain: "local", opset_import: ["" : 21, "local" : 1]>
outer <alpha> (p, q) => (r) {
    k = Constant <value_float: float = @alpha> ()
    t = Mul(p, k)
    r = local.inner(t, q)
}
<domain: "local", opset_import: ["" : 21]>
inner (p, q) => (r) { s = Add(p, q)
  r = Neg(s) }
"""


def external_model(folder, name="m.onnx", data="weights/m.data"):
    """A model with two external weights, one of them bfloat16, and an external int4 constant."""
    rng = np.random.default_rng(0)
    arrays = {
        "w": rng.random((64, 32)).astype(np.float32),
        "b": rng.random(64).astype(ml_dtypes.bfloat16),
        "q": np.arange(16).astype(ml_dtypes.uint4),
    }
    (folder / data).parent.mkdir(parents=True, exist_ok=True)
    tensors, content = [], b""
    for key, array in arrays.items():
        tensor = numpy_helper.from_array(array, key)
        raw = tensor.raw_data
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for k, v in (("location", data), ("offset", str(len(content))), ("length", str(len(raw)))):
            tensor.external_data.add(key=k, value=v)
        content += raw + b"\0" * 64
        tensors.append(tensor)
    (folder / data).write_bytes(content)
    graph = text("""
    <ir_version: 10, opset_import: ["" : 21]>
    g (float[N, 64] x) => (float[N, 32] y, float[64] c, int32[16] i) {
        y = MatMul(x, w)
        c = Cast <to = 1> (b)
        i = Cast <to = 6> (q)
    }""")
    graph.graph.initializer.extend(tensors)
    onnx.save_model(graph, folder / name)
    return folder / name, graph, arrays
