"""A conversion with hand-made measurements, for the tests of reports."""

import math

import amp_transpiler as amp
from amp_transpiler.conversion.report.record import Conversion, CutRecord, RangeRecord, record_program
from amp_transpiler.conversion.verdict import Verdict
from amp_transpiler.passes.numerics.constraints import ConstantNote
from tests.helpers import golden

SMALL = """g (float[2, 4] x, bool c) => (float[2, 4] y, float[N, 2] z)
<float[4, 4] w = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, float[4] unused_scale = {1, 1, 1, 1}> {
    h = MatMul (x, w)
    r = Relu (h)
    e = Exp (r)
    q = If (c) <
        then_branch = inside () => (float[2, 4] t) { t = MatMul (e, w) },
        else_branch = other () => (float[2, 4] f) { k = Constant <value = float[4] {1, 2, 3, 4}> () f = Add (e, k) }
    >
    y = Softmax (q)
    i = NonZero (r)
    s = Transpose (i)
    z = Cast <to = 1> (s)
}"""


def conversion(model=None, mode="mixed", **fields) -> Conversion:
    """What a conversion of the model leaves, with hand-made measurements."""
    model = golden.model(SMALL) if model is None else model
    before = record_program(amp.Program.from_onnx(model))
    after = record_program(amp.convert(model, mode=mode))
    return Conversion("model.onnx", mode, "float16", before, after, **fields)


def measured() -> dict:
    return dict(
        cut=CutRecord(3, 1_234_567, 2_345_678, 3_456_789, True),
        constants=(ConstantNote("w", "overflow", 2, 16, -math.inf, "kept in fp32"),),
        ranges=(
            RangeRecord("h", 3e5, 1e-9, 2e-4, 0.5, True),
            RangeRecord("r", math.inf, 1e-3, math.nan, math.nan, False),
        ),
        verdict=Verdict({"y": 1e-3, "z": math.nan}, tolerance=1e-2),
        rounds=("run 1: 'h' overflows",),
        notes=("nothing was measured of 'z'",),
    )
