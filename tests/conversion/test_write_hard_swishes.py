"""A hard swish that is written out with a Clip is converted as two operators in place of four."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from tests.helpers.converting import faithful, off
from tests.helpers.sessions import session
from tests.passes.test_fuse_hard_swish import HEAD, OTHERS, SWISHES, X

CLIPPED = [name for name, body in SWISHES.items() if "Clip" in body]


def model_of(body: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEAD + body)


def types(program: amp.Program) -> list[str]:
    return [op.type for op in program.operators if op.type != "Cast"]


@pytest.mark.parametrize("name", CLIPPED)
def test_it_is_a_product_with_a_hard_sigmoid(name: str) -> None:
    model = model_of(SWISHES[name])
    program = amp.convert(model)
    assert types(program) == ["HardSigmoid", "Mul"]
    (expected,) = session(model).run(None, {"x": X})
    assert off(faithful(program, {"x": X})[0], expected) < 1e-3


@pytest.mark.parametrize("name", [name for name, body in OTHERS.items() if "Clip" in body])
def test_what_only_looks_like_one_stays(name: str) -> None:
    assert "Clip" in types(amp.convert(model_of(OTHERS[name])))


@pytest.mark.parametrize(
    "options",
    [
        {"black_list": ["HardSigmoid"]},
        {"black_list": ["Clip"]},
        {"black_varnames": ["a"]},
        {"exclude": ["re:.*c"]},
        {"black_list": ["Add"]},
    ],
)
def test_where_it_stays_as_it_is(options: dict[str, object]) -> None:
    program = amp.convert(model_of(SWISHES[CLIPPED[0]]), **options)  # type: ignore[arg-type]
    assert types(program) == ["Add", "Clip", "Mul", "Div"]


def test_both_are_the_same_at_every_number() -> None:
    """In fp32, from where the gate is shut to where it is open."""
    model = model_of(SWISHES[CLIPPED[0]])
    x = np.linspace(-4, 4, 4096, dtype=np.float32).reshape(-1, 8)
    other = model_of(SWISHES["by a hard sigmoid"])
    one, two = (session(each).run(None, {"x": x})[0] for each in (model, other))
    np.testing.assert_allclose(one, two, atol=1e-6)
