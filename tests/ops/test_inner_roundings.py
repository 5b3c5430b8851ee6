"""16-bit kernels compute in fp32 inside and round their result once, as everything that runs node by node takes for granted.

On CPU they are what stands for a GPU's; on CUDA as many roundings are taken as a lowering takes of any place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from amp_transpiler.lists import has_kernel
from amp_transpiler.passes.lowering.arithmetic import MOST
from tests.corpora.rounded_sums import fed, one_operator
from tests.helpers import cuda_sessions, rounding_kernels, sessions
from tests.helpers.rounding_kernels import KERNELS, opset_of, worth

Array = np.ndarray[Any, Any]
#: Of storing the result, and of a function that is two kernels there (HardSwish); half arithmetic makes Sigmoid 5.4.
_ONCE = 2.0
_KERNELS = [
    operator
    for operator in KERNELS
    if has_kernel(cuda_sessions.PROVIDER, operator.split("::")[-1], "float16", 20, operator.rpartition("::")[0])
]
_RUN = {"cpu": lambda *given: sessions.run(*given, "DISABLE_ALL"), "cuda": cuda_sessions.run}


@pytest.mark.parametrize("operator", _KERNELS)
@pytest.mark.parametrize(("place", "most"), [("cpu", _ONCE), pytest.param("cuda", MOST, marks=pytest.mark.gpu)])
def test_kernels_round_once(place: str, most: float, operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(type_: str, feeds: dict[str, Array], /, domain: str = "", **attrs: Any) -> Array:
        model = one_operator(type_, feeds, opset_of(type_), domain=domain, **attrs)
        model.opset_import.add(domain="com.microsoft", version=1)
        return np.asarray(_RUN[place](model, fed(feeds))[0])

    monkeypatch.setattr(rounding_kernels, "run", run)
    assert worth(operator) < most
