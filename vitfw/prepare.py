"""What a configuration means on this data and with these processes; everything that can be refused is refused here."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from vitfw import run
from vitfw.config import Config
from vitfw.data.augment import AugmentConfig, TrainTransform, resolve_policy, statistics, train_transform
from vitfw.data.index import Samples
from vitfw.data.mix import BatchAugment
from vitfw.data.order import TrainOrder
from vitfw.data.section import build_train_order, open_data
from vitfw.evaluate.freezing import freeze
from vitfw.evaluate.short_tune import ShortTune, plan_short_tune
from vitfw.guard import check_precision
from vitfw.launch import Launch, broadcast, on_main, split_batch
from vitfw.models.load_report import LoadReport
from vitfw.models.preprocess import Preprocessing
from vitfw.models.preprocess import check as check_preprocessing
from vitfw.models.probe_head import ProbeHead
from vitfw.models.variants import ModelConfig, input_size
from vitfw.models.vit import ViT
from vitfw.optim import ResolvedRate, resolve_learning_rate
from vitfw.parallel import starts_on_rank_0
from vitfw.schedules import Length, learning_rate, resolve_length
from vitfw.seeding import derive, seed_all
from vitfw.tasks import build_task
from vitfw.tasks.distill import DistillTask
from vitfw.tasks.mae import MaeTask
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
    preprocessing: Preprocessing  # of evaluation; travels with the weights
    load_report: LoadReport | None  # of `weights=`
    transform: TrainTransform
    order: TrainOrder
    tune: ShortTune | None  # of a masked autoencoder, at each evaluation


def prepare(config: Config, launch: Launch) -> Prepared:
    """Opens the data, resolves lengths, rates and batches, and builds the task. Raises ValueError naming key, value and fix."""
    train_set, val_set = open_data(config.data, num_classes=getattr(config.task, "num_classes", 0))
    length = resolve_length(config.train, len(train_set))
    rate = resolve_learning_rate(config.optim, length.global_batch)
    learning_rate(config.optim, rate.value, 0, length)  # refuses a warm-up longer than the run, an end above the peak
    limit = config.machine.images_per_device
    images_per_device, accumulation = split_batch(length.global_batch, launch.world, limit)
    seed = _seed(config, launch)
    seed_all(derive(seed, "init"))  # the same weights on every rank that has some
    from_main = starts_on_rank_0(config.machine, launch) and not config.task.everywhere
    with torch.device("meta") if from_main and not launch.is_main else nullcontext():
        task = build_task(config.task, config.model, num_classes=train_set.num_classes)
    if images_per_device < 2 and any(isinstance(module, ProbeHead) for module in task.modules()):
        raise ValueError(
            f"machine.images_per_device={images_per_device}: the BatchNorm of the task's probe needs 2 images or more in a "
            "micro-batch; raise it, or train.global_batch"
        )
    for split, samples in (("train", train_set), ("val", val_set)):
        if samples is not None:
            _check_labels(config, task, split, samples)
    if task.num_classes is not None and not task.multi_label:
        counts = np.bincount(train_set.labels[train_set.labels >= 0])
        task.see_classes(torch.from_numpy(counts), train_set.classes)
    preprocessing = evaluation_preprocessing(config.augment, config.model, train_set.classes)
    report = _load_weights(config, launch, task, preprocessing, from_main=from_main)
    freeze(task, config.freeze)
    _check_heads(config, task)
    check_precision(task, config.guard.raise_precision, config.machine)
    augment = BatchAugment(
        config.augment, channels=config.model.in_channels, num_classes=task.num_classes, smoothing=task.smoothing
    )
    transform = train_transform(config.augment, size=input_size(config.model), channels=config.model.in_channels)
    order = build_train_order(
        train_set,
        data=config.data,
        seed=seed,
        global_batch=length.global_batch,
        images_per_device=images_per_device,
        rank=launch.rank,
        world=launch.world,
        repeats=config.augment.repeats,
    )
    return Prepared(
        train_set=train_set,
        val_set=val_set,
        length=length,
        rate=rate,
        images_per_device=images_per_device,
        accumulation=accumulation,
        seed=seed,
        task=task,
        augment=augment,
        preprocessing=preprocessing,
        load_report=report,
        transform=transform,
        order=order,
        tune=_short_tune(task, train_set, val_set, launch, images_per_device),
    )


def _short_tune(
    task: Task, train_set: Samples, val_set: Samples | None, launch: Launch, images_per_device: int
) -> ShortTune | None:
    if not isinstance(task, MaeTask):
        return None
    places = {"rank": launch.rank, "world": launch.world, "images_per_device": images_per_device}
    return plan_short_tune(task.config, train_set, val_set, **places)


def _check_heads(config: Config, task: Task) -> None:
    """Refuses a network with a second head that this task would not teach. A frozen one answers with the mean of both."""
    two_heads = isinstance(task.network, ViT) and task.network.arch.distillation_token and task.network.training
    if two_heads and task.num_classes is not None and not isinstance(task, DistillTask):
        raise ValueError(
            f"task.name={config.task.name} with model.variant={config.model.variant}, model.distillation_token="
            f"{config.model.distillation_token}: nothing would teach the distillation head; set "
            "model.distillation_token=false, or use task.name=distill"
        )


def _check_labels(config: Config, task: Task, split: str, samples: Samples) -> None:
    """Refuses labels that the task cannot learn from: none at all, several where one is meant, or one where several are."""
    if task.num_classes is None:
        return
    if not samples.labelled:
        raise ValueError(
            f"task.name={config.task.name} needs labels, and data.{split} has none: name labelled data, or use a task "
            "without labels (task.name=mae)"
        )
    if task.multi_label != samples.multi_label:
        found, wanted = ("several labels", "multi_label") if samples.multi_label else ("one label", "classify")
        raise ValueError(
            f"task.name={config.task.name}: the images of data.{split} have {found} each; use task.name={wanted}"
        )


def _seed(config: Config, launch: Launch) -> int:
    """The seed asked for; else the one that this run drew when it began; else a new one."""
    if config.train.seed is not None:
        return config.train.seed
    stored = run.stored_seed(config.folder) if launch.is_main else None
    return broadcast(stored if stored is not None else torch.seed() % 2**31)


def evaluation_preprocessing(
    augment: AugmentConfig, model: ModelConfig, classes: tuple[str, ...] | None
) -> Preprocessing:
    """What evaluation does to an image before the network sees it."""
    policy = resolve_policy(augment)
    mean, std = statistics(augment, model.in_channels)
    return Preprocessing(
        size=input_size(model),
        mean=mean,
        std=std,
        interpolation=policy.eval_interpolation,
        crop=policy.eval_crop if augment.eval_resize == "cover" else 1.0,
        resize=augment.eval_resize,
        class_names=classes or (),
    )


def _load_weights(
    config: Config, launch: Launch, task: Task, preprocessing: Preprocessing, *, from_main: bool
) -> LoadReport | None:
    """Starts the task's network from `weights=`, and checks that images are prepared alike. `from_main`: rank 0 alone has
    a network to load them into."""
    if config.weights is None:
        frozen = config.freeze.rung != "full" or any(not p.requires_grad for p in task.network.parameters())
        if frozen and launch.is_main:
            print(
                f"note: task.name={config.task.name}, freeze.rung={config.freeze.rung} without weights=: the frozen part "
                "is random"
            )
        return None
    load = partial(task.load_weights, config.weights, config.load)
    report = on_main(launch, load) if from_main else load()
    if report.preprocessing is not None:
        # another head is trained here, so other class names are no mistake; another mean or deviation is
        for word in check_preprocessing(replace(report.preprocessing, class_names=()), preprocessing):
            if launch.is_main:
                print(f"note: {word}")
    return report
