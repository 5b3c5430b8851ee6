"""Every node test of the onnx package whose operator has a gradient, differentiated.

Each becomes a program (integer inputs as constants), the loss a random weighting of its float outputs. The gradients
that ``append_backward`` appends, run in fp32 by onnxruntime, are compared with central differences in float64 along
random directions, with ONNX's reference evaluator as the operator.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import amp_transpiler as amp
from amp_transpiler.ir.decompose import has_decomposition
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import lookup
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.lowering.lowering import lower
from tests.helpers.node_tests import node_tests
from tests.helpers.reference_ops import CORRECTED
from tests.helpers.sessions import session

Array = np.ndarray[Any, Any]

_MASKED = "its output is -inf where it is masked, so the sum of it has no slope"
_RANDOM = "the evaluator draws another mask"
_WINDOWS = "onnxruntime's kernel at opset 21 adds a window that starts behind the input"
_UNROUNDED = "the evaluator aligns corners to the size before it is rounded down; onnxruntime to the size there is"
_SHAPED = "its rule refuses an output_shape"
_FUNCTION = "the function that the evaluator runs adds fp32 constants to float64; test_decompose has it"
_LARGEST = "its rule refuses the largest of samples, which test_regions has"
_BREAKS = "the evaluator has places in fp32, which lie on elements, where slopes break; test_deformable has others"
_OTHER = "its rule refuses this reduction, which test_gradients_more proves"
#: Tests that are not differentiated, and why: the test fails where one of them comes right, or another goes wrong.
NAMED: dict[str, str] = {
    "test_attention_4d_with_past_and_present_qk_matmul_bias_3d_mask_causal": _MASKED,
    "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask_causal": _MASKED,
    "test_maxpool_2d_ceil_output_size_reduce_by_one": _WINDOWS,
    "test_resize_downsample_scales_linear_align_corners": _UNROUNDED,
    "test_resize_downsample_scales_cubic_align_corners": _UNROUNDED,
    "test_maxunpool_export_with_output_shape": _SHAPED,
    "test_mvn": _FUNCTION,
    **dict.fromkeys(
        (
            "test_training_dropout",
            "test_training_dropout_mask",
            "test_training_dropout_default",
            "test_training_dropout_default_mask",
        ),
        _RANDOM,
    ),
    **dict.fromkeys(
        (
            "test_basic_deform_conv_with_padding",
            "test_basic_deform_conv_without_padding",
            "test_deform_conv_with_mask_bias",
            "test_deform_conv_with_multiple_offset_groups",
        ),
        _BREAKS,
    ),
    "test_scatter_elements_with_reduction_mul": _OTHER,
    "test_scatternd_multiply": _OTHER,
    "test_roialign_mode_max": _LARGEST,
}
#: Operators whose node tests are all on integers; test_gradients_data has their gradients.
WITHOUT = frozenset({"Trilu"})


@cache
def cases() -> list[tuple[str, onnx.ModelProto, tuple[Array, ...]]]:
    """Name, model and inputs of the tests with one operator that has a gradient rule or is taken apart."""
    found = []
    for case in node_tests():
        model = case.model
        if len(model.graph.node) != 1 or model.functions or "_expanded" in case.name:
            continue
        op = of_node(model.graph.node[0])
        rule = lookup(op)
        differentiable = rule is not None and rule.gradient is not None and not rule.gradient.zero
        if differentiable or has_decomposition(op):
            found.append((case.name, model, case.data_sets[0][0]))
    return found


def of_node(node: onnx.NodeProto) -> Operator:
    """An operator of this type, to look its rule up."""
    return Operator(amp.Program(), 0, node.op_type, node.domain)


def is_float(info: onnx.ValueInfoProto) -> bool:
    return info.type.tensor_type.elem_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)


class Node:
    """One node test: its program, its inputs, which of them are differentiated, and its float64 forward."""

    def __init__(self, model: onnx.ModelProto, inputs: tuple[Array, ...]) -> None:
        self.rng = np.random.default_rng(0)
        node = model.graph.node[0]
        rule = lookup(of_node(node))
        allowed = None if rule is None or rule.gradient is None else rule.gradient.inputs
        values = dict(zip([i.name for i in model.graph.input], inputs, strict=False))
        if node.op_type in ("Cast", "CastLike"):
            values = {name: finite(value) for name, value in values.items()}
        free = [
            i.name
            for i in model.graph.input
            if is_float(i)
            and np.isfinite(plain(values[i.name])).all()  # a mask of -inf is none that is trained
            and (allowed is None or any(allowed_slot(node, slot, i.name) for slot in allowed))
        ]
        self.model = onnx.ModelProto()
        self.model.CopyFrom(model)
        del self.model.graph.input[:]
        self.model.graph.input.extend(i for i in model.graph.input if i.name in free)
        for name, value in values.items():
            if name not in free:
                self.model.graph.initializer.append(onnx.numpy_helper.from_array(plain(value), name))
        # A little noise: most of the tests hold round numbers, at which maxima tie and pieces meet.
        self.values = {n: plain(values[n]).astype(np.float64) for n in free}
        self.values = {n: np.asarray(a + 1e-2 * self.rng.uniform(0.1, 1, a.shape)) for n, a in self.values.items()}
        self.values = {n: a.astype(np.float32).astype(np.float64) for n, a in self.values.items()}
        self.outputs = [o.name for o in model.graph.output]
        self.evaluator = ReferenceEvaluator(self.model, new_ops=CORRECTED)

    def forward(self, values: dict[str, Array]) -> list[Array]:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return [np.asarray(y) for y in self.evaluator.run(None, values)][: len(self.outputs)]


def plain(value: Any) -> Array:
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def finite(value: Any) -> Any:
    """A float tensor with 1 in the place of infinities and NaN."""
    array = plain(value)
    return (
        np.where(np.isfinite(array), array, 1).astype(array.dtype) if array.dtype in (np.float32, np.float64) else value
    )


def allowed_slot(node: onnx.NodeProto, slot: int, name: str) -> bool:
    return slot < len(node.input) and node.input[slot] == name


def gradients(node: Node, weights: list[Array | None]) -> dict[str, Array]:
    """The gradients that this package computes, in fp32."""
    program = amp.Program.from_onnx(node.model)
    for variable in program.variables:
        if variable.data is not None:  # fixed here
            variable.persistable = variable.trainable = False
    program.convert_opset()
    for name, value in node.values.items():
        program.var(name).shape = value.shape
    with amp.program_guard(program, amp.Program("startup")), amp.unique_name.guard():
        loss: Variable | None = None
        for name, weight in zip(node.outputs, weights, strict=True):
            if weight is not None:
                y = program.var(name)
                y.shape = weight.shape
                part = F.sum(y * program.add_constant("weights", weight.astype(y.dtype)))
                loss = part if loss is None else loss + part
    pairs = amp.append_backward(loss, parameter_list=list(node.values))
    fetches = [grad for _, grad in pairs]
    shapes = {n: a.shape for n, a in node.values.items()}
    model = lower(program, "cpu", shapes, fetches, updates=False).model
    fed = {i.name: node.values.get(i.name, np.zeros(())) for i in model.graph.input}
    kinds = {i.name: onnx.helper.tensor_dtype_to_np_dtype(i.type.tensor_type.elem_type) for i in model.graph.input}
    fed = {n: a.astype(kinds[n]) for n, a in fed.items()}
    results = session(model).run(None, fed)
    return {parameter.name: result for (parameter, _), result in zip(pairs, results, strict=True)}


def slope_along(node: Node, name: str, weights: list[Array | None], direction: Array, large: bool) -> float:
    """The slope of the loss along a direction: by a small step, or by two large ones where a part of the evaluator
    works in fp32 (Richardson: of fourth order)."""

    def loss(step: float) -> float:
        ys = node.forward({**node.values, name: node.values[name] + step * direction})
        return float(sum(np.sum(w * y) for w, y in zip(weights, ys, strict=True) if w is not None))

    def slope(step: float) -> float:
        return (loss(step) - loss(-step)) / (2 * step)

    return (4 * slope(2e-3) - slope(4e-3)) / 3 if large else slope(1e-6)


def check(model: onnx.ModelProto, inputs: tuple[Array, ...]) -> bool:
    """Whether the test was differentiated; AssertionError where the gradient is wrong."""
    node = Node(model, inputs)
    if not node.values or not all(a.size for a in node.values.values()):
        return False
    ys = node.forward(node.values)
    rule = lookup(of_node(model.graph.node[0]))
    through = None if rule is None or rule.gradient is None or "dy*" in rule.gradient.reads else rule.gradient.reads
    weights: list[Array | None] = []
    for y, info in zip(ys, model.graph.output, strict=True):
        passes = through is None or f"dy{list(model.graph.node[0].output).index(info.name)}" in through
        weights.append(node.rng.normal(size=y.shape) if is_float(info) and passes else None)
    if all(w is None or not w.size for w in weights):
        return False
    found = gradients(node, weights)
    assert found, "nothing was differentiated"
    for name, gradient in found.items():
        directions = node.rng.normal(size=(2, *gradient.shape))
        got = np.array([np.sum(d * gradient) for d in directions])
        assert np.isfinite(gradient).all(), f"{name}: not finite"
        wanted: list[Array] = []
        for large in (False, True):
            wanted.append(np.array([slope_along(node, name, weights, d, large) for d in directions]))
            size = max(np.linalg.norm(wanted[-1]), np.linalg.norm(gradient), 1e-2)
            if np.linalg.norm(got - wanted[-1]) < 2e-4 * size:
                break
        else:
            raise AssertionError(f"{name}: {got}, not {wanted[0]} or {wanted[1]}")
    return True


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the evaluator
def test_every_node_test_of_a_differentiable_operator() -> None:
    done: dict[str, int] = {}
    failures: dict[str, str] = {}
    for name, model, inputs in cases():
        type_ = model.graph.node[0].op_type
        try:
            done[type_] = done.get(type_, 0) + check(model, inputs)
        except Exception as error:  # whatever it is: the table of failures names it
            failures[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    surprises = {name: reason for name, reason in failures.items() if name not in NAMED}
    assert not surprises, "\n".join(f"{name}: {reason}" for name, reason in surprises.items())
    assert set(failures) == set(NAMED), f"came right: {sorted(set(NAMED) - set(failures))}"
    assert {type_ for type_, count in done.items() if not count} == WITHOUT
    assert len(done) >= 111 and sum(done.values()) >= 660, f"{len(done)} operators, {sum(done.values())} tests"
