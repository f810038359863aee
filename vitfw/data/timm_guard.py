"""Repairs timm's policies for Pillow 13, per built policy: nothing of timm or Pillow is changed for others."""

from collections.abc import Iterator
from typing import Any

from PIL import Image, ImageOps


def posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """Keeps the highest `bits` bits of each channel: 8 and more leave the image alone, 0 and fewer make it black.

    timm's increasing policies ask for 0 bits at full magnitude. Pillow up to 12 gave a black image; Pillow 13 raises.
    """
    if bits >= 8:
        return image
    if bits < 1:
        return Image.new(image.mode, image.size)
    return ImageOps.posterize(image, bits)


def guard_posterize(policy: Any) -> Any:
    """Replaces timm's posterize in a policy that timm built, in place, and returns the policy."""
    from timm.data import auto_augment

    for operation in _operations(policy):
        if operation.aug_fn is auto_augment.posterize:
            operation.aug_fn = posterize
    return policy


def _operations(policy: Any) -> Iterator[Any]:
    """All AugmentOps of timm's RandAugment (`ops`), AutoAugment (`policy`) or AugMix (`ops`)."""
    if hasattr(policy, "ops"):
        yield from policy.ops
    else:
        for chain in policy.policy:
            yield from chain
