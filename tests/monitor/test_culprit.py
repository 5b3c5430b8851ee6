"""The culprit of a bad step is named: planted overflows, bad feeds and parameters, masks, cures, saved steps."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import ArgumentError, ArgumentTypeError, FeedError, ModelFileError
from amp_transpiler.monitor.culprit import called
from amp_transpiler.monitor.finiteness_probes import PROBES, floats, with_probes
from amp_transpiler.monitor.rerun import Rerun
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.lowering.lowered import needed
from amp_transpiler.passes.lowering.lowering import lower
from amp_transpiler.passes.view.training_step import training_step
from tests.helpers import programs
from tests.helpers.cuda_kernels import without_cuda_kernel
from tests.tools import overflows
from tests.tools.overflows import Ready, culprit, ready


@pytest.fixture(scope="module")
def mlp() -> Ready:
    return ready(programs.build("mlp", "amp"), "mlp")


@pytest.fixture(scope="module")
def use_case() -> Ready:
    return ready(programs.build("use_case", "amp"), "use_case")


def with_state(step: Ready, **values: object) -> amp.Scope:
    """A copy of the step's scope with other values."""
    scope = amp.Scope()
    for name in step.scope.var_names():
        scope.set_var(name, values.get(name, step.scope.find_var(name)))
    return scope


def found_inf(step: Ready, feed: dict, scope: amp.Scope) -> bool:
    return bool(step.executor.run(step.main, feed, [step.found_inf], scope)[0])


# -- planted ------------------------------------------------------------------------------------------
def test_planted_overflows_are_named() -> None:
    results = list(overflows.plant_many(6, each=4, seed=5))
    wrong = [
        (step, name, None if c is None else c.operator) for step, name, c in results if not c or c.operator != name
    ]
    assert not wrong
    assert {c.role for _, _, c in results} >= {"forward", "backward"}


def first_bad(step: Ready, feed: dict, scope: amp.Scope) -> str | None:
    """By fetching every floating-point variable: the first operator with finite inputs that makes what is not."""
    order = [op for op in step.main.operators if op.role in ("forward", "backward", "loss_scaling")]
    names = [v.name for op in order for v in op.outputs if v is not None and v.dtype in overflows.LIMITS]
    values = dict(zip(names, step.executor.run(step.main, feed, names, scope), strict=True))
    bad = {name for name, value in values.items() if not np.isfinite(value.astype(np.float64)).all()}
    for op in order:
        made = [v.name for v in op.outputs if v is not None]
        if not bad.isdisjoint(made) and bad.isdisjoint(v.name for v in op.inputs if v is not None):
            return called(op)
    return None


@pytest.mark.parametrize("name", ["transformer", "resnet"])
@pytest.mark.parametrize("mode", ["amp", "pure-fp16"])
def test_huge_parameters_and_scales(name: str, mode: str) -> None:
    """One parameter, or the loss scale, is made large: as brute force over every variable says."""
    step = ready(programs.build(name, mode), name)
    rng = np.random.default_rng(3)
    named = set()
    for parameter in rng.permutation([p.name for p in step.main.parameters if len(p.shape) > 1])[:4]:
        value = step.scope.find_var(parameter)
        large = (value.astype(np.float64) * (50000 / np.abs(value.astype(np.float64)).max())).astype(value.dtype)
        scope = with_state(step, **{parameter: large})
        wanted = first_bad(step, step.feeds, with_state(step, **{parameter: large}))
        found = amp.find_culprit(step.main, step.feeds, scope, executor=step.executor, cures=False)
        if wanted is not None and found is not None:
            assert found.operator == wanted
            named.add(wanted)
        else:
            assert found is None and not found_inf(step, step.feeds, scope)
    scope = with_state(step, loss_scaling_0=np.array([2.0**40], np.float32))
    found = amp.find_culprit(step.main, step.feeds, scope, executor=step.executor, cures=False)
    assert found.role == "backward" and found.loss_finite and found.loss_scaling == 2.0**40
    assert found.operator == first_bad(step, step.feeds, scope)
    assert named


# -- not operators ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_feed_is_named(mlp: Ready, value: float) -> None:
    image = mlp.feeds["image"].copy()
    image[1, 5] = value
    found = culprit(mlp, {**mlp.feeds, "image": image})
    assert (found.kind, found.variable, found.loss_finite) == ("feed", "image", False)
    assert found.output.nan + found.output.inf == 1 and found.output.shape == (4, 784)
    assert "feed 'image' is not finite" in str(found)


def test_a_bad_parameter_and_a_bad_scale_are_named(mlp: Ready) -> None:
    weight = mlp.scope.find_var("fc_1.w_0")
    weight[3, 3] = np.nan
    found = amp.find_culprit(mlp.main, mlp.feeds, with_state(mlp, **{"fc_1.w_0": weight}))
    assert (found.kind, found.variable) == ("parameter", "fc_1.w_0")
    found = culprit(mlp, before={"loss_scaling_0": np.nan})
    assert (found.kind, found.variable, found.loss_finite) == ("state", "loss_scaling_0", True)
    found = culprit(mlp, before={"loss_scaling_0": 0.0})
    assert found.type.endswith("CheckFiniteAndUnscale") and found.inputs[0].absmax == 0


def test_a_good_step_has_none(mlp: Ready) -> None:
    assert culprit(mlp) is None


def masked_net(masked: int, factor: float) -> Ready:
    """Attention scores with a mask of -infinity on ``masked`` of 6 positions."""
    mask = np.zeros((4, 6), np.float32)
    mask[:, :masked] = -np.inf
    main, startup = amp.Program(), amp.Program("startup")
    startup.seed = 3
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.data("x", [4, 6], "float32")
        scores = amp.nn.fc(x, 6) + main.add_constant("mask", mask)
        loss = F.mean(F.softmax(scores) * x)
        opt = amp.decorate(amp.optimizer.SGD(0.1), init_loss_scaling=8.0)
        opt.minimize(loss, startup)
    feeds = {"x": np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32) * factor}
    return ready(programs.Net(main, startup, loss, feeds, opt, loss), "masked")


def test_a_mask_of_minus_infinity_is_no_culprit() -> None:
    assert culprit(masked_net(2, 1.0)) is None
    step = masked_net(2, 1.0)
    step.scope.set_var("fc_0.w_0", np.full((6, 6), 60000, np.float32))
    step.feeds["x"] = np.full((4, 6), 100, np.float32)
    assert culprit(step).type == "MatMul"  # its overflow, although the mask is not finite either


def test_rows_masked_altogether_name_the_softmax() -> None:
    assert culprit(masked_net(6, 1.0)).type == "Softmax"


def test_the_loss_itself() -> None:
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.data("x", [4, 3], "float32")
        loss = F.mean(F.log(F.relu(amp.nn.fc(x, 2))))
        opt = amp.decorate(amp.optimizer.SGD(0.1))
        opt.minimize(loss, startup)
    step = ready(programs.Net(main, startup, loss, {"x": np.zeros((4, 3), np.float32)}, opt, loss), "log")
    found = culprit(step)
    assert found.type == "Log" and not found.loss_finite and found.role == "forward"
    assert [c.works for c in found.cures if "scale" in c.change] == [False]


def test_finite_gradients_whose_sum_leaves_fp32() -> None:
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.data("x", [1, 4], "float32")
        w = amp.create_parameter([1, 4], "float32")
        loss = F.sum(x * w)
        opt = amp.decorate(amp.optimizer.SGD(0.1), init_loss_scaling=2.0, use_dynamic_loss_scaling=False)
        opt.minimize(loss, startup)
    step = ready(programs.Net(main, startup, loss, {"x": np.full((1, 4), 1.5e38, np.float32)}, opt, loss), "sum")
    found = culprit(step)
    assert found.type.endswith("CheckFiniteAndUnscale") and "leave fp32" in found.reason


def test_programs_without_a_check(mlp: Ready) -> None:
    net = programs.build("mlp", "fp32")
    scope = amp.Scope()
    amp.Executor().run(net.startup, scope=scope)
    scope.set_var("fc_1.w_0", np.full((512, 512), 3e38, np.float32))
    assert amp.find_culprit(net.main, net.feeds, scope).operator == "MatMul -> fc_1.tmp_0"
    test = net.main.clone(for_test=True)
    test.outputs.append(test.var(net.loss.name))
    assert amp.find_culprit(test, net.feeds, scope).operator == "MatMul -> fc_1.tmp_0"


# -- the re-run -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["transformer", "use_case"])
@pytest.mark.parametrize("mode", ["amp", "pure-fp16"])
def test_taps_change_no_bit(name: str, mode: str) -> None:
    step = ready(programs.build(name, mode), name)
    step.executor = amp.Executor(amp.CPUPlace(), threads=1, optimization_level="basic")
    parts = training_step(step.main)
    gradients = [gradient.name for _, gradient in parts.gradients]
    made = floats([v for op in needed(step.main, parts.tested) for v in op.outputs])
    rerun = Rerun(step.feeds, step.scope, step.executor, None)
    without = step.values(step.main, gradients)
    probed = rerun.run(with_probes(step.main, made), [PROBES, *gradients])[1:]
    for one, other in zip(without, probed, strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("name", ["transformer", "use_case"])
@pytest.mark.parametrize("mode", ["amp", "pure-fp16"])
def test_taps_run_on_cuda(name: str, mode: str) -> None:
    net = programs.build(name, mode)
    order = needed(net.main, training_step(net.main).tested)
    copy = with_probes(net.main, floats([v for op in order for v in op.outputs]))
    lowered = lower(copy, "cuda", {k: v.shape for k, v in net.feeds.items()}, [copy.var(PROBES)], updates=False)
    assert not without_cuda_kernel(lowered.model)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["amp", "pure-fp16"])
def test_the_culprit_on_cuda_is_that_on_cpu(mode: str) -> None:
    step = ready(programs.build("transformer", mode), "transformer")
    on_cpu = culprit(step, before={"loss_scaling_0": 2.0**30})
    step.executor = amp.Executor(amp.CUDAPlace(0))
    found = culprit(step, before={"loss_scaling_0": 2.0**30})
    assert (found.operator, found.loss_finite) == (on_cpu.operator, True)
    assert [cure.works for cure in found.cures] == [cure.works for cure in on_cpu.cures]


def test_the_scope_stays_as_it_is(use_case: Ready) -> None:
    before = {name: use_case.scope.find_var(name).tobytes() for name in use_case.scope.var_names()}
    culprit(use_case, before={"loss_scaling_0": 1e9})
    assert before == {name: use_case.scope.find_var(name).tobytes() for name in use_case.scope.var_names()}


def test_step_state_reproduces_a_step_that_moved_the_scale() -> None:
    step = ready(
        programs.build("transformer", "amp", init_loss_scaling=2.0**40, decr_every_n_nan_or_inf=1, decr_ratio=1e-9),
        "transformer",
    )
    before = amp.step_state(step.main, step.scope)
    assert set(before) == {"loss_scaling_0", "num_good_steps_0", "num_bad_steps_0", "@rng_step"}
    assert found_inf(step, step.feeds, step.scope)
    assert culprit(step) is None  # at the new scale
    assert culprit(step, before=before).loss_scaling == 2.0**40


# -- cures --------------------------------------------------------------------------------------------------
def test_the_scale_that_is_named_is_the_largest_that_works(mlp: Ready) -> None:
    found = culprit(mlp, before={"loss_scaling_0": 2.0**30})
    scale = float(next(c.change for c in found.cures if c.works and "scale" in c.change).split()[-1])
    for factor, bad in ((1, False), (2, True)):
        scope = with_state(mlp, loss_scaling_0=np.array([scale * factor], np.float32))
        assert found_inf(mlp, mlp.feeds, scope) is bad


def large_hidden(lists: amp.AutoMixedPrecisionLists | None) -> Ready:
    """The hidden layer of three leaves fp16, and its relative size comes back into range behind it."""
    main, startup = amp.Program(), amp.Program("startup")
    startup.seed = 5
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.data("x", [4, 8], "float32")
        h = amp.nn.fc(x, 8)
        h = F.softmax(F.relu(h))
        loss = F.mean(amp.nn.fc(h, 2))
        opt = amp.decorate(amp.optimizer.SGD(0.1), lists, init_loss_scaling=8.0)
        opt.minimize(loss, startup)
    feeds = {"x": np.full((4, 8), 200, np.float32)}
    step = ready(programs.Net(main, startup, loss, feeds, opt, loss), "hidden")
    step.scope.set_var("fc_0.w_0", np.full((8, 8), 100, np.float32))
    return step


def test_the_list_entries_that_are_named_work() -> None:
    """Each entry that is said to work does when the program is built with it; and one that is not does not."""
    found = culprit(large_hidden(None))
    assert found.operator == "MatMul -> fc_0.tmp_0" and "white list" in found.reason
    works = {cure.change: cure.works for cure in found.cures}
    assert works == {
        "any smaller loss scale": False,
        "custom_black_varnames=['fc_0.tmp_0'] (fp32)": True,
        "custom_black_list=['MatMul'] (fp32)": True,
    }
    for lists in (
        amp.AutoMixedPrecisionLists(custom_black_varnames=["fc_0.tmp_0"]),
        amp.AutoMixedPrecisionLists(custom_black_list=["MatMul"]),
    ):
        step = large_hidden(lists)
        assert not found_inf(step, step.feeds, step.scope)


# -- saved ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode, dtype", [("amp", "float16"), ("pure-fp16", "float16"), ("pure-fp16", "bfloat16")])
def test_a_saved_step_gives_the_same_report(tmp_path: object, mode: str, dtype: str) -> None:
    step = ready(programs.build("transformer", mode, dtype=dtype), "transformer")
    before = {"loss_scaling_0": np.array([3e38 if dtype == "bfloat16" else 1e9], np.float32)}
    if dtype == "bfloat16":
        step.scope.set_var("fc_0.w_0", np.full_like(step.scope.find_var("fc_0.w_0"), 1e38))
    amp.save_step(tmp_path / "bad.npz", step.main, step.feeds, step.scope, before=before)
    offline = amp.find_culprit(tmp_path / "bad.npz", executor=step.executor)
    assert offline is not None and offline.kind == "operator"
    assert offline == culprit(step, before=before)


def test_files_that_are_no_step(tmp_path: object, mlp: Ready) -> None:
    path = tmp_path / "step.npz"
    with pytest.raises(ModelFileError, match="there is no saved step"):
        amp.find_culprit(path)
    amp.save_step(path, mlp.main, mlp.feeds, mlp.scope)
    assert amp.find_culprit(path) is None
    with pytest.raises(ArgumentTypeError, match="give it neither"):
        amp.find_culprit(path, mlp.feeds)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelFileError, match="no step that amp.save_step wrote, or is damaged"):
        amp.find_culprit(path)
    np.savez(path, meta=np.frombuffer(json.dumps({"types": {}}).encode(), np.uint8), program=np.array([object()]))
    with pytest.raises(ModelFileError, match="damaged"):
        amp.find_culprit(path)
    with pytest.raises(OSError):
        amp.save_step(tmp_path / "no" / "step.npz", mlp.main, mlp.feeds, mlp.scope)


def test_what_is_saved_can_be_run(tmp_path: Path, mlp: Ready) -> None:
    """Feeds as a run takes them, of lists too; what it refuses is refused before a file is written."""
    path = tmp_path / "step.npz"
    lists = {name: array.tolist() for name, array in mlp.feeds.items()}
    amp.save_step(path, mlp.main, lists, mlp.scope)
    assert amp.find_culprit(path) is None and amp.find_culprit(path, executor=amp.watch(mlp.executor)) is None
    path.unlink()
    with pytest.raises(FeedError):
        amp.save_step(path, mlp.main, None, mlp.scope)
    with pytest.raises(FeedError, match="nope"):
        amp.save_step(path, mlp.main, {**mlp.feeds, "nope": 1}, mlp.scope)
    with pytest.raises(ArgumentError, match="'nope', which is no variable of the scope"):
        amp.save_step(path, mlp.main, mlp.feeds, mlp.scope, before={"nope": 1})
    for call in (partial(amp.save_step, path), amp.find_culprit):
        with pytest.raises(ArgumentError, match=r"'fc_0.w_0' is not float32 of shape"):
            call(mlp.main, mlp.feeds, mlp.scope, before={"fc_0.w_0": np.zeros(3)})
    assert not path.exists()


@pytest.mark.parametrize("meta", [{"version": 99}, {"format": "another"}, {"name": None}])
def test_a_step_of_another_version(meta: dict[str, Any], tmp_path: Path, mlp: Ready) -> None:
    path = tmp_path / "step.npz"
    amp.save_step(path, mlp.main, mlp.feeds, mlp.scope)
    with np.load(path) as stored:
        content = dict(stored)
    said = {k: v for k, v in (json.loads(content["meta"].tobytes()) | meta).items() if v is not None}
    np.savez(path, **(content | {"meta": np.frombuffer(json.dumps(said).encode(), np.uint8)}))
    with pytest.raises(ModelFileError, match="no step that amp.save_step wrote"):
        amp.find_culprit(path)
    path.write_text("a text")
    with pytest.raises(ModelFileError, match="or is damaged$"):
        amp.find_culprit(path)


def test_bad_arguments(mlp: Ready) -> None:
    with pytest.raises(ArgumentError, match="'loss_scaling_9' is no variable of the scope"):
        culprit(mlp, before={"loss_scaling_9": 1.0})
    with pytest.raises(ArgumentTypeError, match="expected an amp.Executor"):
        amp.find_culprit(mlp.main, mlp.feeds, mlp.scope, executor=amp.CPUPlace())
    with pytest.raises(ArgumentTypeError, match="expected the training program"):
        amp.find_culprit(None)
    with pytest.raises(ArgumentError, match="on_bad is 'stop'"):
        amp.watch(mlp.executor, "stop")
    with pytest.raises(ArgumentTypeError, match="takes an amp.Executor"):
        amp.watch(mlp.main)
    with pytest.raises(ArgumentError, match="limit is -1"):
        amp.watch(mlp.executor, limit=-1)
