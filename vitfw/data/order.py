"""Which image comes when: a pure function of (seed, epoch), dealt to ranks. No state but one number, images consumed.

N samples, B = global batch (images of one optimiser step), m = images per device, W = processes ("world"),
A = B / (m W) micro-batches a step. Micro-batch g = micro W + rank of a global batch takes its places g m .. g m + m-1.
The order knows neither W nor m, so a run that goes on with another number of processes continues the same epoch.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from vitfw.data.shuffle import shuffled_rows
from vitfw.seeding import derive


class Draw(NamedTuple):
    """One image to load: row of the index (-1: padding), in this epoch, as its copy number `repeat`."""

    epoch: int
    index: int  # pyright: ignore[reportIncompatibleMethodOverride] (tuple.index; a row number is what it is)
    repeat: int


def epoch_order(shard_sizes: Sequence[int] | np.ndarray, *, seed: int, epoch: int, window: int = 0) -> np.ndarray:
    """[N] int64: each row once. Shards are shuffled, then the samples of `window` shards at a time, together.

    window 0 is one window over everything: an exactly uniform permutation. Smaller windows read disks and remote
    stores nearly in sequence, at the price that neighbours in the epoch come from the same `window` shards.
    """
    sizes = np.asarray(shard_sizes, np.int64)
    if window <= 0 or window >= len(sizes):
        return shuffled_rows(int(sizes.sum()), derive(seed, "order", epoch))
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    shards = shuffled_rows(len(sizes), derive(seed, "shards", epoch))
    blocks = []
    for number, first in enumerate(range(0, len(shards), window)):
        rows = np.concatenate([np.arange(int(starts[s]), int(starts[s + 1])) for s in shards[first : first + window]])
        blocks.append(rows[shuffled_rows(len(rows), derive(seed, "order", epoch, number))])
    return np.concatenate(blocks)


def quota_order(
    groups: Sequence[np.ndarray], shares: Sequence[float], num_draws: int, *, seed: int, epoch: int
) -> np.ndarray:
    """[num_draws] int64 rows: group k (rows [N_k]) fills its share of the epoch (balanced classes, weighted sources).

    A group is used up whole before any of its rows comes again; what is left of its quota is a random part of it.
    Quotas are rounded by largest remainder, so they add up to num_draws.
    """
    weights = np.asarray(shares, np.float64) / np.sum(shares)
    exact = weights * num_draws
    quotas = np.floor(exact).astype(np.int64)
    quotas[np.argsort(quotas - exact, kind="stable")[: num_draws - quotas.sum()]] += 1
    drawn = []
    for number, (rows, quota) in enumerate(zip(groups, quotas, strict=True)):
        for turn in range(-(-int(quota) // len(rows))):
            order = rows[shuffled_rows(len(rows), derive(seed, "group", epoch, number, turn))]
            drawn.append(order[: int(quota) - turn * len(rows)])
    joined = np.concatenate(drawn)
    return joined[shuffled_rows(len(joined), derive(seed, "mix", epoch))]


class TrainOrder:
    """Batch sampler of one rank: iterating gives the remaining micro-batches of the current epoch as lists of Draw.

    The iteration after that starts at the next epoch; it is set when an iteration begins, because trainers leave an
    iterator before it is exhausted. Only whole global batches are used; `dropped` images of each epoch are left over
    (others in each epoch).

    repeats (repeated augmentation, Hoffer et al. 2020, with DeiT's epoch length): an epoch still has N draws, of
    ceil(N / repeats) different images, each `repeats` times; the copies of an image lie in one global batch (those at
    its edge in two), in neighbouring micro-batches, that is on different ranks where there are that many.

    groups and shares: see `quota_order`; they replace the plain order.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        global_batch: int,
        images_per_device: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        repeats: int = 1,
        shard_sizes: Sequence[int] | np.ndarray | None = None,
        window: int = 0,
        groups: Sequence[np.ndarray] | None = None,
        shares: Sequence[float] | None = None,
    ) -> None:
        sizes = np.asarray([num_samples] if shard_sizes is None else shard_sizes, np.int64)
        assert sizes.sum() == num_samples, f"shard sizes add up to {sizes.sum()}, not to {num_samples}"
        assert 0 <= rank < world, f"rank {rank} of {world}"
        if global_batch < 1 or images_per_device < 1 or global_batch % (images_per_device * world):
            raise ValueError(
                f"train.global_batch={global_batch} is not a multiple of machine.images_per_device={images_per_device} "
                f"x {world} process(es) = {images_per_device * world}; change one of the three"
            )
        if num_samples < global_batch:
            raise ValueError(
                f"data.train has {num_samples} samples, fewer than one global batch of {global_batch}: "
                "no step could be made; lower train.global_batch"
            )
        if repeats < 1:
            raise ValueError(f"augment.repeats={repeats}: must be 1 or more")
        if repeats > 1 and groups is not None:
            raise ValueError(
                f"augment.repeats={repeats} with data.balance or data.weights: both repeat images, and together the "
                "length of an epoch has no meaning; use one of them"
            )
        self.num_samples, self.global_batch, self.images_per_device = num_samples, global_batch, images_per_device
        self.seed, self.rank, self.world, self.repeats, self.window = seed, rank, world, repeats, window
        self.shard_sizes, self.groups, self.shares = sizes, groups, shares
        self._epoch, self._images = 0, 0

    @property
    def accumulation(self) -> int:
        """Micro-batches of one rank in a step (A)."""
        return self.global_batch // (self.images_per_device * self.world)

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in a whole epoch, the same on every rank."""
        return self.num_samples // self.global_batch

    @property
    def dropped(self) -> int:
        """Draws of each epoch that fill no whole global batch."""
        return self.num_samples % self.global_batch

    @property
    def distinct(self) -> int:
        """Different images drawn in an epoch (before dropping), where no groups are used."""
        return -(-self.num_samples // self.repeats)

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, images consumed in it) at which the next iteration starts."""
        return self._epoch, self._images

    def describe(self) -> str:
        """One line for the log: steps, dropped images, and what an epoch is with repeats."""
        text = f"{self.steps_per_epoch} steps an epoch of {self.global_batch} images"
        if self.accumulation > 1:
            text += f" ({self.accumulation} micro-batches each)"
        text += f"; {self.dropped} of {self.num_samples} dropped in each epoch (others in each)"
        if self.repeats > 1:
            text += f"; {self.distinct} different images in an epoch, each {self.repeats} times"
        return text

    def seek(self, *, epoch: int, images: int) -> None:
        """Sets where the next iteration starts: after `images` images (of all ranks) of this epoch.

        Where fewer than one global batch would remain, that is the start of the next epoch. `images` need not be a
        multiple of the present global batch, so a run may go on with another one.
        """
        if epoch < 0 or not 0 <= images <= self.num_samples:
            raise ValueError(
                f"position epoch={epoch}, images={images} lies outside this data set of {self.num_samples} images; "
                "was the run started on other data?"
            )
        rolls = self.num_samples - images < self.global_batch
        self._epoch, self._images = (epoch + 1, 0) if rolls else (epoch, images)

    def __len__(self) -> int:
        """Micro-batches of this rank in a whole epoch."""
        return self.steps_per_epoch * self.accumulation

    def draws(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """index [N] and repeat [N] of all draws of an epoch, in order, for all ranks together."""
        if self.groups is not None:
            assert self.shares is not None, "groups come with shares"
            rows = quota_order(self.groups, self.shares, self.num_samples, seed=self.seed, epoch=epoch)
        else:
            rows = epoch_order(self.shard_sizes, seed=self.seed, epoch=epoch, window=self.window)
        if self.repeats == 1:
            return rows, np.zeros(len(rows), np.int8)
        repeat = np.tile(np.arange(self.repeats), self.distinct)[: self.num_samples]
        return np.repeat(rows[: self.distinct], self.repeats)[: self.num_samples], repeat

    def __iter__(self) -> Iterator[list[Draw]]:
        # A generator: it starts at its first batch, not at iter(), because torch's DataLoader calls iter() twice
        # when it starts its workers and uses only the second iterator.
        epoch, images = self._epoch, self._images
        self._epoch, self._images = epoch + 1, 0
        index, repeat = self.draws(epoch)
        micro_batches = self.world * self.accumulation
        for start in range(images, self.num_samples - self.global_batch + 1, self.global_batch):
            places = np.arange(start, start + self.global_batch)
            if self.repeats > 1:  # deal the copies to neighbouring micro-batches, as DeiT deals them to ranks
                places = places.reshape(self.images_per_device, micro_batches).T.reshape(-1)
            for micro in range(self.accumulation):
                first = (micro * self.world + self.rank) * self.images_per_device
                mine = places[first : first + self.images_per_device]
                yield [Draw(epoch, int(index[place]), int(repeat[place])) for place in mine]


def eval_order(num_samples: int, *, batch: int, rank: int = 0, world: int = 1) -> list[list[Draw]]:
    """Batches of one rank for evaluation: sample i goes to rank i % world; all ranks have equally many batches.

    Padding has index -1 (label -1 in the batch), so every sample counts exactly once for any number of ranks.
    """
    if num_samples < 1:
        raise ValueError("the evaluation set has no sample")
    each = -(-num_samples // world)
    rows = [index if index < num_samples else -1 for index in range(rank, each * world, world)]
    rows += [-1] * (-each % batch)
    return [[Draw(0, row, 0) for row in rows[first : first + batch]] for first in range(0, len(rows), batch)]
