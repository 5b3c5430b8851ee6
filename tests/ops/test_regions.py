"""Gradients of RoiAlign and MaxRoiPool: those of onnxruntime's own kernels, central differences, and training through
regions of a detector."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import GradientError
from amp_transpiler.nn import functional as F
from tests.helpers.gradcheck import check_gradient
from tests.helpers.sessions import run

pytestmark = pytest.mark.rules

#: Inside, across each border, outside, smaller than an element, empty, and with its ends exchanged.
REGIONS = np.array(
    [
        [1.2, 0.7, 6.9, 5.1],
        [-3.3, -2.4, 4.2, 3.7],
        [5.1, 4.3, 14.2, 17.7],
        [-30.1, -20.3, 41.3, 33.9],
        [20.2, 20.1, 24.3, 25.2],
        [2.31, 2.42, 2.53, 2.64],
        [3.3, 3.4, 3.3, 3.4],
        [6.2, 5.3, 2.1, 1.7],
    ]
)


def aligned(x: np.ndarray, regions: np.ndarray, images: np.ndarray, **attrs: object) -> list[np.ndarray]:
    """RoiAlign as onnxruntime computes it, sample by sample, in float64."""
    down, across, scale = attrs["output_height"], attrs["output_width"], attrs.get("spatial_scale", 1.0)
    half = attrs.get("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    height, width = x.shape[2:]

    def samples(start: float, end: float, bins: int) -> list[list[float]]:
        first, last = (v * scale - 0.5 * half for v in (start, end))
        length = (last - first if half else max(last - first, 1.0)) / bins
        count = attrs.get("sampling_ratio", 0) or math.ceil(length)
        return [[first + (b + (i + 0.5) / count) * length for i in range(count)] for b in range(bins)]

    def taps(place: float, size: int) -> list[tuple[int, float]]:
        if not -1 <= place <= size:
            return []
        place = min(max(place, 0.0), size - 1.0)
        low = min(int(place), max(size - 2, 0))
        return [(low, 1 - (place - low)), (min(low + 1, size - 1), place - low)]

    y = np.zeros((len(regions), x.shape[1], down, across))
    for n, (left, top, right, bottom) in enumerate(regions):
        for i, ys in enumerate(samples(top, bottom, down)):
            for j, xs in enumerate(samples(left, right, across)):
                for v in ys:
                    for h in xs:
                        for row, a in taps(v, height):
                            for column, b in taps(h, width):
                                y[n, :, i, j] += a * b * x[images[n], :, row, column]
                y[n, :, i, j] /= max(len(ys) * len(xs), 1)
    return [y]


@pytest.mark.parametrize("ratio", [0, 1, 2])
@pytest.mark.parametrize("mode", ["half_pixel", "output_half_pixel"])
def test_the_gradient_is_that_of_every_sample(ratio: int, mode: str) -> None:
    attrs = {"output_height": 2, "output_width": 3, "sampling_ratio": ratio, "coordinate_transformation_mode": mode}
    x = np.random.default_rng(0).standard_normal((2, 3, 6, 7))
    images = np.arange(len(REGIONS)) % 2
    check_gradient(
        "RoiAlign", [x, REGIONS, images], attrs=attrs, wrt=[0], forward=lambda *inputs: aligned(*inputs, **attrs)
    )


def detector(mode: str) -> amp.Program:
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
    net (float[1,2,6,6] x, float[r,4] boxes, int64[r] image) => (float[r,2,2,2] y)
      <float[2,2,1,1] w = {{0.5, -0.25, 1.5, 0.75}}, float[4] shift = {{0.5, 0.25, -0.5, 0.125}}>
    {{
      h = Conv(x, w)
      proposed = Add(boxes, shift)
      y = RoiAlign <output_height = 2, output_width = 2, mode = "{mode}"> (h, proposed, image)
    }}"""
    return amp.Program.from_onnx(onnx.parser.parse_model(text))


def test_what_is_read_learns_and_what_proposes_regions_does_not() -> None:
    program = detector("avg")
    with amp.program_guard(program, program.startup):
        pairs = amp.append_backward(F.sum(program.outputs[0]), parameter_list=["w"])
    executor, scope = amp.Executor(), amp.Scope()
    executor.run(program.startup, scope=scope)
    x = np.random.default_rng(0).uniform(0, 1, (1, 2, 6, 6)).astype(np.float32)
    for count in (3, 0):
        image = np.zeros(count, np.int64)
        feed = {"x": x, "boxes": REGIONS[:count].astype(np.float32), "image": image}
        (gradient,) = executor.run(program, feed, [pairs[0][1]], scope=scope)
        moved_boxes = REGIONS[:count] + [0.5, 0.25, -0.5, 0.125]
        (read,) = aligned(x, moved_boxes, image, output_height=2, output_width=2)
        np.testing.assert_allclose(gradient[:, :, 0, 0], [read.sum((0, 2, 3))] * 2, rtol=1e-5)


def test_nothing_is_learned_of_regions() -> None:
    program = detector("avg")
    with pytest.raises(GradientError, match="does not depend"), amp.program_guard(program, program.startup):
        amp.append_backward(F.sum(program.outputs[0]), parameter_list=["shift"])


def test_the_largest_sample_has_no_gradient() -> None:
    program = detector("max")
    with pytest.raises(GradientError, match="its mode is 'max'"), amp.program_guard(program, program.startup):
        amp.append_backward(F.sum(program.outputs[0]))


def pooled(x: np.ndarray, regions: np.ndarray, pooled_shape: tuple[int, int], spatial_scale: float = 1.0) -> np.ndarray:
    """MaxRoiPool as onnxruntime computes it, in float32 where edges are rounded."""
    f = np.float32

    def bins(start: float, end: float, count: int, size: int) -> list[slice]:
        first, last = (int(np.copysign(np.floor(abs(f(v) * f(spatial_scale)) + 0.5), v)) for v in (start, end))
        step = f(max(last - first + 1, 1)) / f(count)
        ends = [(int(np.floor(f(i) * step)) + first, int(np.ceil(f(i + 1) * step)) + first) for i in range(count)]
        return [slice(*(min(max(at, 0), size) for at in pair)) for pair in ends]

    y = np.zeros((len(regions), x.shape[1], *pooled_shape))
    for n, (image, left, top, right, bottom) in enumerate(regions):
        for i, down in enumerate(bins(top, bottom, pooled_shape[0], x.shape[2])):
            for j, across in enumerate(bins(left, right, pooled_shape[1], x.shape[3])):
                part = x[int(image), :, down, across]
                y[n, :, i, j] = part.max((1, 2)) if part.size else 0
    return y


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_the_gradient_goes_to_the_largest_of_each_bin(scale: float) -> None:
    rng = np.random.default_rng(0)
    x = rng.permutation(2 * 3 * 6 * 7).reshape(2, 3, 6, 7) / 64.0 - 2
    regions = np.column_stack([np.arange(len(REGIONS)) % 2, REGIONS])
    attrs = {"pooled_shape": [2, 3], "spatial_scale": scale}
    node = onnx.helper.make_node("MaxRoiPool", ["x", "r"], ["y"], **attrs)
    infos = [onnx.helper.make_tensor_value_info(n, 1, a.shape) for n, a in (("x", x), ("r", regions))]
    graph = onnx.helper.make_graph([node], "g", infos, [onnx.helper.make_empty_tensor_value_info("y")])
    model = onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 21)])
    feeds = {"x": x.astype(np.float32), "r": regions.astype(np.float32)}
    np.testing.assert_array_equal(run(model, feeds)[0], pooled(x, regions, (2, 3), scale))
    check_gradient("MaxRoiPool", [x, regions], attrs=attrs, wrt=[0], forward=lambda a, b: [pooled(a, b, (2, 3), scale)])


def test_of_equal_elements_the_first_of_a_bin_learns() -> None:
    text = """<ir_version: 8, opset_import: ["" : 18]>
    net (float[r,5] boxes) => (float[r,1,1,1] y)
      <float[1,1,2,3] x = {0, 2, 1, 2, 2, 0}> { y = MaxRoiPool <pooled_shape = [1, 1]> (x, boxes) }"""
    program = amp.Program.from_onnx(onnx.parser.parse_model(text))
    with amp.program_guard(program, program.startup):
        ((_, gradient),) = amp.append_backward(F.sum(program.outputs[0]))
    executor, scope = amp.Executor(), amp.Scope()
    executor.run(program.startup, scope=scope)
    boxes = np.array([[0, 0, 0, 2, 1], [0, 0, 1, 1, 1], [0, 5, 0, 6, 1]], np.float32)  # the last is beside the image
    (found,) = executor.run(program, {"boxes": boxes}, [gradient], scope=scope)
    np.testing.assert_array_equal(found[0, 0], [[0, 1, 0], [1, 0, 0]])
