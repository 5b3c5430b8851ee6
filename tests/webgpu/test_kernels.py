"""The kernel table of WebGPU against the provider that is here."""

import json
from functools import cache

import pytest
from onnx import defs

from amp_transpiler.lists import TARGET_OPSET, kernel_types
from amp_transpiler.lists._data import read_text
from tests.helpers.kernel_registry import numbered
from tests.helpers.one_node import one_node, questions
from tests.helpers.webgpu_sessions import PROVIDER, built_in, lands
from tests.record.webgpu_kernels import registry

pytestmark = pytest.mark.webgpu

TABLE = json.loads(read_text("kernels.json"))
TYPES = {"float", "float16", "int32", "uint32", "int64", "bool"}
WITHOUT = ("IsNaN", "LogSoftmax", "Mod", "NonZero", "OneHot", "Round", "Sign", "Sum", "Xor")


def test_the_table_of_the_plugin_is_its_registry():
    if built_in():
        pytest.skip("the provider that is built in tells no registry")
    assert numbered(registry(), TABLE["type_sets"]) == TABLE["kernels"][f"{PROVIDER}/plugin"]


@cache
def _schema(op_type):
    try:
        schema = defs.get_schema(op_type, TARGET_OPSET)
    except defs.SchemaError:
        return None
    return None if schema.deprecated or op_type == "If" else schema


@pytest.mark.parametrize(
    "op_type", [op for op in (*WITHOUT, *TABLE["kernels"][f"{PROVIDER}/plugin"]["ai.onnx"]) if _schema(op)]
)
def test_nodes_land_on_the_built_in_provider_where_the_table_says(op_type):
    if not built_in():
        pytest.skip("the plugin tells its registry")
    schema = _schema(op_type)
    asked = list(questions(schema))
    # One parameter at a time, and the types that programs have: all combinations of Cast and Pow take minutes.
    asked = [t for t in asked if sum(t[p] != asked[0][p] for p in t) <= 1 and TYPES.issuperset(t.values())]
    kernel = kernel_types(PROVIDER, op_type, TARGET_OPSET)
    for types in asked:
        expected = kernel is not None and all(types[param] in kernel[param] for param in kernel if param in types)
        assert lands(one_node(schema, types, TARGET_OPSET)) == expected, types
