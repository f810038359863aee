"""The `model` section: a named variant, and whatever differs from it."""

from dataclasses import dataclass, field

from vitfw.models.architecture import (
    Activation,
    AttentionKind,
    Bias,
    DropPathMode,
    FinalNorm,
    Init,
    Mlp,
    Norm,
    Pool,
    Position,
    PreHead,
    Rope,
    RopeLayout,
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The `model` section. A value left at null comes from the variant."""

    variant: str = field(
        default="vit_b16", metadata={"help": "named size and family, such as vit_b16, or timm:NAME for a model of timm"}
    )
    image_size: int = field(default=224, metadata={"help": "side of square images in pixels"})
    image_height: int | None = field(default=None, metadata={"help": "pixels; null: image_size"})
    image_width: int | None = field(default=None, metadata={"help": "pixels; null: image_size"})
    in_channels: int = field(default=3, metadata={"help": "channels of an image"})
    patch_size: int | None = field(default=None, metadata={"help": "side of square patches in pixels"})
    patch_height: int | None = field(default=None, metadata={"help": "pixels; null: the patch size"})
    patch_width: int | None = field(default=None, metadata={"help": "pixels; null: the patch size"})
    width: int | None = field(default=None, metadata={"help": "features of a token"})
    depth: int | None = field(default=None, metadata={"help": "number of blocks"})
    heads: int | None = field(default=None, metadata={"help": "attention heads"})
    mlp_ratio: float | None = field(
        default=None, metadata={"help": "hidden features of the MLP / width; null: the variant's, scaled with width"}
    )
    mlp: Mlp | None = field(default=None, metadata={"help": "mlp, swiglu (packed matrices) or swiglu_split"})
    mlp_norm: bool | None = field(default=None, metadata={"help": "normalise inside the MLP, before its last matrix"})
    activation: Activation | None = field(
        default=None, metadata={"help": "activation of the MLP; gelu is the exact form"}
    )
    norm: Norm | None = field(default=None, metadata={"help": "layernorm or rmsnorm"})
    norm_bias: bool | None = field(default=None, metadata={"help": "whether layer norms have a bias"})
    norm_eps: float | None = field(default=None, metadata={"help": "epsilon of the norms"})
    qkv_bias: Bias | None = field(default=None, metadata={"help": "qkv, qv (no key bias) or none"})
    proj_bias: bool | None = field(default=None, metadata={"help": "biases of attention output and MLP"})
    patch_bias: bool | None = field(default=None, metadata={"help": "bias of the patch projection"})
    qk_norm: bool | None = field(default=None, metadata={"help": "normalise queries and keys per head"})
    attention_norm: bool | None = field(
        default=None, metadata={"help": "normalise the attention result before its output matrix"}
    )
    layer_scale: float | None = field(
        default=None, metadata={"help": "initial value of the residual factors; 0 switches a variant's off"}
    )
    parallel: bool | None = field(default=None, metadata={"help": "attention and MLP side by side in one residual"})
    class_token: bool | None = field(default=None, metadata={"help": "a learned token that reads the image"})
    distillation_token: bool | None = field(
        default=None, metadata={"help": "a second class token with its own head, taught by a teacher (DeiT)"}
    )
    registers: int | None = field(default=None, metadata={"help": "number of register tokens"})
    mask_token: bool | None = field(
        default=None, metadata={"help": "a learned token that can stand for masked patches"}
    )
    position: Position | None = field(
        default=None, metadata={"help": "learned, sincos (fixed), factorised (rows + columns) or none"}
    )
    position_prefix: bool | None = field(
        default=None, metadata={"help": "whether the position table has rows for the prefix tokens"}
    )
    rope: Rope | None = field(
        default=None, metadata={"help": "rotary positions: none, centered (DINOv3) or index (EVA-02)"}
    )
    rope_temperature: float | None = field(default=None, metadata={"help": "base of the rotary wavelengths"})
    rope_layout: RopeLayout | None = field(
        default=None, metadata={"help": "which features are turned together: half or interleaved"}
    )
    rope_reference: int | None = field(
        default=None, metadata={"help": "side of the grid that index positions are rescaled to; 0: none"}
    )
    pre_norm: bool | None = field(default=None, metadata={"help": "a norm before the first block (CLIP)"})
    pool: Pool | None = field(
        default=None, metadata={"help": "cls, gap (mean of the patches) or map (attention pooling)"}
    )
    final_norm: FinalNorm | None = field(default=None, metadata={"help": "norm on all tokens, or on the pooled vector"})
    pre_head: PreHead | None = field(default=None, metadata={"help": "tanh: a representation layer before the head"})
    window: int | None = field(default=None, metadata={"help": "side of attention windows in patches; 0: none"})
    global_blocks: tuple[int, ...] | None = field(
        default=None, metadata={"help": "numbers of the blocks without windows, from 0"}
    )
    dropout: float = field(default=0.0, metadata={"help": "rate before the head"})
    position_dropout: float = field(default=0.0, metadata={"help": "rate after the positions"})
    projection_dropout: float = field(default=0.0, metadata={"help": "rate after attention output and MLP matrices"})
    attention_dropout: float = field(default=0.0, metadata={"help": "rate on attention weights"})
    drop_path: float = field(default=0.0, metadata={"help": "stochastic depth rate of the last block"})
    drop_path_mode: DropPathMode = field(
        default="linear", metadata={"help": "linear (from 0 at the first block) or constant"}
    )
    drop_path_skip: bool = field(default=False, metadata={"help": "compute a branch only for the samples that keep it"})
    attention: AttentionKind = field(
        default="auto", metadata={"help": "auto, fused or explicit; auto is explicit on CPU under bfloat16"}
    )
    dynamic_size: bool = field(
        default=False, metadata={"help": "accept other image sizes, interpolating positions on the fly"}
    )
    init: Init | None = field(default=None, metadata={"help": "timm, mae or jax initialisation"})
    zero_head: bool = field(default=False, metadata={"help": "start from a head of zeros"})
    head_std: float = field(default=0.02, metadata={"help": "standard deviation of a fresh head"})
    head_bias: float = field(
        default=0.0, metadata={"help": "bias of a fresh head; a negative prior suits a sigmoid loss"}
    )

    def __post_init__(self) -> None:
        positive = (
            "image_size",
            "image_height",
            "image_width",
            "in_channels",
            "patch_size",
            "patch_height",
            "patch_width",
        )
        for key in (*positive, "width", "depth", "heads", "mlp_ratio", "norm_eps", "rope_temperature"):
            value = getattr(self, key)
            if value is not None and value <= 0:
                raise ValueError(f"model.{key}={value}: must be above 0")
        for key in ("dropout", "position_dropout", "projection_dropout", "attention_dropout", "drop_path"):
            if not 0.0 <= getattr(self, key) < 1.0:
                raise ValueError(f"model.{key}={getattr(self, key)}: is a rate, from 0 up to but not including 1")
        if self.layer_scale is not None and self.layer_scale < 0:
            raise ValueError(f"model.layer_scale={self.layer_scale}: must be 0 (off) or more")
        if self.head_std < 0:
            raise ValueError(f"model.head_std={self.head_std}: must be 0 or more")
