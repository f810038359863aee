"""Self-attention: fused or explicit, with rotary positions, windows, and packed sequences."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitfw.models.architecture import Architecture, AttentionKind
from vitfw.models.layers import Linear, norm_layer
from vitfw.models.packing import Segments
from vitfw.models.positions import Grid, rotate


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    kind: AttentionKind,
    dropout: float = 0.0,
    segments: Segments | None = None,
    weights: bool = False,
    precise: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Query, key, value [B, heads, T, head width] -> result of the same shape, and the weights [B, heads, T, T] if
    asked. `precise`: scores, softmax and their product with the values in float32, whatever autocast says.

    Asking for the weights, kind "explicit", and kind "auto" under bfloat16 on a CPU (where the fused kernel is slow)
    write the softmax out; everything else takes torch's fused kernel. A packed sequence attends inside each image
    only: by the variable-length kernel on CUDA in half precision, by a block-diagonal mask elsewhere.
    """
    if precise and value.dtype is not torch.float32:
        with torch.autocast(value.device.type, enabled=False):
            query, key, wide = query.float(), key.float(), value.float()
            masked = None if segments is None else segments.masked()
            result, probabilities = attend(
                query, key, wide, kind=kind, dropout=dropout, segments=masked, weights=weights
            )
        return result.to(value.dtype), probabilities
    slow_fused = value.device.type == "cpu" and value.dtype is torch.bfloat16
    mask = None if segments is None else segments.mask
    if weights or kind == "explicit" or (kind == "auto" and slow_fused):
        scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        probabilities = scores.softmax(dim=-1)
        result = F.dropout(probabilities, dropout, training=dropout > 0.0) @ value
        return result, probabilities if weights else None
    if segments is not None and mask is None:
        return _attend_ragged(query, key, value, segments), None
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout), None


def ragged_kernel(tensor: Tensor, dtype: torch.dtype, *, dropout: float, kind: AttentionKind) -> bool:
    """Whether torch's variable-length kernel serves a packed sequence computed in `dtype` on this tensor's device."""
    return tensor.is_cuda and dtype in (torch.bfloat16, torch.float16) and dropout == 0.0 and kind != "explicit"


def _attend_ragged(query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    flat_query, flat_key, flat_value = [
        x[0].transpose(0, 1).contiguous() for x in (query, key, value)
    ]  # [T, heads, -1]
    result = varlen_attn(
        flat_query, flat_key, flat_value, segments.starts, segments.starts, segments.longest, segments.longest
    )
    assert isinstance(result, Tensor)
    return result.transpose(0, 1)[None]


class Attention(nn.Module):
    """Multi-head self-attention [B, T, D] -> [B, T, D]."""

    def __init__(self, arch: Architecture):
        super().__init__()
        self.heads, self.layout = arch.heads, arch.rope_layout
        self.kind: AttentionKind = arch.attention
        self.attention_dropout, self.projection_dropout = arch.attention_dropout, arch.projection_dropout
        self.precise = False  # see `attend`; set while training when numbers go wrong (guard.raise_precision)
        head_width = arch.width // arch.heads
        self.qkv = Linear(arch.width, 3 * arch.width, arch.qkv_bias == "qkv", init=arch.init, role="qkv")
        self.q_bias = nn.Parameter(torch.empty(arch.width)) if arch.qkv_bias == "qv" else None
        self.v_bias = nn.Parameter(torch.empty(arch.width)) if arch.qkv_bias == "qv" else None
        self.q_norm = norm_layer(arch, head_width) if arch.qk_norm else nn.Identity()
        self.k_norm = norm_layer(arch, head_width) if arch.qk_norm else nn.Identity()
        self.norm = norm_layer(arch, arch.width) if arch.attention_norm else nn.Identity()
        self.proj = Linear(arch.width, arch.width, arch.proj_bias, init=arch.init)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for bias in (self.q_bias, self.v_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(
        self, x: Tensor, *, rope: Tensor | None = None, segments: Segments | None = None, weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Also returns the attention weights [B, heads, T, T] if asked. rope broadcasts to [B, 1, T, 2 * head
        width].
        """
        bias = self.qkv.bias
        if self.q_bias is not None and self.v_bias is not None:
            bias = torch.cat([self.q_bias, torch.zeros_like(self.v_bias), self.v_bias])
        qkv = F.linear(x, self.qkv.weight, bias)
        query, key, value = qkv.unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        query, key = self.q_norm(query), self.k_norm(key)
        if rope is not None:
            query, key = rotate(query, rope, self.layout), rotate(key, rope, self.layout)
        query, key = query.to(value.dtype), key.to(value.dtype)  # norms and rotations promote under autocast
        dropout = self.attention_dropout if self.training else 0.0
        result, probabilities = attend(
            query,
            key,
            value,
            kind=self.kind,
            dropout=dropout,
            segments=segments,
            weights=weights,
            precise=self.precise,
        )
        x = self.proj(self.norm(result.transpose(1, 2).flatten(2)))
        return F.dropout(x, self.projection_dropout, self.training), probabilities


def to_windows(x: Tensor, grid: Grid, side: int) -> Tensor:
    """Patch tokens [B, rows * columns, D] -> windows [B * n, side * side, D].

    The grid is filled up with zeros at the bottom and right to whole windows. As in ViTDet and SAM the fill takes
    part in attention: after the projection it is just another token whose key and value are the biases.
    """
    rows, columns = grid
    x = x.unflatten(1, grid)
    x = F.pad(x, (0, 0, 0, -columns % side, 0, -rows % side))
    x = x.unflatten(2, (-1, side)).unflatten(1, (-1, side))  # [B, down, side, across, side, D]
    return x.transpose(2, 3).flatten(3, 4).flatten(0, 2)


def from_windows(x: Tensor, grid: Grid, side: int) -> Tensor:
    """The inverse of `to_windows`; drops the fill."""
    down, across = -(-grid[0] // side), -(-grid[1] // side)
    x = x.unflatten(1, (side, side)).unflatten(0, (-1, down, across))
    x = x.transpose(2, 3).flatten(3, 4).flatten(1, 2)  # [B, down * side, across * side, D]
    return x[:, : grid[0], : grid[1]].flatten(1, 2)
