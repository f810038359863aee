"""The operations of an augmentation policy by name, thin over timm's and torchvision's own."""

import re
from collections.abc import Callable
from typing import Any

from PIL import Image
from torchvision.transforms import v2

from vitfw.data.policies import Interpolation
from vitfw.data.timm_guard import guard_posterize

_MAGNITUDES = 31  # of torchvision's RandAugment, its own default

RESAMPLING = {
    "nearest": v2.InterpolationMode.NEAREST,
    "bilinear": v2.InterpolationMode.BILINEAR,
    "bicubic": v2.InterpolationMode.BICUBIC,
    "lanczos": v2.InterpolationMode.LANCZOS,
    "area": v2.InterpolationMode.BOX,
}
PILLOW = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "area": Image.Resampling.BOX,
}

# timm itself skips a section that it cannot read, and takes the plain set for a set (-t) that it does not know
_TIMM = re.compile(
    r"rand(-(m|n|inc|mmax)\d+|-(p|mstd)\d+(\.\d+)?|-t(weights|3aw|3a))*"
    r"|augmix(-(m|w|d|b)\d+|-(a|mstd)\d+(\.\d+)?)*"
    r"|(original|originalr|v0|v0r|3a)(-mstd\d+(\.\d+)?)?"
)


def build_operations(
    name: str, size: tuple[int, int], mean: tuple[float, ...], interpolation: Interpolation, channels: int
) -> Callable[[Any], Any] | None:
    """The policy that a text names, on PIL images.

    `rand-...`, `augmix-...`, `original`, `v0`, `3a` are timm's, with the constants that timm's create_transform and
    so DeiT gives them. `tv-rand-n2-m9`, `tv-trivial`, `tv-auto-imagenet|cifar10|svhn` are torchvision's.
    """
    if not name:
        return None
    if channels not in (1, 3):
        raise ValueError(f"augment.operations={name}: works on 1 or 3 channels, not {channels}; set operations=''")
    if name.startswith("tv-"):
        return _torchvision_operations(name, interpolation)
    from timm.data import auto_augment
    from timm.data.transforms import str_to_pil_interp

    fill = tuple(min(255, round(255 * value)) for value in mean)
    options: dict[str, Any] = {"translate_const": int(min(size) * 0.45), "img_mean": fill if channels == 3 else fill[0]}
    if interpolation != "area":
        options["interpolation"] = str_to_pil_interp(interpolation)
    try:
        if not _TIMM.fullmatch(name):
            raise ValueError(name)
        if name.startswith("rand"):
            policy = auto_augment.rand_augment_transform(name, options)
        elif name.startswith("augmix"):
            policy = auto_augment.augment_and_mix_transform(name, options | {"translate_pct": 0.3})
        else:
            policy = auto_augment.auto_augment_transform(name, options)
    except (AssertionError, ValueError, IndexError) as error:
        raise ValueError(
            f"augment.operations={name}: timm does not know this policy; e.g. rand-m9-mstd0.5-inc1"
        ) from error
    return guard_posterize(policy)


def _torchvision_operations(name: str, interpolation: Interpolation) -> Callable[[Any], Any]:
    mode = RESAMPLING[interpolation]
    if found := re.fullmatch(r"tv-rand-n(\d+)-m(\d+)", name):
        if int(found[2]) >= _MAGNITUDES:
            raise ValueError(
                f"augment.operations={name}: torchvision's magnitudes m go from 0 to {_MAGNITUDES - 1}, not to {found[2]}"
            )
        return v2.RandAugment(int(found[1]), int(found[2]), num_magnitude_bins=_MAGNITUDES, interpolation=mode)
    if name == "tv-trivial":
        return v2.TrivialAugmentWide(interpolation=mode)
    policies = {f"tv-auto-{policy.value}": policy for policy in v2.AutoAugmentPolicy}
    if name in policies:
        return v2.AutoAugment(policies[name], interpolation=mode)
    raise ValueError(f"augment.operations={name}: not one of tv-rand-nN-mM, tv-trivial, {', '.join(policies)}")
