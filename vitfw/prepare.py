"""What a configuration means on this data and with these processes; everything that can be refused is refused here."""

from dataclasses import dataclass

import torch

from vitfw import run
from vitfw.config import Config
from vitfw.data.index import Samples
from vitfw.data.mix import BatchAugment
from vitfw.data.section import open_split
from vitfw.launch import Launch, broadcast, split_batch
from vitfw.optim import ResolvedRate, resolve_learning_rate
from vitfw.schedules import Length, learning_rate, resolve_length
from vitfw.seeding import derive, seed_all
from vitfw.tasks import build_task
from vitfw.tasks.task import Task


@dataclass(frozen=True)
class Prepared:
    """Facts that follow from the configuration, the data and the launch. Nothing has been written so far."""

    train_set: Samples
    val_set: Samples | None
    length: Length
    rate: ResolvedRate
    images_per_device: int  # images of one micro-batch
    accumulation: int  # micro-batches a process sums before a step
    seed: int
    task: Task
    augment: BatchAugment


def prepare(config: Config, launch: Launch) -> Prepared:
    """Opens the data, resolves lengths, rates and batches, and builds the task. Raises ValueError naming key, value and fix."""
    train_set = open_split(config.data, "train")
    val_set = open_split(config.data, "val") if config.data.val is not None else None
    length = resolve_length(config.train, len(train_set))
    rate = resolve_learning_rate(config.optim, length.global_batch)
    learning_rate(config.optim, rate.value, 0, length)  # refuses a warm-up longer than the run, an end above the peak
    limit = config.machine.images_per_device
    images_per_device, accumulation = split_batch(length.global_batch, launch.world, limit)
    seed = _seed(config, launch)
    seed_all(derive(seed, "init"))  # the same weights on every rank
    task = build_task(config.task, config.model, num_classes=train_set.num_classes)
    augment = BatchAugment(
        config.augment, channels=config.model.in_channels, num_classes=task.num_classes, smoothing=task.smoothing
    )
    return Prepared(train_set, val_set, length, rate, images_per_device, accumulation, seed, task, augment)


def _seed(config: Config, launch: Launch) -> int:
    """The seed asked for; else the one that this run drew when it began; else a new one."""
    if config.train.seed is not None:
        return config.train.seed
    stored = run.stored_seed(config.folder) if launch.is_main else None
    return broadcast(stored if stored is not None else torch.seed() % 2**31)
