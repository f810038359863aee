"""How well the classes are spread over the shards of a data set."""

import numpy as np

from vitfw.data.index import Samples


def shard_mixing(samples: Samples) -> float:
    """0..1: mean entropy of the labels within a shard over their entropy in the whole set. 1: well shuffled, 0: one
    class a shard. 1 also where it has no meaning (no labels, one class, folders)."""
    if not samples.labelled or samples.multi_label or len(samples.names) < 2:
        return 1.0
    whole = _entropy(samples.labels)
    if whole == 0:
        return 1.0
    parts = np.split(samples.labels, samples.starts[1:-1])
    weights = samples.shard_sizes / len(samples)
    return float(sum(weight * _entropy(part) for weight, part in zip(weights, parts, strict=True)) / whole)


def _entropy(labels: np.ndarray) -> float:
    counts = np.unique(labels, return_counts=True)[1]
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum())
