"""Nearest neighbours on stored features: exact, in bounded memory, shared out over processes.

Weighted votes as in DINO and DINOv2 (Caron et al. 2021): cosine similarity, weights exp(similarity / T), the k most
similar training images vote. k and T change the number by points, so both belong to every result. N training images,
M queries, K classes, W width.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

QUERIES = 256  # in one block; a block is worked on by one process, so its arithmetic does not depend on their number


@dataclass(frozen=True, kw_only=True)
class KnnConfig:
    """How the votes are counted, and how much is held in memory."""

    neighbours: tuple[int, ...] = field(
        default=(10, 20, 100, 200), metadata={"help": "numbers of voters, each its own result"}
    )
    temperature: float = field(default=0.07, metadata={"help": "T of the weights exp(similarity / T)"})
    chunk: int = field(default=32768, metadata={"help": "training images compared at once (memory only)"})

    def __post_init__(self) -> None:
        if not self.neighbours or min(self.neighbours) < 1:
            raise ValueError(f"knn.neighbours={self.neighbours}: one or more numbers of at least 1")
        if not self.temperature > 0:
            raise ValueError(f"knn.temperature={self.temperature}: must be above 0")
        if self.chunk < 1:
            raise ValueError(f"knn.chunk={self.chunk}: must be at least 1 image")


def knn_votes(
    train: np.ndarray,
    labels: np.ndarray,
    queries: np.ndarray,
    config: KnnConfig,
    *,
    num_classes: int,
    device: torch.device | str = "cpu",
) -> dict[int, np.ndarray]:
    """train [N, W], labels int64 [N] or 0/1 [N, K], queries [M, W] -> {k: share of the votes float32 [M, K]}.

    Entered by all ranks together, each with all the rows (memory maps): blocks of queries go round the ranks, and every
    rank gets all the votes. Of equally similar training images the earlier one is nearer. A k above N is refused.
    """
    widest = max(config.neighbours)
    if widest > len(train):
        raise ValueError(f"knn.neighbours={config.neighbours}: the training set has only {len(train)} images")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    targets = _targets(labels, num_classes).to(device)
    votes = torch.zeros(len(config.neighbours), len(queries), num_classes, device=device)
    for number, start in enumerate(range(0, len(queries), QUERIES)):
        if number % world == rank:
            block = _normalised(queries[start : start + QUERIES], device)
            similarity, rows = nearest(train, block, widest, chunk=config.chunk, device=device)
            weight = ((similarity - similarity[:, :1]) / config.temperature).exp()
            for place, count in enumerate(config.neighbours):
                votes[place, start : start + QUERIES] = _shares(targets, rows[:, :count], weight[:, :count])
    if world > 1:
        dist.all_reduce(votes)  # each entry is counted by one rank and zero on the others
    return {count: votes[place].cpu().numpy() for place, count in enumerate(config.neighbours)}


def nearest(
    train: np.ndarray, queries: Tensor, count: int, *, chunk: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """train [N, W], normalised queries [m, W] -> cosine similarity [m, count], falling, and rows int64 [m, count].

    Similarity and row are packed into one integer, higher for the more similar and then the earlier row: the best of
    the best of each chunk are the best of all, whatever the chunk.
    """
    best = torch.empty(len(queries), 0, dtype=torch.int64, device=device)
    for start in range(0, len(train), chunk):
        part = _normalised(train[start : start + chunk], device)
        keys = _pack(queries @ part.T, start)
        best = torch.cat([best, keys], dim=1).topk(min(count, best.shape[1] + keys.shape[1]), dim=1).values
    return _unpack(best)


def _pack(similarity: Tensor, start: int) -> Tensor:
    bits = similarity.float().contiguous().view(torch.int32)
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # the order of floats as the order of integers
    rows = torch.arange(start, start + similarity.shape[1], device=similarity.device)
    return (rising << 32) | (0xFFFFFFFF - rows)


def _unpack(keys: Tensor) -> tuple[Tensor, Tensor]:
    rising, rows = (keys >> 32).int(), 0xFFFFFFFF - (keys & 0xFFFFFFFF)
    return torch.where(rising < 0, rising ^ 0x7FFFFFFF, rising).view(torch.float32), rows


def _normalised(rows: np.ndarray, device: torch.device | str) -> Tensor:
    return F.normalize(torch.from_numpy(np.asarray(rows, np.float32)).to(device), dim=1)


def _targets(labels: np.ndarray, num_classes: int) -> Tensor:
    """[N] int64 stays (a table of one-hot rows would be large); [N, K] becomes float32."""
    if labels.ndim == 1 and (labels.min() < 0 or labels.max() >= num_classes):
        raise ValueError(f"labels run from {labels.min()} to {labels.max()}, expected 0 to {num_classes - 1}")
    return torch.from_numpy(labels.astype(np.int64 if labels.ndim == 1 else np.float32))


def _shares(targets: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """Targets [N] or [N, K], rows [m, k], weights [m, k] -> share of the weight for each class [m, K]."""
    total = weight.sum(dim=1, keepdim=True)
    if targets.ndim == 2:
        return (targets[rows] * weight[:, :, None]).sum(dim=1) / total
    classes = int(targets.max()) + 1
    return weight.new_zeros(len(rows), classes).scatter_add_(1, targets[rows], weight) / total
