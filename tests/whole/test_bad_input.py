"""What a newcomer gets wrong: each a clear error, and nothing half done.

Wrong feeds, lists, numbers and files have their tests beside what they are given to; here is what cuts across.
"""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import amp_transpiler as amp
from amp_transpiler import errors
from amp_transpiler.errors import (
    ArgumentError,
    ArgumentTypeError,
    ExecutionError,
    FeedError,
    GradientError,
    GraphError,
    OrderError,
    PrecisionError,
    ScopeError,
)
from amp_transpiler.ir.rollback import unchanged_on_error
from amp_transpiler.nn import functional as F
from tests.helpers.refusals import BATCH, CPU, IMAGES, LABELS, MODES, Net, mixed, plain, pure, refused, trained, values

KINDS = [e for _, e in inspect.getmembers(errors, inspect.isclass) if e is not amp.AmpError]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_is_ours_and_a_built_in_one(kind: type[Exception]) -> None:
    assert issubclass(kind, amp.AmpError)
    assert any(
        vars(builtins).get(base.__name__) is base and base not in (Exception, BaseException, object)
        for base in kind.__mro__
    )


@MODES
def test_an_operator_without_gradient_is_named_and_the_program_can_still_be_trained(mode: Callable[..., Any]) -> None:
    net, clean = Net(dead_end=True), Net(dead_end=True)
    optimizer = mode(amp.optimizer.Adam(multi_precision=True))
    with amp.unique_name.guard():
        with refused(
            GradientError,
            "'Shrink -> shrunk",
            "fc_0.tmp_2",
            "no_grad_set",
            "register_gradient",
            programs=(net.main, net.startup),
        ):
            optimizer.minimize(net.loss)
        optimizer.minimize(net.loss, no_grad_set=["shrunk"])  # the way out, with the same optimizer
    with amp.unique_name.guard():
        mode(amp.optimizer.Adam(multi_precision=True)).minimize(clean.loss, no_grad_set=["shrunk"])
    assert net.main.to_onnx().SerializeToString() == clean.main.to_onnx().SerializeToString()
    assert net.startup.to_onnx().SerializeToString() == clean.startup.to_onnx().SerializeToString()


class Broken(Exception):
    pass


@MODES
@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
def test_a_failure_at_the_very_end_takes_everything_back(mode: Callable[..., Any], error: type[Exception]) -> None:
    def choose(name: str) -> bool:
        raise error

    net = Net()
    optimizer = mode(amp.optimizer.AdamW(apply_decay_param_fun=choose, multi_precision=True))
    with refused(error, programs=(net.main, net.startup)):
        optimizer.minimize(net.loss)
    if mode is not plain:
        with refused(OrderError, "minimize"):
            optimizer.get_loss_scaling()
    mode(amp.optimizer.AdamW(multi_precision=True)).minimize(net.loss)


@MODES
def test_startup_programs_that_cannot_be(mode: Callable[..., Any]) -> None:
    net, other = Net(), amp.Program("other")
    optimizer = mode(amp.optimizer.SGD(multi_precision=True))
    programs = (net.main, net.startup, other)
    with refused(GraphError, "'other'", "does not initialise", "'fc_0.w_0'", programs=programs):
        optimizer.minimize(net.loss, other)
    with refused(ArgumentError, "'main' itself", programs=programs):
        optimizer.minimize(net.loss, net.main)
    with refused(ArgumentTypeError, "startup_program", programs=programs):
        optimizer.minimize(net.loss, "startup")
    optimizer.minimize(net.loss)


@MODES
def test_a_program_is_minimised_once(mode: Callable[..., Any]) -> None:
    net = Net()
    mode(amp.optimizer.SGD(multi_precision=True)).minimize(net.loss)
    kind, words = (GraphError, "updated already") if mode is plain else (OrderError, "has gradients already")
    with refused(kind, "'main'", words, programs=(net.main, net.startup)):
        mode(amp.optimizer.SGD(multi_precision=True)).minimize(net.loss)


@pytest.mark.parametrize(
    "arguments, kind, words",
    [
        ({"parameter_list": "fc_0.w_0"}, ArgumentTypeError, "parameter_list"),
        ({"parameter_list": 3}, ArgumentTypeError, "parameter_list"),
        ({"parameter_list": [3]}, ArgumentTypeError, "holds 3"),
        ({"parameter_list": ["fc_0.w_1"]}, GraphError, "did you mean 'fc_0.w_0'"),
        ({"parameter_list": []}, GradientError, "does not depend on any parameter"),
        ({"parameter_list": ["fc_0.w_0", "label"]}, GradientError, "'label' of parameter_list"),
        ({"parameter_list": [Net(name="other").main.var("fc_0.w_0")]}, GraphError, "belongs to program 'other'"),
        ({"no_grad_set": "fc_0.w_0"}, ArgumentTypeError, "no_grad_set"),
        ({"no_grad_set": [None]}, ArgumentTypeError, "holds None"),
        ({"no_grad_set": ["fc_1.tmp_1", "fc_1.tmp_0"]}, GradientError, "does not depend on any parameter"),
    ],
)
def test_parameters_that_cannot_be_differentiated_for(arguments: Any, kind: Any, words: str) -> None:
    net = Net()
    with refused(kind, words, programs=(net.main, net.startup)):
        amp.append_backward(net.loss, **arguments)
    with refused(kind, words, programs=(net.main, net.startup)):
        mixed(amp.optimizer.SGD()).minimize(net.loss, net.startup, **arguments)


BRANCHES = """<ir_version: 8, opset_import: ["" : 11]>
g (float[2,3] x, int64 n, bool c) => (float[1,1] loss) <float[3,3] w = {1,2,3,4,5,6,7,8,9}> {
    h = MatMul(x, w)
    s = Softmax <axis = 0> (h)
    b = Loop (n, c, s) <
        body = t (int64 i, bool on, float[2,3] p) => (bool go, float[2,3] q) { go = Identity(on)  q = MatMul(p, w) }
    >
    loss = ReduceSum(b)
}"""


def test_an_imported_program_comes_back_from_its_opset_and_its_nested_graphs() -> None:
    program = amp.Program.from_onnx(onnx.parser.parse_model(BRANCHES))
    for attempt in (
        lambda: amp.append_backward(program.var("loss")),
        lambda: mixed(amp.optimizer.SGD()).minimize(program.var("loss")),
    ):
        with refused(GradientError, "trip count 'n'", programs=(program, program.startup)):
            attempt()
    assert program.opset() == 11
    with refused(Broken, programs=(program,)), unchanged_on_error(program):
        amp.cast_model_to_fp16(program, use_fp16_guard=False)
        raise Broken


def test_a_parameter_beyond_fp16_stops_amp_init_before_anything_is_cast() -> None:
    net, optimizer, test, scope, executor = trained()
    scope.set_var("fc_1.w_0", np.full((16, 4), 7e4, np.float32))
    with refused(
        PrecisionError,
        "'fc_1.w_0'",
        "float16",
        "70000",
        "custom_black_varnames",
        "bfloat16",
        programs=(net.main, test),
        scope=scope,
    ):
        optimizer.amp_init(CPU, scope, test)
    with refused(ScopeError, "'fc_0.w_0'", "float32", "amp_init", programs=(net.main,), scope=scope):
        executor.run(net.main, BATCH, [net.loss], scope)
    scope.set_var("fc_1.w_0", np.full((16, 4), 7, np.float32))
    optimizer.amp_init(CPU, scope, test)
    executor.run(net.main, BATCH, [net.loss], scope)


def test_a_test_program_that_cannot_be_rewritten_leaves_the_scope_alone() -> None:
    net, optimizer, test, scope, _ = trained()
    for op in test.operators:
        op.guard = False
    with refused(PrecisionError, "fp16_guard", "mark_fp16", programs=(test,), scope=scope):
        optimizer.amp_init(CPU, scope, test)
    with refused(
        ArgumentError, "training program 'main' itself", "clone(for_test=True)", programs=(net.main,), scope=scope
    ):
        optimizer.amp_init(CPU, scope, net.main)
    with refused(ArgumentTypeError, "amp_init", "CPUPlace()", programs=(net.main,), scope=scope):
        optimizer.amp_init(amp.CPUPlace, scope)


def test_amp_init_before_the_startup_program_ran() -> None:
    net, optimizer, test, _, _ = trained()
    scope = amp.Scope()
    with refused(ScopeError, "startup program", programs=(net.main, test), scope=scope):
        optimizer.amp_init(CPU, scope, test)


def test_amp_init_takes_a_place_in_every_mode() -> None:
    net, optimizer, test, scope, _ = trained(mixed)
    with refused(ArgumentTypeError, "amp_init: place is 0; expected", programs=(net.main, test), scope=scope):
        optimizer.amp_init(0, scope, test, use_fp16_test=True)


# -- arguments -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("call", [amp.cast_model_to_fp16, amp.rewrite_program])
def test_precision_passes_take_a_program_and_lists(call: Callable[..., Any]) -> None:
    net = Net()
    with refused(ArgumentTypeError, call.__name__, "takes a Program", "'m.onnx'"):
        call("m.onnx")
    with refused(ArgumentTypeError, call.__name__, "AutoMixedPrecisionLists", programs=(net.main,)):
        call(net.main, ["MatMul"])
    with refused(ArgumentTypeError, call.__name__, "AutoMixedPrecisionLists", programs=(net.main,)):
        call(net.main, [])


@pytest.mark.parametrize(
    "patterns, kind, words",
    [
        ((), ArgumentError, "at least one pattern"),
        (("decoder/*",), ArgumentError, "'decoder/*'"),
        (("encoder/*", "decoder/*"), ArgumentError, "'encoder/layer'"),
        ((["encoder/*"],), ArgumentTypeError, "['encoder/*']"),
    ],
)
def test_mark_fp16_marks_all_or_nothing(patterns: Any, kind: Any, words: str) -> None:
    main = amp.Program("net")
    with amp.program_guard(main):
        x = amp.data("x", [2, 2])
        with amp.name_scope("encoder"), amp.name_scope("layer"):
            F.relu(x)
    with refused(kind, "mark_fp16", words, programs=(main,)):
        main.mark_fp16(*patterns)
    assert main.mark_fp16("encoder/*", "*/layer") == 1  # marked twice, counted once


def test_guards_say_what_they_take() -> None:
    with refused(ArgumentTypeError, "program_guard: main is 'net'"), amp.program_guard("net"):  # type: ignore[arg-type]
        pass
    with refused(ArgumentTypeError, "startup is 3"), amp.program_guard(amp.Program(), 3):  # type: ignore[arg-type]
        pass
    with refused(ArgumentTypeError, "name_scope"), amp.name_scope(3):  # type: ignore[arg-type]
        pass
    assert amp.default_main_program().name == "main"


# -- running ---------------------------------------------------------------------------------------------------
def test_a_variable_of_another_program_is_told_from_a_misspelt_one() -> None:
    net, _, _, scope, executor = trained(plain)
    other = Net(name="other")
    with amp.program_guard(other.main):
        extra = F.relu(other.scores * 2.0)
    with refused(GraphError, f"'{extra.name}' belongs to program 'other'", "'main', which is run", scope=scope):
        executor.run(net.main, BATCH, [net.loss, extra], scope)
    with refused(ArgumentTypeError, "fetch_list", "None", scope=scope):
        executor.run(net.main, BATCH, [net.loss, None], scope)
    with refused(ArgumentTypeError, "keys of feed", "None", scope=scope):
        executor.run(net.main, {**BATCH, None: IMAGES}, [net.loss], scope)
    with amp.program_guard(net.main), refused(ArgumentError, "belongs to program 'other'", programs=(net.main,)):
        F.relu(extra)


@MODES
def test_training_goes_on_after_every_mistake_as_if_it_had_not_been(mode: Callable[..., Any]) -> None:
    (net, optimizer, test, scope, executor), clean = trained(mode), trained(mode)
    mistakes: list[tuple[type[Exception], dict[str, Any], str]] = [
        (errors.FeedTypeError, {"image": IMAGES.astype(np.float64), "label": LABELS}, "astype('float32')"),
        (errors.FeedTypeError, {"image": IMAGES, "label": LABELS.astype(np.int32)}, "astype('int64')"),
        (FeedError, {"image": IMAGES, "label": LABELS[:, 0]}, "'label'"),
        (FeedError, {"image": IMAGES}, "needs the input 'label'"),
        (FeedError, {**BATCH, "lable": LABELS}, "did you mean 'label'"),
        (ExecutionError, {"image": IMAGES[:5], "label": LABELS}, "'image' [5, 8], 'label' [6, 1]"),
    ]
    if mode is pure:
        with refused(ScopeError, "amp_init", scope=scope):
            executor.run(net.main, BATCH, [net.loss], scope)
        optimizer.amp_init(CPU, scope, test)
        clean[1].amp_init(CPU, clean[3], clean[2])
    for kind, feed, words in mistakes:
        for size in (6, 4, 6, 1):  # the last batch is often a smaller one
            for of, where in ((net, scope), (clean[0], clean[3])):
                executor.run(of.main, {name: array[:size] for name, array in BATCH.items()}, [of.loss], where)
        with refused(kind, words, programs=(net.main,), scope=scope):
            executor.run(net.main, feed, [net.loss], scope)
    assert list(values(scope).values()) == list(values(clean[3]).values())
    np.testing.assert_array_equal(
        *(
            executor.run(t, {"image": IMAGES}, [n.scores.name], s)[0]
            for t, n, s in ((test, net, scope), (clean[2], clean[0], clean[3]))
        )
    )


@pytest.mark.parametrize("shift", [4, -4])
def test_a_label_out_of_range_says_so(shift: int) -> None:
    net, _, _, scope, executor = trained(plain)
    with pytest.raises(ExecutionError, match="label or index is below 0 or not below the number of classes"):
        executor.run(net.main, {"image": IMAGES, "label": LABELS + shift}, [net.loss], scope)


# -- files -----------------------------------------------------------------------------------------------------
def test_a_model_that_cannot_be_saved_leaves_no_file(tmp_path: Path) -> None:
    net, optimizer, _, scope, executor = trained()
    target = tmp_path / "model.onnx"
    for kind, words, feeds, fetches, where in (
        (ScopeError, "startup program", ["image"], [net.scores], amp.Scope()),
        (GraphError, "amp_init", ["image"], [net.scores], scope),
        (ArgumentError, "needs the input 'label'", ["image"], [net.loss], scope),
        (ArgumentError, "serves only the training", ["image", "label"], ["fc_0.w_0@GRAD"], scope),
        (ArgumentTypeError, "fetch_vars", ["image"], [None], scope),
    ):
        with refused(kind, words, programs=(net.main,), scope=where):
            amp.save_inference_model(target, feeds, fetches, executor, net.main, scope=where)
        assert not list(tmp_path.iterdir())
    optimizer.amp_init(CPU, scope)
    amp.save_inference_model(target, ["image"], [net.scores], executor, scope=scope)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
