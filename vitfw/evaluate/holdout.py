"""The share of the TRAINING images on which probes choose their settings: the reported set is never looked at."""

from dataclasses import dataclass

import numpy as np

from vitfw.data.index import shuffled_rows
from vitfw.seeding import derive


@dataclass(frozen=True)
class Split:
    """fit and held: rows [n], [m] of the training features, disjoint, together all; name: for the results' lines."""

    fit: np.ndarray
    held: np.ndarray
    name: str


def split_training(
    labels: np.ndarray, *, share: float = 0.01, least: int = 256, seed: int = 0, name: str = "data.train"
) -> Split:
    """Labels [N] or [N, K] -> which images are held out: `share` of them, but at least `least`, and at most a fifth.

    One label an image: the same share of every class (the first images of a fixed shuffle), and never a class's only
    image. A pure function of the number of images, the labels and the seed.
    """
    if not 0.0 < share < 1.0:
        raise ValueError(f"holdout={share}: the share held out of the training set must lie between 0 and 1")
    images = len(labels)
    wanted = min(max(round(share * images), least), images // 5)
    if wanted < 1:
        raise ValueError(f"{images} training images are too few to hold some out; at least 5 are needed")
    order = shuffled_rows(images, derive(seed, "holdout"))
    held = np.sort(_by_class(labels, order, wanted) if labels.ndim == 1 else order[:wanted])
    if len(held) == 0:
        raise ValueError(f"{name} has one image of every class: none can be held out; a probe needs two of some class")
    rest = np.setdiff1d(np.arange(images), held)
    return Split(rest, held, f"{len(held):,} of {images:,} images held out of {name} (seed {seed})")


def _by_class(labels: np.ndarray, order: np.ndarray, wanted: int) -> np.ndarray:
    """Rows held out of each class, in proportion, rounded by largest remainder; a class keeps one image at least."""
    classes, counts = np.unique(labels, return_counts=True)
    exact = counts * wanted / len(labels)
    quotas = np.floor(exact).astype(np.int64)
    quotas[np.argsort(quotas - exact, kind="stable")[: wanted - int(quotas.sum())]] += 1
    quotas = np.minimum(quotas, counts - 1)
    rows = [order[labels[order] == label][:quota] for label, quota in zip(classes, quotas, strict=True)]
    return np.concatenate(rows)
