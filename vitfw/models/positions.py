"""Positions: fixed sin-cos tables, rotary tables, and the 2-D resize of learned tables."""

import torch
import torch.nn.functional as F
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from torch import Tensor

Grid = tuple[int, int]


def sincos_table(grid: Grid, width: int) -> Tensor:
    """Grid (rows, columns) -> fixed table [rows * columns, width], float32.

    The MAE layout (He et al. 2021): the first half of the features encodes the column, the second half the row; each
    half is sines then cosines of the coordinate times 10000^(-i / (width / 4)). Computed in float64, as the published
    tables.
    """
    bands = 1.0 / 10000.0 ** (torch.arange(width // 4, dtype=torch.float64, device="cpu") / (width / 4))
    rows, columns = _coordinates(grid, torch.float64)
    angles = torch.stack([columns, rows], dim=1)[:, :, None] * bands  # [N, 2, width / 4]
    return torch.cat([angles.sin(), angles.cos()], dim=2).flatten(1).float()


def resize_positions(table: Tensor, old: Grid, new: Grid, prefix: int) -> Tensor:
    """Learned table [1, prefix + old, D] -> [1, prefix + new, D]; grids are (rows, columns).

    Bicubic with anti-aliasing in float32. Prefix rows, and a table whose grid stays, are returned bit for bit.
    Raises ValueError where the table does not have the rows that `old` and `prefix` say.
    """
    if table.ndim != 3 or table.shape[1] != prefix + old[0] * old[1]:
        raise ValueError(
            f"pos_embed has shape {tuple(table.shape)}, but a grid of {old[0]} x {old[1]} with {prefix} prefix rows "
            f"needs [1, {prefix + old[0] * old[1]}, D]; give the grid of the file (rows, columns)"
        )
    if old == new:
        return table
    patches = table[:, prefix:].float().unflatten(1, old).permute(0, 3, 1, 2)
    patches = F.interpolate(patches, size=new, mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([table[:, :prefix], patches.flatten(2).transpose(1, 2).to(table.dtype)], dim=1)


def rope_table(
    grid: Grid, head_width: int, *, kind: str, temperature: float, layout: str, reference: int, prefix: int
) -> Tensor:
    """Grid (rows, columns) -> [prefix + rows * columns, 2 * head_width]: sines, then cosines, float32.

    kind "centered": patch centres scaled to [-1, 1], angle 2 pi x / temperature^(4 i / head_width) (DINOv3).
    kind "index": patch numbers, rescaled to a square grid of side `reference` if that is not 0, times
    temperature^(-4 i / head_width) (EVA-02). Rows of prefix tokens hold sine 0 and cosine 1, which rotates nothing.
    """
    count = head_width // 4
    if kind == "centered":
        axes = [2.0 * (torch.arange(0.5, side, device="cpu") / side) - 1.0 for side in grid]
        periods = temperature ** (2.0 * torch.arange(count, dtype=torch.float32, device="cpu") / (head_width // 2))
        angles = 2 * torch.pi * _pairs(axes)[:, :, None] / periods
    else:
        axes = [torch.arange(side, dtype=torch.float32, device="cpu") for side in grid]
        if reference:
            axes = [axis / side * reference for axis, side in zip(axes, grid, strict=True)]
        bands = 1.0 / temperature ** (torch.arange(count, dtype=torch.float32, device="cpu") / count)
        angles = _pairs(axes)[:, :, None] * bands
    angles = angles.flatten(1)
    angles = torch.cat([angles, angles], dim=1) if layout == "half" else angles.repeat_interleave(2, dim=1)
    table = torch.cat([angles.sin(), angles.cos()], dim=1)
    still = torch.cat([torch.zeros(prefix, head_width), torch.ones(prefix, head_width)], dim=1)
    return torch.cat([still.to(table), table])


def rotate(x: Tensor, table: Tensor, layout: str) -> Tensor:
    """Queries or keys [B, heads, T, head_width] turned by a table that broadcasts to [B, 1, T, 2 * head_width]."""
    return apply_rot_embed_cat(x, table, half=layout == "half")


def _coordinates(grid: Grid, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    axes = [torch.arange(side, dtype=dtype, device="cpu") for side in grid]
    rows, columns = torch.meshgrid(*axes, indexing="ij")
    return rows.flatten(), columns.flatten()


def _pairs(axes: list[Tensor]) -> Tensor:
    """Row axis and column axis -> [N, 2]."""
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 1)
