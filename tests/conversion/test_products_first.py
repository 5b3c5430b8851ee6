"""Products with a matrix are written so that onnxruntime's CPU provider takes the 16-bit file."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest

import amp_transpiler as amp
from tests.helpers.converting import filled

ROWS = "m (float[S,N,16] x) => (float[n,s,4] y) <float[16,8] w, float[8,4] v>"


def types(text: str, **options: Any) -> list[str]:
    return [op.type for op in amp.convert(filled(text), **options).walk() if op.type != "Cast"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            "t = Transpose<perm=[1,0,2]>(x) a = MatMul(t, w) b = Relu(a) y = MatMul(b, v)",
            "MatMul Transpose Relu MatMul",
        ),
        ("t = Transpose<perm=[1,0,2]>(x) a = MatMul(t, w) y = MatMul(a, v)", "MatMul MatMul Transpose"),
    ],
)
def test_the_product_comes_first(body: str, expected: str) -> None:
    """As a linear layer behind a recurrent one: onnxruntime would end this process."""
    model = filled(f"{ROWS} {{ {body} }}")
    program = amp.convert(model)
    assert [op.type for op in program.walk() if op.type != "Cast"] == expected.split()
    x = np.random.default_rng(0).random((3, 2, 16), np.float32)
    outputs = []
    for each in (model, program.to_onnx()):
        session = onnxruntime.InferenceSession(each.SerializeToString(), providers=["CPUExecutionProvider"])
        outputs.append(session.run(None, {"x": x})[0])
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=2e-3)


@pytest.mark.parametrize("sizes", [(16, 3, 2), (16, 3, 2, 5)])
def test_channels_of_one_image_before_a_product(sizes: tuple[int, ...]) -> None:
    """No product comes before what makes the first axis the last; onnxruntime would end this process here too."""
    order, rank = [*range(1, len(sizes)), 0], len(sizes)
    shape, made = (", ".join(f"{letter}{i}" for i in range(rank)) for letter in "ds")
    model = filled(f"""m (float[{shape}] x) => (float[{made}] y) <float[16,8] w>
        {{ t = Transpose<perm={order}>(x) y = MatMul(t, w) }}""")
    program = amp.convert(model)
    assert [op.type for op in program.walk() if op.type != "Cast"] == ["Transpose", "MatMul"]
    x = np.random.default_rng(0).random(sizes, np.float32)
    outputs = []
    for each in (model, program.to_onnx()):
        session = onnxruntime.InferenceSession(each.SerializeToString(), providers=["CPUExecutionProvider"])
        outputs.append(session.run(None, {"x": x})[0])
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=2e-3)


def test_a_transposition_that_others_read_stays_for_them() -> None:
    text = "m (float[S,N,16] x) => (float[n,s,8] y, float[n,s,16] z) <float[16,8] w>"
    body = "{ t = Transpose<perm=[1,0,2]>(x) y = MatMul(t, w) z = Relu(t) }"
    assert sorted(types(f"{text} {body}")) == ["MatMul", "Relu", "Transpose", "Transpose"]


@pytest.mark.parametrize(
    ("body", "options"),
    [
        ("t = Transpose<perm=[1,0,2]>(x) a = MatMul(t, w) y = MatMul(a, v)", {"dtype": "bfloat16"}),
        ("t = Transpose<perm=[1,0,2]>(x) a = MatMul(t, w) y = MatMul(a, v)", {"black_varnames": ["t"]}),
        ("t = Transpose<perm=[0,1,2]>(x) a = MatMul(t, w) y = MatMul(a, v)", {}),
    ],
)
def test_what_is_left_as_it_is(body: str, options: dict[str, Any]) -> None:
    assert types(f"{ROWS} {{ {body} }}", **options)[0] == "Transpose"
