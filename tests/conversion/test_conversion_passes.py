"""A conversion is a list of passes: by their text it gives the bytes of ``amp.convert``, and each keeps its word."""

from __future__ import annotations

from typing import Any

import pytest

import amp_transpiler as amp
from amp_transpiler.conversion.conversion_options import OPTIONS, ConversionOptions
from amp_transpiler.conversion.converting import conversion
from amp_transpiler.errors import ArgumentError, GraphError
from amp_transpiler.passes.pipeline import Context, Pipeline, Property, apply
from tests.helpers.exported import exported, samples

STEPS = (
    "freeze-weights,try-inline-functions,dense-constants,widen-other,fold-constants,fold-channels,raise-opset,invert-triangles,write-norms,write-hard-swishes,write-fused,write-lacking,products-first,around-faults,"
    "rescale-factors,constraints,partition,narrow-io"
)
ASKED: dict[str, dict[str, Any]] = {
    "options": {},
    "options{mode=mixed dtype=bfloat16}": {"mode": "mixed", "dtype": "bfloat16"},
    "options{mode=auto keep-io=false}": {"mode": "auto", "keep_io": False},
    "options{black-list=Relu,Softmax black-varnames=logits numeric-guards=false}": {
        "black_list": ["Relu", "Softmax"],
        "black_varnames": ["logits"],
        "numeric_guards": False,
    },
    r'options{exclude="re:.*(conv2d|Softmax).{0\\,9}"}': {"exclude": ["re:.*(conv2d|Softmax).{0,9}"]},
}


def test_the_passes_of_convert() -> None:
    assert str(conversion(ConversionOptions())) == f"options,{STEPS}"
    assert str(conversion(ConversionOptions(calibration=[]))) == f"options,{STEPS}".replace(
        "constraints,partition", "search"
    )


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", ["cnn_dynamo", "encoder_torchscript"])
def test_a_conversion_by_text_gives_the_bytes_of_convert(name: str, asked: str) -> None:
    program = amp.Program.from_onnx(exported(name))
    ran = Pipeline(f"{asked},{STEPS}").run(program)
    expected = amp.convert(exported(name), **ASKED[asked])
    assert program.to_onnx() == expected.to_onnx()
    assert ran.notes == expected.conversion.notes and ran["assignment"].free == expected.conversion.cut.free


def test_a_search_by_text_gives_the_bytes_of_convert() -> None:
    images = {"image": samples("cnn_dynamo", 4)["image"]}
    options: dict[str, Any] = {"mode": "auto", "calibration": images, "tolerance": 1e-4}
    program = amp.Program.from_onnx(exported("cnn_dynamo"))
    asked = ConversionOptions(**options)
    ran = Pipeline(str(conversion(asked))).run(program, options=asked)
    expected = amp.convert(exported("cnn_dynamo"), **options)
    assert program.to_onnx() == expected.to_onnx()
    assert tuple(ran["searched"].rounds) == expected.conversion.rounds


@pytest.mark.parametrize("mode", ["pure", "mixed", "auto"])
@pytest.mark.parametrize("name", ["cnn_torchscript", "encoder_dynamo"])
def test_passes_keep_what_they_guarantee_and_change_nothing_twice(name: str, mode: str) -> None:
    program = amp.Program.from_onnx(exported(name))
    pipeline, context = conversion(ConversionOptions(mode=mode)), Context({OPTIONS: ConversionOptions(mode=mode)})
    changed = []
    for each in pipeline:
        before = {p for p in Property if p.holds(program)}
        changed += [step.name for step, did in apply([each], program, context) if did]
        program.verify()
        kept = (before - set(each.invalidates)) | {p for p in each.guarantees if isinstance(p, Property)}
        assert all(p.holds(program) for p in kept), each
    folds = ["fold-constants"] * (name == "cnn_torchscript")  # its flattened shape
    assert changed == ["freeze-weights", *folds, "partition"]
    again = Pipeline(str(pipeline)).run(program, options=ConversionOptions(mode=mode))
    assert not any(did for _, did in again.changes)


def test_options_are_said_once() -> None:
    program = amp.Program.from_onnx(exported("cnn_torchscript"))
    with pytest.raises(ArgumentError, match=r"leave options\{mode=mixed\} bare"):
        Pipeline("options{mode=mixed}").run(program, options=ConversionOptions())
    with pytest.raises(GraphError, match="partition needs `options`.*put options before it"):
        Pipeline("freeze-weights,partition").run(program)
    with pytest.raises(GraphError, match="constraints needs known weights are constants.*put freeze-weights before it"):
        Pipeline("options,constraints").run(program)
