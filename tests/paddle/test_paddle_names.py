"""Paddle's spelling: the table, the mechanism, and the names and keywords that Paddle's documentation uses."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
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


@pytest.mark.parametrize(
    "args, kwargs, error, said",
    [
        ((3,), {"input": 3}, ArgumentTypeError, "layer: 'input' is another name of 'x', which is given as well"),
        ((), {"x": 3, "input": 3}, ArgumentTypeError, "'input' is another name of 'x'"),
        (
            (3,),
            {"data_format": "NHWC"},
            ArgumentError,
            "layer: data_format='NHWC' is Paddle's, and not offered: transpose first",
        ),
        ((3,), {"seed": 0}, ArgumentError, "call amp.seed"),
        ((3,), {"sise": 3}, TypeError, "sise"),
    ],
)
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


@pytest.mark.parametrize("function", [lambda y: y, lambda x, input: x])
def test_a_function_without_the_arguments_of_its_table_is_refused(function: Any, table: None) -> None:
    with pytest.raises(ListError, match="does not have argument 'x', or has Paddle's itself"):
        paddle.paddle_arguments("layer")(function)


# -- the table of this package -------------------------------------------------------------------------------
def test_every_table_is_carried_by_something_and_every_name_leads_somewhere() -> None:
    tables = paddle.paddle_names()
    assert amp.convert is not None, "loaded when it is asked for"
    assert set(tables["arguments"]) == paddle.carried
    for module, names in tables["names"].items():
        attribute = paddle.paddle_attributes(module)
        for name, entry in names.items():
            if isinstance(entry, str) or "value" in entry:
                assert attribute(name) is not None
            else:
                with pytest.raises(MissingNameError, match="(?s): .{10}"):
                    attribute(name)


def test_conversion_takes_the_words_of_onnxconverter_common() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[8] x) => (float[8] y) { [a] t = Exp(x) [b] y = Neg(t) }'
    )
    ours = amp.convert(model, keep_io=False, black_list=["Exp"], exclude=["b"])
    theirs: dict[str, Any] = {"keep_io_types": False, "op_block_list": ["Exp"], "node_block_list": ["b"]}
    assert amp.convert(model, **theirs).to_onnx() == ours.to_onnx()
    for name in theirs:
        assert amp.convert(model, **{k: v for k, v in theirs.items() if k != name}).to_onnx() != ours.to_onnx()


def test_an_argument_that_there_is_not_names_those_that_there_are(layer: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="^layer: there is no argument 'sise'; the arguments are x, size$"):
        layer(3, sise=3)


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: amp.optimizer.SGD(lr=0.1), "SGD: there is no argument 'lr'; .* learning_rate, "),
        (lambda: amp.optimizer.Adam(betas=(0.9, 0.9)), "Adam: .* 'betas'; .* beta1, beta2, "),
        (lambda: amp.decorate(amp.optimizer.SGD(), opt_level="O1"), "decorate: .* 'opt_level'"),
        (lambda: amp.nn.functional.relu(x=1, inplace=True, name="r"), "relu: .* 'inplace'; .* are x"),
        (lambda: amp.Executor(places=1), "Executor: .* 'places'; the arguments are place, "),
        (lambda: amp.ParamAttr(names="w"), "ParamAttr: .* 'names'; the arguments are name, "),
        (lambda: amp.Executor().run(amp.Program(), feeds={}), "run: .* 'feeds'; .* program, feed, "),
    ],
)
def test_an_argument_that_the_package_does_not_have_names_those_that_it_has(call: Any, said: str) -> None:
    with pytest.raises(ArgumentTypeError, match=said):
        call()


@pytest.mark.parametrize(
    "path",
    [
        "GradScaler",
        "autocast",
        "cuda.amp",
        "optim.SGD",
        "optimizers.Adam",
        "keras.mixed_precision",
        "no_grad",
        "save",
        "load",
        "io.DataLoader",
        "metric.Accuracy",
        "distributed.fleet",
        "jit.to_static",
        "utils.run_check",
        "set_flags",
        "nn.Module",
        "nn.ReLU",
        "nn.MSELoss",
        "static.nn.switch_case",
        "static.nn.rnn",
        "static.serialize_program",
        "static.amp.fp16_lists.white_list",
        "static.amp.decorator.GradScaler",
        "optimizer.Adafactor",
        "nn.functional.randn",
        "masked_fill",
        "meshgrid",
        "randint",
        "nn.functional.channel_shuffle",
        "nn.functional.affine_grid",
        "nn.functional.scaled_dot_product_attention",
        "optimizer.Adam().zero_grad",
        "optimizer.Adam().scale",
        "optimizer.Adam().unscale_",
        "optimizer.Adam().update",
        "static.ExponentialMovingAverage().apply",
        "static.ExponentialMovingAverage().restore",
        "static.Executor().train_from_dataset",
        "global_scope().var",
        "global_scope().new_scope",
        "static.default_main_program().global_block().append_op",
    ],
)
def test_a_name_that_is_not_offered_leads_to_ours(path: str) -> None:
    with pytest.raises(MissingNameError, match="has no attribute '[^']+': .{10}"):
        eval(f"amp.{path}")


def test_element_types_are_their_names() -> None:
    names = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
    assert [getattr(amp, name) for name in names] == list(names)


def test_functions_are_methods_of_variables() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3) - 2
    with amp.program_guard(amp.Program(), amp.Program()):
        a = amp.static.data("a", [2, 3])
        fetched = [
            a.mean(),
            a.sum(axis=1),
            a.reshape([3, 2]),
            a.transpose(perm=[1, 0]),
            a.exp(),
            a.max(axis=0, keepdim=True),
        ]
        got = amp.Executor().run(a.program, feed={"a": x}, fetch_list=fetched)
        for name in ("numpy", "backward", "ndim", "op", "grad"):
            with pytest.raises(MissingNameError, match=f"'amp_transpiler.Variable' has no attribute '{name}': "):
                getattr(a, name)
    wanted = [x.mean(), x.sum(1), x.reshape(3, 2), x.T, np.exp(x), x.max(0, keepdims=True)]
    for value, right in zip(got, wanted, strict=True):
        np.testing.assert_allclose(value, right, rtol=1e-6)


def test_the_average_follows_the_current_program_where_none_is_named() -> None:
    with amp.program_guard(amp.Program(), amp.Program()):
        loss = amp.static.nn.fc(amp.static.data("x", [1, 2]), 1, weight_attr=amp.ParamAttr("w"), bias_attr=False).sum()
        amp.optimizer.SGD(1.0).minimize(loss)
        average = amp.static.ExponentialMovingAverage(0.75, name="average")
        assert [v.name for v in average.update().inputs if v is not None][:1] == ["w_ema_0"]
    with pytest.raises(ArgumentError, match="thres_steps=3 .* warmup=True"):
        amp.static.ExponentialMovingAverage(0.75, thres_steps=3)


def test_initializers_and_schedules_as_paddles_documentation_writes_them() -> None:
    made = amp.nn.initializer
    with amp.static.scope_guard(amp.static.Scope()), amp.program_guard(amp.Program(), amp.Program()):
        for n, initializer in enumerate(
            (
                made.Normal(mean=0.0, std=2.0, name=None),
                made.Constant(value=2.0),
                made.Assign([1.0, 2.0], name=None),
                made.TruncatedNormal(mean=0.0, std=2.0, a=-2.0, b=2.0, name=None),
                made.XavierNormal(fan_in=3, fan_out=4, gain=1.0, name=None),
                made.XavierUniform(fan_in=None, fan_out=None, name=None),
                made.KaimingUniform(fan_in=3, negative_slope=0.0, nonlinearity="relu"),
            )
        ):
            amp.create_parameter([2], "float32", f"p{n}", initializer)
        amp.Executor().run(amp.default_startup_program())
        assert amp.global_scope().find_var("p1").tolist() == [2, 2]
    for wrong in (lambda: made.TruncatedNormal(a=-1.0), lambda: made.XavierUniform(gain=2.0)):
        with pytest.raises(ArgumentError, match="is Paddle's, and not offered: "):
            wrong()
    # lr * d_model ** -0.5 * min(step ** -0.5, step * warmup ** -1.5), with the size that Paddle's documentation has
    assert amp.optimizer.lr.NoamDecay(d_model=0.01, warmup_steps=100).value(3) == pytest.approx(10 * 3 * 100**-1.5)


def test_a_misspelt_name_leads_to_those_near_it() -> None:
    program = amp.Program()
    with amp.program_guard(program):
        x = amp.data("x", [2])
    F = amp.nn.functional
    for home, name, near in (
        (F, "sofmax", "'softmax'"),
        (amp.optimizer, "Adamw", "'AdamW'"),
        (amp.static, "programguard", "'program_guard'"),
        (x, "reshap", "'reshape'"),
        (program, "outpts", "'outputs'"),
    ):
        with pytest.raises(MissingNameError, match=f"has no attribute '{name}'; did you mean .*{near}"):
            getattr(home, name)
    with pytest.raises(MissingNameError, match="has no attribute '_softmax'$"):
        F._softmax  # type: ignore[attr-defined]  # noqa: B018


def test_names_of_torch_say_what_to_use() -> None:
    looked_up = {
        amp: ("auto_cast", "DataLoader", "load_state_dict"),
        amp.nn: ("utils", "Parameter"),
        amp.optimizer.lr: ("StepLR", "SequentialLR"),
        amp.Program(): ("train", "eval", "half", "to", "run"),
        amp.optimizer.SGD(0.1): ("param_groups", "lr"),
    }
    for owner, names in looked_up.items():
        for name in names:
            with pytest.raises(MissingNameError, match=f"has no attribute '{name}': "):
                getattr(owner, name)
