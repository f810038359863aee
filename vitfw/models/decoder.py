"""The decoder of masked autoencoding (He et al. 2021): visible tokens and mask tokens -> the values of the patches.

Shapes: B images, T = prefix + K visible tokens of the encoder, M removed patches, N = K + M, P values of a patch. The
tokens stay in the order visible, removed: attention does not care about order once positions are added, so nothing is
sorted back, and the last block, the norm and the prediction are computed only for the patches that are asked for.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitfw.models.architecture import Architecture
from vitfw.models.attention import Attention, attend
from vitfw.models.layers import Linear, Mlp, norm_layer
from vitfw.models.positions import sincos_table

Grid = tuple[int, int]


def decoder_architecture(
    encoder: Architecture, *, width: int, depth: int, heads: int, mlp_ratio: float
) -> Architecture:
    """A plain ViT's blocks over the encoder's patches, initialised as the source whatever the encoder is."""
    return Architecture(
        image=encoder.image,
        patch=encoder.patch,
        in_channels=encoder.in_channels,
        width=width,
        depth=depth,
        heads=heads,
        mlp_hidden=round(width * mlp_ratio),
        norm_eps=encoder.norm_eps,
        attention=encoder.attention,
        position="sincos",
        init="mae",
    )


class DecoderBlock(nn.Module):
    """A pre-norm block [B, T, D] -> [B, queries, D] that may answer for its last `queries` tokens alone."""

    def __init__(self, arch: Architecture):
        super().__init__()
        self.arch = arch
        self.norm1 = norm_layer(arch, arch.width)
        self.attn = Attention(arch)
        self.norm2 = norm_layer(arch, arch.width)
        self.mlp = Mlp(arch, inner_norm=False, biased=True, drop=0.0)

    def forward(self, x: Tensor, queries: int | None = None) -> Tensor:
        normed = self.norm1(x)
        x = x + self.attn(normed)[0] if queries is None else x[:, -queries:] + self._attend_last(normed, queries)
        return x + self.mlp(self.norm2(x))

    def _attend_last(self, x: Tensor, queries: int) -> Tensor:
        """Attention of the last tokens to all: the same numbers as the full result's last rows."""
        width = x.shape[2]
        weight, bias = self.attn.qkv.weight, self.attn.qkv.bias
        query = F.linear(x[:, -queries:], weight[:width], bias[:width])
        both = F.linear(x, weight[width:], bias[width:])
        query = query.unflatten(2, (self.arch.heads, -1)).transpose(1, 2)
        key, value = both.unflatten(2, (2, self.arch.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        result, _ = attend(query, key, value, kind=self.arch.attention, precise=self.attn.precise)
        return self.attn.proj(result.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Its state dict, with `decoder_` before each name but `mask_token`, is that of the published decoders."""

    pos_embed: Tensor

    def __init__(self, arch: Architecture, *, encoder_width: int, prefix: int):
        super().__init__()
        self.arch, self.grid, self.prefix = arch, arch.grid, prefix
        self.embed = Linear(encoder_width, arch.width, init="mae")
        self.mask_token = nn.Parameter(torch.empty(1, 1, arch.width))
        self.register_buffer("pos_embed", torch.empty(1, arch.patches, arch.width))  # fixed; prefix tokens have none
        self.blocks = nn.ModuleList(DecoderBlock(arch) for _ in range(arch.depth))
        self.norm = norm_layer(arch, arch.width)
        self.pred = Linear(arch.width, arch.patch[0] * arch.patch[1] * arch.in_channels, init="mae")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.mask_token, std=0.02)
        with torch.no_grad():
            self.pos_embed.copy_(sincos_table(self.grid, self.arch.width)[None])

    def forward(
        self, tokens: Tensor, visible: Tensor, removed: Tensor, *, grid: Grid | None = None, everywhere: bool = False
    ) -> Tensor:
        """Tokens [B, prefix + K, encoder width] -> predictions of the removed patches [B, M, P], or of all [B, N, P].

        visible int64 [B, K]: patch numbers of the tokens, in their order. removed int64 [B, M]: order of the result;
        with `everywhere` it has all patches, row by row. grid: (rows, columns) if not the one built for.
        """
        table = self.pos_embed[0]
        if grid is not None and grid != self.grid:
            table = sincos_table(grid, self.arch.width).to(table)
        x = self.embed(tokens)
        hidden = self.mask_token + table[removed]
        x = torch.cat([x[:, : self.prefix], x[:, self.prefix :] + table[visible], hidden], dim=1)
        wanted = removed.shape[1] + (visible.shape[1] if everywhere else 0)
        for block in self.blocks[:-1]:
            x = block(x)
        x = self.pred(self.norm(self.blocks[-1](x, wanted)))
        if not everywhere:
            return x
        back = torch.cat([visible, removed], dim=1).argsort(dim=1)
        return x.gather(1, back[:, :, None].expand(-1, -1, x.shape[2]))
