"""Images with several labels: mean average precision, F1, and a threshold for each class.

N images, K classes. Targets are 0 / 1 [N, K]; scores [N, K] rank the images of a class (logits or probabilities).
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Thresholds:
    """values [K]: an image has the class from this score on; f1 [K]: percent reached where they were fitted.

    NaN f1 and an infinite threshold for a class without a positive image: it is never called.
    """

    values: np.ndarray
    f1: np.ndarray


def average_precision(scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Scores [N, K], targets [N, K] -> [K] average precision, 0 to 1; NaN for classes without a positive image.

    The sum over recall steps of precision, without interpolation; images of equal score enter together.
    """
    scores, targets = check_targets(scores, targets)
    values = np.full(scores.shape[1], np.nan)
    for number in np.flatnonzero(targets.sum(axis=0)):
        hits, called, _ = _sweep(scores[:, number], targets[:, number])
        recall_steps = np.diff(np.concatenate([[0.0], hits])) / hits[-1]
        values[number] = float((recall_steps * hits / called).sum())
    return values


def multilabel_scores(scores: np.ndarray, targets: np.ndarray, thresholds: np.ndarray) -> dict[str, float]:
    """Scores, targets [N, K], thresholds [K] -> map, f1_macro, f1_micro (percent), classes_scored, samples.

    Classes without a positive image have no average precision and no part in map and f1_macro; `classes_scored` says
    how many the means run over. The thresholds come from other images (`fit_thresholds`) or are fixed beforehand.
    """
    scores, targets = check_targets(scores, targets)
    called = scores >= thresholds[None]
    hits = (called & (targets > 0)).sum(axis=0).astype(np.float64)
    support, claims = targets.sum(axis=0).astype(np.float64), called.sum(axis=0).astype(np.float64)
    present = support > 0
    if not present.any():
        raise ValueError("no image has any label: there is nothing to score")
    f1 = 2.0 * hits[present] / (support[present] + claims[present])
    return {
        "map": 100.0 * float(np.nanmean(average_precision(scores, targets)[present])),
        "f1_macro": 100.0 * float(f1.mean()),
        "f1_micro": 100.0 * float(2.0 * hits.sum() / (support.sum() + claims.sum())),
        "classes_scored": float(present.sum()),
        "samples": float(len(scores)),
    }


def fit_thresholds(scores: np.ndarray, targets: np.ndarray) -> Thresholds:
    """For each class the score that separates best (most F1) on these images, which must not be the reported ones.

    The threshold lies half-way between the last image called and the first not called, so it does not sit on a score.
    """
    scores, targets = check_targets(scores, targets)
    values, reached = np.full(scores.shape[1], np.inf), np.full(scores.shape[1], np.nan)
    for number in np.flatnonzero(targets.sum(axis=0)):
        hits, called, levels = _sweep(scores[:, number], targets[:, number])
        f1 = 2.0 * hits / (called + hits[-1])
        best = int(f1.argmax())  # the first: the highest threshold of equals
        below = levels[best + 1] if best + 1 < len(levels) else levels[best]
        values[number], reached[number] = (levels[best] + below) / 2.0, 100.0 * f1[best]
    return Thresholds(values, reached)


def check_targets(scores: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Float64 scores and int64 targets after checks. Raises ValueError for shapes, NaN, targets other than 0 and 1."""
    if scores.ndim != 2 or scores.shape != targets.shape or len(scores) == 0:
        raise ValueError(
            f"scores {list(scores.shape)} and targets {list(targets.shape)}: both must be [N, K], N over 0"
        )
    if not np.isfinite(scores).all():
        raise ValueError("some scores are not finite: the model is broken")
    if not np.isin(targets, (0, 1)).all():
        raise ValueError("multi-label targets must be 0 or 1; an unlabelled set can be predicted, not scored")
    return scores.astype(np.float64), targets.astype(np.int64)


def _sweep(scores: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One class: (hits, images called, score) at each distinct score [M], from the highest down."""
    order = np.argsort(-scores, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    return np.cumsum(targets[order])[ends].astype(np.float64), ends + 1.0, scores[order][ends]
