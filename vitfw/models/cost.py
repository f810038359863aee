"""What a ViT costs, as exact integers from its shape alone: parameters, multiply-adds, attention memory, training
FLOPs.

One multiply-add (MAC) is two FLOPs; a training step costs three forwards, so 6 x MACs FLOPs an image. Norms,
activations, softmax and additions are left out, as in torch's FLOP counter. Names: N patches, T tokens, d width, f
MLP width.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Everything about a network that changes a count. Fields have the names and meanings of `Architecture`."""

    image: tuple[int, int] = (224, 224)
    patch: tuple[int, int] = (16, 16)
    in_channels: int = 3
    width: int = 768
    depth: int = 12
    heads: int = 12
    mlp_hidden: int = 3072
    mlp: str = "mlp"
    mlp_norm: bool = False
    norm: str = "layernorm"
    norm_bias: bool = True
    qkv_bias: str = "qkv"
    proj_bias: bool = True
    patch_bias: bool = True
    qk_norm: bool = False
    attention_norm: bool = False
    layer_scale: float | None = None
    parallel: bool = False
    class_token: bool = True
    distillation_token: bool = False
    registers: int = 0
    mask_token: bool = False
    position: str = "learned"
    position_prefix: bool = True
    pre_norm: bool = False
    pool: str = "cls"
    pre_head: str = "none"
    window: int = 0
    global_blocks: tuple[int, ...] = ()

    @property
    def grid(self) -> tuple[int, int]:
        return self.image[0] // self.patch[0], self.image[1] // self.patch[1]

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def prefix(self) -> int:
        return self.class_token + self.distillation_token + self.registers

    @property
    def tokens(self) -> int:
        return self.patches + self.prefix

    @property
    def windows(self) -> int:
        """Windows of one image in a windowed block; the grid is filled up to whole windows."""
        return -(-self.grid[0] // self.window) * -(-self.grid[1] // self.window) if self.window else 0

    @property
    def windowed_blocks(self) -> int:
        return self.depth - len(self.global_blocks) if self.window else 0


def parameters(shape: Shape, num_classes: int = 0) -> dict[str, int]:
    """Trainable numbers by part; the sum is the model's. Sin-cos positions are not trained and count 0."""
    d = shape.width
    heads = (1 + shape.distillation_token) if num_classes else 0
    rows = {
        "learned": shape.patches + (shape.prefix if shape.position_prefix else 0),
        "factorised": sum(shape.grid),
    }
    return {
        "patch embedding": shape.patch[0] * shape.patch[1] * shape.in_channels * d + shape.patch_bias * d,
        "tokens": (shape.prefix + shape.mask_token) * d,
        "positions": rows.get(shape.position, 0) * d,
        "blocks": shape.depth * sum(block_parameters(shape).values()),
        "norms": (1 + shape.pre_norm) * _norm(shape, d),
        "attention pool": _pool_parameters(shape) if shape.pool == "map" else 0,
        "representation layer": d * (d + 1) if shape.pre_head == "tanh" else 0,
        "head": heads * (d + 1) * num_classes,
    }


def block_parameters(shape: Shape) -> dict[str, int]:
    """Trainable numbers of one block by part."""
    d, f = shape.width, shape.mlp_hidden
    inputs = 1 if shape.mlp == "mlp" else 2
    qkv_bias = {"qkv": 3, "qv": 2, "none": 0}[shape.qkv_bias] * d
    if shape.parallel:  # one input matrix: the MLP's input bias stays even where query, key, value have none
        mlp_bias, residuals = f + shape.proj_bias * d, 1
    else:
        mlp_bias, residuals = shape.proj_bias * (inputs * f + d), 2
    return {
        "norms": residuals * _norm(shape, d),
        "qkv": 3 * d * d + qkv_bias,
        "attention output": d * d + shape.proj_bias * d,
        "inner norms": 2 * shape.qk_norm * _norm(shape, d // shape.heads)
        + shape.attention_norm * _norm(shape, d)
        + shape.mlp_norm * _norm(shape, f),
        "mlp": (inputs + 1) * d * f + mlp_bias,
        "layer scale": residuals * d if shape.layer_scale is not None else 0,
    }


def block_matrices(shape: Shape) -> int:
    """Numbers in the weight matrices of all blocks: depth x (4 d^2 + 2 d f), or 3 d f with a gated MLP."""
    d, f = shape.width, shape.mlp_hidden
    return shape.depth * (4 * d * d + (2 if shape.mlp == "mlp" else 3) * d * f)


def _norm(shape: Shape, width: int) -> int:
    return width * (2 if shape.norm == "layernorm" and shape.norm_bias else 1)


def _pool_parameters(shape: Shape) -> int:
    d, f = shape.width, shape.mlp_hidden
    attention = (d * d + d) + (2 * d * d + 2 * d) + (d * d + d)
    return d + attention + _norm(shape, d) + (d * f + f) + (f * d + d)


def forward_macs(shape: Shape, num_classes: int = 0, *, kept: int | None = None) -> dict[str, int]:
    """Multiply-adds of one image by term. `kept`: patches that enter the blocks (masked training); None: all of
    them.
    """
    d, f = shape.width, shape.mlp_hidden
    patches = shape.patches if kept is None else kept
    if kept is not None and not 0 < kept <= shape.patches:
        raise ValueError(f"kept={kept}: must be from 1 to the {shape.patches} patches of the image")
    if kept is not None and shape.window:
        raise ValueError("kept: windows need the whole grid")
    tokens = patches + shape.prefix
    mlp = (2 if shape.mlp == "mlp" else 3) * d * f
    filled = shape.windows * shape.window**2  # tokens of a windowed block, fill included
    whole, cut = shape.depth - shape.windowed_blocks, shape.windowed_blocks
    heads = (1 + shape.distillation_token) if num_classes else 0
    pool = 2 * d * d + 2 * d * f + patches * (2 * d * d + 2 * d) if shape.pool == "map" else 0
    return {
        "patch embedding": shape.patches * shape.patch[0] * shape.patch[1] * shape.in_channels * d,
        "linear": shape.depth * tokens * mlp + (whole * tokens + cut * filled) * 4 * d * d,
        "attention": attention_pairs(shape, kept=kept) * 2 * d,
        "attention pool": pool,
        "representation layer": (1 + shape.distillation_token) * d * d if shape.pre_head == "tanh" else 0,
        "head": heads * d * num_classes,
    }


def attention_pairs(shape: Shape, *, kept: int | None = None) -> int:
    """Query-key pairs of one image over all blocks, for one head."""
    tokens = (shape.patches if kept is None else kept) + shape.prefix
    whole, cut = shape.depth - shape.windowed_blocks, shape.windowed_blocks
    return whole * tokens**2 + cut * shape.windows * shape.window**4


def attention_numbers(shape: Shape, *, fused: bool = False) -> int:
    """Numbers kept for the backward of attention, one image, all blocks and heads: every weight; fused: one
    log-sum-exp a row.
    """
    if not fused:
        return shape.heads * attention_pairs(shape)
    whole, cut = shape.depth - shape.windowed_blocks, shape.windowed_blocks
    return shape.heads * (whole * shape.tokens + cut * shape.windows * shape.window**2)


def crossover(shape: Shape) -> tuple[int, int]:
    """(side in pixels, tokens) of the smallest square image whose global attention costs at least as much as the
    linear layers.

    They meet at T = 2 d + f tokens, or 2 d + 1.5 f with a gated MLP.
    """
    if shape.patch[0] != shape.patch[1]:
        raise ValueError(f"crossover: a square image needs square patches, got {shape.patch}")
    d, f = shape.width, shape.mlp_hidden
    linear = 4 * d * d + (2 if shape.mlp == "mlp" else 3) * d * f
    side = 1
    while 2 * (side**2 + shape.prefix) * d < linear:
        side += 1
    return side * shape.patch[0], side**2 + shape.prefix


def training_flops(shape: Shape, num_classes: int, images: int, *, kept: int | None = None) -> int:
    """FLOPs of training on `images` images (epochs times data set): forward and backward, 6 x MACs each."""
    return 6 * images * sum(forward_macs(shape, num_classes, kept=kept).values())


def ladder(shape: Shape, num_classes: int) -> dict[str, int]:
    """Trainable parameters of each rung of fine-tuning."""
    parts = parameters(shape, num_classes)
    last = sum(block_parameters(shape).values()) + _norm(shape, shape.width)
    behind = parts["attention pool"] + parts["representation layer"] + parts["head"]
    return {
        "linear probe": parts["head"],
        "last block + final norm + head": last + behind,
        "full": sum(parts.values()),
    }


def training_bytes(trainable: int) -> int:
    """Weight, gradient and two moments in float32: 16 bytes a parameter."""
    return 16 * trainable


def count_table(shape: Shape, num_classes: int, *, images: int | None = None, kept: int | None = None) -> str:
    """The counts as text, exact integers with a readable unit; `images`: those of the whole training run."""
    parts = parameters(shape, num_classes)
    macs = forward_macs(shape, num_classes, kept=kept)
    title = (
        f"image {shape.image[0]} x {shape.image[1]}, patch {shape.patch[0]} x {shape.patch[1]}, width {shape.width}, "
        f"depth {shape.depth}, heads {shape.heads}, MLP {shape.mlp_hidden} ({shape.mlp}), {num_classes} classes, "
        f"{shape.patches} patches + {shape.prefix} prefix tokens"
    )
    lines = [title, "", "parameters"]
    lines += [_row(name, count, "") for name, count in parts.items() if count]
    lines += [_row("total", sum(parts.values()), ""), _row("one block", sum(block_parameters(shape).values()), "")]
    lines += ["", "forward multiply-adds of one image" + (f", {kept} patches kept" if kept is not None else "")]
    total = sum(macs.values())
    lines += [_row(name, count, f"{100 * count / total:5.1f} %") for name, count in macs.items() if count]
    lines += [_row("total", total, "MACs"), _row("training", 6 * total, "FLOPs an image")]
    lines += ["", "attention weights kept for the backward, one image"]
    lines += [_row("explicit", attention_numbers(shape), "numbers")]
    lines += [_row("fused", attention_numbers(shape, fused=True), "numbers (float32 log-sum-exp)")]
    if shape.patch[0] == shape.patch[1]:
        side, tokens = crossover(replace(shape, window=0, global_blocks=()))
        lines += ["", f"attention costs as much as the linear layers from {side} px ({tokens:,} tokens)"]
    if images is not None:
        lines += ["", _row("whole training", training_flops(shape, num_classes, images, kept=kept), "FLOPs")]
    lines += ["", "fine-tuning ladder: trainable parameters, float32 weight + gradient + two moments"]
    lines += [_row(name, count, _bytes(training_bytes(count))) for name, count in ladder(shape, num_classes).items()]
    return "\n".join(lines)


def _row(name: str, count: int, note: str) -> str:
    return f"  {name:<32}{count:>26,}  {note}".rstrip()


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
