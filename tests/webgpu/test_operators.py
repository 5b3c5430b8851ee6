"""WebGPU's kernels compute as recorded in ``tests/data/webgpu_operators.json``: on software Vulkan, which is the same everywhere."""

import re

import pytest

from tests.helpers.verdicts import KILLED, verdict
from tests.helpers.webgpu_sessions import built_in
from tests.record.webgpu_operators import ALL, cases, recorded

pytestmark = pytest.mark.webgpu

_WRONG = 1000
_ULPS = re.compile(r"([\d.e+]+) ulps(?:; )?")


@pytest.mark.parametrize("op_type", sorted(ALL))
def test_kernels_compute_as_recorded(op_type, software_vulkan):
    told = recorded("wheel" if built_in() else "plugin")
    other = recorded("plugin" if built_in() else "wheel")
    changed = []
    for case in cases(op_type):
        was = told[str(case)]
        if was == KILLED or (built_in() and was == other[str(case)]):
            continue  # the plugin's environment goes through all of them
        now = verdict(case)
        wrong = min(_ulps(now), _ulps(was)) >= _WRONG  # by how much is another number in each run
        if _kind(now) != _kind(was) or (_ulps(now) > 1.5 * _ulps(was) + 1 and not wrong):
            changed.append(f"{case}: {now}; recorded: {was}")
    assert not changed, "\n".join(changed)


def _ulps(said):
    found = _ULPS.match(said)
    return float(found[1]) if found else 0.0


def _kind(said):
    """What is said beside roundings, without the numbers of its examples."""
    return re.sub(r"[-\d.e+]+|inf|nan|True|False", "", _ULPS.sub("", said)).replace("exact", "").split(":")[0]
