"""How states are bound to a session."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.errors import ScopeError
from amp_transpiler.passes.lowering.lowered import Port
from amp_transpiler.runtime.states import States
from tests.helpers.places import change_place


class _Copying:
    """A binding that, like onnxruntime's, copies to the device when an input is bound."""

    def __init__(self) -> None:
        self.device: dict[str, Any] = {}

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        self.device[name] = np.array(value.numpy())


def test_a_state_in_host_memory_is_bound_to_a_device_in_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    change_place(monkeypatch, "cpu", device=True)
    scope, binding = amp.Scope(), _Copying()
    scope.set_var("w", np.zeros(3, np.float32))
    states = States([Port("w", "w", "float32", (3,))], amp.CPUPlace(), "main", "")
    states.bind(scope, binding)
    scope.ort_values["w"].update_inplace(np.ones(3, np.float32))  # an update in place
    states.bind(scope, binding)
    assert binding.device["w"].tolist() == [1, 1, 1]


def test_a_startup_program_names_what_it_copies_and_nobody_has_written() -> None:
    startup, scope = amp.Program("startup"), amp.Scope()
    w = startup.add_variable("w", "float32", [2], persistable=True)
    startup.add_operator("Identity", [w], [startup.add_variable("copy", "float32", [2], persistable=True)])
    with pytest.raises(ScopeError, match="'w'"):
        amp.Executor(amp.CPUPlace()).run(startup, scope=scope)
    assert scope.var_names() == []
    scope.set_var("w", np.array([1, 2], np.float32))
    amp.Executor(amp.CPUPlace()).run(startup, scope=scope)
    assert scope.find_var("copy").tolist() == [1, 2]
