"""What is reported of predictions beside the loss, gathered over the batches of an epoch."""

from __future__ import annotations

import numpy as np

from amp_transpiler.distributed import all_gather_object

#: By name: the losses that each goes with.
_LOSSES: dict[str, tuple[str, ...]] = {
    "accuracy": ("cross_entropy", "bce_with_logits", "kl_div"),
    "top5": ("cross_entropy",),
    "f1": ("cross_entropy", "bce_with_logits"),
    "mae": ("mse", "bce_with_logits"),
    "mse": ("mse", "bce_with_logits"),
    "none": ("cross_entropy", "bce_with_logits", "kl_div", "mse"),
}
METRICS = tuple(_LOSSES)
#: Labels that do not count, as ``F.cross_entropy`` has them.
IGNORED = -100


def fits_loss(metric: str, loss: str) -> bool:
    """Whether a metric can be had of what a loss reads."""
    return loss in _LOSSES[metric]


def default_metric(loss: str) -> str:
    """The metric that is reported where none is asked for."""
    return {"mse": "mae", "kl_div": "none"}.get(loss, "accuracy")


class Metric:
    """A metric over batches of (prediction, label): logits or numbers as the loss reads them, labels as it does.

    Shares ("accuracy", "top5", "f1") lie between 0 and 1. "f1" is the mean over the classes that occur, in labels or
    predictions; of yes and no, that of yes.
    """

    def __init__(self, name: str, loss: str) -> None:
        self.name, self.loss = name, loss
        self._sum, self._count = 0.0, 0
        self._classes: dict[int, np.ndarray] = {}  # right, predicted, labelled

    def update(self, prediction: np.ndarray, label: np.ndarray) -> None:
        """Add a batch."""
        prediction = np.asarray(prediction, np.float32)
        if self.name in ("mae", "mse"):
            if self.loss == "bce_with_logits":
                prediction = np.exp(-np.logaddexp(0, -prediction))
            error = prediction.astype(np.float64) - np.asarray(label, np.float64).reshape(prediction.shape)
            self._add(np.abs(error) if self.name == "mae" else error**2)
            return
        if self.loss == "bce_with_logits":
            decided, right = prediction > 0, np.asarray(label, np.float32).reshape(prediction.shape) > 0.5
        else:
            target = label.argmax(-1) if self.loss == "kl_div" else label.reshape(prediction.shape[:-1])
            counted = target != IGNORED
            prediction, right = prediction[counted], target[counted]
            if self.name == "top5":
                best = np.argsort(prediction, -1)[..., -5:]
                self._add((best == right[..., None]).any(-1))
                return
            decided = prediction.argmax(-1)
        if self.name == "accuracy":
            self._add(decided == right)
        else:
            self._add_classes(decided, right)

    def gather(self) -> None:
        """Take in what all other ranks added; in the order of ranks, so that all have the same."""
        of_all = all_gather_object(
            [self._sum, self._count, {str(k): list(map(int, v)) for k, v in self._classes.items()}]
        )
        self._sum, self._count, self._classes = 0.0, 0, {}
        for total, count, classes in of_all:
            self._sum, self._count = self._sum + total, self._count + count
            for one, counts in classes.items():
                self._classes[int(one)] = self._classes.get(int(one), np.zeros(3)) + counts

    def value(self) -> float:
        """The metric over all that was added; NaN where nothing was."""
        if self.name != "f1":
            return self._sum / self._count if self._count else float("nan")
        scores = [
            2 * right / (predicted + labelled)
            for right, predicted, labelled in self._classes.values()
            if predicted + labelled
        ]
        return float(np.mean(scores)) if scores else float("nan")

    def _add(self, values: np.ndarray) -> None:
        self._sum += float(np.sum(values, dtype=np.float64))
        self._count += int(values.size)

    def _add_classes(self, decided: np.ndarray, right: np.ndarray) -> None:
        wanted = [1] if self.loss == "bce_with_logits" else np.unique(np.concatenate([decided.ravel(), right.ravel()]))
        for one in wanted:
            counts = [np.sum((decided == one) & (right == one)), np.sum(decided == one), np.sum(right == one)]
            self._classes[int(one)] = self._classes.get(int(one), np.zeros(3)) + counts


def is_share(metric: str) -> bool:
    """Whether it is a share of what is right, the better the larger, and not an error."""
    return metric not in ("loss", "mae", "mse")


def shown(metric: str, value: float) -> str:
    """A loss or a metric for people: shares in percent."""
    if is_share(metric):
        return f"{value:.2%}"
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.4g}"
