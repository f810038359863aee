"""Tensors of a weight file made to fit a model of another size: positions, patch embedding, channels, head, biases.

Each function changes `state` (our names) in place and writes what it did into `resized`.
"""

import math
import re
from collections.abc import Mapping, MutableMapping, Sequence

import torch
from torch import Tensor

from vitfw.models.architecture import Architecture
from vitfw.models.positions import Grid, resize_positions, sincos_table
from vitfw.models.vit import ViT

State = MutableMapping[str, Tensor]


class MisfitError(ValueError):
    """A tensor that cannot be made to fit; the text says which and what to do."""


def fit_patch_embed(state: State, own: Mapping[str, Tensor], resized: MutableMapping[str, str]) -> None:
    """Patch projection [D, C, h, w] to other channels and another patch size.

    Channels: to one, the sum over the old; to others, the old repeated, scaled so that the response to grey stays.
    Size: the pseudo-inverse resize of FlexiViT (Beyer et al. 2022), after which resized patches give the old embedding.
    """
    name = "patch_embed.proj.weight"
    if name not in state or name not in own:
        return
    weight, target = state[name], own[name].shape
    if weight.ndim == 2:
        if weight.shape[1] != target[1:].numel():
            raise MisfitError(
                f"{name} is a flat matrix {list(weight.shape)}, which fits patches {list(target[1:])} only"
            )
        weight = weight.reshape(len(weight), target[1], *target[2:])
    if weight.shape[1] != target[1]:
        resized[f"{name} (channels)"] = f"{weight.shape[1]} -> {target[1]}"
        weight = _fit_channels(weight, target[1])
    if weight.shape[2:] != target[2:]:
        from timm.layers.patch_embed import resample_patch_embed

        resized[name] = f"{tuple(weight.shape[2:])} -> {tuple(target[2:])} pixels, pseudo-inverse"
        weight = resample_patch_embed(weight.float(), list(target[2:]), interpolation="bicubic", antialias=True)
    state[name] = weight


def _fit_channels(weight: Tensor, channels: int) -> Tensor:
    old = weight.shape[1]
    if channels == 1:
        return weight.float().sum(1, keepdim=True)
    repeated = weight.float().repeat(1, math.ceil(channels / old), 1, 1)[:, :channels]
    return repeated * (old / channels)


def fit_positions(
    state: State,
    model: ViT,
    theirs: Architecture | None,
    grid: Sequence[int] | None,
    resized: MutableMapping[str, str],
) -> None:
    """Positions [1, rows, D] to the model's grid and prefix rows.

    A learned table is interpolated in 2-D; a fixed sin-cos table is computed anew. Prefix rows that the model's table
    has not are added to their tokens; rows that the file's table has not become zero: both leave the sums as they
    were. A model with fixed positions takes the file's table only if it is the same.
    Raises MisfitError where the file's grid cannot be known, or the tables are of different kinds.
    """
    table, arch = state.get("pos_embed"), model.arch
    if table is None:
        return
    if arch.position not in ("learned", "sincos"):
        raise MisfitError(
            f"the file has a table of positions (pos_embed), the model has model.position={arch.position}"
        )
    tokens = [state[name] for name in ("cls_token", "dist_token", "reg_token") if name in state]
    old, rows = _file_grid(table, [token.shape[1] for token in tokens], theirs, grid)
    fixed = _is_sincos(table[:, rows:], old)
    if arch.position == "sincos" and not fixed:
        raise MisfitError("the file's positions are learned, model.position=sincos are not; set model.position=learned")
    table = _match_prefix(table, rows, arch.prefix if arch.position_prefix else 0, state)
    wanted = arch.prefix if arch.position_prefix else 0
    if old != model.grid_size:
        rule = "computed anew (sin-cos)" if fixed else "bicubic"
        resized["pos_embed"] = f"{old[0]} x {old[1]} -> {model.grid_size[0]} x {model.grid_size[1]} patches, {rule}"
        if fixed:
            fresh = sincos_table(model.grid_size, arch.width)[None].to(table)
            table = torch.cat([table[:, :wanted], fresh], dim=1)
        else:
            table = resize_positions(table, old, model.grid_size, wanted)
    state["pos_embed"] = table


def _file_grid(
    table: Tensor, tokens: list[int], theirs: Architecture | None, grid: Sequence[int] | None
) -> tuple[Grid, int]:
    """(rows, columns) of the file's patches, and how many rows of the table belong to prefix tokens."""
    total = table.shape[1]
    prefixes = [sum(tokens[:i]) for i in range(len(tokens) + 1)]
    if theirs is not None and grid is None and total - theirs.patches in prefixes:
        return theirs.grid, total - theirs.patches
    if grid is not None:
        rows, columns = grid
        if total - rows * columns not in prefixes:
            raise MisfitError(
                f"load.grid={tuple(grid)}: the table has {total} rows, of which {prefixes} may be prefix tokens"
            )
        return (rows, columns), total - rows * columns
    squares = [count for count in prefixes if math.isqrt(total - count) ** 2 == total - count]
    if len(squares) != 1:
        raise MisfitError(
            f"the table of {total} positions is not square; give its rows and columns as load.grid=[rows,columns]"
        )
    side = math.isqrt(total - squares[0])
    return (side, side), squares[0]


def _is_sincos(patches: Tensor, grid: Grid) -> bool:
    width = patches.shape[2]
    return width % 4 == 0 and torch.allclose(patches[0].float(), sincos_table(grid, width), atol=1e-4)


def _match_prefix(table: Tensor, have: int, want: int, state: State) -> Tensor:
    if have == want:
        return table
    if want > have:
        return torch.cat([table[:, :have], table.new_zeros(1, want - have, table.shape[2]), table[:, have:]], dim=1)
    if want:
        raise MisfitError(f"the file's table has rows for {have} prefix tokens, the model's for {want}")
    place = 0
    for name in ("cls_token", "dist_token", "reg_token"):
        count = min(state[name].shape[1], have - place) if name in state else 0
        if count > 0:
            token = state[name].clone()
            token[:, :count] += table[:, place : place + count]
            state[name], place = token, place + count
    return table[:, have:]


def fit_qkv_bias(state: State, own: Mapping[str, Tensor]) -> list[str]:
    """Biases of query, key, value between one vector and a pair without key. Returns names left out because they are
    zero.

    Raises MisfitError for a bias that is not zero where the model can have none.
    """
    left_out: list[str] = []
    places = {name.rsplit(".", 1)[0] for name in state if re.fullmatch(r"blocks\.\d+\.attn\.[qv]_bias", name)}
    places = {place for place in places if f"{place}.qkv.weight" in own}
    for place in places:
        query, value = f"{place}.q_bias", f"{place}.v_bias"
        if query in own:
            continue
        pair = [state.pop(query), state.pop(value)]
        if f"{place}.qkv.bias" in own:
            state[f"{place}.qkv.bias"] = torch.cat([pair[0], torch.zeros_like(pair[0]), pair[1]])
        elif any(bias.any() for bias in pair):
            raise MisfitError(f"{place} has query and value biases in the file, none here; set model.qkv_bias=qv")
        else:
            left_out += [query, value]
    for place in [name.removesuffix(".qkv.weight") for name in own if name.endswith(".attn.qkv.weight")]:
        name = f"{place}.qkv.bias"
        if name in own or name not in state:
            continue
        query, key, value = state.pop(name).chunk(3)
        if f"{place}.q_bias" in own and not key.any():
            state[f"{place}.q_bias"], state[f"{place}.v_bias"] = query, value
        elif not (query.any() or key.any() or value.any()):
            left_out.append(name)
        else:
            raise MisfitError(
                f"{name} is not zero in the file and the model has no room for it; set model.qkv_bias=qkv"
            )
    return left_out


def fit_head(
    state: State,
    own: Mapping[str, Tensor],
    rule: str,
    rows: Sequence[int] | None,
    resized: MutableMapping[str, str],
    *,
    name: str = "head",
) -> list[str]:
    """The heads (`head`, `head_dist`) kept, dropped or remapped. Returns the names left out.

    Raises MisfitError for rule "keep" where the classes differ, and for rows that the file's head does not have.
    """
    left_out: list[str] = []
    for key in [f"{head}.{part}" for head in (name, "head_dist") for part in ("weight", "bias")]:
        if key not in state:
            if rule == "keep" and key in own:
                raise MisfitError(f"load.head=keep: the file has no {key}")
            continue
        if rows is not None and key in own:
            state[key] = _remap(state[key], key, rows, len(own[key]), resized)
        elif rule == "drop" or key not in own or state[key].shape[0] != own[key].shape[0]:
            if rule == "keep":
                here = list(own[key].shape) if key in own else "absent"
                raise MisfitError(f"load.head=keep: {key} is {list(state[key].shape)} in the file and {here} here")
            del state[key]
            left_out.append(key)
    return left_out


def _remap(value: Tensor, key: str, rows: Sequence[int], classes: int, resized: MutableMapping[str, str]) -> Tensor:
    if len(rows) != classes:
        raise MisfitError(f"load.head_rows has {len(rows)} entries, the model has {classes} classes")
    if not all(0 <= row < len(value) for row in rows):
        raise MisfitError(f"load.head_rows: the file's {key} has rows 0 to {len(value) - 1}")
    resized[key] = f"{len(value)} -> {classes} classes, remapped"
    return value[torch.tensor(list(rows))]
