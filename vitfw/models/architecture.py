"""`Architecture`: every fact that fixes the shape and the mathematics of one Vision Transformer, all of them concrete.

The user's section (`variants.ModelConfig`) may leave values to the named variant; this is what comes out of it. It is
also what travels with weights, and what a weight file is compared with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Mlp = Literal["mlp", "swiglu", "swiglu_split"]
Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"]
Norm = Literal["layernorm", "rmsnorm"]
Bias = Literal["qkv", "qv", "none"]
Position = Literal["learned", "sincos", "factorised", "none"]
Rope = Literal["none", "centered", "index"]
RopeLayout = Literal["half", "interleaved"]
Pool = Literal["cls", "gap", "map"]
FinalNorm = Literal["tokens", "pooled"]
PreHead = Literal["none", "tanh"]
DropPathMode = Literal["linear", "constant"]
AttentionKind = Literal["auto", "fused", "explicit"]
Init = Literal["timm", "mae", "jax"]


# Where a field's value comes from another key of the user's section.
_USER_KEYS = {"image": "image_size", "patch": "patch_size", "mlp_hidden": "mlp_ratio"}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """All sizes are in pixels (image, patch), tokens (registers, window) or features (width, mlp_hidden)."""

    image: tuple[int, int] = (224, 224)  # height, width in pixels
    patch: tuple[int, int] = (16, 16)  # height, width in pixels
    in_channels: int = 3
    width: int = 768
    depth: int = 12
    heads: int = 12
    mlp_hidden: int = 3072  # width after the activation; a gated MLP has two input matrices of this size
    mlp: Mlp = "mlp"  # swiglu: one matrix `fc1` holds gate then value; swiglu_split: `fc1_g` and `fc1_x`
    mlp_norm: bool = False  # normalise inside the MLP, before its last matrix (EVA-02, BEiT-3)
    activation: Activation = "gelu"  # gelu is the exact (erf) form
    norm: Norm = "layernorm"
    norm_bias: bool = True
    norm_eps: float = 1e-6
    qkv_bias: Bias = "qkv"  # qv: no key bias, which matters under rotary positions
    proj_bias: bool = True  # attention output and both MLP matrices
    patch_bias: bool = True
    qk_norm: bool = False  # normalise queries and keys per head
    attention_norm: bool = False  # normalise the attention result before its output matrix
    layer_scale: float | None = None  # initial value of the per-channel residual factors; None: no such factors
    parallel: bool = False  # attention and MLP side by side in one residual (ViT-22B)
    class_token: bool = True
    distillation_token: bool = False
    registers: int = 0
    mask_token: bool = False
    position: Position = "learned"
    position_prefix: bool = True  # the position table has rows for the prefix tokens
    rope: Rope = "none"  # centered: patch centres in [-1, 1] (DINOv3); index: patch numbers (EVA-02)
    rope_temperature: float = 100.0
    rope_layout: RopeLayout = "half"
    rope_reference: int = 0  # index positions are rescaled to a grid of this side; 0: not rescaled
    pre_norm: bool = False  # a norm before the first block (CLIP)
    pool: Pool = "cls"
    final_norm: FinalNorm = "tokens"  # on all tokens before pooling, or on the pooled vector (`fc_norm`)
    pre_head: PreHead = "none"  # tanh: the representation layer of the 2020 ViT pretraining head
    window: int = 0  # side of the attention windows in patches; 0: every block is global
    global_blocks: tuple[int, ...] = ()  # blocks without windows, counted from 0
    dropout: float = 0.0  # before the head
    position_dropout: float = 0.0
    projection_dropout: float = 0.0  # after attention output and MLP matrices
    attention_dropout: float = 0.0
    drop_path: float = 0.0  # rate of the last block
    drop_path_mode: DropPathMode = "linear"  # linear: 0 at the first block; constant: the same everywhere
    drop_path_skip: bool = False  # compute the branch only for the samples that keep it
    attention: AttentionKind = "auto"
    dynamic_size: bool = False  # accept images of another size; learned positions are interpolated on the fly
    init: Init = "timm"
    zero_head: bool = False
    head_std: float = 0.02
    head_bias: float = 0.0

    def __post_init__(self) -> None:
        for key, message in _contradictions(self):
            raise ValueError(f"model.{_USER_KEYS.get(key, key)}={getattr(self, key)!r}: {message}")

    @property
    def grid(self) -> tuple[int, int]:
        """Patches down, patches across."""
        return self.image[0] // self.patch[0], self.image[1] // self.patch[1]

    def grid_of(self, shape: Sequence[int]) -> tuple[int, int]:
        """Patches down and across of an image batch of this shape.

        Raises ValueError unless it is [B, in_channels, H, W] with the size of this architecture, or with
        `dynamic_size` any size that the patch divides.
        """
        if len(shape) != 4 or shape[1] != self.in_channels:
            raise ValueError(
                f"images have shape {list(shape)}, expected [B, {self.in_channels}, H, W] (model.in_channels)"
            )
        height, width = shape[2:]
        if (height, width) != self.image and not self.dynamic_size:
            raise ValueError(
                f"images are {height} x {width} pixels, the model was built for {self.image[0]} x {self.image[1]}; set "
                "model.image_size to the images' size, or model.dynamic_size=true to interpolate positions"
            )
        if height % self.patch[0] or width % self.patch[1] or 0 in (height, width):
            raise ValueError(f"images are {height} x {width} pixels, not divisible by the patch {self.patch}")
        return height // self.patch[0], width // self.patch[1]

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def prefix(self) -> int:
        """Tokens before the patches: class, distillation, registers, in this order."""
        return self.class_token + self.distillation_token + self.registers

    def path_rates(self) -> list[float]:
        """Drop-path rate of each block."""
        if self.drop_path_mode == "constant" or self.depth == 1:
            rate = self.drop_path if self.drop_path_mode == "constant" else 0.0
            return [rate] * self.depth
        return [self.drop_path * i / (self.depth - 1) for i in range(self.depth)]


def _contradictions(arch: Architecture):
    """(key, what is wrong and what to do) for every pair of values that cannot stand together."""
    for key in ("width", "depth", "heads", "mlp_hidden", "in_channels"):
        if getattr(arch, key) < 1:
            yield key, "must be 1 or more"
    for key in ("dropout", "position_dropout", "projection_dropout", "attention_dropout", "drop_path"):
        if not 0.0 <= getattr(arch, key) < 1.0:
            yield key, "is a rate, from 0 up to but not including 1"
    if min(*arch.patch, *arch.image) < 1:
        yield "image", "image and patch sides must be 1 pixel or more"
    elif arch.image[0] % arch.patch[0] or arch.image[1] % arch.patch[1]:
        yield "image", f"(height, width) must be divisible by the patch size {arch.patch}; patches are never cropped"
    if arch.width % arch.heads:
        yield "heads", f"must divide model.width={arch.width}"
    yield from _token_contradictions(arch)
    yield from _position_contradictions(arch)
    yield from _block_contradictions(arch)


def _token_contradictions(arch: Architecture):
    if arch.pool == "cls" and not arch.class_token:
        yield "pool", "pooling by the class token needs model.class_token=true; use gap or map without one"
    if arch.distillation_token and not (arch.class_token and arch.pool == "cls"):
        yield "distillation_token", "needs model.class_token=true and model.pool=cls"
    if arch.registers < 0:
        yield "registers", "must be 0 or more"
    if arch.final_norm == "pooled" and (arch.pool == "map" or arch.distillation_token):
        yield "final_norm", "map pooling and distillation read normalised tokens; use model.final_norm=tokens"


def _position_contradictions(arch: Architecture):
    if arch.position == "sincos" and arch.width % 4:
        yield "position", f"sin-cos positions need model.width divisible by 4, got {arch.width}"
    if arch.rope != "none" and (arch.width // arch.heads) % 4:
        yield "rope", f"rotary positions need a head width divisible by 4, got {arch.width // arch.heads}"
    if arch.rope_reference < 0 or (arch.rope_reference and arch.rope != "index"):
        yield "rope_reference", "is the side of a reference grid for model.rope=index; 0 otherwise"


def _block_contradictions(arch: Architecture):
    if arch.parallel and (arch.mlp != "mlp" or arch.mlp_norm or arch.attention_norm or arch.qkv_bias == "qv"):
        yield "parallel", "a parallel block has model.mlp=mlp, no inner norms, and model.qkv_bias=qkv or none"
    if arch.window < 0:
        yield "window", "must be 0 (no windows) or the side of a window in patches"
    if arch.window and (arch.prefix or arch.rope != "none" or arch.parallel):
        yield "window", "windows hold patches only: no class token, registers, rotary positions or parallel blocks"
    if not arch.window and arch.global_blocks:
        yield "global_blocks", "names the blocks without windows, so model.window must be set"
    if any(not 0 <= i < arch.depth for i in arch.global_blocks):
        yield "global_blocks", f"block numbers run from 0 to {arch.depth - 1}"
