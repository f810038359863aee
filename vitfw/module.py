"""The one LightningModule: joins a task to the Trainer. One call of `optimizer_step` is one step of the run."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from vitfw.data.mix import BatchAugment
from vitfw.ema import Ema, EmaConfig
from vitfw.guard import Guard, GuardConfig, poison, skip_step
from vitfw.optim import OptimConfig, build_optimizer, clip_gradients, parameter_groups, set_schedule
from vitfw.schedules import Length
from vitfw.seeding import derive
from vitfw.tasks.task import Batch, Task


class Module(pl.LightningModule):
    """Holds no state of its own beyond the step counter: everything else is the task's, the optimiser's or the average's."""

    def __init__(
        self,
        task: Task,
        augment: BatchAugment,
        *,
        optim: OptimConfig,
        length: Length,
        ema: EmaConfig,
        seed: int,
        accumulation: int,
        rank: int,
        world: int,
        place: Callable[[Task], None] = lambda task: None,
        guard: GuardConfig | None = None,
    ) -> None:
        super().__init__()
        self.place: Callable[[Task], None] | None = place  # shards, compiles, ... (see parallel.place)
        self.guard = Guard(guard or GuardConfig())
        self.task = task
        self.augment = augment
        self.optim, self.length, self.ema_config = optim, length, ema
        self.seed, self.accumulation, self.rank, self.world = seed, accumulation, rank, world
        self.step = 0  # optimiser steps done in this run, over all attempts
        self.sums: dict[str, Tensor] = {}  # of what the task shows, on the device; only reading them synchronises
        self.micro_batches = 0  # summed since the last reading
        self.gradient_norm: Tensor | None = None
        self.ema: Ema | None = None  # made by `start_average`, once the weights lie where they stay

    @property
    def images_seen(self) -> int:
        return self.step * self.length.global_batch

    @property
    def progress(self) -> float:
        return self.step / self.length.total_steps

    def configure_model(self) -> None:
        """Lays the task out once; Lightning may call this again."""
        if self.place is not None:
            self.place(self.task)
            self.place = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        layers = self.task.parameter_layers(self.optim.norm_layer)
        groups = parameter_groups(self.task.named_parameters(), layers, self.optim, self.length.global_batch)
        return build_optimizer(groups, self.optim)

    def start_average(self) -> None:
        """Begins the average as a copy of the weights. Called after they were loaded, moved and sharded."""
        if self.ema_config.enabled:
            stored = self.task.state_dict().keys()  # what is not stored (tables, normalisation) needs no average
            buffers = [(name, buffer) for name, buffer in self.task.named_buffers() if name in stored]
            self.ema = Ema([*self.task.named_parameters(), *buffers], self.ema_config, self.length)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """One micro-batch. Its random numbers are a function of (seed, step, place in the global batch), so a run that was
        stopped, or goes on with other processes, draws what the uncut run would have drawn."""
        place = (batch_idx % self.accumulation) * self.world + self.rank
        torch.manual_seed(derive(self.seed, "step", self.step, place))
        losses = self.task.losses(self.augment(batch, training=True), self.progress)
        for name, value in losses.items():
            value = value.detach()
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.micro_batches += 1
        return poison(losses["loss"])

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        set_schedule(optimizer.optimizer, self.optim, self.length, self.images_seen)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.step += 1
        if self.ema is not None:
            self.ema.update(self.images_seen)
        self.task.after_step(self.progress)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """Clips by the norm of the whole, synchronised, unscaled gradient; runs once a step, after accumulation. A step
        with a bad gradient is skipped (see guard)."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            scaler.unscale_(optimizer)  # Lightning leaves this to fused optimisers, too late for clipping
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.gradient_norm = clip_gradients(parameters, self.optim.clip_norm)
        bad = self.guard.judge(self.step + 1, self.gradient_norm)
        skip_step(optimizer, bad, scaled=scaler is not None)

    def autocast(self) -> AbstractContextManager[None]:
        """The precision of the run, for code outside the training step."""
        return self.trainer.precision_plugin.forward_context() if self._trainer is not None else nullcontext()

    def read_sums(self) -> dict[str, float]:
        """Means since the last reading, over all ranks' micro-batches. Called on all ranks; this alone waits for the device."""
        if not self.sums:
            return {}
        names = list(self.sums)
        values = torch.stack([self.sums[name].float() for name in names]) / self.micro_batches
        if self.world > 1:
            torch.distributed.all_reduce(values)
            values /= self.world
        means = dict(zip(names, values.tolist(), strict=True))
        if self.gradient_norm is not None:
            means["gradient_norm"] = self.gradient_norm.item()
        self.sums.clear()
        self.micro_batches = 0
        return means
