"""Two real ranks under mpiexec: sums to the bit, and what all others do when one fails. ``ranks_run`` does more by hand."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys

import pytest

from amp_transpiler import distributed
from tests.helpers.normalised import trained
from tests.helpers.where import ROOT
from tests.tools.ranks_run import TIMEOUT, Started, mpiexec

pytestmark = pytest.mark.skipif(mpiexec() is None, reason="mpi4py or an mpiexec is missing: pip install mpi4py mpich")
SOMEONE = r"rank 1 \(host \S+, pid \d+\)"
HERE = r"rank 0 was at call 2 \(all_reduce mean float32\[2000\]\)"


def ran(case: str, *options: str, wrapped: bool = False) -> tuple[int, str]:
    status, said = Started(case, 2, *options, wrapped=wrapped).outcome()
    assert "(it hung)" not in said, said
    return status, said


@pytest.fixture(scope="module")
def computed() -> list[str]:
    """The lines of what two ranks compute one after the other, which takes their start once."""
    status, said = ran("dealt_out shared_norms sums")
    assert status == 0, said
    lines = said.splitlines()
    assert len(lines) == 6, said
    return sorted(lines)


def test_every_call_is_exact(computed: list[str]) -> None:
    assert [line for line in computed if "exact" in line] == [f"rank {rank} of 2: all is exact" for rank in range(2)]


def test_optimizer_state_that_is_dealt_out_has_the_same_bits(computed: list[str]) -> None:
    found = [line for line in computed if "bits" in line]
    assert found == [f"rank {rank} of 2: the bits are the same" for rank in range(2)]


def test_processes_learn_what_threads_learn_with_norms_over_all_of_them(computed: list[str]) -> None:
    expected = []
    for rank, (losses, state) in enumerate(distributed.simulate(2, trained("mixed", [0, 9]))):
        digest = hashlib.sha256(b"".join(state[name].tobytes() for name in sorted(state))).hexdigest()
        expected.append(f"rank {rank} {losses} {digest}")
    assert [line for line in computed if " of 2: " not in line] == expected


def test_an_exception_of_one_rank_ends_the_other_with_its_words() -> None:
    status, said = ran("raises")
    assert status in (1, 9), said  # 9: the launcher ended the other, which had spoken, before it ended itself
    assert said.count("ValueError: no such file\n") == 1, "its own traceback"
    assert re.search(f"DistributedError: {SOMEONE} raised ValueError: no such file; {HERE}\n", said), said


def test_a_rank_that_sleeps_is_named_after_the_timeout() -> None:
    status, said = ran("sleeps")
    assert status == 1
    found = re.search(
        rf"DistributedError: rank 0 waited (\d+\.\d) s at call 2 \(.*\): {SOMEONE} has not come to it", said
    )
    assert found and TIMEOUT <= float(found[1]) < TIMEOUT + 5, said


def test_mpiexec_ends_all_where_one_is_killed_and_names_its_process() -> None:
    status, said = ran("killed")
    assert status != 0 and re.search(r"PID \d+ RUNNING AT", said), said


def test_a_killed_rank_is_named_where_the_launcher_leaves_the_others_alone() -> None:
    status, said = ran("killed", "-disable-auto-cleanup", wrapped=True)
    assert status != 0
    assert re.search(f"DistributedError: the process of {SOMEONE} is gone; {HERE}\n", said), said


def test_ctrl_c_ends_all_with_a_line_each() -> None:
    started = Started("interrupted", 2)
    started.interrupt()
    status, said = started.outcome()
    assert status == 130
    lines = [line for line in said.splitlines() if line and not line.startswith("[mpiexec@")]
    assert sorted(lines) == ["rank 0: interrupted", "rank 1: interrupted", "ready"]


def test_a_rank_that_never_starts_mpi_ends_the_others_in_time() -> None:
    status, said = ran("late")
    assert status == 1
    assert "Timeout (0:00:01)" in said and "in init\n" in said, said


def test_a_rank_that_never_comes_to_init_is_named() -> None:
    status, said = ran("absent")
    assert status == 1
    assert re.search(
        r"DistributedError: rank 0 waited 2.0 s for ranks 1 to come to amp.distributed.init\(\)\n", said
    ), said


def test_an_mpiexec_of_another_mpi_is_noticed() -> None:
    """Each process would believe to be the only one, and train by itself."""
    environment = os.environ | {"OMPI_COMM_WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    program = "import amp_transpiler as amp; amp.distributed.init(timeout=20)"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    expected = r"DistributedError: mpiexec of Open MPI started 2 processes, but mpi4py runs with MPICH.* and sees one"
    assert re.search(expected, done.stderr), done.stderr
