"""What files beside or inside weights tell of their network: vitfw's own description, timm's, or that of transformers."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from vitfw.models.architecture import Activation, Architecture
from vitfw.models.preprocess import Preprocessing


def described(config: Mapping[str, Any]) -> tuple[Architecture | None, Preprocessing | None]:
    """What a config.json tells: ours (key "vitfw"), timm's ("architecture", "model_args"), or transformers'
    ("model_type").
    """
    if "vitfw" in config:
        return architecture_from_plain(config["vitfw"]["architecture"]), told_preprocessing(config["vitfw"])
    if "architecture" in config:
        import timm

        from vitfw.models.timm_bridge import read_architecture

        arguments = dict(config.get("model_args") or {})
        for key in ("num_classes", "global_pool"):
            if key in config:
                arguments.setdefault(key, config[key])
        with torch.device("meta"):
            net = timm.create_model(config["architecture"], pretrained=False, **arguments)
        try:
            arch = read_architecture(net)
        except ValueError:
            arch = None
        pretrained = config.get("pretrained_cfg", config)
        known = "input_size" in pretrained and "mean" in pretrained
        return arch, Preprocessing.from_timm_config(pretrained) if known else None
    if config.get("model_type") in ("vit", "deit", "dinov2", "dinov2_with_registers"):
        return _from_transformers(config), None
    return None, None


def _from_transformers(config: Mapping[str, Any]) -> Architecture:
    hidden = config.get("intermediate_size") or round(config["hidden_size"] * config.get("mlp_ratio", 4))
    gated = bool(config.get("use_swiglu_ffn"))
    if gated:
        hidden = (int(config["hidden_size"] * config.get("mlp_ratio", 4) * 2 / 3) + 7) // 8 * 8
    activations: dict[str, Activation] = {
        "gelu": "gelu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_new": "gelu_tanh",
        "quick_gelu": "quick_gelu",
    }
    dino = config["model_type"].startswith("dinov2")
    return Architecture(
        image=(config["image_size"],) * 2,
        patch=(config["patch_size"],) * 2,
        width=config["hidden_size"],
        depth=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        mlp_hidden=hidden,
        mlp="swiglu" if gated else "mlp",
        activation=activations[config.get("hidden_act", "gelu")],
        norm_eps=config.get("layer_norm_eps", 1e-6 if dino else 1e-12),
        qkv_bias="qkv" if config.get("qkv_bias", True) else "none",
        layer_scale=config.get("layerscale_value", 1.0) if dino else None,
        registers=config.get("num_register_tokens", 0),
        distillation_token=config["model_type"] == "deit",
    )


def architecture_from_plain(values: Mapping[str, Any]) -> Architecture:
    """The inverse of `dataclasses.asdict` after a trip through JSON. Raises ValueError for keys it does not know."""
    return Architecture(**known(values, Architecture))


def known(values: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """The values as `kind` takes them: JSON and YAML turn tuples into lists."""
    unknown = set(values) - {field.name for field in dataclasses.fields(kind)}
    if unknown:
        raise ValueError(f"the file was written by another version: unknown model options {', '.join(sorted(unknown))}")
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}


def told_preprocessing(values: Mapping[str, Any]) -> Preprocessing | None:
    """What vitfw wrote of it, if anything."""
    return Preprocessing.from_plain(values["preprocessing"]) if values.get("preprocessing") else None
