"""Memory of values that were replaced goes back to the system."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import amp_transpiler as amp
from amp_transpiler.runtime.heap import trim
from tests.tools.memory_run import status


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")
def test_values_that_were_replaced_take_no_memory(tmp_path: Path) -> None:
    """Parameters of 32 MiB, rounded to 16 bit and read from a checkpoint, with blocks that glibc takes from its heap."""
    main, startup = amp.Program(), amp.Program("startup")
    with amp.program_guard(main, startup), amp.unique_name.guard():
        h = amp.data("x", [2, 2048], "float32")
        for _ in range(2):
            h = amp.nn.fc(h, 2048)
        optimizer = amp.decorate(amp.optimizer.SGD(0.1, multi_precision=True), use_pure_fp16=True, use_fp16_guard=False)
        optimizer.minimize(amp.nn.functional.mean(h), startup)
    scope = amp.Scope()
    for v in startup.variables:
        scope.set_var(v.name, np.full(v.shape or (), 0.5, v.dtype))
    np.ones(2**22 - 2**10)  # freed: from now on blocks of up to that size are of the heap
    for v in main.parameters:
        scope.set_var(v.name, np.full(v.shape or (), 0.5, np.float32))
    trim()
    taken = [status("VmRSS")]
    optimizer.amp_init(amp.CPUPlace(), scope=scope)
    taken.append(status("VmRSS"))
    amp.save_checkpoint(tmp_path / "state", main, scope=scope)
    amp.load_checkpoint(tmp_path / "state", main, scope=scope)
    taken.append(status("VmRSS"))
    assert taken[1] < taken[0] - 12 and taken[2] < taken[1] + 4, taken  # MiB; the parameters are 32, and then 16
