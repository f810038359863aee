"""Numbers of a classifier from its saved logits: the same for any batch size, any order and any number of processes.

N images, K classes. Labels are int64 [N]. Everything is computed in float64 from the logits of all images at once.
"""

from dataclasses import dataclass

import numpy as np

from vitfw.evaluate.calibration import brier_score, classwise_error, expected_error, negative_log_likelihood, softmax


@dataclass(frozen=True)
class ClassRow:
    """One class: images of it, images called it, hits; recall, precision and F1 in percent (NaN where undefined)."""

    name: str
    images: int
    called: int
    hits: int
    recall: float
    precision: float
    f1: float


def classification_scores(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Logits [N, K], labels [N] -> acc1, acc5, mean_class_acc (percent), nll (nats), ece, ece_classwise, brier, samples.

    acc1 is hits / images. acc5 is left out with 5 or fewer classes, where it says nothing. mean_class_acc is the mean
    recall of the classes that occur. ece has 15 bins of equal width and, like ece_classwise, runs from 0 to 1.
    """
    logits = check_logits(logits, labels)
    ranks = label_ranks(logits, labels)
    probabilities = softmax(logits)
    present = np.unique(labels)
    recalls = [float(np.mean(ranks[labels == label] == 0)) for label in present]
    values = {"acc1": 100.0 * float(np.mean(ranks == 0))}
    if logits.shape[1] > 5:
        values["acc5"] = 100.0 * float(np.mean(ranks < 5))
    values["mean_class_acc"] = 100.0 * float(np.mean(recalls))
    values["nll"] = negative_log_likelihood(logits, labels)
    values["ece"] = expected_error(probabilities, labels)
    values["ece_classwise"] = classwise_error(probabilities, labels)
    values["brier"] = brier_score(probabilities, labels)
    return values | {"samples": float(len(labels))}


def check_logits(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Float64 logits [N, K] after checks. Raises ValueError for shapes, NaN, unlabelled images, labels out of range."""
    if logits.ndim != 2 or labels.shape != (len(logits),) or len(labels) == 0:
        raise ValueError(
            f"logits {list(logits.shape)} and labels {list(labels.shape)}: expected [N, K] and [N], N over 0"
        )
    if not np.isfinite(logits).all():
        bad = int((~np.isfinite(logits).all(axis=1)).sum())
        raise ValueError(f"{bad} of {len(logits)} images have logits that are not finite: the model is broken")
    if labels.min() < 0 or labels.max() >= logits.shape[1]:
        raise ValueError(
            f"labels run from {labels.min()} to {labels.max()}, the model has the classes 0 to {logits.shape[1] - 1}; "
            "an unlabelled set can be predicted, not scored"
        )
    return logits.astype(np.float64)


def label_ranks(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Logits [N, K], labels [N] -> int64 [N]: classes put before the label; of equal logits the lower class first."""
    own = np.take_along_axis(logits, labels[:, None], axis=1)
    earlier = np.arange(logits.shape[1])[None] < labels[:, None]
    return ((logits > own) | ((logits == own) & earlier)).sum(axis=1)


def confusion_matrix(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Logits [N, K], labels [N] -> int64 [K, K]: row the true class, column the class called."""
    logits = check_logits(logits, labels)
    classes = logits.shape[1]
    return np.bincount(labels * classes + logits.argmax(axis=1), minlength=classes**2).reshape(classes, classes)


def class_table(confusion: np.ndarray, names: tuple[str, ...] | None = None) -> list[ClassRow]:
    """Confusion matrix [K, K] -> one row a class; `names` [K], else classes are called by their numbers."""
    names = tuple(str(number) for number in range(len(confusion))) if names is None else names
    if len(names) != len(confusion):
        raise ValueError(f"{len(names)} class names for {len(confusion)} classes of the model")
    rows = []
    for number, name in enumerate(names):
        images, called, hits = (
            int(confusion[number].sum()),
            int(confusion[:, number].sum()),
            int(confusion[number, number]),
        )
        rows.append(
            ClassRow(
                name,
                images,
                called,
                hits,
                _percent(hits, images),
                _percent(hits, called),
                _percent(2 * hits, images + called),
            )
        )
    return rows


def binomial_error(accuracy: float, images: float) -> float:
    """Standard error, in points, of an accuracy in percent measured on so many images.

    Bounded below by that of one miss, so that 100 % on a small set is not taken for certain.
    """
    share = min(max(accuracy / 100.0, 1.0 / (images + 1)), 1.0 - 1.0 / (images + 1))
    return 100.0 * (share * (1.0 - share) / images) ** 0.5


def _percent(part: int, whole: int) -> float:
    return 100.0 * part / whole if whole else float("nan")
