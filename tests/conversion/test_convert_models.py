"""Whole models converted: trained ones on real inputs, traps, the onnx package's own, and exports where there are some."""

from __future__ import annotations

import json
import lzma
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.backend.test
import pytest

import amp_transpiler as amp
from amp_transpiler.lists import has_kernel
from amp_transpiler.passes.view.kernel_faults import leaves
from tests.helpers.converting import faithful, graphs, off, well_formed
from tests.helpers.onnx_goldens import FUNCTIONS, text
from tests.helpers.sessions import session
from tests.helpers.where import DATA, NO_DATA, ROOT, TRAPS

MODELS = DATA / "onnx_models"
PACKAGE = Path(onnx.backend.test.__file__).parent / "data"
TRAINED = ["silero_vad", "magika_v3_3", "ultraface_rfb320", "dtln_1", "gtcrn_simple", "mnist_cntk", "ppocr_cls"]
MODES = [("pure", "float16"), ("mixed", "float16"), ("pure", "bfloat16"), ("mixed", "bfloat16")]
#: Relative L2 error of whole models: what faithful 16-bit execution was seen to give, with room.
TOLERANCE = {"float16": 0.01, "bfloat16": 0.05}
#: The most casts of a conversion to float16, the model's own among them: at its ends, around states and lengths.
CASTS = {"magika_v3_3": 10, "gtcrn_simple": 8, "ppocr_cls": 2, "ultraface_rfb320": 4, "dtln_1": 4, "mnist_cntk": 2}
CASTS["silero_vad"] = 10
needs_models = pytest.mark.skipif(not MODELS.exists(), reason=NO_DATA)


@cache
def trained(name: str) -> onnx.ModelProto:
    return onnx.load_model_from_string(lzma.open(MODELS / f"{name}.onnx.xz").read())


@cache
def golden_input(name: str) -> dict[str, np.ndarray]:
    """The input that the golden outputs were computed from."""
    rng, feed = np.random.default_rng(0), {}
    for key, (dtype, shape) in json.loads((MODELS / "golden_spec.json").read_text())[name]["inputs"].items():
        if dtype == "int64":
            feed[key] = np.array(8000, np.int64)
        elif dtype == "int32":
            feed[key] = rng.integers(0, 256, shape, dtype=np.int32)
        else:
            feed[key] = rng.random(shape, dtype=np.float32)
    if name == "silero_vad":
        feed["input"] = (feed["input"] - np.float32(0.5)) * np.float32(0.2)
        feed["state"] = np.zeros_like(feed["state"])
    return feed


def worst(got: list[Any], wanted: list[Any]) -> float:
    return max([off(g, w) for g, w in zip(got, wanted, strict=True)], default=0.0)


def converts(model: onnx.ModelProto | str, mode: str, dtype: str, **options: Any) -> amp.Program:
    """The converted program, after everything that holds for any conversion has been checked."""
    before = model.SerializeToString(deterministic=True) if isinstance(model, onnx.ModelProto) else b""
    program = amp.convert(model, mode=mode, dtype=dtype, **options)
    converted = program.to_onnx()
    well_formed(converted, dtype)
    content = converted.SerializeToString(deterministic=True)
    assert (
        amp.convert(model, mode=mode, dtype=dtype, **options).to_onnx().SerializeToString(deterministic=True) == content
    )
    again = amp.convert(converted, mode=mode, dtype=dtype, **options).to_onnx().SerializeToString(deterministic=True)
    assert again == content, "a second conversion changes nothing"
    if isinstance(model, onnx.ModelProto):
        assert model.SerializeToString(deterministic=True) == before, "the model itself is never changed"
        assert list(converted.metadata_props) == list(model.metadata_props)
        for one, other in ((model.graph.input, converted.graph.input), (model.graph.output, converted.graph.output)):
            assert [i.name for i in one] == [i.name for i in other]
    return program


def lean(before: onnx.ModelProto, program: amp.Program, most: int) -> None:
    """A file has no more casts than it needs, and weights of half the size; a reason beside each operator is its own."""
    after = program.to_onnx()
    nodes = [node for graph in graphs(after.graph) for node in graph.node]
    assert sum(node.op_type == "Cast" for node in nodes) <= most
    weights = sum(map(weight_bytes, graphs(before.graph)))
    reasons = sum(len(entry.key) + len(entry.value) + 6 for node in nodes for entry in node.metadata_props)
    assert after.ByteSize() - reasons <= 0.55 * weights + (before.ByteSize() - weights)


def weight_bytes(graph: onnx.GraphProto) -> int:
    """The bytes of the float32 constants of a graph."""
    made = [a.t for node in graph.node if node.op_type == "Constant" for a in node.attribute if a.name == "value"]
    return sum(4 * int(np.prod(t.dims)) for t in (*graph.initializer, *made) if t.data_type == t.FLOAT)


# -- trained models ------------------------------------------------------------------------------------------
@needs_models
@pytest.mark.parametrize(("mode", "dtype"), MODES)
@pytest.mark.parametrize("name", TRAINED)
def test_trained_models_keep_their_golden_values(name: str, mode: str, dtype: str) -> None:
    golden, spec = np.load(MODELS / "golden.npz"), json.loads((MODELS / "golden_spec.json").read_text())[name]
    program = converts(trained(name), mode, dtype)
    if (mode, dtype) == ("pure", "float16"):
        lean(trained(name), program, CASTS[name])
    for index, got in enumerate(faithful(program, golden_input(name))):
        step = spec["outputs"][index][2]
        assert off(got.reshape(-1)[::step], golden[f"{name}|{index}"]) <= TOLERANCE[dtype]


@needs_models
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", TRAINED)
def test_what_is_16_bit_has_a_cuda_kernel_and_nothing_leaves_cuda(name: str, dtype: str) -> None:
    before = amp.Program.from_onnx(trained(name))
    after = amp.convert(trained(name), dtype=dtype)
    for op in after.walk():
        if op.precision == dtype and op.type not in ("Constant", "If"):
            body = op.type == "Clip" and dtype == "bfloat16"  # a function in its schema, which onnxruntime inlines
            assert body or has_kernel("CUDAExecutionProvider", op.type, dtype, after.opset()), op.label
    leaving = [{op.type for op in program.walk() if leaves(op, "cuda")} for program in (before, after)]
    assert leaving[1] <= leaving[0]


@needs_models
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", TRAINED)
def test_auto_mode_on_trained_models(name: str, dtype: str) -> None:
    program = amp.convert(trained(name), mode="auto", dtype=dtype, calibration=golden_input(name))
    well_formed(program.to_onnx(), dtype)
    assert max(program.conversion.outputs.values()) <= program.conversion.tolerance
    assert len(program.conversion.rounds) <= 9


@needs_models
@pytest.mark.parametrize(("mode", "dtype"), MODES)
def test_digits_are_read_the_same(mode: str, dtype: str) -> None:
    raw = lzma.decompress((DATA / "mnist" / "t10k-images-idx3-ubyte.xz").read_bytes())
    images = np.frombuffer(raw, np.uint8, offset=16).reshape(-1, 1, 1, 28, 28)[:200].astype(np.float32)
    program, full = amp.convert(trained("mnist_cntk"), mode=mode, dtype=dtype), session(trained("mnist_cntk"))
    executor = amp.Executor(amp.CPUPlace(), threads=1)
    name = program.outputs[0].name
    same = [
        int(executor.run(program, feed={"Input3": x}, fetch_list=[name])[0].argmax())
        == int(full.run(None, {"Input3": x})[0].argmax())
        for x in images
    ]
    assert np.mean(same) >= {"float16": 1.0, "bfloat16": 0.99}[dtype]


@needs_models
@pytest.mark.parametrize(("mode", "dtype"), MODES)
def test_files_are_told_apart_the_same(mode: str, dtype: str) -> None:
    files = [
        *sorted((ROOT / "amp_transpiler" / "ir").glob("*.py"))[:6],
        ROOT / "README.md",
        ROOT / "pyproject.toml",
        ROOT / "LICENSE",
        ROOT / "Makefile",
    ]
    batch = np.concatenate([_ends(path.read_bytes()) for path in files])
    full = session(trained("magika_v3_3")).run(None, {"bytes": batch})[0].argmax(-1)
    half = faithful(amp.convert(trained("magika_v3_3"), mode=mode, dtype=dtype), {"bytes": batch})[0].argmax(-1)
    assert half.tolist() == full.tolist() and len(set(full.tolist())) > 2


def _ends(content: bytes) -> np.ndarray:
    """What magika looks at: the first and the last 1024 bytes, padded with 256."""
    first, last = content.lstrip()[:1024], content.rstrip()[-1024:]
    return np.array([[*first, *[256] * (1024 - len(first)), *[256] * (1024 - len(last)), *last]], np.int32)


@needs_models
@pytest.mark.parametrize(("mode", "dtype"), MODES)
def test_faces_are_sought_in_the_same_places(mode: str, dtype: str) -> None:
    from sklearn.datasets import load_sample_images

    program, full = (
        amp.convert(trained("ultraface_rfb320"), mode=mode, dtype=dtype),
        session(trained("ultraface_rfb320")),
    )
    for photo in load_sample_images().images:
        rows, columns = (
            np.linspace(0, size - 1, count).astype(int) for size, count in zip(photo.shape, (240, 320), strict=False)
        )
        image = ((photo[rows][:, columns].astype(np.float32) - 127) / 128).transpose(2, 0, 1)[None]
        (scores, boxes), (half_scores, half_boxes) = (
            full.run(None, {"input": image}),
            faithful(program, {"input": image}),
        )
        clear = np.abs(scores[0, :, 1] - 0.5) > {"float16": 0.0, "bfloat16": 0.1}[dtype]
        assert np.array_equal(scores[0, clear, 1] > 0.5, half_scores[0, clear, 1] > 0.5)
        assert off(half_boxes, boxes) <= TOLERANCE[dtype] and off(half_scores, scores) <= TOLERANCE[dtype]


# -- traps -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("mode", "dtype"), [*MODES, ("auto", "float16"), ("auto", "bfloat16")])
@pytest.mark.parametrize("path", sorted(TRAPS.glob("*.onnx")), ids=lambda path: path.stem.split("_")[0])
def test_traps(path: Path, mode: str, dtype: str) -> None:
    feed = dict(np.load(path.with_suffix(".npz")))
    options = {"calibration": feed} if mode == "auto" else {}
    program = converts(str(path), mode, dtype, **options)
    assert worst(faithful(program, feed), session(str(path)).run(None, feed)) <= TOLERANCE[dtype]


# -- the onnx package's own ----------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("folder", ["simple", "pytorch-converted", "pytorch-operator"])
def test_models_of_the_onnx_package(folder: str, dtype: str) -> None:
    paths = sorted((PACKAGE / folder).glob("*/model.onnx"))
    assert paths
    for number, path in enumerate(paths):
        model = onnx.load(path)
        try:
            full = session(model)
            feed = {
                i.name: _proto(path.parent / "test_data_set_0" / f"input_{n}.pb")
                for n, i in enumerate(full.get_inputs())
            }
            wanted = full.run(None, feed)
        except Exception:  # onnxruntime's errors have no common base; what it cannot run cannot be compared
            continue
        mode = ("pure", "mixed", "auto")[number % 3]
        program = amp.convert(model, mode=mode, dtype=dtype)
        well_formed(program.to_onnx(), dtype)
        if program.opset() < 7:  # operators that broadcast by other rules convert, but our CPU lowering refuses them
            continue
        error = worst(faithful(program, feed), wanted)
        assert error <= 4 * TOLERANCE[dtype], f"{path.parent.name} in {mode} {dtype}: off by {error:.3g}"


def _proto(path: Path) -> Any:
    tensor = onnx.TensorProto()
    try:
        tensor.ParseFromString(path.read_bytes())
        return onnx.numpy_helper.to_array(tensor)
    except Exception:  # a sequence
        sequence = onnx.SequenceProto()
        sequence.ParseFromString(path.read_bytes())
        return onnx.numpy_helper.to_list(sequence)


@pytest.mark.parametrize("path", sorted((PACKAGE / "light").glob("*.onnx")), ids=lambda path: path.stem)
def test_light_models_of_the_onnx_package(path: Path) -> None:
    model = onnx.load(path)
    for mode in ("pure", "mixed"):
        well_formed(amp.convert(model, mode=mode).to_onnx(), "float16", loads=mode == "mixed")


@cache
def light(name: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray], list[Any]]:
    """A model of the package, an input, and what the model makes of it."""
    model = onnx.load(PACKAGE / "light" / f"{name}.onnx")
    full = session(model)
    given = {i.name for i in model.graph.initializer}
    rng = np.random.default_rng(0)
    feed = {
        i.name: rng.random([d if isinstance(d, int) else 1 for d in i.shape], dtype=np.float32)
        for i in full.get_inputs()
        if i.name not in given
    }
    return model, feed, full.run(None, feed)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("light_squeezenet", "pure"),
        ("light_squeezenet", "mixed"),
        ("light_squeezenet", "auto"),
        ("light_inception_v1", "mixed"),
        ("light_shufflenet", "auto"),
    ],
)
def test_activations_beyond_the_format_on_the_data_stay_fp32(name: str, mode: str) -> None:
    """The dummy weights of the first two bring activations to 9e9 and beyond."""
    model, feed, full = light(name)
    program = amp.convert(model, mode=mode, calibration=feed)
    well_formed(program.to_onnx(), "float16")
    assert worst(faithful(program, feed), full) <= TOLERANCE["float16"]
    kept = [op for op in program.walk() if op.reason.startswith("fp32: measured")]
    assert bool(kept) == (name != "light_shufflenet")


# -- model functions -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("mode", "dtype"), MODES)
def test_functions_are_inlined(mode: str, dtype: str) -> None:
    model = text(FUNCTIONS)
    program = converts(model, mode, dtype)
    assert not program.to_onnx().functions
    rng, feed = np.random.default_rng(0), {}
    for given in session(model).get_inputs():
        value = rng.standard_normal([d if isinstance(d, int) else 3 for d in given.shape])
        feed[given.name] = np.asarray(value > 0 if given.type == "tensor(bool)" else np.float32(value))
    assert worst(faithful(program, feed), session(model).run(None, feed)) <= TOLERANCE[dtype]


def test_functions_that_cannot_be_inlined_stay_and_are_noted() -> None:
    model = text(FUNCTIONS)
    model.functions[0].opset_import[0].version = 12
    model.functions[0].node.add(op_type="Squeeze", input=["p"], output=["squeezed"])  # has another form from 13 on
    program = amp.convert(model)
    assert list(program.to_onnx().functions) == list(model.functions)
    assert "functions stay as they are" in program.conversion.notes[0]
    assert {op.precision for op in program.operators if op.domain == "local"} == {"float32"}


# -- exports -----------------------------------------------------------------------------------------------------
def test_exports(export: Path, subtests: Any) -> None:
    full = session(str(export))
    data = np.load(export.with_suffix(".npz"))
    feed = {i.name: data[i.name] for i in full.get_inputs()}
    wanted = full.run(None, feed)
    for mode, dtype in MODES:
        with subtests.test(mode=mode, dtype=dtype):
            program = converts(str(export), mode, dtype)
            assert worst(faithful(program, feed), wanted) <= TOLERANCE[dtype]
            if (mode, dtype) == ("pure", "float16"):
                lean(onnx.load(export), program, 8)
