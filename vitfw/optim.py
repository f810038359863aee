"""Section `optim`: the learning-rate rule, parameter groups with their guards, the optimiser, clipping."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitfw.ema import bare_name
from vitfw.models.grouping import NoDecay, check_groups, check_names, decays, layer_table, number_text
from vitfw.schedules import Length, ScheduleConfig, cosine_between, learning_rate

__all__ = ["OptimConfig", "build_optimizer", "clip_gradients", "layer_table", "parameter_groups", "set_schedule"]


@dataclass(frozen=True, kw_only=True)
class OptimConfig(ScheduleConfig):
    """Section `optim`. The schedule's keys come from ScheduleConfig."""

    name: Literal["adamw", "adam", "sgd", "lamb", "lars", "lion", "muon"] = field(
        default="adamw", metadata={"help": "the optimiser"}
    )
    lr: float | None = field(
        default=None, metadata={"help": "absolute peak learning rate; exactly one of lr and base_lr"}
    )
    base_lr: float | None = field(
        default=None, metadata={"help": "peak learning rate at a global batch of base_batch images"}
    )
    base_batch: int | None = field(
        default=None, metadata={"help": "the batch that base_lr is meant for: DeiT 512, MAE 256, DINOv2 1024"}
    )
    scaling: Literal["linear", "sqrt"] = field(
        default="linear", metadata={"help": "how base_lr grows with the global batch"}
    )
    betas: tuple[float, float] | None = field(
        default=None,
        metadata={"help": "moment decays; default 0.9, 0.999 (adam, adamw, lamb), 0.9, 0.99 (lion), 0.9, 0.95 (muon)"},
    )
    eps: float | None = field(
        default=None,
        metadata={"help": "added to the denominator; default 1e-8 (adam, adamw, lars), 1e-6 (lamb), 1e-7 (muon)"},
    )
    momentum: float | None = field(
        default=None, metadata={"help": "momentum of sgd, lars (default 0.9) and muon (default 0.95)"}
    )
    nesterov: bool = field(default=False, metadata={"help": "Nesterov momentum (sgd, lars, muon)"})
    trust: float | None = field(default=None, metadata={"help": "trust coefficient of lars; default 0.001"})
    weight_decay: float = field(
        default=0.05, metadata={"help": "decoupled as in AdamW; for sgd, lars and adam it is the L2 term, as in torch"}
    )
    weight_decay_end: float | None = field(
        default=None, metadata={"help": "weight decay at the end of the run (half cosine from weight_decay)"}
    )
    no_decay: NoDecay = field(
        default="all_tokens", metadata={"help": "whose list of parameters without weight decay (docs/optimisation.md)"}
    )
    layer_decay: float | None = field(
        default=None, metadata={"help": "rate of layer i is multiplied by layer_decay^(depth + 1 - i); null: off"}
    )
    norm_layer: Literal["last_block", "head"] = field(
        default="last_block",
        metadata={"help": "with layer_decay, the final norm counts to the last block (timm) or to the head (MAE)"},
    )
    clip_norm: float | None = field(
        default=None, metadata={"help": "global gradient norm above which gradients are scaled down; null or 0: off"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("lr", "base_lr", "base_batch", "trust"):
            value = getattr(self, key)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"optim.{key}={value}: must be a finite number above 0")
        for key in ("weight_decay", "weight_decay_end", "clip_norm", "eps"):
            value = getattr(self, key)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"optim.{key}={value}: must be a finite number of 0 or more")
        if self.weight_decay_end is not None and self.weight_decay == 0:
            raise ValueError("optim.weight_decay=0 with optim.weight_decay_end: start from a value above 0")
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            raise ValueError(f"optim.layer_decay={self.layer_decay}: must lie in (0, 1], or be null")
        if self.norm_layer != "last_block" and self.layer_decay is None:
            raise ValueError(f"optim.norm_layer={self.norm_layer}: only layer decay reads it; set optim.layer_decay")
        if self.betas is not None and not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optim.betas={self.betas}: both must lie in [0, 1)")
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ValueError(f"optim.momentum={self.momentum}: must lie in [0, 1)")
        self._check_read()

    def _check_read(self) -> None:
        """Refuses a key that the chosen optimiser would not read."""
        read = {
            "betas": ("adam", "adamw", "lamb", "lion", "muon"),
            "eps": ("adam", "adamw", "lamb", "lars", "muon"),
            "momentum": ("sgd", "lars", "muon"),
            "nesterov": ("sgd", "lars", "muon"),
            "trust": ("lars",),
        }
        for key, names in read.items():
            value = getattr(self, key)
            # by identity: a momentum of 0 equals False
            if value is not None and value is not False and self.name not in names:
                raise ValueError(f"optim.{key}={value}: {self.name} does not read it; only {', '.join(names)} do")
        if self.nesterov and self.momentum == 0:
            raise ValueError(
                f"optim.nesterov=true with optim.momentum={self.momentum}: there is nothing to look ahead with"
            )


@dataclass(frozen=True)
class ResolvedRate:
    """The peak learning rate and the line that explains it."""

    value: float
    text: str


def resolve_learning_rate(config: OptimConfig, global_batch: int) -> ResolvedRate:
    """The peak learning rate at this global batch, with its factors in words.

    Raises:
        ValueError: neither or both of `optim.lr` and `optim.base_lr`, or a base without its batch.
    """
    if config.lr is None and config.base_lr is None:
        raise ValueError(
            "optim.lr=None, optim.base_lr=None: no learning rate; set optim.lr, or base_lr with base_batch"
        )
    if config.lr is not None:
        if config.base_lr is not None or config.base_batch is not None or config.scaling != "linear":
            raise ValueError(
                f"optim.lr={config.lr:g} is absolute and is never scaled, but optim.base_lr={config.base_lr}, "
                f"base_batch={config.base_batch}, scaling={config.scaling}; to use optim.lr add optim.base_lr=null "
                "optim.base_batch=null optim.scaling=linear"
            )
        return ResolvedRate(config.lr, f"{number_text(config.lr)} (absolute)")
    assert config.base_lr is not None
    if config.base_batch is None:
        raise ValueError("optim.base_batch is missing: the batch that optim.base_lr is meant for (DeiT 512, MAE 256)")
    ratio = global_batch / config.base_batch
    value = config.base_lr * (math.sqrt(ratio) if config.scaling == "sqrt" else ratio)
    factor = f"{global_batch} / {config.base_batch}"
    factor = f"sqrt({factor})" if config.scaling == "sqrt" else factor
    return ResolvedRate(value, f"{number_text(value)} = {number_text(config.base_lr)} x {factor}")


def schedule_notes(config: OptimConfig, peak: float, length: Length) -> list[str]:
    """What a user should know about a schedule that never gets going."""
    if config.epoch_lag + 1 < length.epochs or not config.epoch_lag:
        return []
    first = learning_rate(config, peak, 0, length)
    return [
        f"optim.epoch_lag={config.epoch_lag}: the run has {length.epochs:g} epochs, so the learning rate stays {first:g}"
        + ("; nothing is learned" if first == 0 else "")
    ]


def _kind(parameter: Tensor, layer: int, top: int, config: OptimConfig) -> str:
    """What the optimiser treats apart: LARS trusts only matrices, Muon orthogonalises only hidden matrices."""
    if config.name == "lars":
        return "matrix" if parameter.ndim > 1 else "vector"
    if config.name == "muon":
        return "matrix" if parameter.ndim > 1 and 0 < layer < top else "fallback"
    return ""


def _new_group(layer: int | None, scale: float, decayed: bool, kind: str, config: OptimConfig, peak: float) -> dict:
    weight_decay = config.weight_decay if decayed else 0.0
    group: dict[str, Any] = {"params": [], "names": [], "lr": peak * scale, "peak_lr": peak * scale}
    group |= {"weight_decay": weight_decay, "peak_weight_decay": weight_decay, "lr_scale": scale, "layer": layer}
    if config.name == "lars":
        group["always_adapt"] = kind == "matrix"  # also without weight decay, where timm's LARS would be plain SGD
    if config.name == "muon":
        group["use_fallback"] = kind == "fallback"
    return group


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    layers: Mapping[str, int],
    config: OptimConfig,
    global_batch: int,
) -> list[dict[str, Any]]:
    """Optimiser groups, ordered from the embedding to the head; decayed before free within a layer.

    Layer decay is multiplied into `lr` itself. A parameter's place depends on `layers` alone, which covers the whole
    network: frozen parts and wrappers (compile, activation checkpointing, DDP) change nothing.

    Args:
        named_parameters: all parameters of the task, frozen ones too, with or without wrapper prefixes.
        layers: name -> place: 0 embedding, i + 1 block i, depth + 1 head (the task's `parameter_layers()`).
        config: section `optim`.
        global_batch: images an update, for `resolve_learning_rate`.

    Returns:
        Groups with `params`, `names`, `lr` and `peak_lr` (layer scale included), `weight_decay` and
        `peak_weight_decay`, and for information `layer` (None without layer decay) and `lr_scale`.

    Raises:
        ValueError: names and `layers` disagree, a parameter comes twice, or nothing is trainable.
    """
    named: dict[str, nn.Parameter] = {}
    for name, parameter in named_parameters:
        if bare_name(name) in named:
            raise ValueError(f"the parameter {bare_name(name)} comes twice; pass one module's named_parameters()")
        named[bare_name(name)] = parameter
    layers = {bare_name(name): layer for name, layer in layers.items()}
    check_names(named, layers)
    peak, top = resolve_learning_rate(config, global_batch).value, max(layers.values(), default=0)
    groups: dict[tuple[int, bool, str], dict[str, Any]] = {}
    for name, parameter in named.items():
        if not parameter.requires_grad:
            continue
        decayed = config.weight_decay > 0 and decays(name, parameter, config.no_decay)
        kind = _kind(parameter, layers[name], top, config)
        if config.layer_decay is None:
            layer, scale = None, 1.0
        else:
            layer, scale = layers[name], config.layer_decay ** (top - layers[name])
        key = (layer or 0, not decayed, kind)
        if key not in groups:
            groups[key] = _new_group(layer, scale, decayed, kind, config, peak)
        groups[key]["params"].append(parameter)
        groups[key]["names"].append(name)
    ordered = [groups[key] for key in sorted(groups)]
    check_groups(ordered, named)
    return ordered


def build_optimizer(groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    """The optimiser over these groups. Learning rate and weight decay come from the groups, all else from `config`.

    LAMB's own clipping (to 1.0 in apex and timm) is off: `optim.clip_norm` does it for every optimiser, in view.
    """
    given: dict[str, Any] = {
        key: getattr(config, key) for key in ("betas", "eps", "momentum") if getattr(config, key) is not None
    }
    if config.name in ("adamw", "adam"):
        on_cuda = all(parameter.device.type == "cuda" for group in groups for parameter in group["params"])
        given |= {"fused": True} if on_cuda else {}
        return (torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam)(groups, **given)
    if config.name in ("sgd", "lars"):
        given.setdefault("momentum", 0.9)
    if config.name == "sgd":
        return torch.optim.SGD(groups, **given, nesterov=config.nesterov)
    if config.name == "lars":
        from timm.optim.lars import Lars

        given |= {} if config.trust is None else {"trust_coeff": config.trust}
        return Lars(groups, **given, nesterov=config.nesterov)
    if config.name == "lamb":
        from timm.optim.lamb import Lamb

        return Lamb(groups, **given, max_grad_norm=None)
    if config.name == "lion":
        from timm.optim.lion import Lion

        return Lion(groups, **given)
    from timm.optim.muon import Muon

    return Muon(groups, **given, nesterov=config.nesterov)


def set_schedule(optimizer: torch.optim.Optimizer, config: OptimConfig, length: Length, images_seen: int) -> None:
    """Sets each group's `lr` and `weight_decay` for the update that follows after `images_seen` images.

    The whole schedule, its absolute start and end values too, is multiplied by the group's layer scale, as MAE and timm
    do, so the ratios between layers hold at each step.
    """
    peak = resolve_learning_rate(config, length.global_batch).value
    rate = learning_rate(config, peak, images_seen, length) / peak
    decay = 1.0
    if config.weight_decay_end is not None:
        decay = cosine_between(config.weight_decay, config.weight_decay_end, images_seen, length) / config.weight_decay
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * rate
        group["weight_decay"] = group["peak_weight_decay"] * decay


def current_learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """The learning rate that the live groups hold, before layer decay."""
    group = optimizer.param_groups[0]
    return group["lr"] / group["lr_scale"]


def clip_gradients(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Scales gradients in place to a global 2-norm of at most `max_norm`; returns the norm before, as a scalar tensor.

    To be called once an optimiser step, on summed and unscaled gradients. None and 0 leave the gradients alone. Nothing
    is copied to the host. Sharded gradients (DTensor) give the norm over all shards, equal on all ranks.
    """
    gradients: list[Any] = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    sharded = [gradient for gradient in gradients if hasattr(gradient, "full_tensor")]
    plain = [gradient for gradient in gradients if not hasattr(gradient, "full_tensor")]
    norms = [nn.utils.get_total_norm(plain)] if plain else []
    if sharded:
        norm: Any = nn.utils.get_total_norm(sharded)
        norms.append(norm.full_tensor())
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if max_norm:
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for gradient in plain + [gradient.to_local() for gradient in sharded]:
            gradient.mul_(factor)
    return total
