"""The use case as a user writes it, from layers to a served model, and what a loss scale is for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import amp_transpiler as amp
from amp_transpiler.nn import functional as F
from amp_transpiler.passes.lowering.place import Place
from tests.helpers.on_places import LOWERED, PLACES, needs
from tests.helpers.programs import use_case_layers


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    return request.param  # type: ignore[no-any-return]


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Real digits, enlarged to 28 x 28."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = np.kron(data.images[:, None] / 16, np.ones((3, 3)))
    images = np.pad(images, ((0, 0), (0, 0), (2, 2), (2, 2))).astype(np.float32)
    return images, data.target[:, None].astype(np.int64)


class UseCase:
    """Train and test programs of the use case, decorated for pure fp16."""

    def __init__(self, place: Place, dtype: str = "float16") -> None:
        self.main, self.startup, test = amp.Program(), amp.Program("startup"), amp.Program("test")
        with amp.program_guard(self.main, self.startup), amp.unique_name.guard():
            self.prediction, self.loss, _ = use_case_layers()
            adam = amp.optimizer.Adam(0.001, multi_precision=True)
            lists = amp.AutoMixedPrecisionLists(custom_black_list=["pool2d"], dtype=dtype)
            self.optimizer = amp.decorate(
                adam, lists, init_loss_scaling=128.0, use_dynamic_loss_scaling=True, use_pure_fp16=True, dtype=dtype
            )
            self.optimizer.minimize(self.loss, self.startup)
        with amp.program_guard(test, amp.Program("test_startup")), amp.unique_name.guard():
            self.test_prediction, self.test_loss, _ = use_case_layers()
        self.test = test.clone(for_test=True)
        self.place, self.scope = place, amp.Scope()
        self.executor = amp.Executor(place)
        self.executor.run(self.startup, scope=self.scope)
        self.optimizer.amp_init(place, scope=self.scope, test_program=self.test)

    def step(self, images: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
        """One training step: (loss, loss scale after it)."""
        loss, scale = self.executor.run(
            self.main,
            feed={"image": images, "label": labels},
            scope=self.scope,
            fetch_list=[self.loss, self.optimizer.get_loss_scaling()],
        )
        return float(np.ravel(loss)[0]), float(np.ravel(scale)[0])

    def accuracy(self, images: np.ndarray, labels: np.ndarray) -> float:
        (scores,) = self.executor.run(
            self.test, feed={"image": images}, fetch_list=[self.test_prediction.name], scope=self.scope
        )
        return float((np.argmax(scores, 1) == labels[:, 0]).mean())


def forward(program: amp.Program) -> list[tuple[str, str]]:
    """(operator type, element type of its first input) of the forward operators, data movement left out."""
    quiet = {"Cast", "Flatten", "Squeeze", "Reshape", "Identity"}
    return [(op.type, op.inputs[0].dtype) for op in program.operators if op.role == "forward" and op.type not in quiet]


def test_precision_of_every_operator(place: Place) -> None:
    case = UseCase(place)
    assert forward(case.main) == [
        ("Conv", "float32"),
        ("BatchNormalization", "float16"),
        ("Relu", "float16"),
        ("MaxPool", "float32"),
        ("MatMul", "float16"),
        ("Add", "float16"),
        ("Softmax", "float16"),
        ("SoftmaxCrossEntropyLoss", "float16"),
    ]
    casts = [
        (op.inputs[0].dtype, op.outputs[0].dtype)
        for op in case.main.operators
        if op.type == "Cast" and op.role == "forward"
    ]
    assert casts[:3] == [("float32", "float16"), ("float16", "float32"), ("float32", "float16")]
    pool = next(op for op in case.main.operators if op.type == "MaxPool")
    assert pool.inputs[0].producer.type == "Cast" and "black" in pool.reason
    assert all(op.reason for op in case.main.operators if op.role == "forward")


@pytest.mark.parametrize("kind", LOWERED, ids=repr)
def test_a_16_bit_variable_that_was_declared_fp32_is_fetched_as_fp32(kind: Place, tmp_path: Path) -> None:
    case = UseCase(amp.CPUPlace())
    fetched = case.test.var(case.test_prediction.name)
    assert fetched.dtype == "float16"
    case.test.lower(kind, {"image": (5, 1, 28, 28)}, [fetched]).to_onnx(tmp_path / "test.onnx")
    model = onnx.load(tmp_path / "test.onnx")
    (output,) = model.graph.output
    assert (output.name, output.type.tensor_type.elem_type) == (fetched.name, onnx.TensorProto.FLOAT)
    made = [name for node in model.graph.node for name in node.output]
    assert len(made) == len(set(made)), "onnxruntime refuses two tensors of one name"


def test_parameters_and_masters(place: Place) -> None:
    case = UseCase(place)
    kinds = {name: case.scope.find_var(name).dtype.name for name in case.scope.var_names()}
    assert kinds["fc_0.w_0"] == kinds["fc_0.b_0"] == "float16"
    assert kinds["fc_0.w_0_fp32_master_0"] == kinds["fc_0.b_0_fp32_master_0"] == "float32"
    for name in (
        "conv2d_0.w_0",
        "conv2d_0.b_0",
        "batch_norm_0.w_0",
        "batch_norm_0.b_0",
        "batch_norm_0.w_1",
        "batch_norm_0.w_2",
    ):
        assert kinds[name] == "float32"
        assert f"{name}_fp32_master_0" not in kinds
    master = case.scope.find_var("fc_0.w_0_fp32_master_0")
    assert np.array_equal(case.scope.find_var("fc_0.w_0"), master.astype(np.float16))
    assert {v.name for v in case.test.parameters} == {v.name for v in case.main.parameters}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_trains_tests_and_serves(place: Place, dtype: str, tmp_path: Path) -> None:
    needs(place, dtype)
    case = UseCase(place, dtype)
    images, labels = digits()
    order = np.random.default_rng(0).permutation(1500)
    for _ in range(6):
        for start in range(0, 1472, 64):
            rows = order[start : start + 64]
            case.step(images[rows], labels[rows])
    accuracy = case.accuracy(images[1500:], labels[1500:])
    assert accuracy > 0.7
    before = case.scope.find_var("fc_0.w_0_fp32_master_0")
    case.accuracy(images[:64], labels[:64])
    assert np.array_equal(before, case.scope.find_var("fc_0.w_0_fp32_master_0")), "evaluation changes nothing"
    path = tmp_path / "model.onnx"
    with amp.scope_guard(case.scope):
        amp.save_inference_model(
            str(path), [case.test.var("image")], [case.test.var(case.test_prediction.name)], case.executor, case.test
        )
    if dtype == "float16":  # stock onnxruntime has no bfloat16 arithmetic on CPU
        session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        (scores,) = session.run(None, {"image": images[1500:]})
        assert abs(float((np.argmax(scores, 1) == labels[1500:, 0]).mean()) - accuracy) < 0.01
    program, feeds, fetches = amp.load_inference_model(str(path), case.executor)
    (again,) = case.executor.run(program, feed={feeds[0]: images[1500:]}, fetch_list=fetches)
    assert abs(float((np.argmax(again, 1) == labels[1500:, 0]).mean()) - accuracy) < 0.01


def test_an_overflow_skips_the_step_and_nothing_else(place: Place) -> None:
    case = UseCase(place)
    images, labels = digits()
    case.step(images[:64], labels[:64])
    names = case.scope.var_names()
    before = {name: case.scope.find_var(name).copy() for name in names}
    bad = images[:64].copy()
    bad[3, 0, 5, 5] = np.inf
    case.step(bad, labels[:64])
    changed = {name for name in names if before[name].tobytes() != case.scope.find_var(name).tobytes()}
    assert changed <= {"loss_scaling_0", "num_good_steps_0", "num_bad_steps_0", "@rng_step"}, changed
    assert case.scope.find_var("num_bad_steps_0")[0] == 1


def test_a_scale_far_too_high_recovers(place: Place) -> None:
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        _, loss, _ = use_case_layers()
        optimizer = amp.decorate(
            amp.optimizer.Adam(0.001, multi_precision=True),
            init_loss_scaling=2.0**60,
            decr_every_n_nan_or_inf=1,
            decr_ratio=0.125,
            use_pure_fp16=True,
        )
        optimizer.minimize(loss, startup)
    executor, scope = amp.Executor(place), amp.Scope()
    executor.run(startup, scope=scope)
    optimizer.amp_init(place, scope=scope)
    images, labels = digits()
    feed = {"image": images[:64], "label": labels[:64]}
    run = [
        executor.run(main, feed=feed, fetch_list=[loss, optimizer.get_loss_scaling()], scope=scope) for _ in range(60)
    ]
    losses, scales = ([float(np.ravel(values[i])[0]) for values in run] for i in (0, 1))
    assert scales[0] == 2.0**57 and losses[0] == losses[1], "bad steps only lower the scale"
    assert scales[-1] < 2.0**30 and losses[-1] < losses[0] - 0.1, "then it learns"


def tiny_gradients(scaling: dict[str, object] | None, place: Place) -> float:
    """Share of the distance to the optimum covered where gradients are about 1e-9: below the smallest fp16 number."""
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        x = amp.data("x", [16, 8], "float32")
        with amp.fp16_guard():
            w = amp.create_parameter([8, 1], "float32", name="w", initializer=np.full((8, 1), 1.0, np.float32))
            y = x @ w
        loss = F.mean(y) * 1e-8
        sgd = amp.optimizer.SGD(1e5, multi_precision=True)
        optimizer = amp.decorate(
            sgd, use_pure_fp16=True, **(scaling or {"init_loss_scaling": 1.0, "use_dynamic_loss_scaling": False})
        )
        optimizer.minimize(loss, startup)
    executor, scope = amp.Executor(place), amp.Scope()
    executor.run(startup, scope=scope)
    optimizer.amp_init(place, scope=scope)
    for _ in range(20):
        executor.run(main, feed={"x": np.ones((16, 8), np.float32)}, scope=scope)
    return float(1.0 - scope.find_var("w_fp32_master_0")[0, 0])


def test_tiny_gradients_need_loss_scaling(place: Place) -> None:
    assert tiny_gradients(None, place) == 0.0, "without scaling every gradient is zero in fp16"
    assert tiny_gradients({"init_loss_scaling": 2.0**15}, place) == pytest.approx(20 * 1e5 * 1e-8, rel=1e-2)
