"""``ctc_loss``: against every alignment of tiny cases, and against torch's values and gradients (tests/record/ctc.py)."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import AmpError, ArgumentError
from amp_transpiler.ir.nodes import OWN
from tests.helpers.cuda_kernels import without_cuda_kernel
from tests.helpers.forwardcheck import check_forward
from tests.helpers.gradcheck import check_gradient
from tests.helpers.rules import run_cpu
from tests.helpers.where import RECORDED

F = amp.nn.functional
RECORD = RECORDED / "ctc_torch.npz"


def collapsed(path: tuple[int, ...], blank: int) -> list[int]:
    """The label of an alignment: repeats merged, then blanks dropped."""
    return [c for c, _ in itertools.groupby(path) if c != blank]


def every_alignment(
    logits: np.ndarray,
    labels: np.ndarray,
    steps: np.ndarray,
    symbols: np.ndarray,
    *,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: int = 0,
) -> list[np.ndarray]:
    """The loss by its definition: the probabilities of all paths whose label is the target, added."""
    log_prob = logits - np.log(np.exp(logits).sum(2, keepdims=True))
    each = []
    for n in range(logits.shape[1]):
        target = [int(c) for c in labels[n, : symbols[n]]]
        total = sum(
            np.exp(sum(log_prob[t, n, c] for t, c in enumerate(path)))
            for path in itertools.product(range(logits.shape[2]), repeat=int(steps[n]))
            if collapsed(path, blank) == target
        )
        each.append(-np.log(total) if total else 0.0 if zero_infinity else np.inf)
    losses = np.array(each)
    if reduction == "mean":
        return [np.mean(losses / np.maximum(symbols, 1))]
    return [losses.sum() if reduction == "sum" else losses]


def tiny(seed: int = 0, steps: int = 4, classes: int = 3) -> list[np.ndarray]:
    """Sequences with repeats, an empty target, a short input, padding that is no class."""
    logits = np.random.default_rng(seed).normal(size=(steps, 4, classes))
    labels = np.array([[1, 1], [2, -7], [99, 99], [1, 2]])
    return [logits, labels, np.array([4, 2, 3, 4]), np.array([2, 1, 0, 2], np.int32)]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_definition(reduction: str) -> None:
    attrs = {"reduction": reduction, "blank": 0}
    oracle = partial(every_alignment, **attrs)
    check_forward("CTCLoss", tiny(), attrs=attrs, domain=OWN, feeds=(1, 2, 3), forward=oracle)
    check_gradient("CTCLoss", tiny(), attrs=attrs, domain=OWN, feeds=(1, 2, 3), forward=oracle)


def test_another_blank_and_impossible_targets() -> None:
    logits = tiny(1)[0]
    given = [logits, np.array([[0, 0], [1, 1], [0, 1], [1, 0]]), np.array([4, 2, 0, 1]), np.array([2, 2, 1, 0])]
    attrs = {"blank": 2, "reduction": "none", "zero_infinity": 1}
    oracle = partial(every_alignment, **attrs)
    check_forward("CTCLoss", given, attrs=attrs, domain=OWN, feeds=(1, 2, 3), forward=oracle)
    check_gradient("CTCLoss", given, attrs=attrs, domain=OWN, feeds=(1, 2, 3), forward=oracle)


def test_no_labels_at_all_and_more_steps_than_are_unrolled_on_cpu() -> None:
    given = [*tiny(2)[:1], np.zeros((4, 0), np.int64), np.array([4, 2, 3, 4]), np.zeros(4, np.int64)]
    check_gradient("CTCLoss", given, domain=OWN, feeds=(1, 2, 3), forward=every_alignment)
    given = tiny(3, steps=11, classes=2)
    given[1:] = [np.array([[1, 1], [1, 0], [1, 1], [1, 1]]), np.array([11, 9, 4, 3]), np.array([2, 1, 0, 2])]
    check_gradient("CTCLoss", given, domain=OWN, feeds=(1, 2, 3), forward=every_alignment)


def run(given: dict[str, np.ndarray], logits: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """The loss and its gradient on CPU; of several losses, that of 1, 2, 3, .. times them."""
    main, startup = amp.Program(), amp.Program()
    with amp.program_guard(main, startup), amp.scope_guard(amp.Scope()):
        x = amp.create_parameter(list(logits.shape), "float32", initializer=logits.astype(np.float32))
        names = ("labels", "input_lengths", "label_lengths")
        fed = [amp.data(name, list(given[name].shape), str(given[name].dtype)) for name in names]
        loss = F.ctc_loss(x, *fed, **options)
        total = loss
        if loss.shape:
            total = F.sum(loss * np.arange(1, loss.shape[0] + 1, dtype=np.float32))
        [(_, gradient)] = amp.append_backward(total)
        exe = amp.Executor(amp.CPUPlace())
        exe.run(startup)
        found = exe.run(main, feed={name: given[name] for name in names}, fetch_list=[loss, gradient])
    return found[0], found[1]


def recorded() -> list[dict[str, np.ndarray]]:
    with np.load(RECORD) as record:
        cases: list[dict[str, np.ndarray]] = [{} for _ in range(int(record["cases"]))]
        for key in record.files:
            index, _, name = key.partition("_")
            if name:
                cases[int(index)][name] = record[key]
    return cases


TORCHS = recorded()


@pytest.mark.parametrize("key", ["none0", "mean1", "sum0"])
@pytest.mark.parametrize("index", range(len(TORCHS)))
def test_values_and_gradients_are_torchs(index: int, key: str) -> None:
    options = {"reduction": key[:-1], "zero_infinity": key[-1] == "1"}
    case = TORCHS[index]
    loss, gradient = run(case, case["logits"], blank=int(case["blank"]), **options)
    np.testing.assert_allclose(loss, case[f"loss_{key}"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient, case[f"logits_{key}"], rtol=1e-5, atol=1e-5 * max(1, loss.size))


def test_the_record_has_impossible_and_empty_targets() -> None:
    assert sum(int(np.isinf(case["loss_none0"]).sum()) for case in TORCHS) >= 5
    assert sum(int((case["label_lengths"] == 0).sum()) for case in TORCHS) >= 10


@pytest.mark.parametrize("index", range(12))
def test_log_probabilities_give_what_their_logits_give(index: int) -> None:
    case = TORCHS[index]
    x = case["logits"].astype(np.float64)
    log_probs = x - np.log(np.exp(x).sum(2, keepdims=True))
    loss, gradient = run(case, log_probs, blank=int(case["blank"]), reduction="none")
    np.testing.assert_allclose(loss, case["loss_none0"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient, case["log_probs_none0"], rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("mode", ["fp32", "mixed", "pure"])
def test_a_model_trains_through_it_and_the_loss_stays_fp32(mode: str) -> None:
    rng = np.random.default_rng(0)
    feed = {
        "x": rng.normal(size=(20, 4, 8)).astype(np.float32),
        "labels": rng.integers(1, 6, (4, 5)),
        "input_lengths": np.array([20, 18, 15, 20]),
        "label_lengths": np.array([5, 4, 3, 0]),
    }
    main, startup = amp.Program(), amp.Program()
    with amp.program_guard(main, startup), amp.unique_name.guard(), amp.scope_guard(amp.Scope()):
        hidden = amp.nn.fc(amp.data("x", [20, 4, 8], "float32"), 16, num_flatten_dims=2, act="relu")
        fed = [amp.data(name, list(feed[name].shape), "int64") for name in ("labels", "input_lengths", "label_lengths")]
        loss = F.ctc_loss(amp.nn.fc(hidden, 6, num_flatten_dims=2), *fed)
        optimizer = amp.optimizer.Adam(1e-2, multi_precision=mode == "pure")
        if mode != "fp32":
            optimizer = amp.decorate(
                optimizer, init_loss_scaling=1024.0, use_pure_fp16=mode == "pure", use_fp16_guard=False
            )
        optimizer.minimize(loss, startup)
        exe = amp.Executor(amp.CPUPlace())
        exe.run(startup)
        if mode != "fp32":
            optimizer.amp_init(amp.CPUPlace())
        losses = [float(exe.run(main, feed=feed, fetch_list=[loss])[0]) for _ in range(30)]
    assert np.isfinite(losses).all() and losses[-1] < 0.3 * losses[0], losses
    for op in main.operators:
        if op.type in ("CTCLoss", "CTCLossGrad"):
            assert {v.dtype for v in (op.inputs[0], *op.outputs) if v is not None} == {"float32"}, op.label
    model = main.lower(amp.CUDAPlace(0)).model
    assert not {"Scan", "Loop", "If"} & {node.op_type for node in model.graph.node}
    assert not without_cuda_kernel(model)
    products = [node for node in main.lower(amp.CPUPlace()).model.graph.node if node.op_type == "Scan"]
    assert len(products) == 2, "the gradient uses the forward variables of the loss"


VALID = {"labels": [[1, 2], [1, 1]], "input_lengths": [5, 4], "label_lengths": [2, 1]}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("labels", [[7, 1], [1, 1]]),
        ("labels", [[-1, 1], [1, 1]]),
        ("input_lengths", [6, 4]),
        ("input_lengths", [-1, 4]),
        ("label_lengths", [3, 1]),
        ("label_lengths", [2, -1]),
    ],
)
def test_labels_and_lengths_out_of_range(name: str, value: list[Any]) -> None:
    given = {n: np.array(v) for n, v in VALID.items()}
    logits = np.random.default_rng(0).normal(size=(5, 2, 4))
    expected, _ = run(given, logits, reduction="none")
    given[name] = np.array(value)
    with pytest.raises(AmpError, match=r"ctc_loss.*(?i:out of (data bounds|range))"):
        run(given, logits)
    # What CUDA runs cannot stop; there the loss of that sequence is NaN, and that of the other is untouched.
    main = amp.Program()
    with amp.program_guard(main, amp.Program()):
        fed = [amp.data(n, list(a.shape), "int64") for n, a in given.items()]
        F.ctc_loss(amp.data("logits", [5, 2, 4], "float32"), *fed, reduction="none")
    model = main.lower(amp.CUDAPlace(0), fetch_list=[main.operators[-1].outputs[0]]).model
    found = run_cpu(model, {"logits": logits.astype(np.float32), **given})[0]
    [wrong] = (i for i in range(2) if value[i] != VALID[name][i])
    assert np.isnan(found[wrong])
    np.testing.assert_allclose(found[1 - wrong], expected[1 - wrong], rtol=1e-5)


def test_what_does_not_fit_is_refused_while_building() -> None:
    with amp.program_guard(amp.Program(), amp.Program()):
        x = amp.data("x", [10, 4, 6], "float32")
        labels, lengths = amp.data("labels", [4, 3], "int64"), amp.data("lengths", [4], "int64")
        floats, three = amp.data("floats", [4, 3], "float32"), amp.data("three", [3], "int64")
        with pytest.raises(ArgumentError, match="labels.*float32.*int64"):
            F.ctc_loss(x, floats, lengths, lengths)
        with pytest.raises(ArgumentError, match=r"4 sequences.*label_lengths.*has 3"):
            F.ctc_loss(x, labels, lengths, three)
        with pytest.raises(ArgumentError, match="blank=6.*6 classes"):
            F.ctc_loss(x, labels, lengths, lengths, blank=6)
        with pytest.raises(ArgumentError, match="reduction is 'max'"):
            F.ctc_loss(x, labels, lengths, lengths, reduction="max")
        with pytest.raises(ArgumentError, match="3 dimensions"):
            F.ctc_loss(amp.data("flat", [10, 6], "float32"), labels, lengths, lengths)


def test_steps_and_batch_that_are_known_with_the_feeds_alone() -> None:
    case = recorded()[1]
    main, startup = amp.Program(), amp.Program()
    with amp.program_guard(main, startup), amp.scope_guard(amp.Scope()):
        x = amp.data("x", [None, None, case["logits"].shape[2]], "float32")
        names = ("labels", "input_lengths", "label_lengths")
        fed = [amp.data(name, [None] * case[name].ndim, "int64") for name in names]
        loss = F.ctc_loss(x, *fed, blank=int(case["blank"]), reduction="none")
        exe = amp.Executor(amp.CPUPlace())
        exe.run(startup)
        for count in (1, len(case["input_lengths"])):
            feed = {"x": case["logits"][:, :count], **{name: case[name][:count] for name in names}}
            found = exe.run(main, feed=feed, fetch_list=[loss])[0]
            np.testing.assert_allclose(found, case["loss_none0"][:count], rtol=1e-5)
