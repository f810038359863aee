"""How images were prepared for a network: it travels with the weights, and evaluation is checked against it."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """size: (height, width) in pixels; mean, std: for channels in 0 to 1; crop: centre crop / resized short side;
    resize: "cover" (short side, then crop) or "squash" (to the size itself)."""

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    crop: float = 0.875
    resize: str = "cover"
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std):
            raise ValueError(
                f"preprocessing: {len(self.mean)} means and {len(self.std)} deviations; one of each a channel"
            )
        if not 0 < self.crop <= 1:
            raise ValueError(f"preprocessing: crop={self.crop} must lie in (0, 1]")

    def plain(self) -> dict[str, Any]:
        """Numbers, strings and lists only, for checkpoints and JSON."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> "Preprocessing":
        """The inverse of `plain`. Raises ValueError for keys it does not know."""
        unknown = set(values) - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            raise ValueError(f"preprocessing: unknown keys {', '.join(sorted(unknown))}")
        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**given)

    def timm_config(self, classes: int) -> dict[str, Any]:
        """The keys of timm's `pretrained_cfg`."""
        config: dict[str, Any] = {
            "input_size": (len(self.mean), *self.size),
            "mean": self.mean,
            "std": self.std,
            "interpolation": self.interpolation,
            "crop_pct": self.crop,
            "crop_mode": "squash" if self.resize == "squash" else "center",
            "num_classes": classes,
        }
        if self.class_names:
            config["label_names"] = list(self.class_names)
        return config

    @classmethod
    def from_timm_config(cls, config: Mapping[str, Any]) -> "Preprocessing":
        """From timm's `pretrained_cfg`."""
        return cls(
            size=(config["input_size"][1], config["input_size"][2]),
            mean=tuple(config["mean"]),
            std=tuple(config["std"]),
            interpolation=config.get("interpolation", "bicubic"),
            crop=config.get("crop_pct") or 1.0,
            resize="squash" if config.get("crop_mode") == "squash" else "cover",
            class_names=tuple(config.get("label_names") or ()),
        )


def differences(trained: Preprocessing, used: Preprocessing) -> dict[str, str]:
    """What `used` does otherwise than the weights were trained for: {fact: "trained ..., used ..."}; empty if nothing.

    Class names count only where both sides name them.
    """
    found: dict[str, str] = {}
    for field in dataclasses.fields(Preprocessing):
        theirs, ours = getattr(trained, field.name), getattr(used, field.name)
        if field.name == "class_names" and not (theirs and ours):
            continue
        if not _same(theirs, ours):
            found[field.name] = f"trained with {theirs}, used with {ours}"
    return found


def check(trained: Preprocessing, used: Preprocessing) -> list[str]:
    """Warnings for differences that are a choice (size, crop, resampling).

    Raises ValueError for those that are a mistake: mean, deviation, class names.
    """
    found = differences(trained, used)
    wrong = {key: found[key] for key in ("mean", "std", "class_names") if key in found}
    if wrong:
        listed = "; ".join(f"{key}: {text}" for key, text in wrong.items())
        raise ValueError(
            f"the weights were trained on differently prepared images: {listed}. Set augment.mean and augment.std (and "
            "the order of the classes) to those of the weights"
        )
    return [f"preprocessing differs from the weights' own: {key}: {text}" for key, text in found.items()]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and a and isinstance(a[0], float):
        return len(a) == len(b) and all(math.isclose(x, y, rel_tol=0, abs_tol=1e-3) for x, y in zip(a, b, strict=True))
    return math.isclose(a, b, abs_tol=1e-6) if isinstance(a, float) else a == b
