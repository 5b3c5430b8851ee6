"""A training step is a list of passes: by their text they give the program of ``decorate``, and each keeps its word."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import AmpError, ArgumentError, GraphError
from amp_transpiler.ir.nodes import FORWARD
from amp_transpiler.optimizer.step_passes import TRAINING, training
from amp_transpiler.passes.pipeline import Context, Pipeline, Property, apply
from amp_transpiler.passes.precision.modes import Precision
from amp_transpiler.passes.view.given import LISTS, LOSS
from tests.helpers.programs import LAYERS, feeds_of

TEXTS = {
    "mixed": "canonicalize,precision,scale-loss,autodiff,unscale,gate-state,update-scale,update,check-step",
    "pure": "canonicalize,precision{mode=pure},scale-loss,autodiff,unscale,gate-state,update-scale,update,check-step",
    "bfloat16": "canonicalize,precision{dtype=bfloat16},scale-loss,autodiff,"
    "unscale,gate-state,update-scale,update,check-step",
    "window": "canonicalize,precision,scale-loss,autodiff,"
    "accumulate,unscale,gate-state,update-scale,update,close-window,check-step",
    "guards": "canonicalize,keep-losses,precision{numeric-guards=true},scale-loss,autodiff,"
    "unscale,gate-state,update-scale,update,check-step",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "mixed": {},
    "pure": {"use_pure_fp16": True, "use_fp16_guard": False},
    "bfloat16": {"dtype": "bfloat16"},
    "window": {"accumulate_steps": 3},
    "guards": {"numeric_guards": True},
}


@dataclass
class Built:
    main: amp.Program
    startup: amp.Program
    loss: amp.Variable
    optimizer: Any

    def bytes(self) -> tuple[Any, Any]:
        return self.main.to_onnx(), self.startup.to_onnx()


def build(layers: str, **options: Any) -> Built:
    main, startup = amp.Program("main"), amp.Program("startup")
    main.seed = startup.seed = 3
    with amp.program_guard(main, startup):
        _, loss, _ = LAYERS[layers]()
    return Built(main, startup, loss, amp.decorate(amp.optimizer.Adam(0.01, multi_precision=True), **options))


@pytest.mark.parametrize("layers", ["mlp", "transformer", "resnet"])
@pytest.mark.parametrize("mode", TEXTS)
def test_a_step_by_text_is_that_of_decorate(mode: str, layers: str) -> None:
    with amp.unique_name.guard():
        expected = build(layers, **OPTIONS[mode])
        updates, pairs = expected.optimizer.minimize(expected.loss, expected.startup)
    with amp.unique_name.guard():
        built = build(layers, **OPTIONS[mode])
        ran = Pipeline(TEXTS[mode]).run(built.main, loss=built.loss, training=built.optimizer.training)
    assert built.bytes() == expected.bytes()
    assert [op.type for op in ran["updates"]] == [op.type for op in updates]
    assert [p.name for p, _ in ran["gradients"]] == [p.name for p, _ in pairs]


def test_the_passes_of_decorate() -> None:
    assert str(training(Precision())) == TEXTS["mixed"]
    assert str(training(Precision(), window=True)) == TEXTS["window"]
    assert str(training(Precision(numeric_guards=True))) == TEXTS["guards"]


@pytest.mark.parametrize("pure", [True, False], ids=["pure", "mixed"])
def test_gradients_by_text_are_those_of_decorate(pure: bool) -> None:
    """Without a scale the decorated step has the same forward operators, and the same gradients bit for bit."""
    with amp.unique_name.guard():
        expected = build(
            "mlp", use_pure_fp16=pure, use_fp16_guard=False, init_loss_scaling=1.0, use_dynamic_loss_scaling=False
        )
        pairs = expected.optimizer.backward(expected.loss, expected.startup)
    with amp.unique_name.guard():
        built = build("mlp")
        text = f"canonicalize,precision{{mode={'pure' if pure else 'mixed'}}},autodiff"
        ran = Pipeline(text).run(built.main, loss=built.loss)
    assert [changed for _, changed in ran.changes] == [False, True, True]
    assert forward(built.main) == forward(expected.main)
    assert {op.precision for op in built.main.operators if op.type == "MatMul"} == {"float16"}
    narrowed = {p.name for p, _ in pairs if p.dtype == "float16"}
    got, wanted = gradients(built, ran["gradients"], narrowed), gradients(expected, pairs, narrowed)
    assert bool(narrowed) == pure and len(got) == len(wanted) == 6
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == other.dtype and one.any()
        np.testing.assert_array_equal(one, other)


def forward(program: amp.Program) -> list[Any]:
    return [
        (op.type, op.input_arg_names, op.output_arg_names, op.precision, op.reason)
        for op in program.operators
        if op.role == FORWARD
    ]


def gradients(built: Built, pairs: Any, narrowed: set[str]) -> list[np.ndarray]:
    scope, executor = amp.Scope(), amp.Executor(amp.CPUPlace())
    executor.run(built.startup, scope=scope)
    amp.cast_parameters_to_fp16(amp.CPUPlace(), built.main, scope, narrowed)
    fetched = executor.run(built.main, feeds_of("mlp"), [grad.name for _, grad in pairs], scope=scope)
    return [np.asarray(grad) for grad in fetched]


def test_the_loss_and_the_parameters_are_named_in_text() -> None:
    built = build("mlp")
    first, *_ = built.main.parameters
    ran = Pipeline(f"autodiff{{loss={built.loss.name} parameters={first.name}}}").run(built.main)
    assert [p.name for p, _ in ran["gradients"]] == [first.name]
    with pytest.raises(ArgumentError, match=r"pass loss= to run, or autodiff\{loss=NAME\}"):
        Pipeline("autodiff").run(build("mlp").main)


@pytest.mark.parametrize("mode", TEXTS)
def test_passes_keep_what_they_guarantee(mode: str) -> None:
    built = build("mlp", **OPTIONS[mode])
    dtype = "bfloat16" if mode == "bfloat16" else "float16"
    lists = amp.AutoMixedPrecisionLists(dtype=dtype)
    context = Context({LOSS: built.loss, TRAINING: built.optimizer.training, LISTS: lists})
    for each in Pipeline(TEXTS[mode]):
        before = {p for p in Property if p.holds(built.main)}
        apply([each], built.main, context)
        built.main.verify()
        kept = (before - set(each.invalidates)) | set(each.guarantees)
        assert all(p.holds(built.main) if isinstance(p, Property) else p in context for p in kept), each
    assert not Property.FORWARD.holds(built.main)


def test_a_precision_after_gradients_is_refused_before_anything_runs() -> None:
    built = build("mlp")
    with pytest.raises(GraphError, match="pass 3 .*precision needs no gradients, which program 'main' does not have"):
        Pipeline("canonicalize,autodiff,precision").run(built.main, loss=built.loss)
    assert not any(op.role != FORWARD for op in built.main.operators)


def test_where_a_pass_raises_both_programs_are_as_before() -> None:
    built = build("mlp")
    before = built.bytes()
    with pytest.raises(AmpError, match="nowhere"):
        Pipeline("canonicalize,precision,scale-loss,autodiff{parameters=nowhere}").run(
            built.main, loss=built.loss, training=built.optimizer.training
        )
    assert built.bytes() == before


@pytest.mark.parametrize("retry", ["pipeline", "minimize"])
@pytest.mark.parametrize("scheduled", [False, True])
def test_where_a_pass_raises_the_optimizer_is_as_before(scheduled: bool, retry: str) -> None:
    def built() -> Built:
        found = build("mlp")
        rate = amp.optimizer.lr.StepDecay(0.1, step_size=2) if scheduled else 0.1
        found.optimizer = amp.decorate(amp.optimizer.Adam(rate, name="adam"))
        found.main.startup = None  # passes find it among the values alone
        return found

    with amp.unique_name.guard():
        expected = built()
        expected.optimizer.minimize(expected.loss, expected.startup)
    with amp.unique_name.guard():
        again = built()
        before = again.bytes()
        values = {"loss": again.loss, "training": again.optimizer.training, "startup_program": again.startup}
        with pytest.raises(AmpError, match="nowhere"):
            Pipeline(TEXTS["mixed"] + ",autodiff{parameters=nowhere}").run(again.main, **values)
        assert again.bytes() == before
        if retry == "pipeline":
            Pipeline(TEXTS["mixed"]).run(again.main, **values)
        else:
            again.optimizer.minimize(again.loss, again.startup)
    assert again.bytes() == expected.bytes()
    scope = amp.Scope()
    amp.Executor(amp.CPUPlace()).run(again.startup, scope=scope)
    assert again.optimizer.get_lr(scope) == pytest.approx(0.1)


def test_lists_are_said_once() -> None:
    built = build("mlp")
    with pytest.raises(ArgumentError, match="amp_lists= says the type and the lists"):
        Pipeline("precision{black-list=MatMul}").run(built.main, amp_lists=amp.AutoMixedPrecisionLists())
    Pipeline("precision{black-list=MatMul}").run(built.main)
    assert {op.precision for op in built.main.operators if op.type == "MatMul"} == {"float32"}
