"""Programs moved to the opset that training and lowering rules are written for compute what they computed."""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import GraphError
from amp_transpiler.ir.types import numpy_dtype
from amp_transpiler.lists import NEWEST_OPSET, TARGET_IR_VERSION, TARGET_OPSET
from amp_transpiler.passes.canonicalize.older_forms import ADAPTERS
from tests.helpers.sessions import run
from tests.helpers.where import DATA, NO_DATA

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
X = np.random.default_rng(0).standard_normal((2, 4, 6, 6)).astype(np.float32)

#: name -> (opset, node text over ``x`` (float[2,4,6,6]) giving ``y``, extra initializers)
OLD = {
    "ReduceSum": (11, "y = ReduceSum <axes = [1, -1], keepdims = 0> (x)", ""),
    "ReduceSum of all": (11, "y = ReduceSum <keepdims = 0> (x)", ""),
    "ReduceMean": (17, "y = ReduceMean <axes = [2]> (x)", ""),
    "ReduceMax": (13, "y = ReduceMax <axes = [0, 3], keepdims = 0> (x)", ""),
    "ReduceL2": (11, "y = ReduceL2 <axes = [-1]> (x)", ""),
    "Unsqueeze and Squeeze": (11, "u = Unsqueeze <axes = [0, 3]> (x) y = Squeeze <axes = [3]> (u)", ""),
    "Split by attribute": (11, "y, z = Split <axis = 1, split = [1, 3]> (x)", ""),
    "Split evenly": (13, "y, z = Split <axis = 1> (x)", ""),
    "Split along the first axis": (10, "y, z = Split <split = [1, 1]> (x)", ""),
    "Slice": (9, "y = Slice <axes = [1, 3], starts = [1, -4], ends = [3, 100]> (x)", ""),
    "Clip": (7, "y = Clip <min = -0.5, max = 0.25> (x)", ""),
    "Clip from below": (7, "y = Clip <min = 0.1> (x)", ""),
    "Pad": (10, "y = Pad <pads = [0, 0, 1, 2, 0, 1, 0, 3], value = 1.5> (x)", ""),
    "Pad by reflection": (10, 'y = Pad <pads = [0, 0, 1, 2, 0, 0, 0, 3], mode = "reflect"> (x)', ""),
    "Dropout": (10, "y = Dropout <ratio = 0.3> (x)", ""),
    "Dropout with a mask that is read": (7, "d, m = Dropout <ratio = 0.3> (x) y = Add(d, m)", ""),
    "Dropout with a mask of truth values": (10, "d, m = Dropout (x) k = Cast <to = 1> (m) y = Add(d, k)", ""),
    "TopK": (9, "y, i = TopK <axis = 2, k = 3> (x)", ""),
    "Upsample": (9, 'y = Upsample <mode = "nearest"> (x, s)', "float[4] s = {1, 1, 2, 3}"),
    "Upsample by attribute": (8, 'y = Upsample <mode = "nearest", scales = [1.0, 1.0, 2.0, 1.0]> (x)', ""),
    "Upsample, linear": (9, 'y = Upsample <mode = "linear"> (x, s)', "float[4] s = {1, 1, 2, 2}"),
    "Resize": (10, 'y = Resize <mode = "nearest"> (x, s)', "float[4] s = {1, 1, 2, 1.5}"),
    "Resize, smaller": (10, 'y = Resize <mode = "nearest"> (x, s)', "float[4] s = {1, 1, 0.6, 0.7}"),
    "Resize, smaller and larger": (10, 'y = Resize <mode = "nearest"> (x, s)', "float[4] s = {1, 1, 0.6, 1.7}"),
    "Resize with a region that is made": (
        11,
        'r = Constant <value = float[0] {}> () y = Resize <mode = "nearest"> (x, r, s) ',
        "float[4] s = {1, 1, 2, 1.5}",
    ),
    "Resizes that share a region": (
        11,
        'z = Resize <mode = "nearest"> (x, r, s) y = Resize <mode = "linear"> (z, r, s)',
        "float[0] r = {}, float[4] s = {1, 1, 2, 1.5}",
    ),
    "RoiAlign": (
        10,
        "y = RoiAlign <output_height = 2, output_width = 3, sampling_ratio = 2, spatial_scale = 0.5> (x, b, i)",
        "float[2, 4] b = {1, 1, 6, 6, 0, 2, 9, 8}, int64[2] i = {1, 0}",
    ),
    "Scatter": (10, "y = Scatter <axis = 1> (x, i, u)", "int64[1,1,1,2] i = {1, 0}, float[1,1,1,2] u = {5, 7}"),
    "Softmax of the last axes": (11, "y = Softmax <axis = 3> (x)", ""),
    "Softmax of flattened axes": (11, "y = Softmax (x)", ""),
    "LogSoftmax of flattened axes": (9, "y = LogSoftmax <axis = 2> (x)", ""),
    "Hardmax": (11, "y = Hardmax <axis = 2> (x)", ""),
    "BatchNormalization": (
        7,
        "y = BatchNormalization <epsilon = 0.01, spatial = 1> (x, a, b, b, a)",
        "float[4] a = {1, 2, 0.5, 3}, float[4] b = {0, 1, -1, 0.5}",
    ),
    "BatchNormalization 9": (
        9,
        "y = BatchNormalization (x, a, b, b, a)",
        "float[4] a = {1, 2, 0.5, 3}, float[4] b = {0, 1, -1, 0.5}",
    ),
    "DFT": (17, "r = Unsqueeze(x, last) f = DFT (r) y = ReduceSumSquare <axes = [-1]> (f)", "int64[1] last = {4}"),
    "DFT of an axis": (
        17,
        "r = Unsqueeze(x, last) f = DFT <axis = 2> (r) y = ReduceSumSquare <axes = [-1]> (f)",
        "int64[1] last = {4}",
    ),
    "GroupNormalization": (
        18,
        "y = GroupNormalization <num_groups = 2> (x, a, b)",
        "float[2] a = {1, 2}, float[2] b = {0.5, -1}",
    ),
    "newer than the target": (22, "y = MaxPool <kernel_shape = [2, 2]> (x)", ""),
}


def same(before: onnx.ModelProto, after: onnx.ModelProto, feeds: dict[str, np.ndarray], **tolerance: float) -> None:
    for want, got in zip(run(before, feeds), run(after, feeds), strict=True):
        assert want.shape == got.shape and want.dtype == got.dtype
        np.testing.assert_allclose(got, want, **(tolerance or {"rtol": 1e-5, "atol": 1e-6}))


@pytest.mark.parametrize("name", OLD)
def test_an_old_form_computes_the_same(name: str) -> None:
    version, body, constants = OLD[name]
    text = f"""<ir_version: 10, opset_import: ["" : {version}]>
    net (float[2,4,6,6] x) => (float y) {f"<{constants}>" if constants else ""} {{ {body} }}"""
    model = onnx.parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    shape = X.shape if name == "GroupNormalization" else run(model, {"x": X})[0].shape
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, shape))
    program = amp.Program.from_onnx(model)
    assert program.convert_opset()
    assert program.opset() == TARGET_OPSET and not program.convert_opset()
    program.verify()
    after = program.to_onnx()
    onnx.checker.check_model(after, full_check=True)
    if name == "GroupNormalization":  # onnxruntime has no kernel for the old form: the definition instead
        groups = X.reshape(2, 2, -1)
        normed = (groups - groups.mean(-1, keepdims=True)) / np.sqrt(groups.var(-1, keepdims=True) + 1e-5)
        want = (normed * np.array([1, 2])[:, None] + np.array([0.5, -1])[:, None]).reshape(X.shape)
        np.testing.assert_allclose(run(after, {"x": X})[0], want, atol=1e-5)
    else:
        same(model, after, {"x": X})


@pytest.mark.parametrize("name", [name for name in OLD if name != "GroupNormalization"])
def test_every_opset_between_computes_the_same(name: str) -> None:
    """A conversion raises a model to the first opset that has what it needs, not to the target alone."""
    version, body, constants = OLD[name]
    text = f"""<ir_version: 10, opset_import: ["" : {version}]>
    net (float[2,4,6,6] x) => (float y) {f"<{constants}>" if constants else ""} {{ {body} }}"""
    model = onnx.parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    expected = run(model, {"x": X})[0]
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, expected.shape))
    for target in range(version + 1, TARGET_OPSET):
        program = amp.Program.from_onnx(model)
        program.convert_opset(target)
        after = program.to_onnx()
        onnx.checker.check_model(after, full_check=True)
        np.testing.assert_allclose(run(after, {"x": X})[0], expected, rtol=1e-5, atol=1e-6, err_msg=str(target))


def test_a_resize_in_a_branch_leaves_out_what_is_empty() -> None:
    """There ONNX's inference does not see that scales from outside are none."""
    text = """<ir_version: 8, opset_import: ["" : 11]>
    net (bool c, float[2,4,6,6] x) => (float[2,4,9,3] y) <float[0] none = {}, int64[4] sizes = {2, 4, 9, 3}> {
      y = If (c) <then_branch = one () => (float[2,4,9,3] a) { s = Identity(sizes) a = Resize(x, none, none, s) },
        else_branch = two () => (float[2,4,9,3] b) { t = Identity(sizes) b = Resize<mode = "linear">(x, none, none, t) }>
    }"""
    model = onnx.parser.parse_model(text)
    program = amp.Program.from_onnx(model)
    assert program.convert_opset()
    after = program.to_onnx()
    onnx.checker.check_model(after, full_check=True)
    assert [each.name for each in after.graph.initializer] == ["sizes"]
    for taken in (True, False):
        same(model, after, {"x": X, "c": np.array(taken)})


def test_the_format_version_is_the_first_that_has_the_target_opset() -> None:
    imports = [onnx.helper.make_opsetid("", TARGET_OPSET)]
    assert onnx.helper.find_min_ir_version_for(imports) == TARGET_IR_VERSION


@pytest.mark.parametrize(("before", "target", "after"), [(5, 13, 7), (5, 17, 8), (9, 13, 9), (5, TARGET_OPSET, 10)])
def test_a_later_opset_takes_no_later_format_than_it_needs(before: int, target: int, after: int) -> None:
    """A runtime that knows the opset does not know every later format: onnxruntime 1.17 reads up to 9."""
    text = f'<ir_version: {before}, opset_import: ["" : 10]> m (float[2] x) => (float[2] y) {{ y = Relu(x) }}'
    program = amp.Program.from_onnx(onnx.parser.parse_model(text))
    program.convert_opset(target)
    assert program.to_onnx().ir_version == after


def test_every_changed_operator_has_an_adapter_or_needs_none() -> None:
    """An operator of opset 7 … 20 whose attributes or inputs are not those of the target is adapted."""
    missing = []
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain or schema.since_version >= TARGET_OPSET:
            continue
        new = onnx.defs.get_schema(schema.name, TARGET_OPSET, "")
        try:
            newest_at_7 = onnx.defs.get_schema(schema.name, 7, "").since_version
        except onnx.defs.SchemaError:
            newest_at_7 = 0
        if schema.since_version < newest_at_7 or schema.since_version == new.since_version:
            continue
        lost = set(schema.attributes) - set(new.attributes)
        adapted = any(schema.since_version < upto for upto, _ in ADAPTERS.get(schema.name, []))
        if (lost or new.deprecated) and not adapted:
            missing.append((schema.name, schema.since_version, sorted(lost)))
    assert not missing


def light() -> list[Path]:
    return sorted(LIGHT.glob("*.onnx")) if LIGHT.exists() else []


@pytest.mark.parametrize(
    "path", [p for p in light() if p.stem.split("light_")[-1] in ("squeezenet", "shufflenet")], ids=lambda p: p.stem
)
def test_models_of_opset_9_compute_the_same(path: Path) -> None:
    model = onnx.load(path)
    program = amp.Program.from_onnx(model)
    program.convert_opset()
    initialised = {i.name for i in model.graph.initializer}
    feeds = {
        i.name: np.random.default_rng(1).random([d.dim_value for d in i.type.tensor_type.shape.dim]).astype(np.float32)
        for i in model.graph.input
        if i.name not in initialised
    }
    same(model, program.to_onnx(), feeds, rtol=1e-4)


@pytest.mark.parametrize("name", ["mnist_cntk", "ultraface_rfb320"])
def test_trained_models_compute_the_same(name: str) -> None:
    file = DATA / "onnx_models" / f"{name}.onnx.xz"
    if not file.exists():
        pytest.skip(NO_DATA)
    model = onnx.load_model_from_string(lzma.decompress(file.read_bytes()))
    program = amp.Program.from_onnx(model)
    program.convert_opset()
    feeds = {
        v.name: np.random.default_rng(1).random([d if isinstance(d, int) else 1 for d in v.shape]).astype(np.float32)
        for v in program.inputs
    }
    same(model, program.to_onnx(), feeds, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("version", "body", "complaint"),
    [
        (1, "y = Tile(x)", "Tile.* of an opset before 7 has no form at opset 7"),
        (26, "y = BitCast(x)", r"BitCast.*does not exist at opset 21"),
        (7, "y = BatchNormalization <spatial = 0> (x, x, x, x, x)", "spatial=0"),
    ],
)
def test_what_cannot_be_moved_is_named(version: int, body: str, complaint: str) -> None:
    program = amp.Program()
    program.info.opsets[""] = version
    x = program.add_input("x", "float32", [2])
    y = program.add_variable("y", "float32", [2])
    type_ = body.split("= ")[1].split("(")[0].split("<")[0].strip()
    inputs = [x] * (5 if type_ == "BatchNormalization" else 1)
    program.add_operator(type_, inputs, [y], attrs={"spatial": 0} if len(inputs) > 1 else None)
    with pytest.raises(GraphError, match=complaint):
        program.convert_opset()


@pytest.mark.parametrize("read", [True, False])
def test_statistics_of_an_old_batch_norm_that_somebody_wants_are_no_running_ones(read: bool) -> None:
    body = "y, m, v = BatchNormalization (x, a, a, a, a)" + ("  k = Neg(m)" if read else "  k = Neg(y)")
    text = f"""<ir_version: 8, opset_import: ["" : 9]>
    g (float[2, 3, 4] x, float[3] a) => (float[2, 3, 4] y, float[n] {"k" if read else "m"}) {{ {body} }}"""
    with pytest.raises(GraphError, match="training outputs"):
        amp.Program.from_onnx(onnx.parser.parse_model(text)).convert_opset()


NEWEST = onnx.defs.onnx_opset_version()


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        (99, rf"target is 99, and onnx .* knows operator sets up to {NEWEST}"),
        (6, "at least 7"),
        (20.5, "is 20.5; expected a whole number"),
        (None, "None; expected a whole"),
    ],
)
def test_what_is_no_opset_is_refused(target: Any, complaint: str) -> None:
    program = amp.Program.from_onnx(
        onnx.parser.parse_model(
            '<ir_version: 8, opset_import: ["" : 17]> net (float[3] x) => (float[3] y) { y = Neg(x) }'
        )
    )
    with pytest.raises(amp.AmpError, match=complaint):
        program.convert_opset(target)
    assert program.opset() == 17


@pytest.mark.parametrize("dtype", ["float", "float16", "bfloat16"])
@pytest.mark.parametrize("opset", range(NEWEST_OPSET - 1, NEWEST + 1))
def test_a_model_of_an_opset_that_onnxruntime_does_not_know_runs(opset: int, dtype: str) -> None:
    text = f'<ir_version: 10, opset_import: ["" : {opset}]> net ({dtype}[3] x) => ({dtype}[3] y) {{ y = Neg(x) }}'
    program = amp.Program.from_onnx(onnx.parser.parse_model(text))
    fed = np.array([1.5, -2, 0], numpy_dtype({"float": "float32"}.get(dtype, dtype)))
    (found,) = amp.Executor(amp.CPUPlace()).run(program, {"x": fed}, ["y"])
    assert found.tobytes() == (-fed).tobytes()
    assert program.opset() == opset  # the user's, which is written out


def test_an_operator_newer_than_onnxruntime_computes_by_its_parts() -> None:
    text = '<ir_version: 10, opset_import: ["" : 28]> net (float[3] a, float[3] b) => (float[3] y) { y = SwiGLU(a, b) }'
    program = amp.Program.from_onnx(onnx.parser.parse_model(text))
    a, b = np.array([-3, 0.5, 2], np.float32), np.array([1, -2, 0.25], np.float32)
    (found,) = amp.Executor(amp.CPUPlace()).run(program, {"a": a, "b": b}, ["y"])
    np.testing.assert_allclose(found, a / (1 + np.exp(-a)) * b, rtol=1e-6)


@pytest.mark.parametrize("opset", [24, 25, NEWEST])
@pytest.mark.parametrize("dtype", ["float", "float16", "bfloat16"])
def test_an_operator_whose_function_onnxruntime_has_outgrown_computes_by_its_parts(opset: int, dtype: str) -> None:
    """onnxruntime takes Swish apart at opset 24 alone, where its function was written, and has no kernel of it."""
    text = f'<ir_version: 10, opset_import: ["" : {opset}]> net ({dtype}[3] x) => ({dtype}[3] y) {{ y = Swish(x) }}'
    program = amp.Program.from_onnx(onnx.parser.parse_model(text))
    x = np.array([-3, 0.5, 2], numpy_dtype({"float": "float32"}.get(dtype, dtype)))
    (found,) = amp.Executor(amp.CPUPlace()).run(program, {"x": x}, ["y"])
    np.testing.assert_allclose(found.astype(np.float32), [-0.1422776, 0.3112297, 1.7615942], rtol=1e-2)


@pytest.mark.parametrize("opset", [22, NEWEST])
@pytest.mark.parametrize(
    "node",
    ["RandomUniformLike(x)", "Bernoulli(x)", "Multinomial(x)", "GlobalLpPool(image)", "RoiAlign(image, box, zero)"],
)
def test_an_operator_whose_kernel_ends_with_the_target_opset_computes(node: str, opset: int) -> None:
    """onnxruntime 1.31 registers none of opset 22 for it on CPU."""
    text = f"""<ir_version: 10, opset_import: ["" : {opset}]> net (float[1,4] x, float[1,1,4,4] image, float[1,4] box)
        => (y) <int64[1] zero = {{0}}> {{ y = {node} }}"""
    program = amp.Program.from_onnx(onnx.parser.parse_model(text))
    feed = {"x": np.ones((1, 4)), "image": np.full((1, 1, 4, 4), 0.25), "box": np.array([[0, 0, 2, 2]])}
    (found,) = amp.Executor(threads=1).run(program, {n: v.astype(np.float32) for n, v in feed.items()}, ["y"])
    assert np.isfinite(found).all() and program.opset() == opset
    if "image" in node:
        assert found.item() == (1.0 if node.startswith("Global") else 0.25)


@pytest.mark.parametrize("dtype", ["float", "float16", "bfloat16"])
def test_a_remainder_with_the_sign_of_its_divisor_computes_where_floats_have_none(dtype: str) -> None:
    """Opset 28 has it for floats; earlier ones, and onnxruntime until 1.31, refuse it when they run."""
    text = f'<ir_version: 10, opset_import: ["" : 28]> net ({dtype}[n] a, {dtype}[n] b) => ({dtype}[n] y) {{ y = Mod(a, b) }}'
    program = amp.Program.from_onnx(onnx.parser.parse_model(text))
    numbers = [0.0, -0.0, 1.5, -1.5, 4.25, -4.25, 7.0, -7.0, 3.5, np.inf, -np.inf, np.nan]
    a, b = (
        side.ravel().astype(numpy_dtype({"float": "float32"}.get(dtype, dtype)))
        for side in np.meshgrid(numbers, numbers)
    )
    (found,) = amp.Executor(amp.CPUPlace()).run(program, {"a": a, "b": b}, ["y"])
    with np.errstate(invalid="ignore"):
        wanted = np.mod(a.astype(np.float64), b.astype(np.float64))
    assert found.dtype == a.dtype
    np.testing.assert_array_equal(found.astype(np.float64), wanted)


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_space_to_depth_of_either_mode_computes(mode: str) -> None:
    text = f"""<ir_version: 10, opset_import: ["" : 28]>
        net (float[n, 3, 4, 6] x) => (float[n, 12, 2, 3] y) {{ y = SpaceToDepth <blocksize = 2, mode = "{mode}"> (x) }}"""
    program = amp.Program.from_onnx(onnx.parser.parse_model(text))
    x = np.arange(144, dtype=np.float32).reshape(2, 3, 4, 6)
    (found,) = amp.Executor(amp.CPUPlace()).run(program, {"x": x}, ["y"])
    order = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    np.testing.assert_array_equal(found, x.reshape(2, 3, 2, 2, 3, 2).transpose(order).reshape(2, 12, 2, 3))


def test_an_attribute_of_a_later_opset_that_says_what_is_so_without_it_is_left_out() -> None:
    text = """<ir_version: 10, opset_import: ["" : 24]>
        net (float[4] x) => (float[4] y) {{ h = Cast <to = 10, round_mode = "{mode}"> (x)  y = Cast <to = 1> (h) }}"""
    program = amp.Program.from_onnx(onnx.parser.parse_model(text.format(mode="up")))
    program.convert_opset(21)
    assert list(program.operators[0].attrs) == ["to"]
    other = amp.Program.from_onnx(onnx.parser.parse_model(text.format(mode="down")))
    with pytest.raises(GraphError, match="uses attribute 'round_mode' of opset 24"):
        other.convert_opset(21)


def test_a_program_stays_at_an_opset_that_no_earlier_one_can_express() -> None:
    text = """<ir_version: 10, opset_import: ["" : 28]>
        net (float16 a, float16 b, float16 c) => (float16[n] y) { y = Range <stash_type = 10> (a, b, c) }"""
    program = amp.Program.from_onnx(onnx.parser.parse_model(text))
    lowered = program.lower(amp.CPUPlace())
    assert [(each.domain, each.version) for each in lowered.model.opset_import] == [("", 28)]


def test_the_mask_of_an_old_dropout_has_a_size_and_is_left_out_where_nobody_reads_it() -> None:
    text = "{ d, m = Dropout <ratio = 0.3> (x)  y = Relu(d) }"
    model = onnx.parser.parse_model(f'<ir_version: 3, opset_import: ["" : 9]> m (float[4] x) => (float[4] y) {text}')
    assert amp.Program.from_onnx(model).cost_estimate(amp.CUDAPlace(0), {}).kernels == 2
    assert {op.type for op in amp.convert(model).operators} == {"Cast", "Relu"}
