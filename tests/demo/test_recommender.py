"""The recommender demo: its scores, its data, and that precisions and numbers of ranks learn alike."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import recommender
import tabular

from tests.helpers.where import DATA, NO_DATA, ROOT
from tests.tools.ranks_run import mpiexec


def test_scores_are_those_of_their_definitions() -> None:
    rng = np.random.default_rng(0)
    score, label = rng.integers(0, 7, (200, 1)), rng.integers(0, 2, (200, 1)).astype(np.float32)
    yes, no = score[label > 0], score[label < 1]
    pairs = (yes[:, None] > no).mean() + (yes[:, None] == no).mean() / 2
    assert tabular.auc(score, label) == pytest.approx(pairs)
    assert tabular.rmse(np.array([[1.0], [5.0]], np.float16), np.array([[2.0], [2.0]])) == pytest.approx(5**0.5)


def films(folder: Path) -> None:
    rng = np.random.default_rng(0)
    lines = [f"{u + 1}::{900 + 3 * i}::{(u + i) % 9 + 1}::0" for u, i in rng.integers(0, 30, (600, 2))]
    (folder / "ratings.dat").write_text("\n".join(lines))
    (folder / "movies.dat").write_text(
        "\n".join(f"{900 + 3 * i}::F (2000)::{'A|B' if i % 3 else ''}" for i in range(30))
    )


def test_films_have_bags_of_genres_and_every_rating_is_in_one_part(tmp_path: Path) -> None:
    films(tmp_path)
    data = tabular.load(str(tmp_path), 0, 0)
    assert (len(data.train), len(data.test)) == (540, 60) and data.sizes["genres"] == 3
    genres = data.train.features["genres"]
    assert set(map(tuple, genres)) == {(0, 0), (1, 2)}
    assert data.baselines["means of user and film"] > 0 and data.train.feed(np.arange(3))["user"].dtype == np.int64


def people(folder: Path) -> None:
    """Those over 40 earn more; the test part knows an occupation that the other does not, and ends its lines in dots."""
    rng = np.random.default_rng(0)
    for name, count, end in (("adult.data", 120, ""), ("adult.test", 40, ".")):
        lines = ["|1x3 Cross validator"] if end else []
        for i, age in enumerate(rng.integers(20, 60, count)):
            job = "Diver" if end and i == 0 else "Sales" if i % 3 else "?"
            numbers = [str(v) for v in rng.integers(0, 100, 5)]
            row = [str(age), "Private", numbers[0], "HS-grad", numbers[1], "Single", job, "Wife", "White", "Female"]
            lines.append(", ".join([*row, *numbers[2:], "Peru", ">50K" if age > 40 else "<=50K"]) + end)
        (folder / name).write_text("\n".join([*lines, ""]))


def test_people_have_a_number_in_one_table_for_each_column(tmp_path: Path) -> None:
    people(tmp_path)
    data = tabular.load(str(tmp_path), 0, 0)
    assert (len(data.train), len(data.test)) == (120, 40)
    ids, dense = data.train.features["ids"], data.train.features["dense"]
    assert ids.shape == (120, 14) and dense.shape == (120, 6)
    assert np.all(ids[:, :-1].max(0) < ids[:, 1:].min(0)) and ids.max() < data.sizes["ids"]
    job = data.test.features["ids"][:, 6]
    assert job[0] < ids[:, 6].min() and set(job[1:]) == set(ids[:, 6])
    assert np.allclose(dense.mean(0), 0, atol=1e-5) and np.allclose(dense.std(0), 1, atol=1e-5)
    old = dense[:, 0] > dense[data.train.label[:, 0] == 0, 0].max()
    assert np.array_equal(old, data.train.label[:, 0] == 1) and 0 < data.test.label.mean() < 1
    assert data.baselines["logistic regression"] > 0.9
    (tmp_path / "adult.test").unlink()
    with pytest.raises(SystemExit, match=r"there is no .*adult\.test\[\.xz\].*--data criteo needs no file"):
        tabular.load(str(tmp_path), 0, 0)


def ran(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *options: str) -> dict[str, list[float]]:
    monkeypatch.setattr(sys, "argv", ["recommender.py", *options])
    assert recommender.main() == 0
    return table(capsys.readouterr().out)


def table(out: str) -> dict[str, list[float]]:
    rows = (re.split(r"\s{2,}", line) for line in out.splitlines()[2:])
    return {row[0]: [float(value) for value in row[1:]] for row in rows}


CLICKS = [
    "--rows",
    "6000",
    "--table-rows",
    "1000",
    "--width",
    "4",
    "--table-lr",
    "0.05",
    "--lr",
    "0.01",
    "--epochs",
    "2",
    "--batch-size",
    "128",
]


def test_all_modes_learn_alike_on_clicks_and_two_ranks_as_one(capsys, monkeypatch) -> None:
    found = ran(capsys, monkeypatch, *CLICKS)
    for mode in recommender.training.MODES:
        score, loss, _, skipped, _ = found[mode]
        assert score == pytest.approx(found["fp32"][0], abs=0.01) and loss == pytest.approx(found["fp32"][1], rel=0.02)
        assert 0.6 < score < found["the model drawn from"][0] and skipped <= 3
    launcher = mpiexec()
    if launcher is None:
        pytest.skip("mpi4py or an mpiexec is missing: pip install mpi4py mpich")
    command = [launcher, "-n", "2", sys.executable, "demo/recommender.py", *CLICKS, "--mode", "mixed"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("examples: ") == 1, done.stdout + done.stderr
    assert table(done.stdout)["mixed"][:2] == pytest.approx(found["mixed"][:2], abs=5e-3)


def test_two_towers_learn_from_ratings(capsys, monkeypatch, tmp_path: Path) -> None:
    films(tmp_path)
    found = ran(capsys, monkeypatch, "--data", str(tmp_path), "--mode", "pure", "--epochs", "4", "--batch-size", "32")
    assert found["pure"][0] < found["the mean rating"][0]


@pytest.mark.parametrize("data, better", [("uci_adult", 1), ("movietweetings_100k", -1)])
def test_real_data_is_read_whole(data: str, better: int) -> None:
    if not (DATA / data).is_dir():
        pytest.skip(NO_DATA)
    found = tabular.load(str(DATA / data), 0, 0)
    counts = {"uci_adult": (32561, 16281), "movietweetings_100k": (90000, 10000)}
    assert (len(found.train), len(found.test)) == counts[data]
    worst, best = (0.9, 0.92) if better == 1 else (1.9, 1.5)
    assert all(min(worst, best) <= value <= max(worst, best) + 0.01 for value in found.baselines.values())


def test_wrong_options_are_refused(monkeypatch, tmp_path: Path) -> None:
    for options, said in (
        (("--data", str(tmp_path)), "there is no .*ratings.dat.*--data criteo needs no file"),
        (("--rows", "3"), "--rows must be at least 1000"),
        (("--rows", "1000", "--batch-size", "5000"), "--batch-size 5000 is more than the 900 examples"),
    ):
        monkeypatch.setattr(sys, "argv", ["recommender.py", *options])
        with pytest.raises(SystemExit, match=said):
            recommender.main()
