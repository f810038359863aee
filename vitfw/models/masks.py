"""Which patches stay visible: pure functions of uniform random numbers, with a fixed count for every image.

Shapes: B images, N = rows * columns patches, K visible, M = N - K removed. A fixed count keeps all shapes static, so
the step compiles to one graph. Removed patches are the last of an order, visible ones the first.
"""

from typing import Literal

import torch
from torch import Tensor

Grid = tuple[int, int]
MaskKind = Literal["random", "block", "grid"]

BLOCKS = 32  # rectangles drawn for one block mask: enough that hardly a patch stays uncovered
BLOCK_AREA = (0.08, 0.4)  # of the grid; 8 % is the 16 of 196 patches of Bao et al. 2021
BLOCK_ASPECT = (0.3, 1 / 0.3)  # height / width


def kept_patches(patches: int, ratio: float) -> int:
    """Visible patches at a mask ratio: int(N (1 - ratio)), cut and not rounded, as He et al. 2021 (49 at 0.75 -> 12).

    Raises ValueError where nothing would stay or nothing would be removed.
    """
    kept = int(patches * (1 - ratio))
    if not 0 < kept < patches:
        raise ValueError(
            f"task.mask_ratio={ratio}: keeps {kept} of {patches} patches; at least one must stay and one must go"
        )
    return kept


def grid_side(ratio: float) -> int:
    """Side s of the cells of which a grid mask keeps one patch: 0.75 -> 2. Raises ValueError for ratios in between."""
    side = round((1 - ratio) ** -0.5)
    if side < 2 or abs(1 - 1 / side**2 - ratio) > 5e-3:
        raise ValueError(
            f"task.mask_ratio={ratio}: task.mask=grid keeps one patch of each s x s cell, so the ratio must be 0.75 "
            "(s = 2), 0.889 (s = 3), 0.9375 (s = 4), ...; or use task.mask=random"
        )
    return side


def numbers_needed(kind: MaskKind, grid: Grid) -> int:
    """Uniform random numbers that the mask of one image is made from."""
    patches = grid[0] * grid[1]
    return {"random": patches, "grid": patches + 2, "block": 4 * BLOCKS + patches}[kind]


def patch_order(kind: MaskKind, numbers: Tensor, grid: Grid, ratio: float) -> Tensor:
    """Numbers in [0, 1) [B, `numbers_needed`] -> int64 [B, N]: patch numbers, the first to stay first.

    random: by ascending noise. grid: first the patches of a regular lattice, shifted at random. block: rectangles are
    removed one after the other (Bao et al. 2021), so the order ends with the first rectangle; where the count is
    reached inside a rectangle, its lower rows are those that stay.
    """
    if kind == "random":
        return numbers.argsort(dim=1)
    if kind == "grid":
        return _lattice_score(numbers, grid, grid_side(ratio)).argsort(dim=1)
    return _block_score(numbers, grid).argsort(dim=1)


def split_order(order: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """Order [B, N] -> visible [B, K] and removed [B, M] patch numbers."""
    return order[:, :kept], order[:, kept:]


def binary_mask(removed: Tensor, patches: int) -> Tensor:
    """Removed patch numbers [B, M] -> float [B, N]: 1 removed, 0 visible."""
    return torch.zeros(len(removed), patches, device=removed.device).scatter_(1, removed, 1.0)


def _coordinates(grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column [N] of each patch."""
    number = torch.arange(grid[0] * grid[1], device=device)
    return number // grid[1], number % grid[1]


def _lattice_score(numbers: Tensor, grid: Grid, side: int) -> Tensor:
    rows, columns = _coordinates(grid, numbers.device)
    shift = (numbers[:, :2] * side).long()
    off_lattice = ((rows + shift[:, :1]) % side != 0) | ((columns + shift[:, 1:2]) % side != 0)
    return off_lattice.float() + numbers[:, 2:]


def _block_score(numbers: Tensor, grid: Grid) -> Tensor:
    """High for patches that an early rectangle covers; below all of them, noise for patches that none covers."""
    draws, noise = numbers[:, : 4 * BLOCKS].unflatten(1, (4, BLOCKS))[:, :, :, None], numbers[:, 4 * BLOCKS :]
    patches = grid[0] * grid[1]
    area = (BLOCK_AREA[0] + (BLOCK_AREA[1] - BLOCK_AREA[0]) * draws[:, 0]) * patches
    aspect = BLOCK_ASPECT[0] * (BLOCK_ASPECT[1] / BLOCK_ASPECT[0]) ** draws[:, 1]
    height = (area * aspect).sqrt().round().clamp(1, grid[0])
    width = (area / aspect).sqrt().round().clamp(1, grid[1])
    top = (draws[:, 2] * (grid[0] - height + 1)).floor()
    left = (draws[:, 3] * (grid[1] - width + 1)).floor()
    rows, columns = _coordinates(grid, numbers.device)
    covered = (rows >= top) & (rows < top + height) & (columns >= left) & (columns < left + width)  # [B, BLOCKS, N]
    first = torch.where(covered.any(1), covered.float().argmax(1), BLOCKS)
    # rows from the top go first inside a rectangle, so that a cut rectangle stays one
    within = (patches - torch.arange(patches, device=numbers.device)) / (patches + 1)
    return torch.where(first < BLOCKS, BLOCKS - first + within, noise)
