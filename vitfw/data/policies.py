"""The augmentation policies by name, each with its source's constants (docs/augmentation.md)."""

from dataclasses import dataclass, replace
from typing import Literal

Crop = Literal["resized", "resized_once", "random", "simple", "padded", "center", "squash"]
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos", "area"]

STATISTICS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "inception": ((0.5,), (0.5,)),  # any number of channels: -1 to 1
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    "none": ((0.0,), (1.0,)),  # 0 to 1
}


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What happens to one image, in this order: crop, flip, operations, colour jitter. No field is optional."""

    crop: Crop
    scale: tuple[float, float]  # share of the area (crop resized, resized_once)
    ratio: tuple[float, float]  # width / height of the crop
    train_crop: float  # side of the crop / short side after resizing (crop random)
    interpolation: Interpolation
    flip: float  # probability of a horizontal flip
    operations: str  # see augment.build_operations; "" for none
    color_jitter: float  # strength of brightness, contrast and saturation; 0 is off
    statistics: str  # name in STATISTICS
    eval_crop: float  # side of the centre crop / short side after resizing
    eval_interpolation: Interpolation


_DEIT = Policy(
    crop="resized",
    scale=(0.08, 1.0),
    ratio=(3 / 4, 4 / 3),
    train_crop=0.875,
    interpolation="bicubic",
    flip=0.5,
    operations="rand-m9-mstd0.5-inc1",
    color_jitter=0.0,
    statistics="imagenet",
    eval_crop=0.875,
    eval_interpolation="bicubic",
)
_PLAIN = replace(_DEIT, operations="")
_BIGVISION = replace(
    _PLAIN,
    scale=(0.05, 1.0),
    interpolation="bilinear",
    statistics="inception",
    operations="rand-m10-n2-p1.0-mmax20",
    eval_interpolation="area",
)
_SMALL = replace(_PLAIN, crop="padded", eval_crop=1.0)

POLICIES: dict[str, Policy] = {
    "none": replace(_PLAIN, crop="center", flip=0.0),
    "flip_crop": _SMALL,
    "digits": replace(_SMALL, flip=0.0, statistics="inception"),  # a mirrored digit is another sign
    "cifar10": replace(_SMALL, operations="tv-auto-cifar10", statistics="cifar10"),
    "cifar100": replace(_SMALL, operations="tv-auto-cifar10", statistics="cifar100"),
    "deit": _DEIT,
    "deit3": replace(_PLAIN, operations="3a", color_jitter=0.3, eval_crop=1.0),
    "mae": replace(_PLAIN, scale=(0.2, 1.0)),
    "mae_probe": replace(_PLAIN, crop="resized_once"),
    "bigvision": _BIGVISION,
    "torchvision": replace(_PLAIN, operations="tv-rand-n2-m9", interpolation="bilinear", eval_interpolation="bilinear"),
    "augreg_none": replace(_BIGVISION, operations=""),
    "augreg_light1": replace(_BIGVISION, operations="rand-m0-n2-p1.0-mmax20"),
    "augreg_light2": _BIGVISION,
    "augreg_medium1": replace(_BIGVISION, operations="rand-m15-n2-p1.0-mmax20"),
    "augreg_medium2": replace(_BIGVISION, operations="rand-m15-n2-p1.0-mmax20"),
    "augreg_strong1": replace(_BIGVISION, operations="rand-m20-n2-p1.0-mmax20"),
    "augreg_strong2": replace(_BIGVISION, operations="rand-m20-n2-p1.0-mmax20"),
}
