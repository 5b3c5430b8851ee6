"""Paddle's spelling: the table, the mechanism, and the names and keywords that Paddle's documentation uses."""

from __future__ import annotations

from typing import Any

import pytest

import amp_transpiler as amp
from amp_transpiler.errors import ArgumentError, ArgumentTypeError, ListError, MissingNameError
from amp_transpiler.lists import paddle

TABLE = """
[arguments.layer]
input = "x"
use_cudnn = {unused = "speed alone"}
data_format = {takes = ["NCHW"], otherwise = "transpose first"}
seed = {otherwise = "call amp.seed"}

[names."amp_transpiler"]
Other = "Program"
number = {value = 3}
nothing = {otherwise = "use amp.data"}
"""


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = paddle.parse_names(TABLE)
    monkeypatch.setattr(paddle, "paddle_names", lambda: parsed)
    monkeypatch.setattr(paddle, "carried", set())


@pytest.fixture
def layer(table: None) -> Any:
    @paddle.paddle_arguments("layer")
    def layer(x: int, size: int = 1) -> tuple[int, int]:
        return x, size

    return layer


def test_another_name_is_the_same_argument(layer: Any) -> None:
    assert layer(3) == layer(x=3) == layer(input=3) == layer(size=1, input=3, use_cudnn=True) == (3, 1)
    assert layer(3, data_format="NCHW", seed=None) == (3, 1)


@pytest.mark.parametrize("args, kwargs, error, said", [
    ((3,), {"input": 3}, ArgumentTypeError, "layer: 'input' is another name of 'x', which is given as well"),
    ((), {"x": 3, "input": 3}, ArgumentTypeError, "'input' is another name of 'x'"),
    ((3,), {"data_format": "NHWC"}, ArgumentError, "layer: data_format='NHWC' is Paddle's, and not offered: transpose first"),
    ((3,), {"seed": 0}, ArgumentError, "call amp.seed"),
    ((3,), {"sise": 3}, TypeError, "sise"),
])  # fmt: skip
def test_what_is_not_taken_says_why(layer: Any, args: Any, kwargs: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        layer(*args, **kwargs)


def test_a_class_takes_them_too(table: None) -> None:
    class Base:
        def __init__(self, x: int) -> None:
            self.x = x

    @paddle.paddle_arguments("layer")
    class Layer(Base):
        pass

    assert Layer(input=4).x == 4  # type: ignore[call-arg]
    with pytest.raises(ArgumentError, match="^Layer: seed=1"):
        Layer(4, seed=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="input"):
        Base(input=4)  # type: ignore[call-arg]


def test_a_modules_names(table: None) -> None:
    attribute = paddle.paddle_attributes("amp_transpiler")
    assert attribute("Other") is amp.Program and attribute("number") == 3
    with pytest.raises(MissingNameError, match="'amp_transpiler' has no attribute 'nothing': use amp.data"):
        attribute("nothing")
    with pytest.raises(AttributeError, match="has no attribute 'whatever'$"):
        attribute("whatever")


@pytest.mark.parametrize("text", ["[arguments.a]\nx = 3", "[arguments.a]\nx = {takes = [1]}", "[other.a]\nx = 'y'"])
def test_a_broken_table_is_refused(text: str) -> None:
    with pytest.raises(ListError, match="paddle_names.toml"):
        paddle.parse_names(text)


def test_a_table_that_does_not_fit_its_function_is_refused(table: None) -> None:
    with pytest.raises(ListError, match="no table arguments.layre"):
        paddle.paddle_arguments("layre")(lambda x: x)
    for function in (lambda y: y, lambda x, input: x):
        with pytest.raises(ListError, match="does not have argument 'x', or has Paddle's itself"):
            paddle.paddle_arguments("layer")(function)


# -- the table of this package -------------------------------------------------------------------------------
def test_every_table_is_carried_by_something_and_every_name_leads_somewhere() -> None:
    tables = paddle.paddle_names()
    assert set(tables["arguments"]) == paddle.carried
    for module, names in tables["names"].items():
        attribute = paddle.paddle_attributes(module)
        for name, entry in names.items():
            if isinstance(entry, str) or "value" in entry:
                assert attribute(name) is not None
            else:
                with pytest.raises(MissingNameError, match="(?s): .{10}"):
                    attribute(name)
