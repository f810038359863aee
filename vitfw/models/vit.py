"""The one configurable Vision Transformer. Its state dict is named as timm's `VisionTransformer`."""

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitfw.models.architecture import Architecture
from vitfw.models.attention import ragged_kernel
from vitfw.models.blocks import Block, Context, ParallelBlock
from vitfw.models.layers import AttentionPool, Linear, PatchEmbed, norm_layer
from vitfw.models.packing import Packed, segments, unpack
from vitfw.models.positions import Grid, resize_positions, rope_table, sincos_table

Output = Literal["logits", "pooled", "tokens"]


class Taken(NamedTuple):
    """`output` of the forward, tokens [B, T, D] of the chosen blocks, attention [B, heads, T, T] of the chosen
    blocks.
    """

    output: Tensor | tuple[Tensor, Tensor]
    blocks: dict[int, Tensor]
    attention: dict[int, Tensor]


class ViT(nn.Module):
    """Images [B, C, H, W] -> logits [B, num_classes]; without classes (0) the pooled vector [B, D]."""

    def __init__(self, arch: Architecture, num_classes: int):
        super().__init__()
        if num_classes < 0:
            raise ValueError(f"num_classes={num_classes}: must be 0 (no head) or more")
        self.arch, self.num_classes = arch, num_classes
        self.embed_dim, self.depth, self.in_channels = arch.width, arch.depth, arch.in_channels
        self.num_prefix_tokens, self.patch_size, self.grid_size = arch.prefix, arch.patch, arch.grid
        self.cls_token = _token(1, arch.width) if arch.class_token else None
        self.dist_token = _token(1, arch.width) if arch.distillation_token else None
        self.reg_token = _token(arch.registers, arch.width) if arch.registers else None
        self.mask_token = _token(1, arch.width) if arch.mask_token else None
        self._make_positions()
        self.patch_embed = PatchEmbed(arch)
        self.norm_pre = norm_layer(arch, arch.width) if arch.pre_norm else nn.Identity()
        block = ParallelBlock if arch.parallel else Block
        self.blocks = nn.ModuleList(block(arch, i) for i in range(arch.depth))
        self.norm = norm_layer(arch, arch.width) if arch.final_norm == "tokens" else nn.Identity()
        self.attn_pool = AttentionPool(arch) if arch.pool == "map" else None
        self.fc_norm = norm_layer(arch, arch.width) if arch.final_norm == "pooled" else nn.Identity()
        self.pre_logits = None
        if arch.pre_head == "tanh":
            self.pre_logits = Linear(arch.width, arch.width, init=arch.init, role="pre_head")
        self.head = _head(arch, num_classes)
        self.head_dist = _head(arch, num_classes) if arch.distillation_token else None
        self._rope_tables: dict[tuple[Grid, torch.device], Tensor] = {}
        self.reset_parameters()

    def _make_positions(self) -> None:
        arch = self.arch
        prefix = arch.prefix if arch.position_prefix else 0
        self.pos_embed: Tensor | None = None
        if arch.position == "learned":
            self.pos_embed = _token(prefix + arch.patches, arch.width)
        elif arch.position == "sincos":  # not trained: a buffer, so that no optimiser or decay ever touches it
            del self.pos_embed
            self.register_buffer("pos_embed", torch.empty(1, prefix + arch.patches, arch.width))
        factorised = arch.position == "factorised"
        self.pos_embed_rows = _token(arch.grid[0], arch.width) if factorised else None
        self.pos_embed_columns = _token(arch.grid[1], arch.width) if factorised else None

    def reset_parameters(self) -> None:
        """Initialises the tensors this module itself owns; every other module has its own `reset_parameters`."""
        init = self.arch.init
        for token in (self.cls_token, self.reg_token):
            if token is not None:
                nn.init.normal_(token, std={"timm": 1e-6, "mae": 0.02, "jax": 0.0}[init])
        for token in (self.dist_token, self.mask_token, self.pos_embed_rows, self.pos_embed_columns):
            if token is not None:
                nn.init.trunc_normal_(token, std=0.02)
        if self.arch.position == "learned":
            assert self.pos_embed is not None
            nn.init.trunc_normal_(self.pos_embed, std=0.02)
        elif self.arch.position == "sincos":
            assert self.pos_embed is not None
            with torch.no_grad():
                self.pos_embed.copy_(self._sincos(self.grid_size))

    def forward(
        self,
        images: Tensor | Packed,
        *,
        keep: Tensor | None = None,
        masked: Tensor | None = None,
        output: Output = "logits",
        blocks: Sequence[int] = (),
        attention: Sequence[int] = (),
        block_norm: bool = True,
    ):
        """Images [B, C, H, W] float, or a packed batch -> what `output` names.

        "logits": [B, classes]; a model with a distillation token gives the pair (class, distillation) in training and
        their mean in evaluation. "pooled": the head's input [B, D]. "tokens": [B, prefix + N, D] after the final norm.
        A packed batch counts its images as B; its tokens come padded with zeros, [B, longest, D].

        keep int64 [B, K]: numbers of the patches that stay, in the order wanted; positions are added before, prefix
        tokens always stay. masked bool [B, N]: patches replaced by the mask token, before positions.
        blocks, attention: numbers of blocks (negative from the end) whose tokens and attention weights are wanted;
        the result is then a `Taken`. block_norm: put the tokens of chosen blocks through the final norm.
        """
        wanted, watched = self._numbers("blocks", blocks), self._numbers("attention", attention)
        x, context, lengths = self._embed(images, keep, masked, dense=bool(watched))
        x = self.norm_pre(x)
        tokens: dict[int, Tensor] = {}
        weights: dict[int, Tensor] = {}
        for index, block in enumerate(self.blocks):
            x, seen = block(x, context, index in watched)
            if index in wanted:
                tokens[index] = self._padded(self.norm(x) if block_norm else x, lengths)
            if seen is not None:
                weights[index] = seen
        result = self._finish(self.norm(x), lengths, output)
        return Taken(result, tokens, weights) if wanted or watched else result

    # From images to tokens

    def _embed(self, images: Tensor | Packed, keep: Tensor | None, masked: Tensor | None, *, dense: bool):
        if isinstance(images, Packed):
            if keep is not None or masked is not None:
                raise ValueError("a packed batch takes neither keep nor masked; leave patches out when packing")
            return self._embed_packed(images, dense)
        grid = self.arch.grid_of(images.shape)
        if keep is not None:
            self._check_keep(keep, len(images))
        x = self.patch_embed(images, keep)
        if masked is not None:
            x = self._mask(x, masked, grid, keep)
        x = self._add_positions(x, grid, keep)
        rope = self._rope(grid, x.device)
        if keep is not None and rope is not None:
            front = torch.arange(self.num_prefix_tokens, device=x.device).expand(len(x), -1)
            rope = rope[0, 0][torch.cat([front, keep + self.num_prefix_tokens], dim=1)][:, None]
        return F.dropout(x, self.arch.position_dropout, self.training), Context(rope, None, grid), None

    def _embed_packed(self, packed: Packed, dense: bool):
        arch = self.arch
        if arch.window:
            raise ValueError("model.window: windows need images of one size; a packed batch cannot have them")
        columns = arch.in_channels * arch.patch[0] * arch.patch[1]
        if packed.patches.shape[1] != columns:
            raise ValueError(
                f"packed patches have {packed.patches.shape[1]} values, this model's patches have {columns}"
            )
        patches = self.patch_embed(packed.patches)
        parts = [
            self._add_positions(part[None], grid)
            for part, grid in zip(patches.split(packed.counts), packed.grids, strict=True)
        ]
        x = F.dropout(torch.cat(parts, dim=1), arch.position_dropout, self.training)
        device = x.device
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else x.dtype
        dropout = arch.attention_dropout if self.training else 0.0
        dense = dense or not ragged_kernel(x, dtype, dropout=dropout, kind=arch.attention)
        ropes = [self._rope(grid, device) for grid in packed.grids]
        rope = torch.cat([r for r in ropes if r is not None], dim=2) if arch.rope != "none" else None
        parted = segments(packed, arch.prefix, dense=dense)
        return x, Context(rope, parted, None), parted.lengths

    def _mask(self, x: Tensor, masked: Tensor, grid: Grid, keep: Tensor | None) -> Tensor:
        if self.mask_token is None:
            raise ValueError("forward(masked=...) needs a mask token: set model.mask_token=true")
        wanted = (len(x), grid[0] * grid[1])
        if masked.dtype is not torch.bool or masked.shape != wanted:
            raise ValueError(f"masked must be bool {list(wanted)}, got {masked.dtype} {list(masked.shape)}")
        masked = masked if keep is None else masked.gather(1, keep)
        return torch.where(masked[:, :, None], self.mask_token.to(x.dtype), x)

    def _add_positions(self, x: Tensor, grid: Grid, keep: Tensor | None = None) -> Tensor:
        """Patches [B, N, D], or those with the numbers keep [B, K, D], -> prefix tokens in front, positions added."""
        prefix = [
            t.expand(x.shape[0], -1, -1) for t in (self.cls_token, self.dist_token, self.reg_token) if t is not None
        ]
        table = self._table(grid)
        if table is None:
            return torch.cat([*prefix, x], dim=1)
        own = table.shape[1] - grid[0] * grid[1]  # rows for the prefix tokens
        if keep is not None:
            front = [torch.cat(prefix, dim=1) + table[:, :own]] if own else prefix
            return torch.cat([*front, x + table[0, own:][keep]], dim=1)
        if own:
            return torch.cat([*prefix, x], dim=1) + table
        return torch.cat([*prefix, x + table], dim=1)

    def _table(self, grid: Grid) -> Tensor | None:
        if self.pos_embed_rows is not None and self.pos_embed_columns is not None:
            limit = self.pos_embed_rows.shape[1], self.pos_embed_columns.shape[1]
            if grid[0] > limit[0] or grid[1] > limit[1]:
                raise ValueError(
                    f"a grid of {grid[0]} x {grid[1]} patches is larger than the factorised positions, {limit[0]} x "
                    f"{limit[1]}; build the model with a larger model.image_size"
                )
            table = self.pos_embed_rows[0, : grid[0], None] + self.pos_embed_columns[0, None, : grid[1]]
            return table.flatten(0, 1)[None]
        if self.pos_embed is None or grid == self.grid_size:
            return self.pos_embed
        if self.arch.position == "sincos":
            return self._sincos(grid).to(self.pos_embed)
        prefix = self.arch.prefix if self.arch.position_prefix else 0
        return resize_positions(self.pos_embed, self.grid_size, grid, prefix)

    def _sincos(self, grid: Grid) -> Tensor:
        table = sincos_table(grid, self.embed_dim)[None]
        prefix = self.arch.prefix if self.arch.position_prefix else 0
        return torch.cat([table.new_zeros(1, prefix, self.embed_dim), table], dim=1)

    def _rope(self, grid: Grid, device: torch.device) -> Tensor | None:
        """Rotary table [1, 1, prefix + N, 2 * head width], float32, kept for each grid and device."""
        arch = self.arch
        if arch.rope == "none":
            return None
        if (grid, device) not in self._rope_tables:
            with torch.inference_mode(False):  # a table first made during evaluation must serve training as well
                table = rope_table(
                    grid,
                    arch.width // arch.heads,
                    kind=arch.rope,
                    temperature=arch.rope_temperature,
                    layout=arch.rope_layout,
                    reference=arch.rope_reference,
                    prefix=arch.prefix,
                )
                self._rope_tables[grid, device] = table[None, None].to(device)
        return self._rope_tables[grid, device]

    def _check_keep(self, keep: Tensor, images: int) -> None:
        if self.arch.window:
            raise ValueError("forward(keep=...): windows need the whole grid; set model.window=0")
        if keep.dtype is not torch.int64 or keep.ndim != 2 or len(keep) != images:
            raise ValueError(f"keep must be int64 [{images}, K], got {keep.dtype} {list(keep.shape)}")

    # From tokens to the result

    def _finish(self, x: Tensor, lengths: Sequence[int] | None, output: Output):
        if output not in ("logits", "pooled", "tokens"):
            raise ValueError(f"output={output!r}: must be logits, pooled or tokens")
        valid = None
        if lengths is not None:
            x, valid = unpack(x, lengths)
        if output == "tokens":
            return x
        pooled = [self._represent(y) for y in self._pool(x, valid)]
        if output == "pooled" or self.head is None:
            return torch.stack(pooled).mean(0) if len(pooled) > 1 else pooled[0]
        if self.head_dist is None:
            return self.head(pooled[0])
        pair = self.head(pooled[0]), self.head_dist(pooled[1])
        return pair if self.training else (pair[0] + pair[1]) / 2

    def _pool(self, x: Tensor, valid: Tensor | None) -> list[Tensor]:
        prefix = self.num_prefix_tokens
        if self.arch.pool == "cls":
            return [x[:, i] for i in range(1 + self.arch.distillation_token)]
        patches, valid = x[:, prefix:], None if valid is None else valid[:, prefix:]
        if self.attn_pool is not None:
            return [self.attn_pool(patches, valid)]
        if valid is None:
            return [patches.mean(1)]
        return [(patches * valid[:, :, None]).sum(1) / valid.sum(1, keepdim=True)]

    def _represent(self, pooled: Tensor) -> Tensor:
        pooled = self.fc_norm(pooled)
        if self.pre_logits is not None:
            pooled = torch.tanh(self.pre_logits(pooled))
        return F.dropout(pooled, self.arch.dropout, self.training)

    def _padded(self, x: Tensor, lengths: Sequence[int] | None) -> Tensor:
        return x if lengths is None else unpack(x, lengths)[0]

    def _numbers(self, name: str, chosen: Sequence[int]) -> set[int]:
        if any(not -self.depth <= i < self.depth for i in chosen):
            raise ValueError(f"forward({name}={list(chosen)}): this model has blocks 0 to {self.depth - 1}")
        numbers = {i % self.depth for i in chosen}
        if name == "attention" and self.arch.window and not numbers <= set(self.arch.global_blocks):
            raise ValueError(
                f"forward(attention={list(chosen)}): only blocks without windows, {self.arch.global_blocks}"
            )
        return numbers


def parameter_layers(vit: ViT, *, final_norm: Literal["block", "head"] = "block") -> dict[str, int]:
    """Name of each parameter -> its place for layer-wise learning rates: 0 for everything before the blocks, i + 1
    for block i,
    depth + 1 for everything behind them. The final norm `norm` counts with the last block (as timm does) or with the
    head (as MAE's fine-tuning does)."""
    layers: dict[str, int] = {}
    for name, _ in vit.named_parameters():
        clean = re.sub(r"(_orig_mod|_checkpoint_wrapped_module|module)\.", "", name)
        block = re.match(r"blocks\.(\d+)\.", clean)
        if block:
            layers[name] = int(block[1]) + 1
        elif clean.startswith("norm."):
            layers[name] = vit.depth + (final_norm == "head")
        elif re.match(r"(fc_norm|attn_pool|pre_logits|head|head_dist)\.", clean):
            layers[name] = vit.depth + 1
        else:
            layers[name] = 0
    return layers


def _token(count: int, width: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(1, count, width))


def _head(arch: Architecture, num_classes: int) -> Linear | None:
    if not num_classes:
        return None
    std = 0.0 if arch.zero_head else arch.head_std
    return Linear(arch.width, num_classes, init=arch.init, role="head", std=std, bias_value=arch.head_bias)
