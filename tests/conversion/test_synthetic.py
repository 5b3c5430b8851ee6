"""A sample that is made up has sizes that the model runs on, where unknown ones of 1 are too small."""

from __future__ import annotations

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.conversion.synthetic import synthetic_sample
from amp_transpiler.errors import AmpError
from amp_transpiler.ir.weights import become_constants
from tests.helpers.converting import HEAD, filled

RUNS = {
    "a pixel will do": ("m (float[N,3,H,W] x) => (float[N,3,H,W] y) { y = Relu(x) }", {"x": (1, 3, 1, 1)}),
    "an image": (
        "m (float[N,3,H,W] x) => (float[N,8,A,B] y) <float[8,3,7,7] w> { y = Conv(x, w) }",
        {"x": (1, 3, 64, 64)},
    ),
    "one pixel runs, and is no image": (
        "m (float[N,H,W,3] x) => (float[N,8,A,B] y) <float[8,3,3,3] w>"
        " { t = Transpose<perm = [0, 3, 1, 2]>(x) y = Conv<pads = [1, 1, 1, 1]>(t, w) }",
        {"x": (1, 64, 64, 3)},
    ),
    "a line of text": (
        "m (float[N,3,H,W] x) => (float[N,W,B] y) <float[4,3,4,4] w, float[4,4,8,1] v, int64[1] two = {2}>"
        " { c = Conv<strides = [4, 4]>(x, w) h = Conv(c, v) y = Squeeze(h, two) }",
        {"x": (1, 3, 32, 32)},
    ),
    "only one pixel runs": (
        "m (float[N,3,H,W] x) => (float[1,8] y) <float[8,3,1,1] w, int64[2] s = {1, 8}>"
        " { c = Conv(x, w) y = Reshape(c, s) }",
        {"x": (1, 3, 1, 1)},
    ),
    "a sound, and a state of its batch": (
        "m (float[N,S] x, float[2,N,4] h) => (float[N,1,T] y, float[2,N,4] g) <float[1,1,512] w, int64[1] one = {1}>"
        " { u = Unsqueeze(x, one) y = Conv(u, w) g = Neg(h) }",
        {"x": (1, 1024), "h": (2, 1, 4)},
    ),
    "a sound of one frame, and a state whose batch has no name": (
        "m (float[?,?] x, float[2,?,4] h) => (float[A,1,4] y, float[2,B,4] g)"
        " <float[1,1,256] w, int64[1] one = {1}, float[1,4] v, int64[3] whole = {2, 1, 4}>"
        " { u = Unsqueeze(x, one) c = Conv(u, w) y = MatMul(c, v) s = Neg(h) g = Reshape(s, whole) }",
        {"x": (1, 256), "h": (2, 1, 4)},
    ),
    "one token is padding": (
        "m (int64[N,L] ids) => (float[N,L,4] y) <float[2,4] w, float[2,1] seen = {0.0, 1.0}>"
        " { t = Mul(w, seen) y = Gather(t, ids) }",
        {"ids": (1, 64)},
    ),
    "heads of a cache": (
        "m (float[N,S,32] q, float[N,S,16] k, float[N,S,16] v, float[N,G,P,D] keys, float[N,G,P,D] values)"
        " => (float[N,S,32] y, float[N,G,T,D] a, float[N,G,T,D] b) <int32[1] last = {0}, int32[1] all = {1}>"
        " { y, a, b = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2>"
        "(q, k, v, keys, values, last, all) }",
        {"q": (1, 1, 32), "k": (1, 1, 16), "v": (1, 1, 16), "keys": (1, 2, 1, 8), "values": (1, 2, 1, 8)},
    ),
    "a loop turns once": (
        "m (float[2] x, int64 n) => (float[K,2] y) { c = Constant<value_int = 1>() b = Cast<to = 9>(c)"
        " h, y = Loop(n, b, x) <body = body (int64 i, bool go, float[2] a) => (bool gone, float[2] b, float[2] z)"
        " { gone = Identity(go) b = Neg(a) z = Exp(a) }> }",
        {"x": (2,), "n": ()},
    ),
    "features of a recurrent layer": (
        "m (float[T,F] x) => (float[T,A,B,4] y) <float[1,4,20] w, float[1,4,4] r, int64[1] one = {1}>"
        " { u = Unsqueeze(x, one) y = RNN<hidden_size = 4>(u, w, r) }",
        {"x": (1, 20)},
    ),
    "features of a layer": ("m (float[N,F] x) => (float[N,4] y) <float[20,4] w> { y = MatMul(x, w) }", {"x": (1, 20)}),
    "a batch of one sample is too small": (
        "m (float[N,3] x) => (float[M,3] y) <int64[1] a = {8}, int64[1] b = {40}, int64[1] c = {0}, float[32,3] d>"
        " { s = Slice(x, a, b, c) y = Add(s, d) }",
        {"x": (64, 3)},
    ),
}


def made_up(text: str) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    program = amp.Program.from_onnx(filled(text))
    become_constants(program)
    return synthetic_sample(program)


@pytest.mark.parametrize("name", RUNS)
def test_sizes_that_the_model_runs_on(name: str) -> None:
    text, shapes = RUNS[name]
    sample, outputs = made_up(text)
    assert {key: value.shape for key, value in sample.items()} == shapes
    verdict = amp.convert(filled(text), check=True).conversion.verdict
    assert verdict is not None and verdict.met and len(verdict.errors) == len(outputs)


def test_names_of_sizes_compute() -> None:
    model = filled(
        "m (float[N,past,4] p, float[N,s,4] x, float[N,sum] m, float[twice] d, float[N,other] o)"
        " => (float[N,A,4] y, float[B] e, float[N,other] f)"
        " <int64[1] two = {2}> { k = Concat<axis = 1>(p, x) u = Unsqueeze(m, two) y = Mul(k, u) e = Neg(d) f = Neg(o) }"
    )
    names = {"sum": "past + s", "twice": "2*past", "other": "past, or s"}
    for size in (
        size for put in model.graph.input for size in put.type.tensor_type.shape.dim if size.dim_param in names
    ):
        size.dim_param = names[size.dim_param]
    sample, _ = synthetic_sample(amp.Program.from_onnx(model))
    assert {name: value.shape for name, value in sample.items()} == {
        **{"p": (1, 1, 4), "x": (1, 1, 4), "m": (1, 2), "d": (2,), "o": (1, 1)}
    }


def test_where_no_size_fits_the_first_failure_is_told() -> None:
    text = (
        HEAD + "m (float[N] x) => (float[576] y) <float[576] w, int64[1] s = {576}> { r = Reshape(x, s) y = Add(r, w) }"
    )
    with pytest.raises(AmpError, match=r"\{1\}"):
        made_up(text)


def test_logarithms_and_roots_of_what_is_fed_get_shares() -> None:
    """Numbers around 0 made NaN of all, and the check ended there."""
    sample, outputs = made_up("m (float[4] x) => (float[4] y) { l = Log(x) n = Neg(l) s = Sqrt(n) y = Log(s) }")
    assert ((sample["x"] > 0) & (sample["x"] < 1)).all() and np.isfinite(outputs[0]).all()
