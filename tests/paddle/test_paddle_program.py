"""What a program answers by Paddle's names, what messages call it, and what it writes without declared outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import ArgumentTypeError, GraphError, OrderError
from amp_transpiler.nn import functional as F


class Net:
    def __init__(self, **decorated: Any) -> None:
        self.main, self.startup = amp.Program(), amp.Program("startup")
        with amp.program_guard(self.main, self.startup), amp.unique_name.guard():
            x = amp.data("x", [None, 3], "float32")
            with amp.name_scope("enc"):
                hidden = F.dropout(amp.nn.batch_norm(amp.nn.fc(x, 2)))
                with amp.name_scope("inner"):
                    hidden = F.tanh(hidden)
            frozen = amp.create_parameter([2], name="frozen", initializer=np.ones(2, np.float32), trainable=False)
            self.out = hidden * frozen
            self.loss = F.mean(self.out)
            self.test = self.main.clone(for_test=True)
            if decorated:
                self.optimizer = amp.decorate(amp.optimizer.Adam(0.1, multi_precision=True), **decorated)
                self.optimizer.minimize(self.loss, self.startup)


def test_blocks_operators_and_variables() -> None:
    net = Net(init_loss_scaling=8.0)
    block = net.main.global_block()
    assert block is net.main is net.main.current_block() is net.main.block(0) and net.main.num_blocks == 1
    assert block.ops == net.main.operators and block.var("x") is block.vars["x"] is net.main.var("x")
    assert list(net.main.list_vars()) == list(net.main.variables)
    net.startup.random_seed = 7
    assert net.startup.seed == net.startup.random_seed == 7
    with pytest.raises(AttributeError, match="amp.save_checkpoint"):
        net.main.state_dict()
    with pytest.raises(AttributeError, match="has no attribute 'al_parameters'; did you mean 'all_parameters'"):
        net.main.al_parameters()


@pytest.mark.parametrize("options", [{}, {"init_loss_scaling": 8.0}, {"use_pure_fp16": True, "use_fp16_guard": False}])
def test_all_parameters_are_those_of_the_model_and_none_of_the_step(options: dict[str, Any]) -> None:
    """Paddle's batch normalisation keeps its statistics in parameters, so they count."""
    expected = {
        "fc_0.w_0",
        "fc_0.b_0",
        "batch_norm_0.w_0",
        "batch_norm_0.b_0",
        "batch_norm_0.w_1",
        "batch_norm_0.w_2",
        "frozen",
    }
    net = Net(**options)
    assert {v.name for v in net.main.all_parameters()} == expected
    learned = {name for name in expected if name[-1] in "0" or name[0] == "f"}
    assert {v.name for v in net.main.parameters} == learned - {"frozen"}


def test_an_operator_by_paddles_names() -> None:
    (op,) = [op for op in Net().main.operators if op.type == "Softmax" or op.type == "MatMul"]
    assert op.input_arg_names == ["x", "fc_0.w_0"] and op.output_arg_names == ["fc_0.tmp_0"]
    (flat,) = [op for op in Net().main.operators if op.type == "BatchNormalization"]
    assert flat.has_attr("momentum") and flat.attr("momentum") == flat.attrs["momentum"] and not flat.has_attr("axis")
    with pytest.raises(KeyError):
        flat.attr("axis")


# -- names ---------------------------------------------------------------------------------------------------
def test_programs_are_told_apart(tmp_path: Path) -> None:
    """All were called 'main'."""
    one, two = amp.Program(), amp.Program()
    assert len({one.name, two.name, amp.default_main_program().name}) == 3
    with amp.program_guard(one):
        x = amp.data("x", [1])
    with amp.program_guard(two), pytest.raises(ValueError, match=f"'x' belongs to program '{one.name}'.*'{two.name}'"):
        F.relu(x)
    net = Net()
    for name in ("encoder.onnx", "decoder.onnx"):
        net.test.to_onnx(tmp_path / name)
        program = amp.Program.from_onnx(tmp_path / name)
        assert program.name == name.removesuffix(".onnx")
        with pytest.raises(GraphError, match=f"program '{program.name}' has no variable 'y'"):
            program.var("y")
    assert amp.Program.from_onnx(tmp_path / name, name="mine").name == "mine"


def test_a_name_for_messages_stays_out_of_files(tmp_path: Path) -> None:
    assert Net().test.to_onnx().SerializeToString() == Net().test.to_onnx().SerializeToString()
    net = Net()
    path = tmp_path / "encoder.onnx"
    written = net.test.to_onnx(path)
    again = amp.Program.from_onnx(path)
    assert written.graph.name == again.to_onnx().graph.name == again.clone().to_onnx().graph.name == "main"
    again.name = "renamed"
    assert again.to_onnx().graph.name == "renamed" == amp.Program("renamed").to_onnx().graph.name


# -- marks ---------------------------------------------------------------------------------------------------
def test_a_pattern_of_a_scope_fits_what_lies_in_it_directly() -> None:
    """``enc/*`` fitted ``enc/inner`` alone."""
    program = Net().test
    lying = [op for op in program.operators if op.scope.startswith("enc")]
    assert {op.scope for op in lying} == {"enc", "enc/inner"}
    assert program.mark_fp16("enc/*") == len(lying)
    assert [op for op in program.operators if op.guard] == lying
    inner = [op for op in lying if op.scope == "enc/inner"]
    assert Net().test.mark_fp16("enc/inner/*") == Net().test.mark_fp16("*/inner") == len(inner) == 1


# -- outputs -------------------------------------------------------------------------------------------------
def test_a_built_program_writes_what_it_computes(tmp_path: Path) -> None:
    """The file had no outputs, and onnxruntime refused it."""
    net = Net()
    executor, scope = amp.Executor(amp.CPUPlace()), amp.Scope()
    executor.run(net.startup, scope=scope)
    path = tmp_path / "test.onnx"
    net.test.to_onnx(path, scope=scope)
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [out.name for out in session.get_outputs()] == [net.loss.name]
    feed = {"x": np.ones((4, 3), np.float32)}
    assert np.allclose(session.run(None, feed)[0], executor.run(net.test, feed, [net.loss.name], scope)[0])
    assert net.test.outputs == []
    net.test.outputs = [net.test.var(net.out.name)]
    assert [out.name for out in net.test.to_onnx().graph.output] == [net.out.name]


def test_a_program_with_a_training_step_declares_no_outputs() -> None:
    net = Net(init_loss_scaling=8.0)
    assert not net.main.to_onnx().graph.output and not net.startup.to_onnx().graph.output
    assert isinstance(net.main.to_onnx(), onnx.ModelProto)


# -- messages ------------------------------------------------------------------------------------------------
def test_none_in_a_fetch_list_says_where_it_came_from() -> None:
    net = Net(init_loss_scaling=1.0, use_dynamic_loss_scaling=False)
    assert net.optimizer.get_found_inf() is None
    with pytest.raises(
        ArgumentTypeError, match=r"get_found_inf\(\) gives None where gradients are not checked.*static loss scale of 1"
    ):
        amp.Executor(amp.CPUPlace()).run(net.main, fetch_list=[net.optimizer.get_found_inf()], scope=amp.Scope())


def test_minimize_twice_gives_advice_that_works() -> None:
    """It said to decorate another optimizer, which failed next."""
    net = Net(init_loss_scaling=8.0)
    with pytest.raises(
        OrderError, match=r"has its training step already.*all losses in one list, or build the program anew"
    ):
        net.optimizer.minimize(net.loss, net.startup)
    with pytest.raises(OrderError, match=r"works on program .* already; decorate another one for another program"):
        net.optimizer.minimize(Net().loss)
    other = Net()
    with amp.program_guard(other.main, other.startup):
        amp.decorate(amp.optimizer.SGD(0.1)).minimize([other.loss, other.loss * 2.0], other.startup)


def test_a_name_for_messages_stays_out_of_what_a_place_runs() -> None:
    """Two programs that are built alike are lowered to the same bytes."""
    one, two = (Net().test.lower(amp.CPUPlace(), {"x": (4, 3)}, ["mean_0.tmp_0"]).model for _ in range(2))
    assert one.SerializeToString() == two.SerializeToString()
