"""Section `ema`: an exponential moving average of the weights, in float32 whatever the precision of the run."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from vitfw.schedules import Length

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def bare_name(name: str) -> str:
    """A parameter's name without what compile, activation checkpointing and DDP put into it.

    DDP's own part, a leading `module`, is dropped; a task therefore must not call its first child so.
    """
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(parts[1:] if parts[0] == "module" else parts)


@dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """Section `ema`. Off while both `decay` and `half_life_images` are null."""

    decay: float | None = field(
        default=None,
        metadata={"help": "share of the average kept at each update of it; at most one of decay, half_life_images"},
    )
    half_life_images: float | None = field(
        default=None, metadata={"help": "training images after which an old weight counts half"}
    )
    every: int = field(
        default=1, metadata={"help": "optimiser steps between two updates of the average (torchvision 32)"}
    )
    ramp: Literal["none", "power"] = field(
        default="none", metadata={"help": "power: decay is at most 1 - (1 + updates)^(-2/3), as in timm"}
    )
    scale: Literal["none", "torchvision"] = field(
        default="none",
        metadata={
            "help": "torchvision: 1 - decay is multiplied by global batch x every / epochs, as in its reference script"
        },
    )
    copy_epochs: float = field(
        default=0.0,
        metadata={"help": "first epochs in which the average is a copy of the weights (torchvision: the warm-up)"},
    )

    def __post_init__(self) -> None:
        if self.decay is not None and self.half_life_images is not None:
            raise ValueError("ema.decay and ema.half_life_images are both set; give one of them")
        if self.decay is not None and not 0 <= self.decay < 1:
            raise ValueError(f"ema.decay={self.decay}: must lie in [0, 1), or be null for no average")
        if self.half_life_images is not None and not self.half_life_images > 0:
            raise ValueError(f"ema.half_life_images={self.half_life_images}: must be above 0 images, or null")
        if self.every < 1:
            raise ValueError(f"ema.every={self.every}: must be at least 1 optimiser step")
        if self.copy_epochs < 0:
            raise ValueError(f"ema.copy_epochs={self.copy_epochs}: must be 0 or more")
        if self.scale != "none" and self.decay is None:
            raise ValueError(f"ema.scale={self.scale} scales ema.decay, which is null; set ema.decay")
        if not self.enabled and (self.every, self.ramp, self.copy_epochs) != (1, "none", 0.0):
            raise ValueError("ema.every, ema.ramp or ema.copy_epochs is set, but there is no average; set ema.decay")

    @property
    def enabled(self) -> bool:
        return self.decay is not None or self.half_life_images is not None


def full_decay(config: EmaConfig, length: Length) -> float:
    """The decay of one update of the average, before any ramp."""
    if config.half_life_images is not None:
        return 0.5 ** (config.every * length.global_batch / config.half_life_images)
    assert config.decay is not None
    if config.scale == "none":
        return config.decay
    alpha = (1 - config.decay) * length.global_batch * config.every / length.epochs
    return 1 - min(1.0, alpha)


def ema_decay(config: EmaConfig, length: Length, *, updates: int, images_seen: int) -> float:
    """The decay of the next update: a function of the updates done before and of the images seen, nothing else.

    `images_seen` is the count before the step. As in torchvision's script, the first update behind `copy_epochs` is still
    a copy: the average begins from the weights that it finds there.
    """
    if config.copy_epochs and length.epoch(images_seen - config.every * length.global_batch) < config.copy_epochs:
        return 0.0
    decay = full_decay(config, length)
    return min(decay, 1 - (1 + updates) ** (-2 / 3)) if config.ramp == "power" else decay


def average_notes(config: EmaConfig, length: Length) -> list[str]:
    """What a user should know about an average that this run never has."""
    if not config.enabled:
        return []
    if config.every > length.total_steps:
        return [
            f"ema.every={config.every}: the run has {length.total_steps:,} updates, so the average is never made and never scored"
        ]
    if config.copy_epochs >= length.epochs:
        return [
            f"ema.copy_epochs={config.copy_epochs:g}: the run has {length.epochs:g} epochs, so the average stays a copy of the "
            "weights"
        ]
    return []


class Ema:
    """The averaged copy of named tensors, kept beside the live ones.

    Construct it after weights are loaded, placed and sharded, and before the first step: the average starts as a copy.
    Parameters and floating-point buffers are averaged, all other tensors (counters) are copied. Shards (DTensor) are
    averaged shard by shard, without communication.
    """

    def __init__(self, named_tensors: Iterable[tuple[str, Tensor]], config: EmaConfig, length: Length) -> None:
        """Takes `named_parameters()` and, where wanted, persistent buffers of the task; names are made bare."""
        if not config.enabled:
            raise ValueError("ema.decay and ema.half_life_images are null: there is no average to keep")
        self.config, self.length = config, length
        self.live = {bare_name(name): tensor.detach() for name, tensor in named_tensors}
        self.shadow = {name: _shadow_of(tensor) for name, tensor in self.live.items()}
        self.updates = 0
        self.is_swapped = False

    @property
    def holds_average(self) -> bool:
        """Whether the average holds anything but the initial weights; before that it must not be scored."""
        return self.updates > 0

    @torch.no_grad()
    def update(self, images_seen: int) -> None:
        """To be called after each optimiser step; `images_seen` includes the images of this step."""
        if self.is_swapped:
            raise RuntimeError("Ema.update inside Ema.swapped: the live weights are the averaged ones at this moment")
        if round(self.length.step(images_seen)) % self.config.every:
            return
        before = images_seen - self.length.global_batch
        decay = ema_decay(self.config, self.length, updates=self.updates, images_seen=before)
        averaged = [name for name, tensor in self.shadow.items() if tensor.is_floating_point()]
        shadows = [_local(self.shadow[name]) for name in averaged]
        lives = [_local(self.live[name]).to(self.shadow[name].dtype) for name in averaged]
        torch._foreach_lerp_(shadows, lives, 1 - decay)  # pyright: ignore[reportPrivateImportUsage]
        for name, tensor in self.shadow.items():
            if not tensor.is_floating_point():
                tensor.copy_(self.live[name])
        self.updates += 1

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside, the live tensors hold the average, in place; afterwards, even on an exception, their own."""
        if not self.holds_average:
            raise RuntimeError("Ema.swapped before the first update: the average holds nothing but the initial weights")
        if self.is_swapped:
            raise RuntimeError("Ema.swapped inside Ema.swapped: the live weights are the averaged ones already")
        own = {name: tensor.clone() for name, tensor in self.live.items()}
        self.is_swapped = True
        try:
            self._write(self.shadow)
            yield
        finally:
            self._write(own)
            self.is_swapped = False

    @torch.no_grad()
    def _write(self, values: Mapping[str, Tensor]) -> None:
        for name, tensor in self.live.items():
            tensor.copy_(values[name])

    def state_dict(self) -> dict[str, Tensor]:
        """Bare name -> averaged tensor in float32 (shards where weights are sharded), and `updates`, the counter."""
        return {**self.shadow, "updates": torch.tensor(self.updates)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores counter and average from whole tensors; the live weights are not touched.

        Raises:
            ValueError: names or shapes differ.
        """
        expected = {*self.shadow, "updates"}
        if state.keys() != expected:
            missing, unknown = sorted(expected - state.keys()), sorted(state.keys() - expected)
            raise ValueError(f"averaged weights: missing {missing[:5]}, unknown {unknown[:5]}; not from this model")
        for name, tensor in self.shadow.items():
            if state[name].shape != tensor.shape:
                raise ValueError(
                    f"averaged weights: {name} has shape {tuple(state[name].shape)}, the model {tuple(tensor.shape)}"
                )
            tensor.copy_(_as_placed(state[name], tensor))
        self.updates = int(state["updates"])


def _local(tensor: Any) -> Tensor:
    """This rank's part: shards and whole buffers can then be averaged in one call."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _as_placed(value: Tensor, target: Any) -> Tensor:
    """A whole tensor cut as the target is cut."""
    if not hasattr(target, "full_tensor") or hasattr(value, "full_tensor"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(target.device), target.device_mesh, target.placements)


def _shadow_of(tensor: Tensor) -> Tensor:
    """A copy in float32 (float64 and integers stay): in bfloat16 an average never moves, its steps round to nothing."""
    copy = tensor.detach().clone()
    return copy.float() if copy.is_floating_point() and copy.dtype != torch.float64 else copy
