"""All randomness is a pure function of the seed and of a place: `derive(seed, "augment", epoch, index, repeat)`."""

import random

import numpy as np
import torch

_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """One round of splitmix64, a bijection of 64-bit integers with good avalanche (Steele et al. 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def derive(seed: int, *parts: int | str) -> int:
    """A 63-bit integer for (seed, parts), the same in every process, on every machine and Python.

    Python's own `hash` differs between processes for strings, so it is not used.
    """
    state = _mix(seed & _MASK)
    for part in parts:
        number = int.from_bytes(part.encode(), "little") if isinstance(part, str) else part
        while True:  # strings and large integers are absorbed 64 bits at a time
            state = _mix(state ^ (number & _MASK))
            number >>= 64
            if number in (0, -1):
                break
    return state >> 1


def seed_all(value: int) -> None:
    """Seeds Python's, numpy's and torch's global generators (timm's policies draw from the first two)."""
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.manual_seed(value)
