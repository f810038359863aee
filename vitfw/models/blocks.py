"""Transformer blocks: pre-norm, sequential or parallel, with drop-path."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitfw.models.architecture import Architecture
from vitfw.models.attention import Attention, attend, from_windows, to_windows
from vitfw.models.layers import ACTIVATIONS, GatedMlp, LayerScale, Linear, Mlp, norm_layer
from vitfw.models.packing import Segments
from vitfw.models.positions import Grid, rotate


@dataclass(frozen=True)
class Context:
    """What all blocks of one forward share. rope [B or 1, 1, T, 2 * head width]; grid: (rows, columns) of the
    patches.
    """

    rope: Tensor | None = None
    segments: Segments | None = None
    grid: Grid | None = None

    def take(self, samples: Tensor) -> "Context":
        """The context of the chosen samples int64 [b] of the batch."""
        if self.rope is None or self.rope.shape[0] == 1:
            return self
        return Context(self.rope[samples], self.segments, self.grid)


def drop_path(x: Tensor, rate: float, segments: Segments | None = None) -> Tensor:
    """Stochastic depth: zeroes whole samples of a branch [B, T, D] with probability `rate`, scales the rest up.

    In a packed sequence [1, T, D] the samples are its images.
    """
    count = x.shape[0] if segments is None else len(segments.lengths)
    factors = x.new_empty(count).bernoulli_(1.0 - rate) / (1.0 - rate)
    return x * (factors[:, None, None] if segments is None else factors[segments.ids][None, :, None])


def residual(
    x: Tensor,
    branch: Callable[[Tensor, Context], Tensor],
    context: Context,
    *,
    rate: float,
    skip: bool,
) -> Tensor:
    """x + branch(x) with drop-path at `rate`. With `skip` the branch sees only the samples that keep it: a random
    subset of
    fixed size round(B (1 - rate)), at least one, scaled by B / size (Oquab et al. 2023)."""
    if rate == 0.0:
        return x + branch(x, context)
    segments = context.segments
    if not skip:
        return x + drop_path(branch(x, context), rate, segments)
    if segments is not None:
        raise ValueError("model.drop_path_skip=true drops samples of a batch; a packed sequence needs false")
    kept = max(round(len(x) * (1.0 - rate)), 1)
    samples = torch.randperm(len(x), device=x.device)[:kept]
    update = branch(x[samples], context.take(samples))
    return x.index_add(0, samples, update.to(x.dtype), alpha=len(x) / kept)


class Block(nn.Module):
    """Attention, then MLP, each in a residual branch behind a norm; [B, T, D] -> [B, T, D]."""

    def __init__(self, arch: Architecture, index: int):
        super().__init__()
        self.window = 0 if index in arch.global_blocks else arch.window
        self.rate, self.skip = arch.path_rates()[index], arch.drop_path_skip
        self.norm1 = norm_layer(arch, arch.width)
        self.attn = Attention(arch)
        self.ls1 = nn.Identity() if arch.layer_scale is None else LayerScale(arch.width, arch.layer_scale)
        self.norm2 = norm_layer(arch, arch.width)
        if arch.mlp == "mlp":
            self.mlp = Mlp(arch, inner_norm=arch.mlp_norm, biased=arch.proj_bias, drop=arch.projection_dropout)
        else:
            self.mlp = GatedMlp(arch)
        self.ls2 = nn.Identity() if arch.layer_scale is None else LayerScale(arch.width, arch.layer_scale)

    def forward(self, x: Tensor, context: Context, weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """Also returns the attention weights [B, heads, T, T] if asked (of all samples, whatever drop-path does)."""
        seen: list[Tensor | None] = []
        rate = self.rate if self.training else 0.0
        x = residual(
            x, lambda y, c: self._attention(y, c, weights, seen), context, rate=rate, skip=self.skip and not weights
        )
        x = residual(x, lambda y, c: self.ls2(self.mlp(self.norm2(y))), context, rate=rate, skip=self.skip)
        return x, seen[0]

    def _attention(self, x: Tensor, context: Context, weights: bool, seen: list[Tensor | None]) -> Tensor:
        x = self.norm1(x)
        if self.window:
            assert context.grid is not None
            windows, probabilities = self.attn(to_windows(x, context.grid, self.window))
            x = from_windows(windows, context.grid, self.window)
        else:
            x, probabilities = self.attn(x, rope=context.rope, segments=context.segments, weights=weights)
        seen.append(probabilities)
        return self.ls1(x)


class ParallelBlock(nn.Module):
    """Attention and MLP read one norm and share one input matrix (Dehghani et al. 2023, ViT-22B); [B, T, D] -> [B, T,
    D].

    Rows of `in_proj`: MLP, query, key, value. Without a qkv bias the MLP keeps its own, `mlp_bias`.
    """

    def __init__(self, arch: Architecture, index: int):
        super().__init__()
        self.arch = arch
        self.rate, self.skip = arch.path_rates()[index], arch.drop_path_skip
        self.act = ACTIVATIONS[arch.activation]
        self.precise = False  # as in Attention
        head_width = arch.width // arch.heads
        biased = arch.qkv_bias == "qkv"
        self.in_norm = norm_layer(arch, arch.width)
        self.in_proj = Linear(arch.width, arch.mlp_hidden + 3 * arch.width, biased, init=arch.init)
        self.mlp_bias = None if biased else nn.Parameter(torch.empty(arch.mlp_hidden))
        self.q_norm = norm_layer(arch, head_width) if arch.qk_norm else nn.Identity()
        self.k_norm = norm_layer(arch, head_width) if arch.qk_norm else nn.Identity()
        self.attn_out_proj = Linear(arch.width, arch.width, arch.proj_bias, init=arch.init)
        self.mlp_out_proj = Linear(arch.mlp_hidden, arch.width, arch.proj_bias, init=arch.init)
        self.ls = nn.Identity() if arch.layer_scale is None else LayerScale(arch.width, arch.layer_scale)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.mlp_bias is not None:
            nn.init.zeros_(self.mlp_bias)

    def forward(self, x: Tensor, context: Context, weights: bool = False) -> tuple[Tensor, Tensor | None]:
        seen: list[Tensor | None] = []
        rate = self.rate if self.training else 0.0
        x = residual(
            x, lambda y, c: self._branch(y, c, weights, seen), context, rate=rate, skip=self.skip and not weights
        )
        return x, seen[0]

    def _branch(self, x: Tensor, context: Context, weights: bool, seen: list[Tensor | None]) -> Tensor:
        arch = self.arch
        hidden, *parts = self.in_proj(self.in_norm(x)).split([arch.mlp_hidden] + 3 * [arch.width], dim=-1)
        query, key, value = [part.unflatten(2, (arch.heads, -1)) for part in parts]
        query, key, value = [y.transpose(1, 2) for y in (self.q_norm(query), self.k_norm(key), value)]
        if context.rope is not None:
            query, key = rotate(query, context.rope, arch.rope_layout), rotate(key, context.rope, arch.rope_layout)
        query, key = query.to(value.dtype), key.to(value.dtype)
        result, probabilities = attend(
            query,
            key,
            value,
            kind=arch.attention,
            dropout=arch.attention_dropout if self.training else 0.0,
            segments=context.segments,
            weights=weights,
            precise=self.precise,
        )
        seen.append(probabilities)
        hidden = self.act(hidden if self.mlp_bias is None else hidden + self.mlp_bias)
        hidden = F.dropout(hidden, arch.projection_dropout, self.training)
        return self.ls(self.attn_out_proj(result.transpose(1, 2).flatten(2)) + self.mlp_out_proj(hidden))
