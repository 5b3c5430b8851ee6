"""Scripts of Paddle's documentation and tests of static mixed precision, with the import lines changed.

What they print there is asserted here: which operators run in which element type, what is stored how, what moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import amp_transpiler as paddle
import amp_transpiler.static.amp as amp
from amp_transpiler import static
from amp_transpiler.errors import ArgumentError, ListError
from amp_transpiler.nn import functional as F
from amp_transpiler.optimizer import lr_schedule
from amp_transpiler.static.amp import bf16

BATCH, HEIGHT = 4, 16


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Default programs, names, a scope and schedules of the script's own."""
    monkeypatch.setattr(lr_schedule, "_paddles_way", False)
    main, startup = static.Program(), static.Program()
    with static.program_guard(main, startup), paddle.unique_name.guard(), static.scope_guard(paddle.Scope()):
        yield


def types(program: Any, *kinds: str) -> list[tuple[str, str]]:
    """(operator type, element type of its data) of the forward operators of these types."""
    return [
        (op.type, op.inputs[0].dtype) for op in program.global_block().ops if op.role == "forward" and op.type in kinds
    ]


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    data = np.random.default_rng(seed).standard_normal((BATCH, 1, HEIGHT, HEIGHT)).astype("float32")
    return {"X": data, "image": data, "label": np.arange(BATCH, dtype="int64")[:, None]}


def test_the_example_of_decorate() -> None:
    """Convolution and pooling outside the guard, batch norm and loss inside, the schedule stepped by the script."""
    paddle.enable_static()
    image = static.data(name="image", shape=[None, 1, HEIGHT, HEIGHT], dtype="float32")
    label = static.data(name="label", shape=[None, 1], dtype="int64")
    conv2d = static.nn.conv2d(input=image, num_filters=6, filter_size=3)
    with paddle.static.amp.fp16_guard():
        bn = static.nn.batch_norm(input=conv2d, act="relu")
        pool = F.max_pool2d(bn, kernel_size=2, stride=2)
        hidden = static.nn.fc(pool, size=10)
        loss = F.mean(F.cross_entropy(hidden, label))
    test_program = static.default_main_program().clone(for_test=True)

    scheduler = paddle.optimizer.lr.PiecewiseDecay(boundaries=[2], values=[0.01, 0.001])
    optimizer = paddle.optimizer.Momentum(
        learning_rate=scheduler,
        weight_decay=paddle.regularizer.L2Decay(1e-4),
        parameters=None,
        multi_precision=True,
        rescale_grad=1.0,
        grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0),
    )
    amp_list = paddle.static.amp.CustomOpLists(custom_black_list=["pool2d"])
    optimizer = paddle.static.amp.decorate(
        optimizer, amp_list, init_loss_scaling=128.0, use_dynamic_loss_scaling=True, use_pure_fp16=True
    )
    ops, params_grads = optimizer.minimize(loss, parameter_list=None, no_grad_set=None)
    assert len(params_grads) == 6 and ops[0].type == "Momentum"

    place = paddle.CPUPlace()
    exe = static.Executor(place)
    exe.run(static.default_startup_program())
    optimizer.amp_init(place, scope=static.global_scope(), test_program=test_program, use_fp16_test=True)
    main = static.default_main_program()
    expected = [("Conv", "float32"), ("BatchNormalization", "float16"), ("MaxPool", "float32"), ("MatMul", "float16")]
    assert types(main, "Conv", "BatchNormalization", "MaxPool", "MatMul") == expected
    assert types(test_program, "Conv", "MaxPool", "MatMul") == [expected[0], expected[2], expected[3]]
    stored = {p.name: np.asarray(static.global_scope().find_var(p.name)).dtype.name for p in main.all_parameters()}
    assert {name for name, dtype in stored.items() if dtype == "float16"} == {"fc_0.w_0", "fc_0.b_0"}

    feed, losses, rates = batch(), [], []
    feed.pop("X")
    for _ in range(2):
        for _ in range(2):
            value, scale = exe.run(
                main, feed=feed, use_program_cache=True, fetch_list=[loss, optimizer.get_loss_scaling()]
            )
            losses.append(float(np.ravel(value)[0]))
            rates.append(optimizer.get_lr())
            scheduler.step()
    assert rates == [0.01, 0.01, 0.001, 0.001] and scale == 128.0
    assert losses[-1] < losses[0]
    evaluated = exe.run(test_program, feed=feed, fetch_list=[loss])[0]
    assert np.isfinite(evaluated).all()


def test_the_example_of_cast_model_to_fp16() -> None:
    paddle.enable_static()
    image = static.data("X", [None, 1, HEIGHT, HEIGHT])
    conv = static.nn.conv2d(input=image, num_filters=2, filter_size=3, act="relu")
    out = F.mean(static.nn.fc(x=conv, size=2))
    program, scope = static.default_main_program(), static.global_scope()
    exe = static.Executor(paddle.CPUPlace())
    exe.run(static.default_startup_program())
    names = amp.cast_model_to_fp16(program, amp.AutoMixedPrecisionLists(), use_fp16_guard=False, level="O2")
    amp.cast_parameters_to_fp16(paddle.CPUPlace(), program, scope=scope, to_fp16_var_names=names)
    assert {p.name for p in program.all_parameters()} <= names
    assert all(scope.find_var(p.name).dtype == np.float16 for p in program.all_parameters())
    (value,) = exe.run(program, feed={"X": batch()["X"]}, fetch_list=[out])
    assert np.isfinite(value).all()


def simple_net() -> Any:
    data = static.data(name="X", shape=[None, 1, HEIGHT, HEIGHT], dtype="float32")
    return F.mean(static.nn.fc(F.add(static.nn.fc(data, size=10), 1.0), size=1))


def test_the_example_of_bf16() -> None:
    loss = simple_net()
    optimizer = paddle.optimizer.SGD(learning_rate=0.001)
    lists = bf16.AutoMixedPrecisionListsBF16(custom_fp32_list={"elementwise_add"}, custom_bf16_list={"elementwise_mul"})
    assert "elementwise_mul" in lists.bf16_list and "elementwise_add" in lists.fp32_list and not lists.fp32_varnames
    mp_optimizer = amp.bf16.decorate_bf16(optimizer, amp_lists=lists)
    mp_optimizer.minimize(loss)
    exe = static.Executor(static.CPUPlace())
    exe.run(static.default_startup_program())
    mp_optimizer.amp_init(static.CPUPlace(), scope=static.global_scope(), use_bf16_test=False)
    main = static.default_main_program()
    assert set(types(main, "MatMul")) == {("MatMul", "bfloat16")} and set(types(main, "Add")) == {("Add", "float32")}
    before = static.global_scope().find_var("fc_0.w_0").copy()
    exe.run(main, feed={"X": batch()["X"]}, fetch_list=[loss])
    assert not np.array_equal(before, static.global_scope().find_var("fc_0.w_0"))


def test_pure_bf16_and_the_rewrites() -> None:
    with bf16.bf16_guard():
        loss = simple_net()
    pure = static.default_main_program().clone()
    listed = static.default_main_program().clone()
    names = bf16.cast_model_to_bf16(pure)
    assert {"fc_0.w_0", "fc_1.b_0"} <= names and set(types(pure, "Add", "MatMul")) == {
        ("Add", "bfloat16"),
        ("MatMul", "bfloat16"),
    }
    bf16.rewrite_program_bf16(listed)
    assert set(types(listed, "MatMul")) == {("MatMul", "bfloat16")}
    optimizer = bf16.decorate_bf16(paddle.optimizer.SGD(0.1, multi_precision=True), use_pure_bf16=True)
    optimizer.minimize(loss)
    assert set(types(static.default_main_program(), "MatMul")) == {("MatMul", "bfloat16")}
    with pytest.raises(ListError, match="overlap"):
        bf16.AutoMixedPrecisionListsBF16({"mul"}, {"matmul"})
    with pytest.raises(ArgumentError, match="cast_parameters_to_bf16"):
        bf16.cast_model_to_bf16(pure, static.default_startup_program())
    with pytest.raises(ArgumentError, match="amp_lists are for float16"):
        bf16.rewrite_program_bf16(listed, amp.CustomOpLists())


#: The names of ``paddle.static.amp`` of 2021 and of 2.6, and what each is here.
NAMES = {
    "decorate": paddle.decorate,
    "CustomOpLists": paddle.AutoMixedPrecisionLists,
    "fp16_guard": paddle.fp16_guard,
    "AutoMixedPrecisionLists": paddle.AutoMixedPrecisionLists,
    "cast_model_to_fp16": paddle.cast_model_to_fp16,
    "cast_parameters_to_fp16": paddle.cast_parameters_to_fp16,
    "rewrite_program": paddle.rewrite_program,
    "check_finite_and_unscale": paddle.check_finite_and_unscale,
    "update_loss_scaling": paddle.update_loss_scaling,
    "bf16": bf16,
    "fp16_utils": amp,
    "fp16_lists": amp,
    "decorator": amp,
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_static_amp(name: str) -> None:
    assert getattr(paddle.static.amp, name) is NAMES[name]


@pytest.mark.parametrize(
    "name",
    [
        "Program",
        "program_guard",
        "data",
        "Executor",
        "CPUPlace",
        "CUDAPlace",
        "default_main_program",
        "append_backward",
        "default_startup_program",
        "global_scope",
        "scope_guard",
        "name_scope",
        "create_parameter",
        "save_inference_model",
        "load_inference_model",
        "nn",
        "Variable",
    ],
)
def test_names_of_static_are_those_of_the_package(name: str) -> None:
    assert getattr(paddle.static, name) is getattr(paddle, name)


def test_unique_names_are_in_utils_too() -> None:
    """``paddle.utils.unique_name.guard()``, with which programs that share parameters begin, was an error."""
    assert paddle.utils.unique_name is paddle.unique_name


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: paddle.static.CompiledProgram, "compiles a program at its first run"),
        (lambda: paddle.static.save, "amp.save_checkpoint"),
        (lambda: paddle.static.InputSpec, "amp.data"),
        (lambda: amp.debugging, "amp-transpile explain"),
        (lambda: paddle.amp, "amp.static.amp"),
        (lambda: paddle.fluid, "Paddle 2"),
        (lambda: paddle.to_tensor, "numpy arrays"),
        (lambda: paddle.callbacks, "patience=3"),
        (lambda: paddle.nn.Linear, r"amp.nn.fc\(x, size\)"),
        (lambda: bf16.convert_float_to_uint16, "ml_dtypes"),
    ],
)
def test_names_that_are_not_offered_point_elsewhere(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(AttributeError, match=said):
        call()


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: amp.cast_model_to_fp16(static.Program(), level="O1"), "amp.rewrite_program"),
        (lambda: amp.cast_model_to_fp16(static.Program(), dest_type="bfloat16"), "amp_lists="),
        (
            lambda: paddle.decorate(paddle.optimizer.SGD()).amp_init(paddle.CPUPlace(), rewrite_master_weight=True),
            "keeps the digits",
        ),
        (lambda: static.Executor(paddle.CPUPlace()).run(static.Program(), use_prune=True), "clone"),
        (lambda: static.load_inference_model("m", None, params_filename="p"), "weights are in the ONNX file"),
        (lambda: static.save_inference_model("m", [], [], None, legacy_format=True), "models are ONNX files"),
    ],
)
def test_keywords_that_are_not_offered_point_elsewhere(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        call()


def test_element_types_have_names() -> None:
    x = paddle.data("x", [1], paddle.float16)
    assert x.dtype == paddle.float16 == "float16" and F.cast(x, paddle.float32).dtype == paddle.float32


def test_saving_by_paddles_keyword(tmp_path: Any) -> None:
    x = static.data("x", [None, 3])
    out = static.nn.fc(x, 2)
    exe = static.Executor(static.CPUPlace())
    exe.run(static.default_startup_program())
    path = str(tmp_path / "no" / "folder" / "yet" / "m.onnx")
    given = {"clip_extra": True, "legacy_format": False, "program_only": False}
    static.save_inference_model(path_prefix=path, feed_vars=[x], fetch_vars=[out], executor=exe, **given)
    program, feeds, fetches = static.load_inference_model(path_prefix=path, executor=exe)
    (value,) = exe.run(program, feed={feeds[0]: np.ones((2, 3), np.float32)}, fetch_list=fetches)
    assert value.shape == (2, 2)


def test_a_script_chooses_its_place() -> None:
    place = paddle.CUDAPlace(0) if paddle.is_compiled_with_cuda() else paddle.CPUPlace()
    static.Executor(place)
    if place != paddle.CUDAPlace(0):
        with pytest.raises(paddle.errors.PlaceError):
            static.Executor(paddle.CUDAPlace(0))
