"""Loops of one's own over ranks: gradients reduced by hand, callbacks, and parameters that some ranks do not reach."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler import distributed
from amp_transpiler.nn import functional as F
from amp_transpiler.optimizer.pairs import ParamsGrads

LR, SCALE = 0.5, 64.0
Built = tuple[Any, Any, Any]


def net() -> tuple[amp.Program, amp.Program, amp.Variable]:
    main, startup = amp.Program(), amp.Program("startup")
    startup.seed = 5
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x, label = amp.data("x", [4, 6], "float32"), amp.data("label", [4, 1], "int64")
        loss = F.mean(F.cross_entropy(amp.nn.fc(amp.nn.fc(x, 16, act="relu"), 4), label))
    return main, startup, loss


def optimizer(mode: str, plain: Any = None) -> Any:
    clip = amp.optimizer.ClipGradByGlobalNorm(0.2)
    plain = plain or amp.optimizer.Momentum(LR, 0.9, grad_clip=clip, multi_precision=mode == "pure")
    if mode == "fp32":
        return plain
    return amp.decorate(plain, use_pure_fp16=mode == "pure", use_fp16_guard=False, init_loss_scaling=SCALE)


def halved(pairs: ParamsGrads) -> ParamsGrads:
    return [(parameter, grad * 0.5) for parameter, grad in pairs]


def decayed(pairs: ParamsGrads) -> ParamsGrads:
    return [(parameter, grad + F.cast(parameter, grad.dtype) * 0.01) for parameter, grad in pairs]


# -- four ways to one step ------------------------------------------------------------------------------------
def implicit(opt: Any, loss: amp.Variable, startup: amp.Program) -> None:
    opt.minimize(loss, startup)


def by_hand(opt: Any, loss: amp.Variable, startup: amp.Program) -> None:
    opt.apply_gradients(distributed.all_reduce(opt.backward(loss, startup)))


def by_parts(opt: Any, loss: amp.Variable, startup: amp.Program) -> None:
    """Scaled loss, backward pass, sum and unscale one after the other; without 16 bit the first and the last are not."""
    mixed = hasattr(opt, "get_scaled_loss")
    pairs = amp.append_backward(opt.get_scaled_loss(loss, startup) if mixed else loss)
    grads = distributed.all_reduce([grad for _, grad in pairs])
    grads = opt.get_unscaled_gradients(grads) if mixed else grads
    opt.apply_gradients([(parameter, grad) for (parameter, _), grad in zip(pairs, grads, strict=True)])


def with_callbacks(opt: Any, loss: amp.Variable, startup: amp.Program) -> None:
    opt.minimize(loss, startup, pre_allreduce_callbacks=[halved], post_allreduce_callbacks=[decayed])


def callbacks_by_hand(opt: Any, loss: amp.Variable, startup: amp.Program) -> None:
    pairs = distributed.all_reduce(halved(opt.backward(loss, startup)))
    if hasattr(opt, "get_unscaled_gradients"):
        grads = opt.get_unscaled_gradients([grad for _, grad in pairs])
        pairs = [(parameter, grad) for (parameter, _), grad in zip(pairs, grads, strict=True)]
    opt.apply_gradients(decayed(pairs))


def trained(mode: str, way: Callable[[Any, Any, Any], None], folder: Path) -> tuple[dict[str, bytes], int]:
    """The files of a checkpoint after a few steps, of which one is bad, and how many gradients are reduced."""
    with amp.unique_name.guard():
        main, startup, loss = net()
        opt = optimizer(mode)
        with amp.program_guard(main, startup):
            way(opt, loss, startup)
    exe, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
    exe.run(startup, scope=scope)
    if mode == "pure":
        opt.amp_init(amp.CPUPlace(), scope=scope)
    for step in range(4):
        rng = np.random.default_rng([step, distributed.rank()])
        x = rng.normal(size=(4, 6)).astype(np.float32)
        if step == 2 and distributed.rank() == 1 and mode != "fp32":
            x[0, 0] = np.inf
        exe.run(main, {"x": x, "label": rng.integers(0, 4, (4, 1))}, [], scope)
    distributed.check_equal(main, scope)
    amp.save_checkpoint(folder, main, scope)
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*.*"))}
    return files, sum(len(op.outputs) for op in main.operators if op.type == "AllReduce")


@pytest.mark.parametrize("mode", ["fp32", "mixed", "pure"])
def test_sums_by_hand_give_the_same_files(mode: str, tmp_path: Path) -> None:
    def run() -> dict[str, tuple[dict[str, bytes], int]]:
        ways = (implicit, by_hand, by_parts, with_callbacks, callbacks_by_hand)
        return {way.__name__: trained(mode, way, tmp_path / way.__name__) for way in ways}

    for found in distributed.simulate(2, run):
        files, reduced = found["implicit"]
        assert len(files) >= 2 and sum(map(len, files.values())) > 1000
        for way in ("by_hand", "by_parts"):
            assert found[way] == (files, 4), way  # each gradient once
        assert found["with_callbacks"] == found["callbacks_by_hand"] and found["with_callbacks"][1] == reduced == 4
        assert found["with_callbacks"][0] != files


def test_callbacks_get_scaled_gradients_before_the_sum_and_unscaled_ones_behind_it() -> None:
    def run() -> tuple[list[np.ndarray], list[np.ndarray], float]:
        seen: dict[str, list[amp.Variable]] = {}

        def note(what: str) -> Callable[[ParamsGrads], ParamsGrads]:
            def callback(pairs: ParamsGrads) -> ParamsGrads:
                seen[what] = [grad for _, grad in pairs]
                return pairs

            return callback

        main, startup, loss = net()
        plain = amp.optimizer.SGD(1.0, grad_clip=amp.optimizer.ClipGradByGlobalNorm(0.25))
        optimizer("mixed", plain).minimize(
            loss, startup, pre_allreduce_callbacks=[note("pre")], post_allreduce_callbacks=[note("post")]
        )
        exe, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
        exe.run(startup, scope=scope)
        names = [parameter.name for parameter in main.parameters]
        before = [np.array(scope.find_var(name)) for name in names]
        rng = np.random.default_rng(distributed.rank())
        feed = {"x": 9 * rng.normal(size=(4, 6)).astype(np.float32), "label": rng.integers(0, 4, (4, 1))}
        found = exe.run(main, feed, [*seen["pre"], *seen["post"]], scope)
        moved = [np.array(scope.find_var(name)) - array for name, array in zip(names, before, strict=True)]
        return found[: len(names)], found[len(names) :], float(np.sqrt(sum((each**2).sum() for each in moved)))

    (pre, post, norm), (other, same, _) = distributed.simulate(2, run)
    for mine, theirs, mean, again in zip(pre, other, post, same, strict=True):
        assert not np.array_equal(mine, theirs) and np.array_equal(mean, again)
        exact = (mine.astype(np.float64) + theirs) / 2 / SCALE
        np.testing.assert_allclose(mean, exact, atol=1e-3 * np.abs(exact).max())
    assert np.sqrt(sum((each.astype(np.float64) ** 2).sum() for each in post)) > 0.3  # clipped behind the callback
    assert abs(norm - 0.25) < 1e-5


@pytest.mark.parametrize("callbacks", ["halved", [1], [lambda pairs: None]])
def test_what_is_no_callback_is_an_error(callbacks: Any) -> None:
    main, startup, loss = net()
    with pytest.raises(amp.AmpError, match="post_allreduce_callbacks"):
        optimizer("mixed").minimize(loss, startup, post_allreduce_callbacks=callbacks)
    assert not any(v.grad_of is not None for v in main.variables)


def test_what_is_no_type_is_an_error_and_where_no_rank_has_a_gradient_none_is_made() -> None:
    def run() -> None:
        main, _, loss = net()
        with amp.program_guard(main):
            with pytest.raises(amp.AmpError, match="foo"):
                distributed.all_reduce(loss, precision="foo")
            pairs = [(parameter, None) for parameter in main.parameters]
            assert distributed.all_reduce(pairs) == pairs

    distributed.simulate(2, run)


def test_a_loss_that_is_reduced_before_minimize_is_told_to_be_reduced_behind_it() -> None:
    def run() -> None:
        main, startup, loss = net()
        with amp.program_guard(main, startup):
            mean = distributed.all_reduce(loss)
            with pytest.raises(amp.errors.GradientError, match="leave it out, or call it behind minimize"):
                amp.optimizer.SGD(0.1).minimize(mean, startup)

    distributed.simulate(2, run)


def test_metrics_are_reduced_in_the_program() -> None:
    def run() -> list[Any]:
        main = amp.Program()
        with amp.program_guard(main, amp.Program()):
            x = amp.data("x", [2], "float32")
            mean, (total, largest) = (
                distributed.all_reduce(F.mean(x)),
                distributed.all_reduce([x, F.cast(x, "int64")], "sum"),
            )
            found = [mean, total, largest, distributed.all_reduce(x, "max", precision="float16")]
        x = np.array([1.0, 4.0 - distributed.rank()], np.float32)
        return amp.Executor(amp.CPUPlace()).run(main, {"x": x}, found, amp.Scope())

    for mean, total, whole, largest in distributed.simulate(3, run):
        assert mean == 2.0 and whole.dtype == np.int64
        np.testing.assert_array_equal([total, whole, largest], [[3, 9], [3, 9], [1, 4]])


# -- parameters that not all ranks reach ----------------------------------------------------------------------
def branched(reached: Sequence[str], mode: str = "fp32", sparse: bool = False, train: bool = True) -> Any:
    """A program whose loss goes through the layers ``reached`` alone, its loss and what is to be fed."""
    main, startup = amp.Program(), amp.Program("startup")
    startup.seed = 3
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x, ids = amp.data("x", [2, 3], "float32"), amp.data("ids", [2], "int64")
        parts = {name: F.sum(amp.nn.fc(x, 2, name=name)) for name in ("a", "b", "c")}
        parts["table"] = F.sum(amp.nn.embedding(ids, [5, 3], is_sparse=sparse, param_attr="table"))
        loss = F.sum(x)
        for name in reached:
            loss = loss + parts[name]
    return main, startup, loss


def parameters_after(reached: Sequence[str], mode: str, sparse: bool = False) -> dict[str, np.ndarray]:
    """How far the parameters went in a step with a rate of 1, and the warnings."""
    main, startup, loss = branched(reached, mode, sparse)
    plain = amp.optimizer.SGD(1.0)
    opt = plain if mode == "fp32" else amp.decorate(plain, init_loss_scaling=8.0)
    opt.minimize(loss, startup)
    exe, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
    exe.run(startup, scope=scope)
    before = {v.name: np.array(scope.find_var(v.name)) for v in main.parameters}
    exe.run(main, {"x": np.ones((2, 3), np.float32), "ids": np.array([1, 1])}, [], scope)
    return {name: before[name] - scope.find_var(name) for name in before}


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("mode", ["fp32", "mixed"])
def test_what_a_rank_does_not_reach_counts_as_zeros_there(mode: str, sparse: bool) -> None:
    """Three programs: one reaches a and b, one b and the table, in another order, one nothing at all."""
    reached = (["a", "b"], ["table", "b"], [])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = distributed.simulate(3, lambda: parameters_after(reached[distributed.rank()], mode, sparse))
    for moved in found:
        np.testing.assert_allclose(moved["a.w_0"], np.full((3, 2), 2 / 3), rtol=1e-3)
        np.testing.assert_allclose(moved["b.w_0"], np.full((3, 2), 4 / 3), rtol=1e-3)
        np.testing.assert_allclose(moved["table"], np.array([0, 2 / 3, 0, 0, 0])[:, None] * np.ones(3), rtol=1e-3)
        assert not moved["c.w_0"].any() and not moved["c.b_0"].any()
        assert all(np.array_equal(moved[name], found[0][name]) for name in moved)
    (said,) = [str(each.message) for each in caught if "get no gradient" in str(each.message)]
    assert "'c.w_0', 'c.b_0'" in said and "a.w_0" not in said and "table" not in said


@pytest.mark.parametrize("mode", ["fp32", "mixed"])
def test_no_gradient_on_any_rank_is_an_error_on_all(mode: str) -> None:
    def run() -> str:
        with pytest.raises(amp.AmpError) as error:
            parameters_after([], mode)
        return str(error.value)

    assert all("depends on no parameter, on any rank" in said for said in distributed.simulate(2, run))


def test_a_listed_parameter_may_be_missing_on_some_ranks_but_not_on_all() -> None:
    def run(names: list[str]) -> str:
        _, startup, loss = branched(["a"] if distributed.rank() else ["b"])
        try:
            pairs = amp.optimizer.SGD(1.0).backward(loss, startup, names)
        except amp.AmpError as error:
            return str(error)
        return " ".join(parameter.name for parameter, _ in pairs)

    assert distributed.simulate(2, lambda: run(["b.w_0", "a.w_0"])) == ["b.w_0 a.w_0"] * 2
    assert all(
        "parameter 'c.w_0' of parameter_list, on any rank" in s
        for s in distributed.simulate(2, lambda: run(["a.w_0", "c.w_0"]))
    )


def test_lists_that_differ_are_an_error_that_names_both() -> None:
    """What a loop of one's own gives without its parameters cannot be made good."""

    def run() -> tuple[str, list[str]]:
        main, startup, loss = branched(["a"] if distributed.rank() else ["a", "b"])
        with amp.program_guard(main, startup):
            pairs = amp.append_backward(loss)
            with pytest.raises(amp.AmpError) as error:
                distributed.all_reduce([grad for _, grad in pairs])
            whole = distributed.all_reduce(pairs)
        return str(error.value), [parameter.name for parameter, _ in whole]

    for said, names in distributed.simulate(2, run):
        assert "of parameter 'b.w_0' rank 0 has float32[3, 2], rank 1 has none" in said
        assert sorted(names) == ["a.b_0", "a.w_0", "b.b_0", "b.w_0"]
