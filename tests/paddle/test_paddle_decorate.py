"""``decorate`` and the lists by Paddle's names: levels, element types, operator names in the sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler import optimizer as optim
from amp_transpiler.errors import ArgumentError, ArgumentTypeError, ListError
from amp_transpiler.nn import functional as F
from tests.helpers.cuda_kernels import without_cuda_kernel


class Net:
    """A convolution, an addition and a mean, and a guarded matrix product, as in Paddle's test of levels."""

    def __init__(self, optimizer: Any) -> None:
        self.main, self.startup, self.optimizer = amp.Program(), amp.Program("startup"), optimizer
        with amp.program_guard(self.main, self.startup), amp.unique_name.guard():
            x = amp.data("x", [2, 1, 4, 4], "float32")
            hidden = amp.nn.conv2d(x, 2, 3, bias_attr=False) + 1.0
            with amp.fp16_guard():
                self.loss = F.mean(amp.nn.fc(hidden, 3, bias_attr=False))
            optimizer.minimize(self.loss, self.startup)

    def run_in(self) -> dict[str, str]:
        """Operator type -> the element type that it computes in, forward operators."""
        kinds = ("Conv", "Add", "MatMul", "ReduceMean")
        return {op.type: op.inputs[0].dtype for op in self.main.operators if op.role == "forward" and op.type in kinds}


def scaling(decorated: Any) -> tuple[float, bool, int, int, float, float]:
    rule = decorated.loss_scaler
    return (
        rule.init_scale,
        rule.dynamic,
        rule.growth_every,
        rule.backoff_after,
        rule.growth_factor,
        rule.backoff_factor,
    )


FP16, FP32 = "float16", "float32"


@pytest.mark.parametrize(
    "level, expected",
    [
        ("O1", {"Conv": FP16, "Add": FP16, "MatMul": FP16, "ReduceMean": FP32}),
        ("O2", {"Conv": FP16, "Add": FP16, "MatMul": FP16, "ReduceMean": FP16}),
        ("OD", {"Conv": FP16, "Add": FP32, "MatMul": FP16, "ReduceMean": FP32}),
    ],
)
def test_levels(level: str, expected: dict[str, str]) -> None:
    net = Net(amp.decorate(optim.AdamW(0.1), level=level.lower()))
    assert net.run_in() == expected
    assert scaling(net.optimizer) == (65536.0, True, 2000, 1, 2.0, 0.5)
    assert net.optimizer.multi_precision
    masters = [v.name for v in net.main.variables if v.name.endswith("fp32_master_0")]
    assert masters == (["conv2d_0.w_0_fp32_master_0", "fc_0.w_0_fp32_master_0"] if level == "O2" else [])


def test_the_guard_of_a_level_is_use_amp_guard() -> None:
    net = Net(amp.decorate(optim.AdamW(0.1), None, "O2", "float16", use_amp_guard=True))
    assert net.run_in() == {"Conv": FP32, "Add": FP32, "MatMul": FP16, "ReduceMean": FP16}


def test_every_argument_of_a_level_by_its_place() -> None:
    """The last, ``use_promote``, was one too many."""
    numbers = (1024.0, 500, 3, 4.0, 0.25)
    decorated = amp.decorate(optim.AdamW(0.1), None, "O2", "float16", None, True, *numbers, True, False, False)
    assert scaling(decorated) == (1024.0, True, 500, 3, 4.0, 0.25)
    with pytest.raises(
        ArgumentError, match="use_promote=True is Paddle's, and not offered: which operators run in fp32"
    ):
        amp.decorate(optim.AdamW(0.1), None, "O2", "float16", None, True, *numbers, True, False, True)


def test_master_weight_false_leaves_masters_out() -> None:
    with pytest.warns(UserWarning, match="multi_precision"):
        decorated = amp.decorate(optim.AdamW(0.1), level="O2", master_weight=False, master_grad=True)
    assert not decorated.multi_precision
    assert amp.decorate(optim.AdamW(0.1), level="O2", master_weight=True).multi_precision


@pytest.mark.parametrize("dtype", ["bfloat16", "bf16", "BFloat16"])
def test_bfloat16_by_level_has_no_scaling_unless_asked(dtype: str) -> None:
    assert scaling(amp.decorate(optim.SGD(0.1), level="O1", dtype=dtype))[:2] == (1.0, False)
    assert scaling(amp.decorate(optim.SGD(0.1), level="O1", dtype=dtype, init_loss_scaling=8.0))[:2] == (8.0, True)
    assert Net(amp.decorate(optim.SGD(0.1), level="O1", dtype=dtype)).run_in()["MatMul"] == "bfloat16"


def test_names_of_element_types() -> None:
    """``decorate(dtype="fp16")`` was refused, although the demos' flag says fp16."""
    for name in ("float16", "fp16", "half", "FP16", np.float16):
        assert Net(amp.decorate(optim.SGD(0.1), dtype=name)).run_in()["Conv"] == FP16
    for name in ("bfloat16", "bf16"):
        assert amp.AutoMixedPrecisionLists(dtype=name).amp_dtype == "bfloat16"
        assert (
            Net(amp.decorate(optim.SGD(0.1), amp.CustomOpLists(dtype=name), dtype=name)).run_in()["MatMul"]
            == "bfloat16"
        )
    assert scaling(amp.decorate(optim.SGD(0.1), use_bf16=True))[:2] == (1.0, False)


def test_the_older_signature_keeps_its_defaults() -> None:
    assert scaling(amp.decorate(optim.SGD(0.1))) == (32768.0, True, 1000, 2, 2.0, 0.8)
    assert scaling(amp.decorate(optim.SGD(0.1), None, 128.0)) == (128.0, True, 1000, 2, 2.0, 0.8)
    assert scaling(amp.decorate(optimizers=optim.SGD(0.1), use_dynamic_loss_scaling=False))[:2] == (32768.0, False)


@pytest.mark.parametrize(
    "call, error, said",
    [
        (lambda: amp.decorate(optim.SGD(), level="O3"), ValueError, "'O1' .* 'O2' .* or 'OD'"),
        (lambda: amp.decorate(optim.SGD(), level="O0"), ArgumentError, "call minimize of the optimizer itself"),
        (
            lambda: amp.decorate(optim.SGD(), level="O2", use_pure_fp16=True),
            TypeError,
            "use_pure_fp16 belongs to the other",
        ),
        (lambda: amp.decorate(optim.SGD(), level="O1", dtype="int8"), ValueError, "dtype is 'int8'"),
        (
            lambda: amp.decorate(optim.SGD(), dtype="int8"),
            ValueError,
            "dtype is 'int8'; expected 'float16' or 'bfloat16'",
        ),
        (lambda: amp.decorate(optim.SGD(), amp.CustomOpLists(), level="OD"), ArgumentError, "level='O1'"),
        (lambda: amp.decorate("sgd", level="O2"), ArgumentTypeError, "optimizer is 'sgd'"),
        (lambda: amp.decorate(level="O2"), ArgumentTypeError, "optimizer is None"),
        (lambda: amp.decorate(optim.SGD(), level="O2", master_weight=1), ArgumentTypeError, "master_weight is 1"),
        (lambda: amp.decorate(optim.SGD(), level="O2", use_promote=True), ArgumentError, "custom_black_list"),
        (
            lambda: amp.decorate(models=[], optimizers=optim.SGD(), level="O2"),
            ArgumentError,
            "decorate takes the optimizer alone",
        ),
        (lambda: amp.decorate(optim.SGD(), level="O2", lvl=1), TypeError, "lvl"),
    ],
)
def test_wrong_arguments(call: Callable[[], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()


# -- lists ---------------------------------------------------------------------------------------------------
def test_paddles_operator_names_are_in_the_sets() -> None:
    lists = amp.CustomOpLists(custom_white_list=["softmax"], custom_black_list=["pool2d"])
    assert isinstance(lists, amp.AutoMixedPrecisionLists)
    for name in ("conv2d", "matmul_v2", "mul", "softmax", "Conv"):
        assert name in lists.white_list and name not in lists.black_list and name in lists.all_list
    assert "pool2d" in lists.black_list and "pool2d" not in lists.gray_list
    assert "elementwise_add" in lists.gray_list
    for name in ("no_such_operator", "c_identity", 3, None):
        assert name not in lists.all_list
    assert lists.all_list == lists.white_list | lists.black_list | lists.gray_list
    assert lists.amp_dtype == "float16"


@pytest.mark.parametrize("name", ["batch_norm", "softmax_with_cross_entropy", "lstm", "reduce_prod"])
def test_a_custom_white_operator_that_lowering_writes_out_is_taken(name: str) -> None:
    """They were refused for bfloat16, for which CUDA has no kernel of theirs, and stood in ``unsupported_list``."""
    lists = amp.AutoMixedPrecisionLists(custom_white_list=[name], dtype="bfloat16")
    assert name in lists.white_list and not lists.custom_white_list & lists.unsupported_list
    assert "LogSoftmax" in lists.black_list, (
        "what a loss with probabilities as labels makes is black with it, not white"
    )
    with pytest.raises(ListError, match="'pool2d', but .* cannot run in bfloat16: no CUDA kernel"):
        amp.AutoMixedPrecisionLists(custom_white_list=["pool2d"], dtype="bfloat16")


def test_a_batch_norm_on_the_white_list_runs_in_bfloat16() -> None:
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        loss = F.mean(amp.nn.batch_norm(amp.data("x", [4, 2], "float32")) ** 2)
        lists = amp.AutoMixedPrecisionLists(custom_white_list=["batch_norm"], dtype="bfloat16")
        amp.decorate(optim.SGD(0.1), lists, dtype="bfloat16").minimize(loss, startup)
    (norm,) = [op for op in main.operators if op.type == "BatchNormalization"]
    assert norm.precision == "bfloat16"
    assert not without_cuda_kernel(main.lower(amp.CUDAPlace(0)).model)


#: Paddle's operator that its function of this name makes, and the function here.
FUNCTIONS: list[tuple[str, Callable[[amp.Variable], Any]]] = [
    ("silu", F.silu),
    ("swish", F.swish),
    ("swish", lambda h: amp.nn.fc(h, 8, act="swish")),
    ("softmax_with_cross_entropy", lambda h: F.cross_entropy(h, h, soft_label=True)),
    ("max_pool2d_with_index", lambda h: F.adaptive_max_pool2d(F.reshape(h, [2, 4, 2, 2]), 1)),
    ("argsort", F.sort),
    ("index_select", lambda h: F.index_select(h, amp.data("rows", [4], "int64"))),
    ("flip", lambda h: F.flip(h, [0])),
    ("brelu", F.hardtanh),
    ("dot", lambda h: F.dot(h, h)),
    ("log1p", F.log1p),
    ("logsigmoid", F.log_sigmoid),
    ("maxout", lambda h: F.maxout(F.reshape(h, [1, 2, 4, 4]), 2)),
]


@pytest.mark.parametrize("pure", [False, True], ids=["mixed", "pure"])
@pytest.mark.parametrize("name, function", FUNCTIONS)
def test_a_custom_black_operator_of_paddle_is_what_its_function_makes(
    name: str, function: Callable[[amp.Variable], Any], pure: bool
) -> None:
    """``silu`` was Swish alone, which ``F.silu`` does not make: it went on in 16 bit. Other names were unknown."""
    main = amp.Program()
    with amp.program_guard(main), amp.unique_name.guard():
        hidden = F.matmul(amp.data("x", [4, 8]), amp.create_parameter([8, 8], "float32"))
        before = set(main.operators)
        function(hidden)
    lists = amp.AutoMixedPrecisionLists(custom_black_list=[name])
    if pure:
        amp.cast_model_to_fp16(main, lists, use_fp16_guard=False)
    else:
        amp.rewrite_program(main, lists)
    made = [op for op in main.operators if op not in before and op.type in lists.custom_black_list]
    assert made and {op.precision for op in made} == {FP32}
    assert main.operators[-1].precision == FP32 or pure


def test_the_sets_can_be_changed_by_paddles_names() -> None:
    lists = amp.AutoMixedPrecisionLists()
    lists.black_list.add("conv2d")
    lists.white_list.remove("conv2d")
    lists.gray_list.discard("pool2d")
    lists.gray_list.update(["softmax", "Exp"])
    assert "Conv" in lists.black_list and "Conv" not in lists.white_list and "MaxPool" not in lists.gray_list
    assert {"Softmax", "Exp"} <= lists.gray_list
    assert "Conv" in amp.AutoMixedPrecisionLists().white_list, "the lists of another instance are as they were"
    with pytest.raises(KeyError):
        lists.white_list.remove("conv2d")
    with pytest.raises(ListError, match="no operator has the name 'conv2dd'"):
        lists.white_list.add("conv2dd")
