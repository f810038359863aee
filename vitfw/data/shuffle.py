"""One permutation, the same on every machine and in every release of numpy."""

import numpy as np


def shuffled_rows(num_rows: int, seed: int) -> np.ndarray:
    """A permutation of 0..num_rows-1 as a pure function of the seed: rows sorted by splitmix64 of (seed, row).

    Written out because numpy promises no equal stream between its releases. splitmix64 is a bijection: no ties.
    """
    value = np.arange(num_rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed & ((1 << 64) - 1))
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(value ^ (value >> np.uint64(31)), kind="stable")
