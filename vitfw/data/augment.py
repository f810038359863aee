"""Section `augment`: what happens to one image before it joins a batch. Batch-level parts are in `mix`."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import RandomResizedCrop, v2
from torchvision.transforms.v2 import functional as F

from vitfw.data.operations import PILLOW, RESAMPLING, build_operations
from vitfw.data.policies import POLICIES, STATISTICS, Crop, Interpolation, Policy

LARGE = 16  # times the pixels of the crop, above which a resized image is not made whole
LEAST_CROP, LEAST_STD = 0.1, 1e-3  # below, an evaluated crop is a speck and a normalised image overflows

Size = tuple[int, int]  # (height, width)
Box = tuple[int, int, int, int]  # (top, left, height, width)
PolicyName = Literal[
    "none",
    "flip_crop",
    "digits",
    "cifar10",
    "cifar100",
    "deit",
    "deit3",
    "mae",
    "mae_probe",
    "bigvision",
    "torchvision",
    "augreg_none",
    "augreg_light1",
    "augreg_light2",
    "augreg_medium1",
    "augreg_medium2",
    "augreg_strong1",
    "augreg_strong2",
]
StatisticsName = Literal["imagenet", "inception", "clip", "cifar10", "cifar100", "none"]


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Section `augment`. Keys with default null take the policy's own value (docs/augmentation.md)."""

    policy: PolicyName = field(default="none", metadata={"help": "the source's stack of one-image operations"})
    crop: Crop | None = field(default=None, metadata={"help": "how the training crop is made"})
    scale: tuple[float, float] | None = field(
        default=None, metadata={"help": "area of the crop as shares of the image"}
    )
    ratio: tuple[float, float] | None = field(
        default=None, metadata={"help": "width / height of the crop, from and to"}
    )
    train_crop: float | None = field(
        default=None, metadata={"help": "crop=random: crop / resized short side, 384 of 448 is 0.857142857"}
    )
    padding: int | None = field(default=None, metadata={"help": "pixels around a padded crop; default short side / 8"})
    interpolation: Interpolation | None = field(default=None, metadata={"help": "resampling in training"})
    flip: float | None = field(default=None, metadata={"help": "probability of a horizontal flip"})
    operations: str | None = field(
        default=None, metadata={"help": "e.g. rand-m9-mstd0.5-inc1, 3a, tv-rand-n2-m9; '' off"}
    )
    color_jitter: float | None = field(default=None, metadata={"help": "strength of colour jitter; 0 is off"})
    statistics: StatisticsName | None = field(default=None, metadata={"help": "mean and deviation by name"})
    mean: tuple[float, ...] | None = field(default=None, metadata={"help": "mean of each channel, in 0 to 1"})
    std: tuple[float, ...] | None = field(default=None, metadata={"help": "deviation of each channel, in 0 to 1"})
    eval_crop: float | None = field(default=None, metadata={"help": "evaluation: centre crop / resized short side"})
    eval_interpolation: Interpolation | None = field(default=None, metadata={"help": "resampling in evaluation"})
    eval_resize: Literal["cover", "squash"] = field(
        default="cover", metadata={"help": "evaluation: resize and centre crop, or resize to the size itself"}
    )
    repeats: int = field(default=1, metadata={"help": "augmented copies of an image in its epoch (DeiT 3)"})
    erasing: float = field(default=0.0, metadata={"help": "probability of erasing a rectangle, after normalising"})
    erasing_mode: Literal["pixel", "const"] = field(
        default="pixel", metadata={"help": "fill of it: N(0, 1) a pixel, or 0 (the mean colour)"}
    )
    mixup: float = field(default=0.0, metadata={"help": "alpha of mixup's Beta(alpha, alpha); 0 is off"})
    cutmix: float = field(default=0.0, metadata={"help": "alpha of CutMix's Beta(alpha, alpha); 0 is off"})
    mix_probability: float = field(default=1.0, metadata={"help": "share of batches that are mixed at all"})
    switch: float = field(default=0.5, metadata={"help": "share of CutMix among mixed batches when both are on"})
    pairing: Literal["reverse", "roll"] = field(
        default="reverse", metadata={"help": "partner of image i: n - 1 - i (timm), or i - 1 (torchvision, big_vision)"}
    )
    fold: bool = field(
        default=False, metadata={"help": "mixup keeps the larger share for the image itself (big_vision)"}
    )

    def __post_init__(self) -> None:
        for key in ("flip", "erasing", "mix_probability", "switch"):
            value = getattr(self, key)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"augment.{key}={value}: a probability must lie in [0, 1]")
        for key in ("mixup", "cutmix", "color_jitter", "padding"):
            value = getattr(self, key)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"augment.{key}={value}: must be 0 or more")
        if self.scale is not None and not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"augment.scale={self.scale}: must rise within (0, 1]")
        if self.ratio is not None and not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"augment.ratio={self.ratio}: must rise and be above 0")
        for key in ("eval_crop", "train_crop"):
            value = getattr(self, key)
            if value is not None and not LEAST_CROP <= value <= 1:
                raise ValueError(f"augment.{key}={value}: must lie in [{LEAST_CROP}, 1]")
        if self.repeats < 1:
            raise ValueError(f"augment.repeats={self.repeats}: must be at least 1")
        if (self.mean is None) != (self.std is None):
            raise ValueError("augment.mean and augment.std belong together; set both or none")
        if self.mean is not None and self.statistics is not None:
            raise ValueError(f"augment.statistics={self.statistics} and augment.mean are both set; give one of them")
        self._check_read()

    def _check_read(self) -> None:
        """Refuses keys that nothing would read."""
        if self.fold and not self.mixup:
            raise ValueError("augment.fold=true: there is no mixup to fold; set augment.mixup")
        crop = resolve_policy(self).crop
        readers = {"scale": ("resized", "resized_once"), "ratio": ("resized", "resized_once")}
        readers |= {"padding": ("padded", "simple"), "train_crop": ("random",)}
        for key, crops in readers.items():
            if getattr(self, key) is not None and crop not in crops:
                raise ValueError(
                    f"augment.{key}={getattr(self, key)}: crop={crop} does not read it; use crop={crops[0]}"
                )
        if self.eval_resize == "squash" and self.eval_crop is not None:
            raise ValueError(f"augment.eval_crop={self.eval_crop}: eval_resize=squash crops nothing; drop one of them")


def resolve_policy(config: AugmentConfig) -> Policy:
    """The named policy with the keys that the config sets itself."""
    keys = Policy.__dataclass_fields__
    own = {key: getattr(config, key) for key in keys if getattr(config, key) is not None}
    return replace(POLICIES[config.policy], **own)


def statistics(config: AugmentConfig, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(mean, deviation) of each of the channels, for images in 0 to 1.

    Raises:
        ValueError: the statistics are for another number of channels.
    """
    if config.mean is not None and config.std is not None:
        name, mean, std = "mean", config.mean, config.std
    else:
        name = resolve_policy(config).statistics
        mean, std = STATISTICS[name]
    if not all(LEAST_STD <= value < math.inf for value in std) or not all(math.isfinite(value) for value in mean):
        raise ValueError(
            f"augment.mean={mean}, augment.std={std}: finite numbers for images in 0 to 1; each deviation {LEAST_STD} or more"
        )
    if len(mean) != len(std) or len(mean) not in (1, channels):
        raise ValueError(
            f"augment statistics {name}: {len(mean)} means and {len(std)} deviations for {channels} channels; "
            "set augment.mean and augment.std with one number a channel, or augment.statistics=inception"
        )
    return (mean * channels, std * channels) if len(mean) == 1 else (mean, std)


def _resize(image: Any, size: Size, interpolation: Interpolation) -> Any:
    if F.get_size(image) == list(size):
        return image
    return F.resize(image, list(size), RESAMPLING[interpolation], antialias=True)


def _cover(image: Any, size: Size) -> Size:
    """The size at which the image keeps its shape, with one side equal to `size` and the other at least as long."""
    height, width = F.get_size(image)
    factor = max(size[0] / height, size[1] / width)
    return max(size[0], int(height * factor)), max(size[1], int(width * factor))


def _resize_part(image: Any, whole: Size, box: Box, interpolation: Interpolation) -> Any:
    """The part `box` of the image resized to `whole`; of an image with extreme sides the rest is never made.

    Pillow's filter reads beyond its box, so the pixels are those of the whole, but for the rounding of its coordinates.
    """
    top, left, rows, columns = box
    if F.get_size(image) == list(whole) or whole[0] * whole[1] <= LARGE * rows * columns:
        return F.crop(_resize(image, whole, interpolation), *box)
    if isinstance(image, Tensor):
        bands = [_resize_part(Image.fromarray(band), whole, box, interpolation) for band in image.numpy()]
        return torch.from_numpy(np.stack([np.asarray(band) for band in bands]))
    down, across = image.height / whole[0], image.width / whole[1]
    right, bottom = min(image.width, (left + columns) * across), min(image.height, (top + rows) * down)
    return image.resize((columns, rows), PILLOW[interpolation], box=(left * across, top * down, right, bottom))


def _center(whole: Size, size: Size) -> Box:
    """The box that torchvision's centre crop takes."""
    return round((whole[0] - size[0]) / 2), round((whole[1] - size[1]) / 2), *size


def _padded_part(image: Any, whole: Size, box: Box, interpolation: Interpolation, *, reflect: bool) -> Any:
    """As `_resize_part` for a box that may reach beyond the image, where it is black or mirrored."""
    before, after, first, last = [], [], [], []
    for start, length, limit in zip(box[:2], box[2:], whole, strict=True):
        missing = max(0, -start), max(0, start + length - limit)
        low, high = max(0, start), min(limit, start + length)
        if reflect:  # what is mirrored must be there
            low = min(low, limit - 1 - missing[1]) if missing[1] else low
            high = max(high, missing[0] + 1) if missing[0] else high
        low, high = max(0, low), min(limit, high)
        before.append(missing[0])
        after.append(missing[1])
        first.append(low)
        last.append(high)
    part = _resize_part(image, whole, (first[0], first[1], last[0] - first[0], last[1] - first[1]), interpolation)
    if any(before + after):
        padding = [before[1], before[0], after[1], after[0]]
        part = F.pad(part, padding, padding_mode="reflect" if reflect else "constant")
    top, left = box[0] - first[0] + before[0], box[1] - first[1] + before[1]
    return F.crop(part, top, left, box[2], box[3])


def _to_tensor(image: Any, channels: int) -> Tensor:
    if isinstance(image, Tensor):
        tensor = image
    else:
        array = np.asarray(image)
        planes = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
        tensor = torch.from_numpy(np.array(planes, order="C"))  # twice as fast as torch's own permute + contiguous
    if tensor.shape[0] != channels or tensor.dtype != torch.uint8:
        raise ValueError(f"an image has {tensor.shape[0]} channels of {tensor.dtype}; wanted {channels} of uint8")
    return tensor


class TrainTransform:
    """One image -> uint8 [C, H, W]. Draws from the global generators of `random`, `numpy` and `torch`.

    For readers that decode only a part of an image, `box` gives the part and `finish` does the rest; calling the
    transform does both.
    """

    def __init__(
        self, policy: Policy, size: Size, channels: int, *, mean: tuple[float, ...], padding: int | None
    ) -> None:
        self.policy, self.size, self.channels = policy, size, channels
        self.padding = padding if padding is not None else 4 if policy.crop == "simple" else min(size) // 8
        self.operations = build_operations(policy.operations, size, mean, policy.interpolation, channels)
        jitter = policy.color_jitter
        self.jitter = v2.ColorJitter(brightness=jitter, contrast=jitter, saturation=jitter) if jitter else None

    def box(self, height: int, width: int) -> Box | None:
        """The part of an image of this size that the crop takes, drawn anew; None when it needs the whole image."""
        if self.policy.crop == "resized":
            shape = torch.empty(1, height, width, device="meta")
            top, left, rows, columns = RandomResizedCrop.get_params(
                shape, list(self.policy.scale), list(self.policy.ratio)
            )
            return top, left, rows, columns
        if self.policy.crop == "resized_once":
            return _box_in_one_try(height, width, self.policy.scale, self.policy.ratio)
        return None

    def __call__(self, image: Any) -> Tensor:
        height, width = F.get_size(image)
        box = self.box(height, width)
        return self.finish(image if box is None else F.crop(image, *box))

    def finish(self, image: Any) -> Tensor:
        """Everything after `box`: the region (or the whole image) to the size, flip, operations, jitter, tensor."""
        image = self._to_size(image)
        if self.policy.flip and torch.rand(()).item() < self.policy.flip:
            image = F.horizontal_flip(image)
        if self.operations is not None:
            image = self.operations(image)
        if self.jitter is not None:
            image = self.jitter(image)
        return _to_tensor(image, self.channels)

    def _to_size(self, image: Any) -> Any:
        crop, (height, width), interpolation = self.policy.crop, self.size, self.policy.interpolation
        if crop in ("resized", "resized_once", "squash"):
            return _resize(image, self.size, interpolation)
        larger = self.policy.train_crop if crop == "random" else 1.0
        whole = _cover(image, (round(height / larger), round(width / larger)))
        if crop == "center":
            return _resize_part(image, whole, _center(whole, self.size), interpolation)
        padding = self.padding if crop in ("padded", "simple") else 0
        top = int(torch.randint(0, whole[0] + 2 * padding - height + 1, ()).item()) - padding
        left = int(torch.randint(0, whole[1] + 2 * padding - width + 1, ()).item()) - padding
        return _padded_part(image, whole, (top, left, height, width), interpolation, reflect=crop == "simple")


def _box_in_one_try(height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float]) -> Box:
    """TensorFlow's form, used by MAE's linear probe: one draw, cut to the image; no ten tries, no fallback."""
    area = height * width * torch.empty(()).uniform_(*scale).item()
    aspect = math.exp(torch.empty(()).uniform_(math.log(ratio[0]), math.log(ratio[1])).item())
    rows = max(1, min(height, round(math.sqrt(area / aspect))))
    columns = max(1, min(width, round(math.sqrt(area * aspect))))
    top = int(torch.randint(0, height - rows + 1, ()).item())
    left = int(torch.randint(0, width - columns + 1, ()).item())
    return top, left, rows, columns


def train_transform(config: AugmentConfig, *, size: Size, channels: int = 3) -> TrainTransform:
    """The training transform: PIL image (or uint8 [C, h, w] where no operations are used) -> uint8 [C, H, W]."""
    mean, _ = statistics(config, channels)
    return TrainTransform(resolve_policy(config), size, channels, mean=mean, padding=config.padding)


def eval_transform(config: AugmentConfig, *, size: Size, channels: int = 3) -> Callable[[Any], Tensor]:
    """The evaluation transform: resize so that the centre crop is `eval_crop` of the short side, crop."""
    policy = resolve_policy(config)
    resized = (math.floor(size[0] / policy.eval_crop), math.floor(size[1] / policy.eval_crop))

    def transform(image: Any) -> Tensor:
        if config.eval_resize == "squash":
            return _to_tensor(_resize(image, size, policy.eval_interpolation), channels)
        whole = _cover(image, resized)
        return _to_tensor(_resize_part(image, whole, _center(whole, size), policy.eval_interpolation), channels)

    return transform
