"""Rows that are joined and taken apart in trees: a kernel of CUDA takes so many tensors and no more."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.ir.emitter import Emitter, Value
from amp_transpiler.ir.flat import Rows
from amp_transpiler.nn import functional as F
from amp_transpiler.ops.training import rows
from amp_transpiler.passes.lowering import flat_layout
from tests.helpers.cuda_kernels import with_tables
from tests.helpers.places import change_place


def deep(layers: int) -> tuple[amp.Program, amp.Program, list[amp.Variable]]:
    """A step of layers whose sizes differ, each with a weight and a bias; its loss and unscaled gradients."""
    main, startup = amp.Program("deep"), amp.Program("startup")
    main.random_seed = startup.random_seed = 7
    with amp.program_guard(main, startup), amp.unique_name.guard():
        h = amp.data("x", [4, 3])
        for width in range(layers):
            h = amp.nn.fc(h, 2 + width % 4, act="tanh")
        loss = F.mean(h * h)
        amp.decorate(amp.optimizer.Adam(0.01)).minimize(loss, startup)
    (check,) = (op for op in main.operators if op.type == "CheckFiniteAndUnscale")
    return main, startup, [loss, *(v for v in check.outputs if v is not None and v.shape)]


def test_no_kernel_on_cuda_takes_more_than_it_can() -> None:
    """34 layers, 68 parameters of several sizes; beyond it makes a table as long as the row, in every step."""
    main, _, fetched = deep(34)
    model = main.lower(amp.CUDAPlace(0), fetch_list=fetched).model
    assert with_tables(model) == []
    assert max(len(node.input) for node in model.graph.node if node.op_type == "Concat") > 20


@pytest.mark.parametrize(("most", "much", "alone"), [(3, 5000, 0), (18, 5000, 4), (32, 5000, 4), (32, 5001, 0)])
def test_what_is_large_is_moved_once(most: int, much: int, alone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 tensors, and what lies between them, four large ones are in no Concat that another one reads."""
    change_place(monkeypatch, "cuda", most_tensors=most, most_pieces=most)
    monkeypatch.setattr(rows, "_MUCH", much)
    shapes = tuple((5000 if number % 25 == 7 else 3 + number,) for number in range(100))
    e, together = Emitter("cuda"), Rows(tuple(range(100)), shapes)
    whole = rows.joined(e, together, [Value(f"x{n}", "float32", shape) for n, shape in enumerate(shapes)])
    made = {node.output[0]: node for node in e.nodes}
    views = {name: node.input[0] for name, node in made.items() if node.op_type == "Reshape"}
    last = made[views.get(whole.name, whole.name)]
    direct = {views.get(name, name) for name in last.input}
    assert all(len(node.input) <= most for node in e.nodes if node.op_type == "Concat")
    large = {f"x{number}" for number, shape in enumerate(shapes) if shape[0] == 5000}
    assert len(large & direct) == alone
    if not alone and most == 32:  # 199 tensors, with what lies between them, in 7 kernels and one for these
        assert [node.op_type for node in e.nodes].count("Concat") == 8


def test_a_huge_parameter_has_a_buffer_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """So its gradient is not copied; the others lie together as before."""
    monkeypatch.setattr(flat_layout, "_HUGE", 12)
    main, _, fetched = deep(6)
    lowered = main.lower(amp.CUDAPlace(0), fetch_list=fetched[:1])
    of_each = sorted(len(port.segments) for port in lowered.states if "moment1" in port.variable)
    shapes = [v.shape or () for v in main.variables if v.trainable]
    huge = [shape for shape in shapes if math.prod(shape) >= 12]
    assert of_each == [*[1] * len(huge), len(shapes) - len(huge)] and len(huge) > 1
    own = {port.variable: port.tensor for port in lowered.states if len(port.segments) == 1}
    joined = [n for node in lowered.model.graph.node if node.op_type == "Concat" for n in node.input]
    sizes = {v.name: math.prod(d.dim_value for d in v.type.tensor_type.shape.dim) for v in _inferred(lowered.model)}
    assert own and max(sizes[name] for name in joined if name in sizes) < 12


def _inferred(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    return list(onnx.shape_inference.infer_shapes(model, data_prop=True).graph.value_info)


def test_trees_are_the_single_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, also three levels deep."""
    change_place(monkeypatch, "cpu", flat_fewest=2, flat_largest=0)
    found = []
    for most in (1000, 32, 3):
        change_place(monkeypatch, "cpu", most_tensors=most, most_pieces=most)
        main, startup, fetched = deep(14)
        scope, exe = amp.Scope(), amp.Executor(threads=1, optimization_level="basic")
        exe.run(startup, scope=scope)
        steps = [exe.run(main, {"x": np.full((4, 3), n + 1, np.float32)}, fetched, scope) for n in range(3)]
        state = {name: scope.find_var(name).tobytes() for name in scope.var_names()}
        found.append((state, [array.tobytes() for step in steps for array in step]))
    assert found[0] == found[1] == found[2]
