"""Several images of different sizes in one sequence (NaViT, Dehghani et al. 2023): no padding, no resizing."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vitfw.models.positions import Grid


@dataclass(frozen=True)
class Packed:
    """Patches of several images behind one another; what `ViT.forward` takes in place of an image batch.

    patches [N, C * h * w] in row-major order image by image; grids: (rows, columns) of each image.
    """

    patches: Tensor
    grids: tuple[Grid, ...]

    @property
    def counts(self) -> list[int]:
        """Patches of each image."""
        return [rows * columns for rows, columns in self.grids]


@dataclass(frozen=True)
class Segments:
    """Which tokens of a packed sequence [1, T, D] belong together.

    lengths: tokens of each image, prefix included; starts int32 [images + 1]; ids int64 [T]; mask bool [T, T], True
    where attention may look.
    """

    lengths: tuple[int, ...]
    starts: Tensor
    ids: Tensor
    mask: Tensor | None

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def masked(self) -> "Segments":
        """The same with its mask, which kernels for float32 need."""
        return self if self.mask is not None else replace(self, mask=self.ids[:, None] == self.ids[None, :])


def pack(images: Sequence[Tensor], patch: tuple[int, int]) -> Packed:
    """Images [C, H_i, W_i] of any sizes divisible by the patch (height, width) -> one packed batch.

    Raises ValueError for no images, differing channel counts, or a size that the patch does not divide.
    """
    if not images:
        raise ValueError("pack: no images; a packed batch holds at least one")
    patches, grids = [], []
    for number, image in enumerate(images):
        channels, height, width = image.shape
        if channels != images[0].shape[0]:
            raise ValueError(f"pack: image {number} has {channels} channels, image 0 has {images[0].shape[0]}")
        if not height or not width or height % patch[0] or width % patch[1]:
            raise ValueError(
                f"pack: image {number} is {height} x {width} pixels, not divisible by the patch "
                f"{patch[0]} x {patch[1]}; resize or crop it first"
            )
        cells = image.unflatten(2, (-1, patch[1])).unflatten(1, (-1, patch[0]))  # [C, rows, h, columns, w]
        patches.append(cells.permute(1, 3, 0, 2, 4).flatten(2).flatten(0, 1))
        grids.append((height // patch[0], width // patch[1]))
    return Packed(torch.cat(patches), tuple(grids))


def fill(counts: Sequence[int], capacity: int) -> list[list[int]]:
    """Tokens of each image -> lists of image numbers, each list at most `capacity` tokens (first fit, longest first).

    Raises ValueError for an image that no sequence can hold.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(counts)), key=lambda i: (-counts[i], i)):
        if counts[number] > capacity:
            raise ValueError(f"fill: image {number} has {counts[number]} tokens, a sequence holds {capacity}")
        place = next((i for i, left in enumerate(room) if left >= counts[number]), None)
        if place is None:
            bins.append([])
            room.append(capacity)
            place = len(bins) - 1
        bins[place].append(number)
        room[place] -= counts[number]
    return bins


def segments(packed: Packed, prefix: int, *, dense: bool) -> Segments:
    """Token bookkeeping of a packed batch with `prefix` own prefix tokens for each image; `dense` builds the mask."""
    device = packed.patches.device
    lengths = tuple(prefix + count for count in packed.counts)
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    ids = torch.repeat_interleave(torch.arange(len(lengths), device=device), torch.tensor(lengths, device=device))
    return Segments(lengths, starts, ids, ids[:, None] == ids[None, :] if dense else None)


def unpack(tokens: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Packed tokens [1, T, D] -> padded [images, longest, D] (zeros behind each image), valid bool [images,
    longest].
    """
    longest = max(lengths)
    parts = [
        torch.cat([part, part.new_zeros(longest - len(part), part.shape[1])]) for part in tokens[0].split(list(lengths))
    ]
    counts = torch.tensor(list(lengths), device=tokens.device)
    return torch.stack(parts), torch.arange(longest, device=tokens.device) < counts[:, None]
