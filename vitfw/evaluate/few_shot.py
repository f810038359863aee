"""Few-shot accuracy of stored features: least squares from a handful of images a class.

Protocol of big_vision's few-shot evaluator: features whitened with the statistics of the shots, a constant bias
feature of 100, one-versus-rest targets of -1 and 1, L2 swept in powers of two; mean over several draws. Different, and
stated: the L2 is chosen on training images that are no shots, not on the reported set. S images, W width, K classes.
"""

from dataclasses import dataclass, field

import numpy as np

from vitfw.data.index import shuffled_rows
from vitfw.evaluate.features import Features
from vitfw.evaluate.holdout import Split
from vitfw.seeding import derive

BIAS = 100.0  # a large constant feature: its weight is hardly touched by L2


@dataclass(frozen=True, kw_only=True)
class FewShotConfig:
    """Shots, draws and the sweep."""

    shots: tuple[int, ...] = field(default=(1, 5, 10, 25), metadata={"help": "images a class"})
    draws: int = field(default=3, metadata={"help": "draws of the shots, over which mean and spread are taken"})
    strengths: tuple[float, ...] = field(
        default=tuple(2.0**power for power in range(-4, 21, 2)), metadata={"help": "values of the L2 term"}
    )
    seed: int = field(default=0, metadata={"help": "chooses the shots"})

    def __post_init__(self) -> None:
        if not self.shots or min(self.shots) < 1 or self.draws < 1:
            raise ValueError(f"few_shot.shots={self.shots}, few_shot.draws={self.draws}: must be 1 or more")
        if not self.strengths or min(self.strengths) <= 0:
            raise ValueError(f"few_shot.strengths={self.strengths}: one or more numbers above 0")


@dataclass(frozen=True)
class FewShotResult:
    """One number of shots: accuracy (percent) of each draw on the reported set, and the L2 chosen in each."""

    shots: int
    accuracies: tuple[float, ...]
    strengths: tuple[float, ...]
    protocol: str

    @property
    def mean(self) -> float:
        return float(np.mean(self.accuracies))

    @property
    def spread(self) -> float:
        """Standard deviation over draws (0 with one)."""
        return float(np.std(self.accuracies, ddof=1)) if len(self.accuracies) > 1 else 0.0


def few_shot(
    train: Features, split: Split, test: Features, config: FewShotConfig, *, columns: tuple[str, ...], num_classes: int
) -> list[FewShotResult]:
    """Shots come from split.fit, the L2 is chosen on split.held, accuracies are those on `test`.

    Raises ValueError where a class has fewer images than shots, and for several labels an image.
    """
    if train.multi_label:
        raise ValueError("few-shot needs images with one label each")
    held, test_x = (_matrix(part, rows, columns) for part, rows in ((train, split.held), (test, None)))
    results = []
    for shots in config.shots:
        accuracies, chosen = [], []
        for draw in range(config.draws):
            rows = draw_shots(train.labels, split.fit, shots, seed=derive(config.seed, "shots", draw))
            weights = ridge(
                _matrix(train, rows, columns), train.labels[rows], config.strengths, num_classes=num_classes
            )
            scores = [_accuracy(predict_ridge(one, held), train.labels[split.held]) for one in weights]
            best = int(np.argmax(scores))
            accuracies.append(_accuracy(predict_ridge(weights[best], test_x), test.labels))
            chosen.append(config.strengths[best])
        protocol = (
            f"{shots} shot{'s' * (shots > 1)}: least squares on {'+'.join(columns)}, {config.draws} draws, L2 of "
            f"{len(config.strengths)} chosen on {split.name}; features of {train.place}"
        )
        results.append(FewShotResult(shots, tuple(accuracies), tuple(chosen), protocol))
    return results


def draw_shots(labels: np.ndarray, rows: np.ndarray, shots: int, *, seed: int) -> np.ndarray:
    """Labels [N], rows [n] to draw from -> `shots` rows of each class that occurs; fewer shots are a part of more."""
    order = rows[shuffled_rows(len(rows), seed)]
    chosen = []
    for label in np.unique(labels[rows]):
        own = order[labels[order] == label]
        if len(own) < shots:
            raise ValueError(f"few_shot.shots={shots}: class {label} has only {len(own)} images that may be drawn")
        chosen.append(own[:shots])
    return np.concatenate(chosen)


@dataclass(frozen=True)
class Ridge:
    """weight [W + 1, K] behind (x - mean) / deviation [W] and the bias feature."""

    weight: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray


def ridge(x: np.ndarray, labels: np.ndarray, strengths: tuple[float, ...], *, num_classes: int) -> list[Ridge]:
    """x [S, W], labels [S] -> the least-squares solution for each L2 in `strengths`, from one eigendecomposition.

    (X^T X + l I)^-1 X^T Y = X^T (X X^T + l I)^-1 Y: the smaller of the two matrices is decomposed.
    """
    mean, deviation = x.mean(axis=0), x.std(axis=0) + 1e-5  # big_vision's epsilon
    white = _whiten(x, mean, deviation)
    target = np.where(labels[:, None] == np.arange(num_classes), 1.0, -1.0)
    wide = white.shape[0] < white.shape[1]
    values, vectors = np.linalg.eigh(white @ white.T if wide else white.T @ white)
    right = vectors.T @ (target if wide else white.T @ target)
    solutions = []
    for strength in strengths:
        middle = vectors @ (right / (np.maximum(values, 0.0) + strength)[:, None])
        solutions.append(Ridge(white.T @ middle if wide else middle, mean, deviation))
    return solutions


def predict_ridge(one: Ridge, x: np.ndarray) -> np.ndarray:
    """x [n, W] -> scores [n, K]."""
    return _whiten(x, one.mean, one.deviation) @ one.weight


def _whiten(x: np.ndarray, mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    return np.concatenate([(x - mean) / deviation, np.full((len(x), 1), BIAS)], axis=1)


def _matrix(features: Features, rows: np.ndarray | None, columns: tuple[str, ...]) -> np.ndarray:
    rows = np.arange(len(features.labels)) if rows is None else rows
    return features.take(columns, rows).astype(np.float64)


def _accuracy(scores: np.ndarray, labels: np.ndarray) -> float:
    return 100.0 * float(np.mean(scores.argmax(axis=1) == labels))
