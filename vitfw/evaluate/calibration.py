"""Are the model's probabilities right? ECE, classwise ECE, NLL, Brier score, reliability diagram, temperature.

N images, K classes, B bins. Sources: Guo et al. 2017 (ECE, temperature), Kull et al. 2019 (classwise ECE).
"""

from dataclasses import dataclass

import numpy as np

BINS = 15  # of equal width, as in Guo et al. 2017


@dataclass(frozen=True)
class Reliability:
    """Data of the diagram: edges [B + 1]; images, mean confidence and accuracy [B] of each bin (NaN: empty)."""

    edges: np.ndarray
    images: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """[N, K] -> log-probabilities [N, K] in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def softmax(logits: np.ndarray) -> np.ndarray:
    """[N, K] -> probabilities [N, K] in float64."""
    return np.exp(log_softmax(logits))


def negative_log_likelihood(logits: np.ndarray, labels: np.ndarray) -> float:
    """Mean over images of -log p(label), in nats. From logits, so that a certain mistake costs what it should."""
    return float(-np.take_along_axis(log_softmax(logits), labels[:, None], axis=1).mean())


def brier_score(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Mean over images of the squared distance to the one-hot label, summed over classes: 0 to 2."""
    own = np.take_along_axis(probabilities, labels[:, None], axis=1)[:, 0]
    return float(((probabilities**2).sum(axis=1) - 2.0 * own + 1.0).mean())


def reliability(probabilities: np.ndarray, labels: np.ndarray, bins: int = BINS) -> Reliability:
    """Probabilities [N, K], labels [N] -> the diagram of the top class; bin b holds confidences in (b, b + 1] / B."""
    confidence = probabilities.max(axis=1)
    return _diagram(confidence, (probabilities.argmax(axis=1) == labels).astype(np.float64), bins)


def expected_error(probabilities: np.ndarray, labels: np.ndarray, bins: int = BINS) -> float:
    """ECE, 0 to 1: |accuracy - confidence| of each bin, weighted by its images."""
    return _gap(reliability(probabilities, labels, bins))


def classwise_error(probabilities: np.ndarray, labels: np.ndarray, bins: int = BINS) -> float:
    """Classwise ECE, 0 to 1: the error of each class's own probability, averaged over all K classes."""
    gaps = [
        _gap(_diagram(probabilities[:, number], (labels == number).astype(np.float64), bins))
        for number in range(probabilities.shape[1])
    ]
    return float(np.mean(gaps))


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """The T > 0 at which logits [N, K] / T have the least NLL on these labels [N], between 0.01 and 100.

    To be fitted on images held out of the training set, never on the set that is reported: that would flatter it. The
    NLL is convex in 1 / T, so a golden-section search finds the minimum. Where all images are hits there is none:
    ever greater certainty is ever better, and 0.01 comes back.
    """
    ratio = (5.0**0.5 - 1.0) / 2.0
    low, high = np.log(0.01), np.log(100.0)

    def cost(log_inverse: float) -> float:
        return negative_log_likelihood(logits * np.exp(log_inverse), labels)

    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = cost(left), cost(right)
    while high - low > 1e-7:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = cost(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = cost(right)
    return float(np.exp(-(low + high) / 2.0))


def _diagram(confidence: np.ndarray, correct: np.ndarray, bins: int) -> Reliability:
    """Confidence [N] and correct [N] in {0, 1} -> the bins."""
    if bins < 1:
        raise ValueError(f"bins={bins}: must be 1 or more")
    edges = np.linspace(0.0, 1.0, bins + 1)
    place = np.clip(np.searchsorted(edges, confidence, side="left") - 1, 0, bins - 1)
    images = np.bincount(place, minlength=bins)
    filled = np.where(images > 0, images, 1)
    empty = np.where(images > 0, 0.0, np.nan)
    return Reliability(
        edges=edges,
        images=images,
        confidence=np.bincount(place, weights=confidence, minlength=bins) / filled + empty,
        accuracy=np.bincount(place, weights=correct, minlength=bins) / filled + empty,
    )


def _gap(diagram: Reliability) -> float:
    full = diagram.images > 0
    gaps = np.abs(diagram.accuracy[full] - diagram.confidence[full])
    return float((gaps * diagram.images[full]).sum() / diagram.images.sum())
