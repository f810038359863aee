"""Which parameters share an optimiser group: the sources' lists without weight decay, the guards, the table."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

NoDecay = Literal[
    "all_tokens", "timm", "deit", "mae", "mae_finetune", "mmpretrain", "dinov2", "bigvision", "torchvision"
]
# Parameters of two and more dimensions that a source keeps free of weight decay, by the last part of their name. Every
# rule of this table also frees all tensors of one dimension (biases, norms, LayerScale).
_FREE_LEAVES: dict[str, frozenset[str]] = {
    "all_tokens": frozenset({"pos_embed", "cls_token", "dist_token", "reg_token", "mask_token", "latent"}),
    "timm": frozenset({"pos_embed", "cls_token", "dist_token", "reg_token"}),
    "deit": frozenset({"pos_embed", "cls_token", "dist_token"}),
    "mae": frozenset(),
    "mae_finetune": frozenset({"pos_embed", "cls_token"}),
    "mmpretrain": frozenset({"pos_embed", "cls_token", "mask_token"}),
}


def decays(name: str, parameter: Tensor, rule: NoDecay) -> bool:
    """Whether weight decay reaches this parameter under a source's rule. `name` is the bare module's name."""
    leaf = name.rpartition(".")[2]
    if rule == "torchvision":  # its ViT recipe frees nothing
        return True
    if rule == "bigvision":  # kernels of linear and convolution layers only
        return leaf.endswith("weight") and parameter.ndim >= 2
    if rule == "dinov2":  # by name; positions and tokens are decayed
        return not (leaf == "bias" or "norm" in name or "gamma" in name)
    return parameter.ndim > 1 and leaf != "bias" and leaf not in _FREE_LEAVES[rule]


def check_names(named: Mapping[str, Tensor], layers: Mapping[str, int]) -> None:
    """`layers` must name exactly the task's parameters.

    Raises:
        ValueError: names up to five parameters that are missing in either.
    """
    missing, unknown = sorted(named.keys() - layers.keys()), sorted(layers.keys() - named.keys())
    if missing:
        raise ValueError(
            f"parameter_layers() leaves out {len(missing)} parameters of the task: {', '.join(missing[:5])}; "
            "each needs its place in the network"
        )
    if unknown:
        raise ValueError(
            f"parameter_layers() names {len(unknown)} parameters that the task does not have: {', '.join(unknown[:5])}"
        )


def check_groups(groups: Sequence[Mapping[str, Any]], named: Mapping[str, Tensor]) -> None:
    """Every trainable parameter in exactly one group, no frozen one in any.

    Raises:
        ValueError: names the parameters for which this does not hold.
    """
    trainable = {id(parameter): name for name, parameter in named.items() if parameter.requires_grad}
    if not trainable:
        raise ValueError("no parameter is trainable: everything is frozen; unfreeze at least the head")
    seen: dict[int, int] = {}
    for group in groups:
        for parameter in group["params"]:
            seen[id(parameter)] = seen.get(id(parameter), 0) + 1
    lost = sorted(name for key, name in trainable.items() if key not in seen)
    twice = sorted(name for key, name in trainable.items() if seen.get(key, 0) > 1)
    frozen = sorted(name for name, parameter in named.items() if not parameter.requires_grad and id(parameter) in seen)
    for text, names in (("in no group", lost), ("in several groups", twice), ("frozen but in a group", frozen)):
        if names:
            raise ValueError(f"parameter groups: {len(names)} parameters are {text}: {', '.join(names[:5])}")


def number_text(value: float) -> str:
    """The shortest form with a plain exponent: 5e-4, 1.5e-4, 0.1."""
    if value != 0 and not 1e-2 <= abs(value) < 1e4:
        mantissa, exponent = f"{value:.4e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.6g}"


def layer_table(groups: Sequence[Mapping[str, Any]]) -> str:
    """One line a parameter: group, name, shape, layer scale, peak learning rate, weight decay."""
    rows: list[tuple[str, ...]] = [("group", "name", "shape", "scale", "lr", "decay")]
    for number, group in enumerate(groups):
        for name, parameter in zip(group["names"], group["params"], strict=True):
            shape = "x".join(str(size) for size in parameter.shape) or "scalar"
            numbers = (number_text(group[key]) for key in ("lr_scale", "peak_lr", "peak_weight_decay"))
            rows.append((str(number), name, shape, *numbers))
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
