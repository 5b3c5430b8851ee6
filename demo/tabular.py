"""What the recommender demo learns from: ratings of films, a census, and clicks drawn from a model of any size."""

from __future__ import annotations

import lzma
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

#: Columns of the census that are numbers; the others are categories.
_NUMBERS = {0: "age", 2: "weight", 4: "years of education", 10: "capital gain", 11: "capital loss", 12: "hours"}
#: Fields of Criteo's clicks: numbers and categories.
_DENSE, _FIELDS = 13, 26
_ANSWER = {">50K": 1.0, "<=50K": 0.0}


@dataclass
class Examples:
    """Rows of features by input name, and their labels [rows, 1]."""

    features: dict[str, np.ndarray]
    label: np.ndarray

    def __len__(self) -> int:
        return len(self.label)

    def feed(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """What the inputs of a program take of these rows; ids may be stored in fewer bits."""
        return {
            name: array[rows].astype(np.int64 if array.dtype.kind in "iu" else np.float32)
            for name, array in self.features.items()
        } | {"label": self.label[rows]}


@dataclass
class Data:
    """Training and test examples, sizes of the tables, and scores that need no network to compare with.

    ``epochs`` and ``table_lr`` are what suits these data: more of them learns the training examples by heart.
    """

    train: Examples
    test: Examples
    sizes: dict[str, int]
    baselines: dict[str, float]
    epochs: int
    table_lr: float


# -- scores ----------------------------------------------------------------------------------------------------------
def rmse(scores: np.ndarray, label: np.ndarray) -> float:
    """Root of the mean squared error."""
    return float(np.sqrt(np.mean((np.ravel(scores).astype(np.float64) - np.ravel(label)) ** 2)))


def auc(scores: np.ndarray, label: np.ndarray) -> float:
    """The share of pairs of a yes and a no in which the yes has the higher score; equal ones count half."""
    _, place, count = np.unique(np.ravel(scores), return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2)[place]
    yes = np.ravel(label) > 0.5
    positive, negative = int(yes.sum()), int((~yes).sum())
    return float((rank[yes].sum() - positive * (positive + 1) / 2) / (positive * negative))


# -- ratings of films ------------------------------------------------------------------------------------------------
def films(folder: Path) -> Data:
    """MovieTweetings: who gave which film how many points of ten; every tenth rating is held out.

    Inputs: ``user``, ``film`` [rows, 1], and ``genres`` [rows, most], a bag filled up with 0.
    """
    ratings = np.array([line.split("::")[:3] for line in _lines(folder, "ratings.dat")], np.int64)
    users, user = np.unique(ratings[:, 0], return_inverse=True)
    known, film = np.unique(ratings[:, 1], return_inverse=True)
    genres = _genres(folder, known)
    label = ratings[:, 2:].astype(np.float32)
    held_out = np.random.default_rng(0).permutation(len(label)) % 10 == 0
    parts = [
        Examples({"user": user[part, None], "film": film[part, None], "genres": genres[film[part]]}, label[part])
        for part in (~held_out, held_out)
    ]
    sizes = {"users": len(users), "films": len(known), "genres": int(genres.max()) + 1}
    train, test = parts
    mean = np.full(len(test), train.label.mean())
    baselines = {"the mean rating": rmse(mean, test.label), "means of user and film": _damped_means(train, test, sizes)}
    return Data(train, test, sizes, baselines, 2, 0.05)


def _genres(folder: Path, known: np.ndarray) -> np.ndarray:
    """The genres of each film, from 1 on; 0 fills up."""
    found: dict[int, list[int]] = {}
    numbers: dict[str, int] = {}
    for line in _lines(folder, "movies.dat"):
        film, _, kinds = (line.split("::") + ["", ""])[:3]
        found[int(film)] = [numbers.setdefault(kind, len(numbers) + 1) for kind in kinds.split("|") if kind]
    most = max(map(len, found.values()))
    return np.array([(found.get(int(film), []) + [0] * most)[:most] for film in known], np.int64)


def _damped_means(train: Examples, test: Examples, sizes: dict[str, int], damping: float = 5.0) -> float:
    """The error of mean + user + film, each shrunk towards 0 where it has few ratings (Koren 2009)."""
    mean, rest = float(train.label.mean()), train.label[:, 0] - float(train.label.mean())
    of_user, of_film = np.zeros(sizes["users"]), np.zeros(sizes["films"])
    user, film = (train.features[name][:, 0] for name in ("user", "film"))
    for _ in range(10):
        for own, index, other in ((of_film, film, of_user[user]), (of_user, user, of_film[film])):
            total = np.bincount(index, rest - other, len(own))
            own[:] = total / (np.bincount(index, minlength=len(own)) + damping)
    user, film = (test.features[name][:, 0] for name in ("user", "film"))
    return rmse(np.clip(mean + of_user[user] + of_film[film], 0, 10), test.label)


# -- the census ------------------------------------------------------------------------------------------------------
def census(folder: Path, buckets: int = 32) -> Data:
    """UCI Adult: who earns more than 50,000 dollars a year; the test part is UCI's own.

    Inputs: ``ids`` [rows, 14], a number in one table for each column (numbers by quantile), and ``dense`` [rows, 6].
    """
    parts = [
        [row for line in _lines(folder, name) if len(row := line.rstrip(".").split(", ")) == 15]
        for name in ("adult.data", "adult.test")
    ]
    columns = [[np.array(column) for column in zip(*rows, strict=True)] for rows in parts]
    ids, dense, size = [[], []], [[], []], 0
    for number in range(14):
        train, test = (each[number] for each in columns)
        if number in _NUMBERS:
            train, test = (
                np.log1p(each.astype(np.float32)) if number in (10, 11) else each.astype(np.float32)
                for each in (train, test)
            )
            for part, each in zip(dense, (train, test), strict=True):
                part.append((each - train.mean()) / train.std())
            edges = np.unique(np.quantile(train, np.linspace(0, 1, buckets + 1)[1:-1]))
            coded, rows = [np.searchsorted(edges, each, "right") for each in (train, test)], len(edges) + 1
        else:
            names = {name: place + 1 for place, name in enumerate(np.unique(train))}  # 0: not seen in training
            coded, rows = [np.array([names.get(one, 0) for one in each]) for each in (train, test)], len(names) + 1
        for part, each in zip(ids, coded, strict=True):
            part.append(each + size)
        size += rows
    train, test = (
        Examples(
            {"ids": np.stack(i, 1), "dense": np.stack(d, 1).astype(np.float32)},
            np.array([[_ANSWER[answer]] for answer in column[14]], np.float32),
        )
        for i, d, column in zip(ids, dense, columns, strict=True)
    )
    return Data(train, test, {"ids": size}, {"logistic regression": _logistic(train, test, size)}, 6, 0.02)


def _logistic(train: Examples, test: Examples, size: int, ridge: float = 1.0) -> float:
    """The score of a logistic regression on the same features, by Newton's method."""

    def matrix(examples: Examples) -> np.ndarray:
        found = np.zeros((len(examples), size), np.float64)
        np.put_along_axis(found, examples.features["ids"], 1.0, 1)
        return np.concatenate([found, examples.features["dense"]], 1)

    x, y = matrix(train), train.label[:, 0].astype(np.float64)
    weights = np.zeros(x.shape[1])
    for _ in range(8):
        chance = 1 / (1 + np.exp(-(x @ weights)))
        curvature = (x * (chance * (1 - chance))[:, None]).T @ x + ridge * np.eye(x.shape[1])
        weights += np.linalg.solve(curvature, x.T @ (y - chance) - ridge * weights)
    return auc(matrix(test) @ weights, test.label)


# -- clicks ----------------------------------------------------------------------------------------------------------
def clicks(rows: int, table_rows: int, seed: int = 0) -> Data:
    """Clicks of the shape of Criteo's: 13 numbers and 26 categories, of ``table_rows`` in all; a tenth is held out.

    A few of each field's ids are frequent and most are rare. What is clicked is drawn from a model with a weight for
    each id, of which the network knows nothing; its own score is the best that there is.
    """
    rng = np.random.default_rng(seed)
    shares = 0.7 ** np.arange(_FIELDS)
    sizes = np.maximum(4, shares / shares.sum() * (table_rows - 4 * _FIELDS)).astype(np.int64)
    begins = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    ids = np.stack([b + (s * rng.random(rows) ** 4).astype(np.int64) for b, s in zip(begins, sizes, strict=True)], 1)
    dense = rng.standard_normal((rows, _DENSE)).astype(np.float32)
    total = int(sizes.sum())
    of_id, vectors = rng.standard_normal(total, np.float32), rng.standard_normal((total, 2), np.float32)
    score = of_id[ids].sum(1) / 6 + dense @ rng.standard_normal(_DENSE).astype(np.float32) / 8
    for left in range(0, 8, 2):  # some fields act together
        score += (vectors[ids[:, left]] * vectors[ids[:, left + 1]]).sum(1) / 4
    score -= 1.0
    label = (rng.random(rows) < 1 / (1 + np.exp(-score))).astype(np.float32)[:, None]
    small = ids.astype(np.int32)
    cut = rows - rows // 10
    train, test = (
        Examples({"ids": small[part], "dense": dense[part]}, label[part]) for part in (slice(cut), slice(cut, None))
    )
    baselines = {
        "counts of each id": _counted(train, test, total),
        "the model drawn from": auc(score[cut:], test.label),
    }
    return Data(train, test, {"ids": total}, baselines, 1, 0.02)


def _counted(train: Examples, test: Examples, size: int) -> float:
    """The score of naive Bayes: the log odds of every id, counted on its own."""
    ids, label = train.features["ids"], train.label[:, 0]
    seen = np.zeros(size)
    yes = np.zeros(size)
    for column in ids.T:
        seen += np.bincount(column, minlength=size)
        yes += np.bincount(column, label, size)
    chance = (yes + 20 * label.mean()) / (seen + 20)
    odds = np.log(chance / (1 - chance))
    return auc(odds[test.features["ids"]].sum(1), test.label)


# -- files -----------------------------------------------------------------------------------------------------------
def _lines(folder: Path, name: str) -> list[str]:
    """The lines of a file that may be compressed. SystemExit where there is none."""
    openers: tuple[tuple[str, Callable[..., object]], ...] = (("", open), (".xz", lzma.open))
    for suffix, opener in openers:
        path = folder / (name + suffix)
        if path.exists():
            with opener(path, "rt", encoding="utf-8") as file:  # type: ignore[attr-defined]
                return [line.strip() for line in file if line.strip()]
    raise SystemExit(
        f"error: there is no {folder / name}[.xz]. Put MovieTweetings' ratings.dat and movies.dat, or UCI Adult's "
        "adult.data and adult.test, into a folder and give it as --data; --data criteo needs no file"
    )


def load(data: str, rows: int, table_rows: int) -> Data:
    """Synthetic clicks, or what a folder holds."""
    if data == "criteo":
        return clicks(rows, table_rows)
    folder = Path(data)
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if any(re.fullmatch(r"adult\.data(\.xz)?", name) for name in names):
        return census(folder)
    return films(folder)
