"""Named variants, and the `model` section resolved: a variant name plus whatever differs from it.

A name is FAMILY_SIZEPATCH with optional endings: `vit_b16`, `deit_s16_distilled`, `vit_b16_reg4_gap`,
`dinov2_l14_reg4`, `siglip_so400m14`, `dinov3_7b16`. Any size goes with any family, patch and image size.
"""

import dataclasses
import re
from difflib import get_close_matches
from typing import Any

from vitfw.models.architecture import Architecture
from vitfw.models.cost import Shape
from vitfw.models.model_config import ModelConfig

# width, depth, heads, mlp_hidden. Sources: Steiner et al. 2021 (ti, s, b, l), Dosovitskiy et al. 2020 (h), Touvron
# et al. 2022
# (m), Alabdulmohsin et al. 2023 (so400m), Zhai et al. 2021 (g, G), Dehghani et al. 2023 (22b).
SIZES: dict[str, tuple[int, int, int, int]] = {
    "ti": (192, 12, 3, 768),
    "s": (384, 12, 6, 1536),
    "m": (512, 12, 8, 2048),
    "b": (768, 12, 12, 3072),
    "l": (1024, 24, 16, 4096),
    "h": (1280, 32, 16, 5120),
    "so400m": (1152, 27, 16, 4304),
    "g": (1408, 40, 16, 6144),
    "G": (1664, 48, 16, 8192),
    "22b": (6144, 48, 48, 24576),
    "teaching": (192, 6, 3, 768),  # 64 px, patch 16, 10 classes: 2,822,602 parameters
    "cifar": (256, 6, 4, 512),  # 32 px, patch 4, 10 classes: 3.2 M parameters
    "cifarslim": (384, 7, 12, 384),  # 32 px, patch 4, MLP as wide as the model: 6.3 M parameters
}

# What a family sets besides its sizes; a size of its own stands in FAMILY_SIZES.
FAMILIES: dict[str, dict[str, Any]] = {
    "vit": {},
    "deit": {},
    "deit3": {"position_prefix": False, "layer_scale": 1e-6},
    "mae": {"position": "sincos", "init": "mae"},
    "clip": {"pre_norm": True, "patch_bias": False, "norm_eps": 1e-5},
    "siglip": {"class_token": False, "pool": "map"},
    "dinov2": {"layer_scale": 1e-5},
    "dinov3": {
        "layer_scale": 1e-5,
        "norm_eps": 1e-5,
        "qkv_bias": "none",
        "registers": 4,
        "position": "none",
        "rope": "centered",
    },
    "eva": {"qkv_bias": "qv", "pool": "gap", "final_norm": "pooled"},
    "eva02": {
        "qkv_bias": "qv",
        "pool": "gap",
        "final_norm": "pooled",
        "mlp": "swiglu_split",
        "mlp_norm": True,
        "rope": "index",
        "rope_temperature": 10000.0,
        "rope_layout": "interleaved",
        "rope_reference": 16,
    },
    "rope": {
        "qkv_bias": "qv",
        "class_token": False,
        "registers": 1,
        "pool": "gap",
        "final_norm": "pooled",
        "layer_scale": 1e-5,
        "position": "none",
        "rope": "index",
        "rope_temperature": 10000.0,
        "rope_layout": "interleaved",
        "rope_reference": 16,
    },
    "sam": {"class_token": False, "pool": "gap", "window": 14},
}

FAMILY_SIZES: dict[tuple[str, str], dict[str, Any]] = {
    ("vit", "22b"): {
        "parallel": True,
        "qk_norm": True,
        "qkv_bias": "none",
        "norm_bias": False,
        "class_token": False,
        "pool": "map",
    },
    ("dinov2", "g"): {"width": 1536, "heads": 24, "mlp_hidden": 4096, "mlp": "swiglu"},
    ("dinov3", "splus"): {"width": 384, "depth": 12, "heads": 6, "mlp_hidden": 1536, "mlp": "swiglu_split"},
    ("dinov3", "hplus"): {"width": 1280, "depth": 32, "heads": 20, "mlp_hidden": 5120, "mlp": "swiglu_split"},
    ("dinov3", "7b"): {"width": 4096, "depth": 40, "heads": 32, "mlp_hidden": 8192, "mlp": "swiglu_split"},
    ("eva02", "ti"): {"mlp": "swiglu", "mlp_norm": False, "mlp_hidden": 512},
    ("eva02", "s"): {"mlp": "swiglu", "mlp_norm": False, "mlp_hidden": 1024},
    ("eva02", "b"): {"mlp_hidden": 2048},
    ("eva02", "l"): {"mlp_hidden": 2730},
    ("sam", "b"): {"global_blocks": (2, 5, 8, 11)},
    ("sam", "l"): {"global_blocks": (5, 11, 17, 23)},
    ("sam", "h"): {"global_blocks": (7, 15, 23, 31)},
}

ENDINGS: dict[str, dict[str, Any]] = {
    "distilled": {"distillation_token": True},
    "gap": {"class_token": False, "pool": "gap", "final_norm": "pooled"},
    "map": {"class_token": False, "pool": "map"},
    "reg1": {"registers": 1, "position_prefix": False},
    "reg4": {"registers": 4, "position_prefix": False},
    "quickgelu": {"activation": "quick_gelu"},
    "tanhgelu": {"activation": "gelu_tanh"},
    "qkvb": {"qkv_bias": "qv"},
}


def variant_values(name: str) -> dict[str, Any]:
    """Variant name -> the `Architecture` fields it sets. Raises ValueError with the nearest names for an unknown
    one.
    """
    match = re.fullmatch(r"([a-z0-9]+)_([A-Za-z0-9]*?[A-Za-z])(\d+)((?:_[a-z0-9]+)*)", name)
    family, size, patch, endings = match.groups() if match else ("", "", "0", "")
    chosen = [ending for ending in endings.split("_") if ending]
    sized = size in SIZES or (family, size) in FAMILY_SIZES
    if family not in FAMILIES or not sized or int(patch) < 1 or any(ending not in ENDINGS for ending in chosen):
        near = get_close_matches(name, variant_names(), n=3, cutoff=0.5)
        raise ValueError(
            f"model.variant={name!r} is unknown; nearest: {', '.join(near) or 'none'}. A name is FAMILY_SIZEPATCH with "
            f"endings: families {', '.join(FAMILIES)}; sizes {', '.join(SIZES)} (dinov3 also splus, hplus, 7b); "
            f"endings {', '.join(ENDINGS)}; or timm:NAME for any timm model"
        )
    values: dict[str, Any] = {"patch": (int(patch), int(patch)), **FAMILIES[family]}
    if size in SIZES:
        values |= dict(zip(("width", "depth", "heads", "mlp_hidden"), SIZES[size], strict=True))
    values |= FAMILY_SIZES.get((family, size), {})
    for ending in chosen:
        values |= ENDINGS[ending]
    return values


def variant_names() -> list[str]:
    """The names worth listing: each family at its published sizes and patches."""
    published = {
        "vit": "ti16 s16 s32 b8 b16 b32 l14 l16 l32 h14 so400m14 g14 G14 22b14 teaching16 cifar4 cifarslim4 "
        "b16_gap b16_reg4_gap so400m14_map",
        "deit": "ti16 s16 b16 ti16_distilled s16_distilled b16_distilled",
        "deit3": "s16 m16 b16 l16 h14",
        "mae": "b16 l16 h14",
        "clip": "b16 b32 l14 h14 b16_quickgelu",
        "siglip": "b16 l16 so400m14 so400m16_tanhgelu",
        "dinov2": "s14 b14 l14 g14 s14_reg4 b14_reg4 l14_reg4 g14_reg4",
        "dinov3": "s16 splus16 b16 l16 hplus16 7b16 b16_qkvb",
        "eva": "g14",
        "eva02": "ti14 s14 b14 l14",
        "rope": "b16",
        "sam": "b16 l16 h16",
    }
    return [f"{family}_{rest}" for family, names in published.items() for rest in names.split()]


def input_size(config: ModelConfig) -> tuple[int, int]:
    """Height and width of the images in pixels."""
    return config.image_height or config.image_size, config.image_width or config.image_size


def resolve(config: ModelConfig) -> Architecture:
    """The section with the variant's values filled in. Raises ValueError for an unknown variant and for
    contradictions.
    """
    if config.variant.startswith("timm:"):
        raise ValueError(f"model.variant={config.variant!r} is a model of timm; it has no vitfw architecture")
    values = variant_values(config.variant)
    hidden_ratio = values["mlp_hidden"] / values["width"]
    patch = config.patch_size or values["patch"][0]
    values |= {"image": input_size(config), "patch": (config.patch_height or patch, config.patch_width or patch)}
    for option in dataclasses.fields(Architecture):
        given = getattr(config, option.name, None)
        if given is not None:
            values[option.name] = given
    if config.width is not None or config.mlp_ratio is not None:
        values["mlp_hidden"] = round(values["width"] * (config.mlp_ratio or hidden_ratio))
    if values.get("layer_scale") == 0.0:
        values["layer_scale"] = None
    if config.global_blocks is not None:
        values["global_blocks"] = tuple(config.global_blocks)
    if config.window == 0:  # switching a variant's windows off takes its list of global blocks along
        values["global_blocks"] = ()
    return Architecture(**values)


def shape_of(arch: Architecture) -> Shape:
    """The part of an architecture that `cost` counts."""
    return Shape(**{field.name: getattr(arch, field.name) for field in dataclasses.fields(Shape)})
