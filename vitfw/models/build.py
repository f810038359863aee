"""The `model` section -> a module: our `ViT`, or any model of timm."""

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitfw.models.cost import count_table
from vitfw.models.model_config import ModelConfig
from vitfw.models.variants import input_size, resolve, shape_of
from vitfw.models.vit import ViT
from vitfw.models.vit import parameter_layers as vit_layers

# Options of the section that a timm model takes as well, with timm's name for them.
TIMM_OPTIONS = {"dropout": "drop_rate", "drop_path": "drop_path_rate"}


class TimmModel(nn.Module):
    """Any model of timm behind the forward of `ViT`, for tasks that need logits or pooled features."""

    def __init__(self, name: str, net: nn.Module, image: tuple[int, int]):
        super().__init__()
        self.name, self.net, self.image = name, net, image
        features = getattr(net, "head_hidden_size", net.num_features)  # some have a layer between features and head
        self.embed_dim: int = int(features)  # type: ignore[arg-type]
        self.num_classes: int = int(net.num_classes)  # type: ignore[arg-type]

    def forward(self, images: Tensor, *, output: Literal["logits", "pooled"] = "logits"):
        """Images [B, C, H, W] -> logits [B, classes], or the head's input [B, D]."""
        if output == "logits":
            return self.net(images)
        if output == "pooled":
            return self.net.forward_head(self.net.forward_features(images), pre_logits=True)  # type: ignore[operator]
        raise ValueError(
            f"output={output!r}: timm:{self.name} gives logits or pooled; token access needs a ViT of vitfw"
        )


def build_model(config: ModelConfig, *, num_classes: int) -> nn.Module:
    """The model of the section with a head for `num_classes` (0: none).

    Inside `torch.device("meta")` nothing is allocated; `materialise` gives the same weights later as building directly.
    Raises ValueError for unknown variants, contradictory options, and options a timm model does not have.
    """
    if config.variant.startswith("timm:"):
        return _build_timm(config, num_classes)
    device = torch.get_default_device()
    with torch.device("meta"):
        model = ViT(resolve(config), num_classes)
    return model if device.type == "meta" else materialise(model, device)


def materialise(model: nn.Module, device: torch.device | str) -> nn.Module:
    """Allocates a model built on the meta device and initialises it, module after module in `modules()` order."""
    if isinstance(model, TimmModel):
        return _materialise_timm(model, device)
    model.to_empty(device=device)
    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if own:
            reset = getattr(module, "reset_parameters", None)
            if reset is None:
                raise ValueError(f"{name or type(module).__name__} owns tensors but has no reset_parameters()")
            reset()
    return model


def _materialise_timm(model: TimmModel, device: torch.device | str) -> TimmModel:
    """timm initialises in `reset_parameters`, `init_weights` and `init_non_persistent_buffers`, each model in its own mix. So
    memory is filled with a mark first, and a mark that is left is an error instead of training on garbage."""
    model.to_empty(device=device)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.fill_(_mark(tensor))
        for module in model.net.modules():
            for method in ("reset_parameters", "init_non_persistent_buffers"):
                if callable(initialise := getattr(module, method, None)):
                    initialise()
        if callable(initialise := getattr(model.net, "init_weights", None)):
            initialise()
    # a NaN is the only number that differs from itself
    left = [name for name, t in tensors.items() if bool((t != t if t.is_floating_point() else t == _mark(t)).any())]
    if left:
        raise ValueError(
            f"timm:{model.name} cannot be built on the meta device: {', '.join(left[:4])} stay without a start value; build it "
            "on a real device"
        )
    return model


def _mark(tensor: Tensor) -> float:
    if tensor.is_floating_point():
        return float("nan")
    return 0 if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).min


def _build_timm(config: ModelConfig, num_classes: int) -> TimmModel:
    import timm

    name = config.variant.removeprefix("timm:")
    if not timm.is_model(name):
        near = timm.list_models(f"*{name.split('.')[0][:8]}*")[:5]
        raise ValueError(f"model.variant='timm:{name}': timm has no such model; similar: {', '.join(near) or 'none'}")
    options = _timm_options(config, name)
    size = input_size(config)
    try:
        net = timm.create_model(name, num_classes=num_classes, in_chans=config.in_channels, img_size=size, **options)
    except TypeError as error:
        if "img_size" not in str(error):
            raise ValueError(f"model.variant='timm:{name}' refuses an option: {error}") from error
        net = timm.create_model(name, num_classes=num_classes, in_chans=config.in_channels, **options)  # any size
    return TimmModel(name, net, size)


def _timm_options(config: ModelConfig, name: str) -> dict[str, Any]:
    """The timm keyword arguments the section asks for; refuses options that would be ignored."""
    understood = {"variant", "image_size", "image_height", "image_width", "in_channels", *TIMM_OPTIONS}
    for option in dataclasses.fields(ModelConfig):
        value = getattr(config, option.name)
        if option.name not in understood and value != option.default:
            raise ValueError(
                f"model.{option.name}={value!r} has no effect on timm:{name}; remove it, or choose a variant of vitfw"
            )
    return {theirs: getattr(config, ours) for ours, theirs in TIMM_OPTIONS.items() if getattr(config, ours)}


def parameter_layers(model: nn.Module, *, final_norm: Literal["block", "head"] = "block") -> dict[str, int]:
    """Name of each parameter -> its place for layer-wise learning rates, for our ViT (see `vit.parameter_layers`) and
    for a
    timm model (by its own group matcher, which decides about the final norm itself)."""
    if isinstance(model, ViT):
        return vit_layers(model, final_norm=final_norm)
    if not isinstance(model, TimmModel):
        raise ValueError(f"parameter_layers: a {type(model).__name__} is neither a ViT nor a TimmModel")
    from timm.models import group_parameters

    net: Any = model.net
    groups: Any = group_parameters(net, net.group_matcher(coarse=False), reverse=True)
    return {f"net.{name}": int(place) for name, place in groups.items()}


def has_zero_head(model: nn.Module) -> bool:
    """Whether every head is all zeros, as a fresh `model.zero_head` or a published pretraining head is: its answers
    mean
    nothing, and an evaluation should say so."""
    net: Any = model.net if isinstance(model, TimmModel) else model
    heads = net.get_classifier() if isinstance(model, TimmModel) else (net.head, net.head_dist)
    parameters = [p for head in (heads if isinstance(heads, tuple) else (heads,)) if head for p in head.parameters()]
    return bool(parameters) and not any(bool(p.any()) for p in parameters)


def count_model(config: ModelConfig, *, num_classes: int, images: int | None = None) -> str:
    """The exact counts of the section's model as a table; `images`: those of the whole training run.

    A timm model is counted by torch on the meta device, which sees parameters and matrix products.
    """
    if not config.variant.startswith("timm:"):
        return count_table(shape_of(resolve(config)), num_classes, images=images)
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        model = build_model(config, num_classes=num_classes).eval().requires_grad_(False)
        batch = torch.empty(1, config.in_channels, *input_size(config))
    with FlopCounterMode(display=False) as counter:
        model(batch)
    macs = counter.get_total_flops() // 2
    rows = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "forward MACs of one image": macs,
        "training FLOPs of one image": 6 * macs,
    }
    if images is not None:
        rows["training FLOPs of the run"] = 6 * macs * images
    lines = [f"  {name:<32}{count:>26,}" for name, count in rows.items()]
    return "\n".join([f"{config.variant}, {num_classes} classes, counted by torch", *lines])
