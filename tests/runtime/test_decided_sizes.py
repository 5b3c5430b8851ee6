"""Programs in which data decide sizes: one session trains them whatever is found, with float64's gradients."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import amp_transpiler as amp
from amp_transpiler.errors import ExecutionError, GraphError, PlaceError
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.lowering.place import Place
from amp_transpiler.runtime import executor as executors
from amp_transpiler.runtime.capture import check_capturable
from tests.helpers.on_places import LOWERED, PLACES

ROWS, WIDTH = 7, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, WIDTH))
WEIGHTS = {name: RNG.normal(size=(WIDTH, WIDTH)) for name in ("w", "v", "u")}
CONSTANTS = (
    "int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] all = {7}, int64[1] back = {-1}, "
    "int64[2] heads = {2, 2}, int64 none = {0}, int64 next = {1}, int64[1] last = {2147483647}, int64[1] end = {-2}"
)
#: What is chosen: the places where the mask is true, and the rows of ``h`` there.
CHOSEN = (
    "found = NonZero(mask)  at = Squeeze(found, zero)  c = Gather <axis = 0> (h, at)  n = Shape <start=0, end=1> (c)"
)
#: Each makes ``y`` of x, the rows ``c`` that the mask chooses, and weights.
FORMS = {
    "a mean of rows": "d = MatMul(c, v)  e = Tanh(d)  y = ReduceMean <keepdims = 0> (e, zero)",
    "rows put back": """places = Unsqueeze(at, one)  d = MatMul(c, v)  y0 = ScatterND(x, places, d)  y = MatMul(y0, u)""",
    "rows added": """places = Unsqueeze(at, one)  d = MatMul(c, v)  e = Sigmoid(d)
        y0 = ScatterND <reduction = "add"> (h, places, e)  y = Tanh(y0)""",
    "attention among rows": """q = MatMul(c, v)  k = Transpose <perm = [1, 0]> (c)  s = MatMul(q, k)
        p = Softmax <axis = -1> (s)  y = MatMul(p, c)""",
    "heads": """hd = Concat <axis = 0> (n, heads)  q = Reshape(c, hd)  k = Transpose <perm = [1, 0, 2]> (q)
        r = Transpose <perm = [1, 2, 0]> (q)  s = MatMul(k, r)  p = Softmax(s)  o = MatMul(p, k)
        b = Transpose <perm = [1, 0, 2]> (o)  wide = Constant <value_ints = [-1, 4]> ()  y0 = Reshape(b, wide)
        y = MatMul(y0, v)""",
    "a flat view": "f = Reshape(c, back)  g = Mul(f, f)  s = Shape(c)  y0 = Reshape(g, s)  y = MatMul(y0, v)",
    "as many numbers": """count = Squeeze(n)  r = Range(none, count, next)  f = Cast <to = {kind}> (r)
        g = Unsqueeze(f, one)  d = MatMul(c, v)  y = Mul(d, g)""",
    "a row for each": "r = ReduceSum(u, zero)  s = Shape(c)  e = Expand(r, s)  d = Mul(c, e)  y = MatMul(d, v)",
    "padded to all": """left = Sub(all, n)  p = Concat <axis = 0> (zero, zero, left, zero)  d = Pad(c, p)
        y = Mul(d, x)""",
    "all, split in two": """left = Sub(all, n)  s = Concat <axis = 0> (n, left)  a, b = Split <axis = 0> (h, s)
        d = Mul(a, c)  y = MatMul(d, v)""",
    "the first two at most": "d = Slice(c, zero, two, zero)  y = MatMul(d, v)",
    "all but the last two": "d = Slice(c, zero, end, zero)  y0 = MatMul(d, v)  e = ReduceSum(y0)  y = Mul(e, e)",
    "divided by their number": "f = Cast <to = {kind}> (n)  g = Sqrt(f)  d = Div(c, g)  y = MatMul(d, v)",
    "two choices joined": """other = Not(mask)  found2 = NonZero(other)  at2 = Squeeze(found2, zero)
        c2 = Gather <axis = 0> (h, at2)  d = MatMul(c, v)  e = MatMul(c2, u)  j = Concat <axis = 0> (d, e)  y = Mul(j, x)""",
    "compressed": "d = Compress <axis = 0> (h, mask)  y = MatMul(d, v)",
    "what is left of a product": "d = MatMul(c, v)  e = Mul(d, c)  f = Reshape(e, back)  y = Compress(f, full)",
}
#: Masks, by what is found.
MASKS = {
    "some": np.array([1, 0, 1, 1, 0, 0, 1], bool),
    "one": np.array([0, 0, 0, 0, 1, 0, 0], bool),
    "all": np.ones(7, bool),
    "none": np.zeros(7, bool),
}
#: What has no value where nothing is found, or crashes onnxruntime (1.31: a product of matrices of no rows).
FULL = {"a mean of rows", "heads"}
#: Masks by which a tensor is empty: such crash WebGPU's plugin (0.4.0).
EMPTY = {"all but the last two": {"none", "one"}, "two choices joined": {"none", "all"}}


def weights_of(form: str) -> dict[str, np.ndarray]:
    return {name: w for name, w in WEIGHTS.items() if name == "w" or re.search(rf"\b{name}\b", FORMS[form])}


def model(form: str, real: str, weights: Mapping[str, np.ndarray] | None = None) -> onnx.ModelProto:
    weights = weights or weights_of(form)
    body = FORMS[form].replace("{kind}", str(1 if real == "float" else 11))
    shapes = ", ".join(f"{real}[{WIDTH},{WIDTH}] {name} = {{{', '.join(['0'] * WIDTH**2)}}}" for name in weights)
    fed = f"{real}[{ROWS},{WIDTH}] x, bool[{ROWS}] mask" + (", bool[n] full" if "full" in body else "")
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
        net ({fed}) => ({real}[rows,columns] y) <{shapes}, {CONSTANTS}> {{ t = MatMul(x, w)  h = Tanh(t)  {CHOSEN}  {body} }}"""
    made = onnx.parser.parse_model(text)
    for tensor in made.graph.initializer:
        if tensor.name in weights:
            kind = np.float32 if real == "float" else np.float64
            tensor.CopyFrom(onnx.numpy_helper.from_array(weights[tensor.name].astype(kind), tensor.name))
    if "keepdims" in body or "ReduceSum(y0)" in body or "full" in body:
        made.graph.output[0].type.tensor_type.ClearField("shape")
    return made


def squares(form: str, feeds: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray]) -> float:
    """The sum of squares of what float64 makes."""
    (y,) = ReferenceEvaluator(model(form, "double", weights)).run(None, {**feeds, "x": X})
    return float((y * y).sum())


@cache
def slopes(form: str, mask: str) -> dict[str, np.ndarray]:
    """Central differences of that."""
    weights, feeds, step = weights_of(form), fed(form, mask), 1e-6
    found = {name: np.zeros_like(w) for name, w in weights.items()}
    for name, place in ((name, place) for name, w in weights.items() for place in np.ndindex(w.shape)):
        ends = []
        for sign in (1, -1):
            moved = {n: w.copy() for n, w in weights.items()}
            moved[name][place] += sign * step
            ends.append(squares(form, feeds, moved))
        found[name][place] = (ends[0] - ends[1]) / (2 * step)
    return found


def trained(form: str, mode: str = "fp32") -> tuple[amp.Program, Any, Any, dict[str, Any]]:
    """The program with an update, its optimizer, the sum of squares and the gradients of the weights."""
    program = amp.Program.from_onnx(model(form, "float"))
    amp.prepare_training(program)
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        y = F.cast(program.outputs[0], "float32")
        loss = F.sum(y * y)
        optimizer: Any = amp.optimizer.SGD(0.0, multi_precision=mode == "pure")
        if mode == "pure":
            optimizer = amp.decorate(optimizer, init_loss_scaling=1.0, use_pure_fp16=True, use_fp16_guard=False)
        _, pairs = optimizer.minimize(loss)
    return program, optimizer, loss, {weight.name: gradient for weight, gradient in pairs}


def fed(form: str, mask: str) -> dict[str, np.ndarray]:
    feeds = {"mask": MASKS[mask]}
    if "full" in FORMS[form]:
        feeds["full"] = np.arange(MASKS[mask].sum() * WIDTH) % 3 == 0
    return feeds


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the programs that sessions are made for."""
    names: list[str] = []
    plain: Callable[..., Any] = executors.create_session
    monkeypatch.setattr(executors, "create_session", lambda *a, **k: names.append(a[3]) or plain(*a, **k))
    return names


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", ["fp32", "pure"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_float64s_whatever_is_found(form: str, mode: str, place: Place, made: list[str]) -> None:
    program, optimizer, loss, gradients = trained(form, mode)
    scope, executor = amp.Scope(), amp.Executor(place, threads=1, allow_cpu_fallback=place.kind == "webgpu")
    executor.run(program.startup, scope=scope)
    if mode == "pure":
        optimizer.amp_init(place, scope=scope)
    made.clear()
    left_out = {"none"} if form in FULL else set()
    if place.kind == "webgpu":
        left_out = EMPTY.get(form, {"none"})
    for mask in (name for name in MASKS if name not in left_out):
        feeds = fed(form, mask)
        value, *found = executor.run(
            program, {**feeds, "x": X.astype(np.float32)}, [loss, *gradients.values()], scope=scope
        )
        assert np.isfinite(value).all()
        for name, wanted in slopes(form, mask).items():
            off = found[list(gradients).index(name)].astype(np.float64) - wanted
            limit = (1e-5 if mode == "fp32" else 3e-2) * np.linalg.norm(wanted) + 1e-6
            assert np.linalg.norm(off) < limit, (mask, name)
    if "full" not in FORMS[form]:  # whose bools are as many as are found, so that it is fed several shapes
        assert len(made) == 1


def test_experts_by_a_router_that_is_trained(made: list[str]) -> None:
    """A mixture as transformers writes it: rows of each expert are found, computed, weighted and added."""
    main, startup = amp.Program("experts"), amp.Program()
    rng = np.random.default_rng(1)
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x, target = amp.data("x", [None, 8]), amp.data("target", [None, 8])
        scores, chosen = F.topk(F.softmax(amp.nn.fc(x, 4)), 2)
        y = F.zeros_like(x)
        for expert in range(4):
            place = F.nonzero(F.equal(chosen, expert))
            row, slot = F.slice(place, [1], [0], [1]), place
            part = amp.nn.fc(F.relu(amp.nn.fc(F.gather_nd(x, row), 16)), 8)
            weighted = part * F.reshape(F.gather_nd(scores, slot), [-1, 1])
            y = F.scatter_nd_add(y, row, weighted)
        loss = F.mse_loss(y, target)
        optimizer = amp.decorate(
            amp.optimizer.Adam(0.02, multi_precision=True), use_pure_fp16=True, use_fp16_guard=False
        )
        optimizer.minimize(loss, startup)
    executor, scope = amp.Executor(threads=1), amp.Scope()
    executor.run(startup, scope=scope)
    optimizer.amp_init(amp.CPUPlace(), scope=scope)
    made.clear()
    teacher, losses = rng.normal(size=(8, 8)).astype(np.float32), list[float]()
    for _ in range(60):
        fed = rng.normal(size=(32, 8)).astype(np.float32)
        losses.append(float(executor.run(main, {"x": fed, "target": np.tanh(fed @ teacher)}, [loss], scope)[0]))
    assert made == ["experts"]
    assert np.mean(losses[-5:]) < 0.5 * losses[0]


def masked() -> tuple[amp.Program, amp.Program, Any, Any]:
    """Rows that labels choose, scored against these labels."""
    main, startup = amp.Program("masked"), amp.Program()
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x, labels = amp.data("x", [None, None, 8]), amp.data("labels", [None, None], "int64")
        chosen = labels >= 0
        scores = amp.nn.fc(x[chosen], 5)
        loss = F.cross_entropy(scores, labels[chosen])
        amp.optimizer.SGD(0.1).minimize(loss, startup)
    return main, startup, scores, loss


def test_what_labels_choose_is_scored_against_them(made: list[str]) -> None:
    """The same as where the others are ignored, of any batch and length, and what is fetched has as many rows."""
    main, startup, scores, loss = masked()
    other, ignored = amp.Program(), amp.Program()
    with amp.program_guard(other, ignored), amp.unique_name.guard():
        x, labels = amp.data("x", [None, None, 8]), amp.data("labels", [None, None], "int64")
        whole = F.cross_entropy(amp.nn.fc(x, 5, num_flatten_dims=2), labels, ignore_index=-1)
        amp.optimizer.SGD(0.1).minimize(whole, ignored)
    executor, one, two = amp.Executor(threads=1), amp.Scope(), amp.Scope()
    executor.run(startup, scope=one)
    executor.run(ignored, scope=two)
    for name in ("fc_0.w_0", "fc_0.b_0"):
        two.set_var(name, one.find_var(name))
    made.clear()
    rng = np.random.default_rng(3)
    for shape in ((4, 6), (4, 6), (4, 9), (3, 9), (5, 7), (2, 11)):
        feeds = {"x": rng.normal(size=(*shape, 8)).astype(np.float32), "labels": rng.integers(-3, 5, shape)}
        found, value = executor.run(main, feeds, [scores, loss], one)
        assert found.shape == ((feeds["labels"] >= 0).sum(), 5)
        ignoring = {**feeds, "labels": np.maximum(feeds["labels"], -1)}
        np.testing.assert_allclose(value, executor.run(other, ignoring, [whole], two)[0], rtol=1e-5)
    np.testing.assert_allclose(one.find_var("fc_0.w_0"), two.find_var("fc_0.w_0"), atol=1e-6)
    assert made.count("masked") == 3


def test_a_target_that_is_fed_for_what_is_found_has_its_size() -> None:
    program = amp.Program.from_onnx(model("rows put back", "float"))
    with amp.program_guard(program), amp.unique_name.guard():
        chosen, target = program.var("c"), amp.data("target", [None, WIDTH])
        loss = F.mse_loss(F.matmul(chosen, program.var("u")), target)
        ((_, gradient), *_) = amp.append_backward(loss)
    executor, scope = amp.Executor(threads=1), amp.Scope()
    executor.run(program.startup, scope=scope)
    feeds = {"x": X.astype(np.float32), "mask": MASKS["some"]}
    assert np.isfinite(
        executor.run(program, {**feeds, "target": np.zeros((4, 4), np.float32)}, [gradient], scope)[0]
    ).all()
    with pytest.raises(ExecutionError, match=r"3 by 4\. Data decide the size of 'found': what is fed to go with it"):
        executor.run(program, {**feeds, "target": np.zeros((3, 4), np.float32)}, [gradient], scope)


def test_forecasts_take_all_that_may_be_found() -> None:
    main, _, _, _ = masked()
    shapes = {"x": (16, 64, 8), "labels": (16, 64)}
    lowered = main.lower(amp.CUDAPlace(0), shapes)
    assert lowered.tensors["fc_0.tmp_0"].shape is None
    assert lowered.sized is not None
    assert lowered.sized.tensors["fc_0.tmp_0"].shape == (1031, 5)  # the next prime: 1,024 have no part in sizes
    costs = {row.operator: row.bytes for row in main.cost_estimate(amp.CUDAPlace(0), shapes).operators}
    assert costs["MatMulGrad"] == 4 * (1031 * 8 + 1031 * 5 + 8 * 5)
    assert main.memory_estimate(shapes).activations > 1024 * 8 * 4
    with pytest.raises(PlaceError, match="cannot be captured as a CUDA graph: data decide the sizes of"):
        check_capturable(lowered, "masked")


def budgeted(budget: int) -> tuple[amp.Program, amp.Program, amp.Variable]:
    """Four layers on rows that a mask chooses, trained within these bytes."""
    main, startup = amp.Program(), amp.Program()
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x, keep = amp.data("x", [1024, 8]), amp.data("keep", [1024], "bool")
        hidden = x[keep]
        for _ in range(4):
            hidden = F.tanh(amp.nn.fc(hidden, 64))
        loss = F.mean(hidden)
        amp.recompute(loss, memory_budget=budget)
        amp.optimizer.SGD(0.1).minimize(loss, startup)
    return main, startup, loss


def test_a_budget_of_memory_counts_what_may_be_found() -> None:
    with pytest.raises(amp.AmpError, match="within memory_budget=1000 .*the least that was found is") as said:
        budgeted(1000)
    least = int(str(said.value).split("the least that was found is ")[1].split()[0])
    assert least > 2 * 1031 * 64 * 4
    main, startup, loss = budgeted(least)
    executor, scope = amp.Executor(threads=1), amp.Scope()
    executor.run(startup, scope=scope)
    feeds = {"x": np.ones((1024, 8), np.float32), "keep": np.arange(1024) < 700}
    first, second = (executor.run(main, feeds, [loss], scope)[0] for _ in range(2))
    assert second < first


def test_a_size_that_is_rounded_is_refused() -> None:
    main, startup = amp.Program(), amp.Program()
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x, keep = amp.data("x", [12, 3]), amp.data("keep", [12], "bool")
        image = F.unsqueeze(F.transpose(x[keep], [1, 0]), [0])
        loss = F.mean(amp.nn.conv1d(image, 4, 3, stride=2))
        amp.optimizer.SGD(0.1).minimize(loss, startup)
    with pytest.raises(GraphError, match=r"\(Conv\) rounds a size that data decide, that of .*Pad what it reads"):
        main.lower(amp.CPUPlace(), {})


def test_products_of_no_images_are_no_gradient() -> None:
    """onnxruntime's Conv over no images leaves what memory holds."""
    main, startup = amp.Program(), amp.Program()
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x, keep = amp.data("x", [5, 2, 9, 9]), amp.data("keep", [5], "bool")
        loss = F.sum(amp.nn.conv2d(x[keep], 3, 3))
        pairs = amp.append_backward(loss)
    executor, scope = amp.Executor(threads=1), amp.Scope()
    executor.run(startup, scope=scope)
    kernel = next(gradient for weight, gradient in pairs if len(weight.shape or ()) == 4)
    images = np.ones((5, 2, 9, 9), np.float32)
    for count in (5, 0, 3):
        (found,) = executor.run(main, {"x": images, "keep": np.arange(5) < count}, [kernel], scope)
        np.testing.assert_array_equal(found, np.full((3, 2, 3, 3), 49.0 * count))


@pytest.mark.parametrize("place", LOWERED, ids=repr)
def test_forecasts_of_inference_know_them_too(place: Place) -> None:
    program = amp.Program.from_onnx(model("rows put back", "float"))
    found = program.cost_estimate(place, {"x": (ROWS, WIDTH), "mask": (ROWS,)})
    assert found.kernels and not found.unknown
    assert program.memory_estimate({"x": (ROWS, WIDTH), "mask": (ROWS,)}, place).peak > 0
