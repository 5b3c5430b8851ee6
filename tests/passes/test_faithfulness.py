"""On CPU a 16-bit program gives, bit for bit, what 16-bit storage gives.

The reference: each operator's fp32 form run alone in onnxruntime on the 16-bit inputs, its result rounded
by numpy or ml_dtypes. Sessions run at BASIC: from EXTENDED on onnxruntime may rearrange fp32 arithmetic
between two roundings.
"""

from __future__ import annotations

import functools
import random

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest

import amp_transpiler as amp
from amp_transpiler.ir.nodes import Operator, Variable
from amp_transpiler.ir.opdef import _TABLE, lowering_rule_of
from amp_transpiler.ir.tensors import as_array
from amp_transpiler.ir.types import HALF, numpy_dtype
from amp_transpiler.passes.lowering.lowering import Lowered, lower
from amp_transpiler.passes.view.typing import Slots, has_float, narrowed
from amp_transpiler.program import Program
from tests.helpers.node_tests import node_tests
from tests.helpers.programs import LAYERS, build
from tests.helpers.sessions import session

HALVES = ["float16", "bfloat16"]


def run_lowered(lowered: Lowered, feeds: dict[str, np.ndarray], level: str = "BASIC") -> list[np.ndarray]:
    """Run with ml_dtypes arrays for bfloat16 in and out."""
    values = {}
    for port in [*lowered.feeds, *lowered.states]:
        array = feeds[port.variable]
        kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype) if array.dtype.name != "bfloat16" else 16
        raw = array.view(np.uint16) if array.dtype.name == "bfloat16" else array
        values[port.tensor] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.ascontiguousarray(raw), kind)
    values |= {name: ort.OrtValue.ortvalue_from_numpy(np.zeros((), np.float32)) for name in lowered.scalars}
    names = [port.tensor for port in lowered.fetches]
    results = session(lowered.model, f"ENABLE_{level}").run_with_ort_values(names, values)
    return [_array(value, port.dtype) for value, port in zip(results, lowered.fetches, strict=True)]


def _array(value: ort.OrtValue, dtype: str) -> np.ndarray:
    if dtype != "bfloat16":
        return value.numpy()
    import ctypes

    size = int(np.prod(value.shape(), dtype=np.int64)) * 2
    content = bytes((ctypes.c_char * size).from_address(value.data_ptr()))
    return np.frombuffer(content, np.uint16).view(numpy_dtype("bfloat16")).reshape(value.shape())


def same_bits(got: np.ndarray, want: np.ndarray) -> bool:
    """Equal bit for bit, any NaN equal to any NaN."""
    both_nan = np.isnan(got.astype(np.float32)) & np.isnan(want.astype(np.float32))
    return bool(np.all((got.view(np.uint16) == want.view(np.uint16)) | both_nan))


# -- every operator ---------------------------------------------------------------------------------------
#: Operators whose results are random, or of their own accord not a function of the values alone.
RANDOM = {
    "RandomNormal",
    "RandomUniform",
    "RandomNormalLike",
    "RandomUniformLike",
    "Bernoulli",
    "Multinomial",
    "Dropout",
}


@functools.cache
def node_cases() -> list[tuple[onnx.ModelProto, dict[str, np.ndarray]]]:
    """One backend case with fp32 inputs for each operator and set of attributes."""
    found, seen = [], set()
    for case in node_tests():
        graph = case.model.graph
        if len(graph.node) != 1 or case.model.functions:
            continue
        node = graph.node[0]
        key = (node.op_type, tuple(sorted(a.name for a in node.attribute)), len(node.input))
        feeds = dict(zip((i.name for i in graph.input), case.data_sets[0][0], strict=False))
        plain = all(isinstance(array, np.ndarray) for array in feeds.values())
        if not plain or node.domain or node.op_type in RANDOM or key in seen or any(a.g.node for a in node.attribute):
            continue
        if any(array.dtype == np.float32 for array in feeds.values()):
            seen.add(key)
            found.append((case.model, feeds))
    return found


def halved(program: Program, dtype: str) -> bool:
    """Give every slot the type it has when the operator runs in ``dtype``; False where it has no 16-bit form."""
    (op,) = program.operators
    slots = narrowed(op, dtype) if has_float(op) else None
    if not isinstance(slots, Slots):
        return False
    for variables, types in ((op.inputs, slots.inputs), (op.outputs, slots.outputs)):
        for variable, kind in zip(variables, types, strict=True):
            if variable is not None and kind is not None:
                variable.dtype = kind
    return any(v is not None and v.dtype == dtype for v in op.outputs)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_operator(dtype: str) -> None:
    checked, wrong = set(), []
    for model, given in node_cases():
        program = Program.from_onnx(model)
        if not halved(program, dtype) or lowering_rule_of(program.operators[0]) is not None:
            continue  # composed operators have tests of their own
        feeds, wide = {}, {}
        for name, array in given.items():
            feeds[name] = array.astype(numpy_dtype(dtype)) if program.var(name).dtype == dtype else array
            wide[name] = feeds[name].astype(array.dtype)
        try:
            alone = session(model, "ENABLE_BASIC").run(None, wide)
        except Exception:
            continue  # onnxruntime has no fp32 kernel for this operator
        lowered = lower(program, "cpu", {k: v.shape for k, v in feeds.items()}, program.outputs)
        for got, want, variable in zip(run_lowered(lowered, feeds), alone, program.outputs, strict=True):
            with np.errstate(over="ignore"):
                rounded = want.astype(numpy_dtype(dtype)) if variable.dtype == dtype else want
            if variable.dtype == dtype and not same_bits(got, rounded):
                wrong.append((model.graph.name, variable.name))
        checked.add(program.operators[0].type)
    assert not wrong
    assert len(checked) >= (100 if dtype == "float16" else 60), sorted(checked)


# -- random chains ------------------------------------------------------------------------------------------
UNARY = ["Relu", "Neg", "Abs", "Tanh", "Sigmoid", "Exp", "Sqrt", "Identity", "Transpose", "Softmax"]
BINARY = ["Add", "Mul", "Sub", "Div", "MatMul", "Max", "Min"]


def chain(rng: random.Random, dtype: str, length: int = 12) -> Program:
    """A random program over 4 x 4 tensors, values large and small enough to overflow and underflow."""
    program = Program()
    tensors: list[Variable] = [program.add_input(f"x{i}", dtype, (4, 4)) for i in range(2)]
    for i in range(length):
        type_ = rng.choice(UNARY + BINARY * 2)
        inputs = [rng.choice(tensors[-4:]) for _ in range(1 + (type_ in BINARY))]
        out = program.add_variable(f"t{i}", dtype, (4, 4))
        program.add_operator(type_, inputs, [out], attrs={"perm": [1, 0]} if type_ == "Transpose" else None)
        tensors.append(out)
    program.outputs = tensors[-3:]
    return program


def reference(program: Program, feeds: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """Each operator alone in fp32, rounded."""
    known = dict(feeds)
    for op in program.operators:
        node = onnx.helper.make_node(op.type, [v.name for v in op.inputs], ["out"])
        node.attribute.extend(op.attrs.protos())
        ins = {v.name: known[v.name].astype(np.float32) for v in op.inputs}
        graph = onnx.helper.make_graph(
            [node],
            "one",
            [onnx.helper.make_tensor_value_info(n, 1, a.shape) for n, a in ins.items()],
            [onnx.helper.make_tensor_value_info("out", 1, (4, 4))],
        )
        model = onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 21)])
        with np.errstate(all="ignore"):
            known[op.outputs[0].name] = session(model, "ENABLE_BASIC").run(None, ins)[0].astype(numpy_dtype(dtype))
    return known


@pytest.mark.parametrize("dtype", HALVES)
def test_random_chains(dtype: str) -> None:
    overflowed = underflowed = 0
    for seed in range(25):
        rng = random.Random(seed)
        program = chain(rng, dtype)
        numbers = np.random.default_rng(seed)
        feeds = {
            f"x{i}": (numbers.standard_normal((4, 4)) * 10.0 ** numbers.integers(-4, 4)).astype(numpy_dtype(dtype))
            for i in range(2)
        }
        want = reference(program, feeds, dtype)
        got = run_lowered(lower(program, "cpu", {k: v.shape for k, v in feeds.items()}, program.outputs), feeds)
        for variable, value in zip(program.outputs, got, strict=True):
            assert same_bits(value, want[variable.name]), (seed, variable.name)
        everything = np.concatenate([v.astype(np.float32).ravel() for v in want.values()])
        overflowed += int(np.isinf(everything).any())
        underflowed += int((everything == 0).any())
    assert underflowed and (overflowed or dtype == "bfloat16")


@pytest.mark.parametrize("first, second, value, expected", [(1000.0, 0.001, 100.0, np.inf), (1e-5, 1e4, 1e-4, 0.0)])
def test_overflow_and_underflow_appear(first: float, second: float, value: float, expected: float) -> None:
    program = Program()
    x = program.add_input("x", "float16", (1,))
    a, b = (program.add_constant(n, np.array([v], np.float16)) for n, v in (("a", first), ("b", second)))
    y, z = program.add_variable("y", "float16", (1,)), program.add_variable("z", "float16", (1,))
    program.add_operator("Mul", [x, a], [y])
    program.add_operator("Mul", [y, b], [z])
    program.outputs = [z]
    for level in ("BASIC", "ALL"):
        (got,) = run_lowered(lower(program, "cpu", {}, program.outputs), {"x": np.array([value], np.float16)}, level)
        assert got[0] == np.float16(expected), level


# -- operators with bodies, inside whole training steps ------------------------------------------------------
#: Bodies that round more than once. Their accuracy is tested with the operator; here, that nothing around changes them.
STEPPED = {"DropoutGrad", "SoftmaxGrad", "LogSoftmaxGrad", "LayerNormalizationGrad", "GeluGrad", "MulGrad"} | {
    "SoftmaxCrossEntropyLossGrad"
}


def alone(op: Operator, values: dict[str, np.ndarray]) -> list[np.ndarray | None]:
    """One operator of a training program run alone in fp32 on the values it had there, its results rounded."""
    program = Program()
    widened = () if op.type in STEPPED else HALF
    twins: dict[str, Variable] = {}
    feeds = {}
    for slot, v in enumerate(op.inputs):
        if v is not None and v.name not in twins:
            value = as_array(v.data) if v.is_constant else values[v.name]
            wide = np.asarray(value).astype(np.float32) if v.dtype in widened else np.asarray(value)
            if op.type == "LayerNormalization" and slot in (1, 2):
                wide = wide.astype(numpy_dtype(op.inputs[0].dtype)).astype(np.float32)  # a slot fed in 16 bit
            if v.is_constant:
                twins[v.name] = program.add_variable(v.name, wide.dtype.name, wide.shape, data=wide)
            else:
                twins[v.name] = program.add_input(v.name, wide.dtype.name, wide.shape)
                feeds[v.name] = wide
    outputs = []
    for v in op.outputs:
        shape = None if v is None else values[v.name].shape
        twin = None if v is None else program.add_variable(v.name, "float32" if v.dtype in widened else v.dtype, shape)
        if twin is not None and v.grad_of is not None:
            twin.grad_of = program.var(v.grad_of.name) if program.has_var(v.grad_of.name) else twin
        outputs.append(twin)
    inputs = [None if v is None else twins[v.name] for v in op.inputs]
    copy = program.add_operator(op.type, inputs, outputs, attrs=op.attrs.copy(), domain=op.domain)
    copy.metadata.update(op.metadata)
    wanted = [v for v in outputs if v is not None]
    lowered = lower(program, "cpu", {}, wanted)
    results = iter(run_lowered(lowered, feeds))
    with np.errstate(over="ignore"):
        return [None if v is None else next(results).astype(numpy_dtype(v.dtype)) for v in op.outputs]


#: What scales by a number, which the products and sums that read it take over (test_multiples has their values).
SCALES = frozenset({"Dropout", "DropoutGrad", "Mul", "MulGrad", "AddGrad"})
MOVES = frozenset({"Reshape", "Transpose"})


def _scales_once(op: Operator, found: np.ndarray, want: np.ndarray, dtype: str) -> bool:
    """Whether the operator reads a multiple, and is near to what it makes of the rounded one; or a gradient of weights,
    of which a softmax's reads the product without what its rows have in common (test_softmax_gradients has its values).
    """
    makers = [v.producer for v in op.inputs if v is not None]
    makers = [made.inputs[0].producer if made and made.type in MOVES and made.inputs[0] else made for made in makers]
    makers = [made.inputs[0].producer if made and made.type in MOVES and made.inputs[0] else made for made in makers]
    weighed = op.type == "SoftmaxGrad" and any(made is not None and made.type == "MatMulGrad" for made in makers)
    if not weighed and not any(made is not None and made.type in SCALES for made in makers):
        return False
    found, want = (a.astype(np.float64) for a in (found, want))
    return bool(np.abs(found - want).max() <= 4 * float(ml_dtypes.finfo(dtype).eps) * np.abs(want).max())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", LAYERS)
def test_every_operator_of_a_training_step(name: str, dtype: str) -> None:
    net = build(name, "pure-fp16", dtype=dtype, batch=2)
    executor, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
    executor.run(net.startup, scope=scope)
    net.optimizer.amp_init(amp.CPUPlace(), scope=scope)
    values = {v: scope.find_var(v) for v in scope.var_names()} | dict(net.feeds)
    ops = [op for op in net.main.operators if op.role in ("forward", "backward") and op.type != "Dropout"]
    made = [v for op in ops for v in op.outputs if v is not None and v.dtype is not None]
    made += [v for op in net.main.operators if op.type == "Dropout" for v in op.outputs if v is not None]
    lowered = lower(net.main, "cpu", {k: v.shape for k, v in net.feeds.items()}, made, updates=False)
    values |= dict(zip([v.name for v in made], run_lowered(lowered, values), strict=True))
    checked = set()
    for op in ops:
        if not any(v is not None and v.dtype == dtype for v in op.outputs) or op.type == "Cast":
            continue
        for v, want in zip(op.outputs, alone(op, values), strict=True):
            if v is not None and v.dtype == dtype:
                assert same_bits(values[v.name], want) or _scales_once(op, values[v.name], want, dtype), (op, v)
        checked.add(op.type)
    assert {"MatMulGrad", "MatMul", "SoftmaxCrossEntropyLossGrad"} <= checked, checked


# -- what needs no rounding -----------------------------------------------------------------------------------
def test_operators_without_rounding_are_bit_neutral() -> None:
    """``exact`` operators: with the rounding put back, no bit changes."""
    checked = set()
    for model, given in node_cases():
        op_type = model.graph.node[0].op_type
        entry = _TABLE.get(("", op_type))
        if entry is None or not entry.exact:
            continue
        feeds = {
            name: array.astype(np.float16).astype(np.float32) if array.dtype == np.float32 else array
            for name, array in given.items()
        }
        try:
            outputs = session(model, "ENABLE_BASIC").run(None, feeds)
        except Exception:
            continue  # onnxruntime has no kernel for this case
        for value in outputs:
            if value.dtype == np.float32:
                again = value.astype(np.float16).astype(np.float32)
                assert np.array_equal(value.view(np.int32), again.view(np.int32)), model.graph.name
        checked.add(op_type)
    assert {"Reshape", "Transpose", "Concat", "Relu", "MaxPool", "Gather", "Slice", "Where"} <= checked


# -- found_inf depends on nothing else ----------------------------------------------------------------------------
@pytest.mark.parametrize("extra", ["nothing", "reader", "fetched"])
def test_found_inf_does_not_depend_on_other_readers(extra: str) -> None:
    program = Program()
    with amp.program_guard(program, Program("startup")):
        x = program.add_input("x", "float16", (3,))
        big = program.add_variable("big", "float16", (3,))
        program.add_operator("Mul", [x, x], [big])
        scale = program.add_constant("scale", np.ones(1, np.float32))
        grads, found = amp.check_finite_and_unscale([big], scale)
    fetches = [found, grads[0]]
    if extra == "reader":
        seen = program.add_variable("seen", "bool", (3,))
        program.add_operator("IsInf", [big], [seen])
        fetches.append(seen)
    elif extra == "fetched":
        fetches.append(big)
    for values, expected in [([300, 1, 1], True), ([2, 1, 1], False)]:
        feeds = {"x": np.array(values, np.float16)}
        for level in ("BASIC", "ALL"):
            result = run_lowered(lower(program, "cpu", {"x": (3,)}, fetches), feeds, level)
            assert bool(result[0].reshape(-1)[0]) is expected


# -- on a GPU -----------------------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fp32", "amp", "pure-fp16"])
@pytest.mark.parametrize("name", LAYERS)
def test_cuda_trains_as_the_cpu_does(name: str, mode: str) -> None:
    """The same steps on both places: real 16-bit operators against the bit-faithful ones, up to summation order."""
    states = []
    for place in (amp.CPUPlace(), amp.CUDAPlace(0)):
        net = build(name, mode)
        executor, scope = amp.Executor(place), amp.Scope()
        executor.run(net.startup, scope=scope)
        if mode != "fp32":
            net.optimizer.amp_init(place, scope=scope)
        start = {v: scope.find_var(v) for v in scope.var_names()}
        losses = [executor.run(net.main, feed=net.feeds, fetch_list=[net.loss], scope=scope)[0] for _ in range(3)]
        states.append((start, np.array(losses, np.float32), {v: scope.find_var(v) for v in scope.var_names()}))
    (cpu_start, cpu_losses, cpu), (cuda_start, cuda_losses, cuda) = states
    for v, value in cpu_start.items():  # normal numbers come from Cos and Log, which differ in the last bit
        np.testing.assert_allclose(value.astype(np.float32), cuda_start[v].astype(np.float32), rtol=2e-3, atol=1e-5)
    np.testing.assert_allclose(cpu_losses, cuda_losses, rtol=1e-4 if mode == "fp32" else 5e-3)
    for v in ("num_good_steps_0", "num_bad_steps_0", "loss_scaling_0", "@rng_step"):
        if v in cpu:
            assert np.array_equal(cpu[v], cuda[v]), v
