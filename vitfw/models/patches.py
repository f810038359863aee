"""Images as flat patches, and the targets that masked autoencoding predicts from them.

Shapes: B images, N = rows * columns patches, M chosen patches, P = h * w * C values of a patch. Inside a patch the
order is row, column, channel (He et al. 2021: `nchpwq->nhwpqc`), so the first C values are its top-left pixel; a
decoder of another order draws noise from published weights.
"""

import torch
from torch import Tensor

Size = tuple[int, int]
VARIANCE_EPS = 1e-6


def patchify(images: Tensor, patch: Size) -> Tensor:
    """Images [B, C, H, W] -> patches [B, N, P], row by row. Raises ValueError where a patch would be cut."""
    return _as_grid(images, patch).flatten(3).flatten(1, 2)


def unpatchify(patches: Tensor, patch: Size, grid: Size) -> Tensor:
    """Patches [B, N, P] on a grid (rows, columns) -> images [B, C, H, W]."""
    if patches.ndim != 3 or patches.shape[1] != grid[0] * grid[1] or patches.shape[2] % (patch[0] * patch[1]):
        raise ValueError(
            f"patches have shape {list(patches.shape)}, but a grid of {grid[0]} x {grid[1]} patches of {patch[0]} x "
            f"{patch[1]} pixels needs [B, {grid[0] * grid[1]}, {patch[0] * patch[1]} * channels]"
        )
    pixels = patches.unflatten(2, (*patch, -1)).unflatten(1, grid)  # [B, rows, columns, h, w, C]
    return pixels.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


def take_patches(images: Tensor, patch: Size, chosen: Tensor) -> Tensor:
    """The patches with the numbers chosen int64 [B, M] -> [B, M, P]; only these are copied."""
    grid = _as_grid(images, patch)
    columns = grid.shape[2]
    rows = torch.arange(len(images), device=images.device)[:, None]
    return grid[rows, chosen // columns, chosen % columns].flatten(2)


def patch_statistics(patches: Tensor) -> tuple[Tensor, Tensor]:
    """Patches [..., P] -> mean and deviation [..., 1] of each patch, float32; the variance is unbiased, plus 1e-6.

    Raises ValueError for patches of a single value, which have no unbiased variance.
    """
    if patches.shape[-1] < 2:
        raise ValueError(
            "task.normalise_target=true: a patch of 1 x 1 pixels with 1 channel has no variance to divide by; "
            "set task.normalise_target=false or use larger patches"
        )
    variance, mean = torch.var_mean(patches.float(), dim=-1, keepdim=True)
    return mean, (variance + VARIANCE_EPS).sqrt()


def normalise_patches(patches: Tensor) -> Tensor:
    """Patches [..., P] -> float32, each with mean 0 and deviation 1; a patch of one colour becomes zeros."""
    mean, deviation = patch_statistics(patches)
    return (patches.float() - mean) / deviation


def _as_grid(images: Tensor, patch: Size) -> Tensor:
    """Images [B, C, H, W] -> a view [B, rows, columns, h, w, C]."""
    height, width = images.shape[2:]
    if height % patch[0] or width % patch[1]:
        raise ValueError(f"images are {height} x {width} pixels, not divisible by the patch {patch[0]} x {patch[1]}")
    return images.unflatten(3, (-1, patch[1])).unflatten(2, (-1, patch[0])).permute(0, 2, 4, 3, 5, 1)
