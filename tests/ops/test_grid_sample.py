"""GridSample's gradient: PyTorch's recorded values, central differences in float64, and training in 16 bit."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from tests.helpers.gradcheck import Case, Gradient, check_gradient
from tests.helpers.rules import run_reference
from tests.helpers.where import RECORDED

ORACLE = np.load(RECORDED / "grid_sample.npz")
RECORDED = sorted({name.rpartition("|")[0] for name in ORACLE.files if "|" in name})
#: PyTorch's names in ONNX.
MODES = {"bilinear": "linear", "nearest": "nearest", "bicubic": "cubic"}


def test_the_record_has_every_mode() -> None:
    assert len(RECORDED) == 3 * 3 * 2 + 2 * 3 * 2


@pytest.mark.parametrize("recorded", RECORDED)
def test_gradients_are_those_of_pytorch(recorded: str) -> None:
    mode, padding, aligned, rank = recorded.split("|")
    x, grid, dy = (ORACLE[f"{name}{rank}"] for name in ("x", "grid", "dy"))
    attrs = {"mode": MODES[mode], "padding_mode": padding, "align_corners": int(aligned)}
    case = Case("GridSample", [x, grid], attrs, wrt=[0, 1])
    gradient = Gradient(case, "float64", {"x0": x, "x1": grid, "y0": dy, "dy0": dy}, [0, 1])
    model = gradient.model("reference")
    dx, dgrid = run_reference(model, gradient.feeds(model))
    np.testing.assert_allclose(dx, ORACLE[f"{recorded}|dx"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dgrid, ORACLE[f"{recorded}|dgrid"], rtol=1e-5, atol=1e-6)


def sampled(x: np.ndarray, grid: np.ndarray, mode: str, padding: str, aligned: int) -> np.ndarray:
    """GridSample as its specification reads, element by element, in float64."""

    def reflected(place: float, size: int) -> float:
        low, high = (0.0, size - 1.0) if aligned else (-0.5, size - 0.5)
        while not low <= place <= high:
            place = 2 * low - place if place < low else 2 * high - place
        return min(max(place, 0.0), size - 1.0)

    def taps(g: float, size: int) -> list[tuple[int, float]]:
        place = (g + 1) / 2 * (size - 1) if aligned else ((g + 1) * size - 1) / 2
        if mode == "linear" and padding != "zeros":
            place = reflected(place, size) if padding == "reflection" else min(max(place, 0.0), size - 1.0)
        low = int(np.floor(place))
        t, a = place - low, -0.75
        near = [(a + 2) * d**3 - (a + 3) * d**2 + 1 for d in (t, 1 - t)]
        far = [a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a for d in (1 + t, 2 - t)]
        found = [(low, 1 - t), (low + 1, t)]
        if mode == "cubic":
            found = [(low - 1, far[0]), (low, near[0]), (low + 1, near[1]), (low + 2, far[1])]
        if padding == "reflection":
            found = [(round(reflected(i, size)), w) for i, w in found]
        elif padding == "border":
            found = [(min(max(i, 0), size - 1), w) for i, w in found]
        return [(i, w) for i, w in found if 0 <= i < size]

    y = np.zeros((*x.shape[:2], *grid.shape[1:3]))
    for n, i, j in itertools.product(range(x.shape[0]), *map(range, grid.shape[1:3])):
        for (row, v), (column, w) in itertools.product(*(taps(grid[n, i, j, 1 - k], x.shape[2 + k]) for k in (0, 1))):
            y[n, :, i, j] += v * w * x[n, :, row, column]
    return y


@pytest.mark.parametrize(
    "mode, padding, aligned",
    [
        ("linear", "zeros", 0),
        ("linear", "border", 1),
        ("linear", "reflection", 0),
        ("cubic", "zeros", 1),
        ("cubic", "reflection", 1),
        ("cubic", "border", 0),
    ],
)
def test_gradients_are_central_differences(mode: str, padding: str, aligned: int) -> None:
    rng = np.random.default_rng(3)
    x, grid = rng.normal(size=(2, 3, 4, 5)), rng.uniform(-1.3, 1.3, (2, 3, 2, 2))
    attrs = {"mode": mode, "padding_mode": padding, "align_corners": aligned}
    check_gradient("GridSample", [x, grid], attrs=attrs, forward=lambda x, g: [sampled(x, g, mode, padding, aligned)])


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("align", [0, 1])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_a_place_on_a_border_and_one_element_alone(size: int, align: int, padding: str) -> None:
    """Where an axis has one element, nothing moves; at the last element itself the slope is that of PyTorch: none."""
    x, grid = np.arange(1.0, size + 1).reshape(1, 1, 1, size), np.array([[[[1.0, 0.0], [-1.0, 0.0]]]])
    attrs = {"mode": "linear", "padding_mode": padding, "align_corners": align}
    case = Case("GridSample", [x, grid], attrs, wrt=[0, 1])
    gradient = Gradient(
        case, "float64", {"x0": x, "x1": grid, "y0": np.zeros((1, 1, 1, 2)), "dy0": np.ones((1, 1, 1, 2))}, [0, 1]
    )
    model = gradient.model("reference")
    dx, dgrid = run_reference(model, gradient.feeds(model))
    assert np.isfinite(dx).all() and np.isfinite(dgrid).all()
    if padding == "border" or (align and size > 1):
        np.testing.assert_allclose(dx.sum(), 2, err_msg=str((size, attrs)))
    if padding == "border":
        np.testing.assert_array_equal(dgrid, 0)


@pytest.mark.parametrize("mode", ["fp32", "amp", "pure-fp16"])
def test_a_spatial_transformer_trains(mode: str) -> None:
    """An affine map that finds the shift between two images by moving its grid."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
    net (float[1,1,8,8] image, float[1,8,8,3] places) => (float[1,1,8,8] y) {
      grid = MatMul(places, theta)
      sampled = GridSample <mode = "bilinear", padding_mode = "border", align_corners = 1> (image, grid)
      y = Conv(sampled, w)
    }""")
    for name, array in (("theta", np.eye(3)[:, :2]), ("w", np.ones((1, 1, 1, 1)))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    program, pure = amp.Program.from_onnx(model), mode == "pure-fp16"
    amp.prepare_training(program, trainable=["theta"])
    with amp.program_guard(program, program.startup), amp.unique_name.guard():
        loss = F.mse_loss(program.outputs[0], amp.data("target", [1, 1, 8, 8], "float32"))
        optimizer = amp.optimizer.Adam(0.02, multi_precision=pure)
        if mode != "fp32":
            optimizer = amp.decorate(optimizer, use_pure_fp16=pure, use_fp16_guard=False, init_loss_scaling=64.0)
        optimizer.minimize(loss)
    executor, scope = amp.Executor(), amp.Scope()
    executor.run(program.startup, scope=scope)
    if mode != "fp32":
        optimizer.amp_init(amp.CPUPlace(), scope=scope)
    line = np.linspace(-1, 1, 8, dtype=np.float32)
    places = np.stack([*np.meshgrid(line, line), np.ones((8, 8), np.float32)], -1)[None]
    image = (np.sin(2 * places[..., 0]) + places[..., 1] ** 3)[None]
    # sampled at a shift of (0.2, -0.1)
    moved = np.array([[1, 0], [0, 1], [0.2, -0.1]])
    target = sampled(image, places @ moved, "linear", "border", 1)
    feed = {"image": image, "places": places, "target": target.astype(np.float32)}
    losses = [float(executor.run(program, feed=feed, fetch_list=[loss], scope=scope)[0]) for _ in range(80)]
    assert losses[-1] < 0.02 * losses[0]
    np.testing.assert_allclose(scope.find_var("theta"), moved, atol=0.03)  # fp32 in every mode: it makes places
