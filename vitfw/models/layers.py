"""The small parts of a ViT. Each module that owns tensors initialises itself in `reset_parameters`, so that a model
built
on the meta device can be materialised in any order."""

import contextlib
import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitfw.models.architecture import Activation, Architecture, Init

Role = Literal["matrix", "qkv", "mlp", "pre_head", "head"]

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "silu": F.silu,
}


class Linear(nn.Linear):
    """A linear layer that knows its initialisation.

    timm: normal with standard deviation 0.02, cut at 2. mae: Glorot uniform. jax: Glorot uniform, each of q, k, v on
    its own; MLP biases normal with 1e-6; the representation layer LeCun normal. A head: normal with `std`, bias
    `bias_value`.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool = True,
        *,
        init: Init,
        role: Role = "matrix",
        std: float = 0.02,
        bias_value: float = 0.0,
    ):
        self.init, self.role, self.std, self.bias_value = init, role, std, bias_value
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        if self.role == "head":
            nn.init.trunc_normal_(self.weight, std=self.std) if self.std else nn.init.zeros_(self.weight)
        elif self.init == "timm":
            nn.init.trunc_normal_(self.weight, std=0.02)
        elif self.init == "jax" and self.role == "pre_head":
            nn.init.trunc_normal_(self.weight, std=_lecun(self.in_features))
        else:
            parts = 3 if self.init == "jax" and self.role == "qkv" else 1
            bound = math.sqrt(6.0 / (self.out_features // parts + self.in_features))
            nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            if self.init == "jax" and self.role == "mlp":
                nn.init.normal_(self.bias, std=1e-6)
            else:
                nn.init.constant_(self.bias, self.bias_value)


class PatchConv(nn.Conv2d):
    """The patch projection. timm: torch's default; mae: Glorot uniform over the flattened kernel; jax: LeCun normal,
    bias 0.
    """

    def __init__(self, channels: int, width: int, patch: tuple[int, int], bias: bool, *, init: Init):
        self.init = init
        super().__init__(channels, width, kernel_size=patch, stride=patch, bias=bias)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        fan_in = self.weight[0].numel()
        if self.init == "mae":
            bound = math.sqrt(6.0 / (fan_in + self.out_channels))
            nn.init.uniform_(self.weight, -bound, bound)
        elif self.init == "jax":
            std = _lecun(fan_in)
            nn.init.trunc_normal_(self.weight, std=std, a=-2 * std, b=2 * std)
            if self.bias is not None:
                nn.init.zeros_(self.bias)


class PatchEmbed(nn.Module):
    """Images [B, C, H, W] -> [B, N, D] in row-major order; flat patches [N, C * h * w] -> [N, D].

    keep int64 [B, K]: numbers of the patches wanted -> [B, K, D]; the others are not computed.
    """

    def __init__(self, arch: Architecture):
        super().__init__()
        self.proj = PatchConv(arch.in_channels, arch.width, arch.patch, arch.patch_bias, init=arch.init)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        if keep is not None:
            height, width = self.proj.kernel_size
            grid = x.unflatten(3, (-1, width)).unflatten(2, (-1, height)).permute(0, 2, 4, 1, 3, 5)
            rows, columns = torch.arange(len(x), device=x.device)[:, None], grid.shape[2]
            x = grid[rows, keep // columns, keep % columns].flatten(2)
        elif x.ndim == 4:
            return self.proj(x).flatten(2).transpose(1, 2)
        return F.linear(x, self.proj.weight.flatten(1), self.proj.bias)


class LayerScale(nn.Module):
    """[..., D] -> [..., D], each channel times its own factor."""

    def __init__(self, width: int, value: float):
        super().__init__()
        self.value = value
        self.gamma = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gamma, self.value)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Mlp(nn.Module):
    """[..., D] -> [..., D] through `hidden` features."""

    def __init__(self, arch: Architecture, *, inner_norm: bool, biased: bool, drop: float):
        super().__init__()
        self.act = ACTIVATIONS[arch.activation]
        self.fc1 = Linear(arch.width, arch.mlp_hidden, biased, init=arch.init, role="mlp")
        self.norm = norm_layer(arch, arch.mlp_hidden) if inner_norm else nn.Identity()
        self.fc2 = Linear(arch.mlp_hidden, arch.width, biased, init=arch.init, role="mlp")
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.act(self.fc1(x)), self.drop, self.training)
        return F.dropout(self.fc2(self.norm(x)), self.drop, self.training)


class GatedMlp(nn.Module):
    """SwiGLU: silu(gate) * value -> output matrix; [..., D] -> [..., D].

    Packed (`fc1`: gate rows, then value rows; DINOv2) or split (`fc1_g`, `fc1_x`; DINOv3, EVA-02 base).
    """

    def __init__(self, arch: Architecture):
        super().__init__()
        self.packed = arch.mlp == "swiglu"
        if self.packed:
            self.fc1 = Linear(arch.width, 2 * arch.mlp_hidden, arch.proj_bias, init=arch.init, role="mlp")
        else:
            self.fc1_g = Linear(arch.width, arch.mlp_hidden, arch.proj_bias, init=arch.init, role="mlp")
            self.fc1_x = Linear(arch.width, arch.mlp_hidden, arch.proj_bias, init=arch.init, role="mlp")
        self.norm = norm_layer(arch, arch.mlp_hidden) if arch.mlp_norm else nn.Identity()
        self.fc2 = Linear(arch.mlp_hidden, arch.width, arch.proj_bias, init=arch.init, role="mlp")
        self.drop = arch.projection_dropout

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.fc1(x).chunk(2, dim=-1) if self.packed else (self.fc1_g(x), self.fc1_x(x))
        x = F.dropout(F.silu(gate) * value, self.drop, self.training)
        return F.dropout(self.fc2(self.norm(x)), self.drop, self.training)


class AttentionPool(nn.Module):
    """Multi-head attention pooling: one learned query reads all patch tokens, then an MLP with a residual (SigLIP)."""

    def __init__(self, arch: Architecture):
        super().__init__()
        self.heads, self.init = arch.heads, arch.init
        self.precise = False  # as in Attention
        self.latent = nn.Parameter(torch.empty(1, 1, arch.width))
        self.q = Linear(arch.width, arch.width, init=arch.init)
        self.kv = Linear(arch.width, 2 * arch.width, init=arch.init)
        self.proj = Linear(arch.width, arch.width, init=arch.init)
        self.norm = norm_layer(arch, arch.width)
        self.mlp = Mlp(arch, inner_norm=False, biased=True, drop=0.0)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.init == "jax":
            nn.init.uniform_(
                self.latent, -math.sqrt(6.0 / (1 + self.latent.shape[2])), math.sqrt(6.0 / (1 + self.latent.shape[2]))
            )
        else:
            nn.init.trunc_normal_(self.latent, std=self.latent.shape[2] ** -0.5)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Tokens [B, N, D], valid bool [B, N] (False: padding, not read) -> [B, D]."""
        query = self.q(self.latent.expand(x.shape[0], -1, -1)).unflatten(2, (self.heads, -1)).transpose(1, 2)
        key, value = self.kv(x).unflatten(2, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mask = None if valid is None else valid[:, None, None, :]
        if self.precise:
            query, key, value = query.float(), key.float(), value.float()
        with torch.autocast(x.device.type, enabled=False) if self.precise else contextlib.nullcontext():
            pooled = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        pooled = self.proj(pooled.transpose(1, 2).flatten(2))
        return (pooled + self.mlp(self.norm(pooled)))[:, 0]


def norm_layer(arch: Architecture, width: int) -> nn.Module:
    """The norm the architecture asks for, over the last `width` features."""
    if arch.norm == "rmsnorm":
        return nn.RMSNorm(width, eps=arch.norm_eps)
    return nn.LayerNorm(width, eps=arch.norm_eps, bias=arch.norm_bias)


def _lecun(fan_in: int) -> float:
    """Standard deviation of flax's truncated LeCun normal: the division corrects for the cut at two deviations."""
    return math.sqrt(1.0 / fan_in) / 0.87962566103423978
