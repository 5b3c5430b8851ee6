"""``amp-transpile`` under ``mpiexec``: one voice, and what remains where a rank dies."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from amp_transpiler.cli import main
from amp_transpiler.cli.ranks import Voice
from amp_transpiler.errors import ArgumentError, DistributedError
from amp_transpiler.runtime.collective import mpi
from tests.helpers.where import ROOT
from tests.tools.rank_kills import all_of_them
from tests.tools.ranks_run import mpiexec


def launched(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setenv("PMI_SIZE", "3")
    monkeypatch.setenv("PMI_RANK", str(rank))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wrong_argument_is_said_once(rank: int, monkeypatch, capsys) -> None:
    launched(monkeypatch, rank)
    with pytest.raises(SystemExit) as ended:
        main(["train", "a.onnx", "b.onnx"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("the following arguments are required: --data") == (rank == 0)


@pytest.mark.parametrize(
    ("error", "speaker"),
    [
        (ArgumentError("no"), 0),
        (DistributedError("gone", (1,)), 0),
        (DistributedError("gone", (0,)), 1),
        (DistributedError("gone", (0, 1)), 2),
        (DistributedError("raised", (0,), told=True), 0),
    ],
)
def test_the_first_rank_that_can_says_what_is_wrong(error: Exception, speaker: int, monkeypatch, capsys) -> None:
    for rank in range(3):
        launched(monkeypatch, rank)
        with Voice() as voice:
            print("not of the first rank alone")
            voice.complain(error)
        said = capsys.readouterr()
        assert said.err == (f"amp-transpile: {error}\n" if rank == speaker or rank == 0 else "")
        assert bool(said.out) == (rank == 0)


@pytest.mark.skipif(mpiexec() is None, reason="mpi4py or an mpiexec is missing: pip install mpi4py mpich")
def test_a_training_that_loses_ranks_ends_as_one_that_does_not(tmp_path: Path) -> None:
    """kill -9 at two moments, and then an end under mpiexec, with the bytes of ranks that are threads.

    ``python -m tests.tools.rank_kills`` kills fifty times, and stops ranks too.
    """
    striker = all_of_them(tmp_path, 2, 2, 0, 3, 12, threads=True)
    assert striker.struck["kills"] == 2


def test_the_first_import_of_the_command_asks_for_ranks_as_the_engine_does() -> None:
    """It may import nothing, and so has the names of the launchers' variables itself."""
    tree = ast.parse((ROOT / "amp_transpiler" / "command" / "__init__.py").read_text(encoding="utf-8"))
    said = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    assert ast.literal_eval(said["_RANKS"]) == mpi._RANKS
