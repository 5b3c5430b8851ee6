"""What stands for operators that lose their kernels computes what they compute, in sizes that are open as well."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnxruntime
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import GraphError
from amp_transpiler.ir.decompose import write_instead
from amp_transpiler.ir.weights import become_constants
from amp_transpiler.ops.place_gaps import LACKING, LOST
from tests.helpers.converting import filled
from tests.helpers.sessions import run

POOLS = {
    "a residual net's": "kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]",
    "tiles": "kernel_shape=[2,2], strides=[2,2]",
    "of all around": "kernel_shape=[5,5], pads=[2,2,2,2]",
    "one axis alone": "kernel_shape=[1,3], strides=[1,2], pads=[0,1,0,1]",
    "strides alone": "kernel_shape=[1,1], strides=[2,3]",
    "gaps": "kernel_shape=[3,2], dilations=[2,3]",
    "uneven padding": "kernel_shape=[3,4], strides=[2,3], pads=[0,3,2,1]",
    "valid": "kernel_shape=[3,3], strides=[2,2], auto_pad='VALID'",
    "rounded up": "kernel_shape=[3,3], strides=[2,2], ceil_mode=1",
    "rounded up, uneven": "kernel_shape=[4,5], strides=[3,4], pads=[1,2,1,0], ceil_mode=1",
    "the same size": "kernel_shape=[2,4], auto_pad='SAME_UPPER', ceil_mode=1",
    "the same size, more before": "kernel_shape=[2,4], strides=[1,1], auto_pad='SAME_LOWER'",
}
#: Whose padding goes by the sizes.
FIXED = {
    "rounded up, no window behind the end": "kernel_shape=[2,2], strides=[3,3], pads=[1,1,1,1], ceil_mode=1",
    "the same size, two strides": "kernel_shape=[3,3], strides=[2,2], auto_pad='SAME_UPPER'",
    "the same size, strides": "kernel_shape=[4,4], strides=[2,3], auto_pad='SAME_LOWER'",
}


def written(
    type_: str, attributes: str, sizes: str, more: str = "", reads: str = "x", computed: bool = False
) -> tuple[onnx.ModelProto, amp.Program]:
    """A model of one operator, and the program in which others stand for it."""
    attributes = attributes.replace("'", '"')
    head = f'<ir_version: 10, opset_import: ["" : 22]> m (float[{sizes}] x) => (float[A,B,C,D] y)'
    model = onnx.parser.parse_model(f"{head} {more} {{ y = {type_}{attributes and f'<{attributes}>'}({reads}) }}")
    model = onnx.shape_inference.infer_shapes(model)
    program = amp.Program.from_onnx(model)
    if not computed:
        become_constants(program)
    (op,) = program.operators
    write_instead(op, LOST[type_] if type_ in LOST else LACKING[type_].write)
    assert all(each.type != type_ for each in program.operators)
    return model, program


def results(model: onnx.ModelProto, program: amp.Program, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    written = program.to_onnx()
    onnx.checker.check_model(written, full_check=True)
    one, other = (
        onnxruntime.InferenceSession(each.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})
        for each in (model, written)
    )
    return one[0], other[0]


@pytest.mark.parametrize(
    ("name", "sizes"), [*itertools.product(POOLS, ("2,3,11,13", "N,3,H,W")), *((name, "N,3,11,13") for name in FIXED)]
)
def test_the_maxima_of_windows_are_those_of_slices(name: str, sizes: str) -> None:
    model, program = written("MaxPool", (POOLS | FIXED)[name], sizes)
    others = [(1, 3, 8, 7), (4, 3, 5, 4), (1, 3, 9, 10), (1, 3, 6, 12)] if "H" in sizes else []
    for shape in [(2, 3, 11, 13), *others]:
        x = np.random.default_rng(0).standard_normal(shape, np.float32) - 3  # what padding with zeros would show
        one, other = results(model, program, x)
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "attributes",
    ["kernel_shape=[3,3], dilations=[2,2], pads=[1,1,1,1]", *(text for text in FIXED.values() if "2,3" not in text)],
)
def test_what_open_sizes_do_not_tell_stays(attributes: str) -> None:
    with pytest.raises(GraphError, match="MaxPool"):
        written("MaxPool", attributes, "N,3,H,W")


@pytest.mark.parametrize("sizes", ["2,3,11,13", "N,3,H,W"])
@pytest.mark.parametrize("affine", [False, True])
def test_a_norm_of_channels_is_one_of_rows(sizes: str, affine: bool) -> None:
    scale, bias = ("2, -1, 0.5", "1, 0, -3") if affine else ("1, 1, 1", "0, 0, 0")
    model, program = written(
        "InstanceNormalization",
        "epsilon=0.01",
        sizes,
        f"<float[3] s = {{{scale}}}, float[3] b = {{{bias}}}>",
        "x, s, b",
    )
    assert affine == any(op.type == "Mul" for op in program.operators)
    x = np.random.default_rng(0).standard_normal((2, 3, 11, 13), np.float32) + 2
    np.testing.assert_allclose(*results(model, program, x), atol=1e-5)


FORMS = {
    "Clip": ("", "2,4,3,5"),
    "GlobalAveragePool": ("", "N,4,H,W"),
    "LeakyRelu": ("alpha=0.2", "N,4,H,W"),
    "Reciprocal": ("", "N,4,H,W"),
    "DepthToSpace": ("blocksize=2", "N,4,3,5"),
    "DepthToSpace, columns first": ("blocksize=2, mode='CRD'", "2,8,3,5"),
    "Resize": ("mode='nearest', nearest_mode='floor', coordinate_transformation_mode='asymmetric'", "N,4,3,5"),
    "Resize, half pixels": ("mode='nearest'", "2,4,3,5"),
    "Resize, half pixels, up": ("mode='nearest', nearest_mode='round_prefer_ceil'", "2,4,3,5"),
    "Resize, open sizes": ("mode='nearest'", "N,4,H,W"),
    "DepthToSpace, open sizes": ("blocksize=2", "N,4,H,W"),
    "DepthToSpace, columns first, open sizes": ("blocksize=2, mode='CRD'", "N,4,H,W"),
    "SpaceToDepth": ("blocksize=2", "N,3,4,6"),
    "SpaceToDepth, open sizes": ("blocksize=2", "N,3,H,W"),
    "PRelu": ("", "N,3,H,W"),
    "PRelu, steep": ("", "N,3,H,W"),
    **{f"Pad, {mode}": (f"mode='{mode}'", "N,3,H,W") for mode in ("constant", "reflect", "edge", "wrap")},
    "Pad, fixed sizes": ("", "2,3,4,5"),
    "Pad, a number": ("", "N,3,H,4"),
    "Pad, some axes": ("mode='reflect'", "N,3,4,4"),
    "ConvTranspose": ("strides=[2,3], pads=[0,1,1,2]", "N,4,3,5"),
    "ConvTranspose, open sizes": ("strides=[2,2], pads=[1,1,1,1], group=2, output_padding=[1,0]", "N,4,H,W"),
    "ConvTranspose, side by side": ("strides=[4,6]", "N,4,H,W"),
    "BatchNormalization": ("epsilon=0.1", "N,3,H,W"),
    "BatchNormalization, a slope of 0": ("", "N,3,H,W"),
    "BatchNormalization, computed": ("", "N,3,H,W"),
}
#: What they read besides x, and how.
READ = {
    "Clip": ("<float low = {-0.5}, float high = {0.25}>", "x, low, high"),
    "Resize": ("<float[4] factors = {1, 1, 3, 2}>", "x, , factors"),
    "BatchNormalization": (
        "<float[3] s = {1, -2, 3}, float[3] b = {0.5, 0, 1}, float[3] m = {0, 3, -1}, float[3] v = {4, 0.01, 1}>",
        "x, s, b, m, v",
    ),
}
READ |= {
    "PRelu": ("<float[3,1,1] s = {0.25, 1.0, -2.0}>", "x, s"),
    "PRelu, steep": ("<float[3,1,1] s = {0.25, 1.5, -2.0}>", "x, s"),
    "Pad": ("<int64[8] p = {1, 0, 2, 1, 0, 0, 0, 5}>", "x, p"),
    "Pad, a number": ("<int64[8] p = {0, 0, 1, 0, 0, 2, 1, 0}, float v = {1.5}>", "x, p, v"),
    "Pad, some axes": ("<int64[4] p = {1, 3, 3, 0}, int64[2] a = {-1, 2}>", "x, p, , a"),
}
KERNEL = ", ".join(f"{number:.3f}" for number in np.random.default_rng(1).standard_normal(4 * 2 * 4 * 6))
READ["ConvTranspose"] = (f"<float[4,2,4,6] w = {{{KERNEL}}}, float[2] b = {{1, -2}}>", "x, w, b")
READ["ConvTranspose, open sizes"] = (f"<float[4,2,4,6] w = {{{KERNEL}}}>", "x, w")
READ["BatchNormalization, a slope of 0"] = (
    READ["BatchNormalization"][0].replace("3}, float[3] b", "0}, float[3] b"),
    READ["BatchNormalization"][1],
)


@pytest.mark.parametrize("name", FORMS)
def test_what_has_no_16_bit_kernel_in_other_operators(name: str) -> None:
    type_, (attributes, sizes) = name.partition(",")[0], FORMS[name]
    more, reads = READ.get(name, READ.get(type_, ("", "x")))
    model, program = written(type_, attributes, sizes, more, reads, computed=name.endswith("computed"))
    data = {op.type for op in program.operators if op.outputs[0] and op.outputs[0].dtype == "float32"}
    assert name.endswith("computed") or data <= set(LACKING[type_].parts)
    shape = (2, *(int(size) if size.isdigit() else 6 for size in sizes.split(",")[1:]))
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    np.testing.assert_allclose(*results(model, program, x), rtol=2e-6, atol=2e-6 if type_ == "ConvTranspose" else 1e-7)


@pytest.mark.parametrize(
    ("type_", "attributes", "sizes", "more", "reads"),
    [
        ("LeakyRelu", "alpha=2.0", "2,4,3,5", "", "x"),
        ("DepthToSpace", "blocksize=2", "N,C,H,W", "", "x"),
        ("Pad", "", "2,4,3,5", "<int64[8] p = {0, 0, -1, 0, 0, 0, 0, 1}>", "x, p"),
        ("ConvTranspose", "strides=[3,3]", "2,4,3,5", *READ["ConvTranspose"]),
        ("ConvTranspose", "strides=[2,2], dilations=[2,1]", "2,4,3,5", *READ["ConvTranspose"]),
        ("ConvTranspose", "strides=[2,2], output_padding=[1,1]", "2,4,3,5", *READ["ConvTranspose"]),
        ("ConvTranspose", "strides=[2,2], output_shape=[8,12]", "2,4,3,5", *READ["ConvTranspose"]),
        ("Resize", "", "2,4,H,W", "<float[4] f = {1.0, 1.0, 1.5, 2.0}>", "x, , f"),
        ("Resize", "mode='linear'", "2,4,3,5", "<float[4] f = {1, 1, 2, 2}>", "x, , f"),
        ("Resize", "nearest_mode='floor'", "2,4,3,5", "<float[4] f = {1, 1, 2, 2}>", "x, , f"),
        ("Resize", "nearest_mode='ceil'", "2,4,3,5", "<float[4] f = {1, 1, 2, 2}>", "x, , f"),
        ("Resize", "coordinate_transformation_mode='asymmetric'", "2,4,3,5", "<float[4] f = {1, 1, 2, 2}>", "x, , f"),
        ("Resize", "", "2,4,4,6", "<float[4] f = {1.0, 1.0, 1.5, 2.0}>", "x, , f"),
        ("Clip", "", "2,4,3,5", "", "x"),
        ("BatchNormalization", "training_mode=1", "2,3,3,5", *READ["BatchNormalization"]),
    ],
)
def test_forms_that_have_none(type_: str, attributes: str, sizes: str, more: str, reads: str) -> None:
    with pytest.raises(GraphError, match=type_):
        written(type_, attributes, sizes, more, reads)


PADDED = """<ir_version: 10, opset_import: ["" : 22]> m (float[N,2,H,W] x) => (float[A,B,C,D] y, float[E,F,G,I] z)
    <float[2,2,3,3] w, int64[8] p = {0, 0, 1, 0, 0, 0, 2, 3}> { a = Pad(x, p)
    y = Conv<strides=[2,1]>(a, w) z = Conv<pads=[1,1,0,0]>(a, w) }"""


@pytest.mark.parametrize(
    ("old", "new", "held"),
    [
        ("", "", 0),
        ("Conv<pads=[1,1,0,0]>", "Conv<auto_pad='SAME_UPPER'>", 2),
        ("{0, 0, 1, 0, 0, 0", "{0, 1, 1, 0, 0, -1", None),
        ("z = Conv<pads=[1,1,0,0]>(a, w)", "z = Relu(a)", 2),
        ("Pad(x, p)", "Pad<mode='edge'>(x, p)", 2),
    ],
)
def test_zeros_around_images_become_the_padding_of_convolutions(old: str, new: str, held: int | None) -> None:
    model = filled(PADDED.replace(old, new.replace("'", '"')) if old else PADDED)
    program = amp.Program.from_onnx(model)
    become_constants(program)
    try:
        write_instead(program.operators[0], LACKING["Pad"].write)
    except GraphError:
        assert held is None
        return
    assert sum(op.type == "Concat" for op in program.operators if op.outputs[0].dtype == "float32") == held
    x = np.random.default_rng(0).standard_normal((2, 2, 5, 6), np.float32)
    one, other = (run(each, {"x": x}) for each in (model, program.to_onnx()))
    for first, second in zip(one, other, strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-6)
