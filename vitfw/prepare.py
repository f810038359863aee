"""What a configuration means on this data and with these processes; everything that can be refused is refused here."""

import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from vitfw import run
from vitfw.config import Config
from vitfw.data.augment import AugmentConfig, TrainTransform, resolve_policy, statistics, train_transform
from vitfw.data.index import Samples
from vitfw.data.mix import BatchAugment
from vitfw.data.order import TrainOrder
from vitfw.data.resources import fit_prefetch, resolve_workers
from vitfw.data.section import build_train_order, check_repeats, open_data
from vitfw.ema import average_notes
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
from vitfw.optim import ResolvedRate, resolve_learning_rate, schedule_notes
from vitfw.parallel import starts_on_rank_0
from vitfw.schedules import Length, learning_rate, resolve_length
from vitfw.seeding import derive, seed_all
from vitfw.tasks import build_task
from vitfw.tasks.mae import MaeTask
from vitfw.tasks.task import Task

READ_FOR_A_PLAN = 10_000_000_000  # bytes of the largest file of weights that a plan reads


@dataclass(frozen=True, kw_only=True)
class Begun:
    """What follows from the configuration and the number of images and classes."""

    length: Length
    rate: ResolvedRate
    images_per_device: int  # images of one micro-batch
    accumulation: int  # micro-batches a process sums before a step
    seed: int
    task: Task


@dataclass(frozen=True, kw_only=True)
class Settled:
    """What follows from the configuration and the task."""

    preprocessing: Preprocessing  # of evaluation; travels with the weights
    load_report: LoadReport | None  # of `weights=`
    augment: BatchAugment
    transform: TrainTransform


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Facts that follow from the configuration, the data and the launch: those of Begun and Settled, and the sets. Nothing has
    been written so far."""

    train_set: Samples
    val_set: Samples | None
    length: Length
    rate: ResolvedRate
    images_per_device: int
    accumulation: int
    seed: int
    task: Task
    augment: BatchAugment
    preprocessing: Preprocessing
    load_report: LoadReport | None
    transform: TrainTransform
    order: TrainOrder
    tune: ShortTune | None  # of a masked autoencoder, at each evaluation


def prepare(config: Config, launch: Launch, *, planned: bool = False, weights_later: bool = False) -> Prepared:
    """Opens the data, resolves lengths, rates and batches, and builds the task. Raises ValueError naming key, value and fix.

    planned: nothing will be trained, so the network takes no memory and published weights are not fetched. weights_later:
    `weights` do not exist yet.
    """
    train_set, val_set = open_data(config.data, num_classes=getattr(config.task, "num_classes", 0))
    begun = begin(config, launch, num_images=len(train_set), num_classes=train_set.num_classes, planned=planned)
    task = begun.task
    for split, samples in (("train", train_set), ("val", val_set)):
        if samples is not None:
            _check_labels(config, task, split, samples)
    if task.num_classes is not None and not task.multi_label:
        counts = np.bincount(train_set.labels[train_set.labels >= 0])
        task.see_classes(torch.from_numpy(counts), train_set.classes)
    order = build_train_order(
        train_set,
        data=config.data,
        seed=begun.seed,
        global_batch=begun.length.global_batch,
        images_per_device=begun.images_per_device,
        rank=launch.rank,
        world=launch.world,
        repeats=config.augment.repeats,
    )
    scored = val_set is not None or config.eval.train_images > 0
    _check_memory(config, launch, begun.images_per_device, scored=scored)
    settled = settle(config, launch, task, train_set.classes, planned=planned, weights_later=weights_later)
    return Prepared(
        train_set=train_set,
        val_set=val_set,
        **vars(begun),
        **vars(settled),
        order=order,
        tune=_short_tune(task, train_set, val_set, launch, begun.images_per_device),
    )


def begin(config: Config, launch: Launch, *, num_images: int, num_classes: int, planned: bool = False) -> Begun:
    """Length, rate, batches, seed and a fresh task, for a training set of so many images and classes."""
    length = resolve_length(config.train, num_images)
    rate = resolve_learning_rate(config.optim, length.global_batch)
    learning_rate(config.optim, rate.value, 0, length)  # refuses a warm-up longer than the run, an end above the peak
    for word in [*schedule_notes(config.optim, rate.value, length), *average_notes(config.ema, length)]:
        if launch.is_main:
            print(f"note: {word}")
    images_per_device, accumulation = split_batch(length.global_batch, launch.world, config.machine.images_per_device)
    check_repeats(config.data, config.augment.repeats)
    seed = _seed(config, launch)
    seed_all(derive(seed, "init"))  # the same weights on every rank that has some
    empty = planned or (_from_main(config, launch) and not launch.is_main)
    with torch.device("meta") if empty else nullcontext():
        task = build_task(config.task, config.model, num_classes=num_classes)
    if images_per_device < 2 and any(isinstance(module, ProbeHead) for module in task.modules()):
        raise ValueError(
            f"machine.images_per_device={images_per_device}: the BatchNorm of the task's probe needs 2 images or more in a "
            "micro-batch; raise it, or train.global_batch"
        )
    return Begun(
        length=length,
        rate=rate,
        images_per_device=images_per_device,
        accumulation=accumulation,
        seed=seed,
        task=task,
    )


def settle(
    config: Config,
    launch: Launch,
    task: Task,
    classes: tuple[str, ...] | None,
    *,
    planned: bool = False,
    weights_later: bool = False,
) -> Settled:
    """Weights, frozen parts and what happens to images. `classes`: their names in the training data."""
    preprocessing = evaluation_preprocessing(config.augment, config.model, classes)
    if planned and config.weights is not None and not weights_later:
        weights_later = not _can_rehearse(config.weights)
        if not weights_later:
            task.to_empty(device="cpu")  # takes memory only where weights are written into it
    from_main = not planned and _from_main(config, launch)
    report = None if weights_later else _load_weights(config, launch, task, preprocessing, from_main=from_main)
    freeze(task, config.freeze)
    _check_heads(config, task)
    check_precision(task, config.guard.raise_precision, config.machine)
    channels = config.model.in_channels
    return Settled(
        preprocessing=preprocessing,
        load_report=report,
        augment=BatchAugment(config.augment, channels=channels, num_classes=task.num_classes, smoothing=task.smoothing),
        transform=train_transform(config.augment, size=input_size(config.model), channels=channels),
    )


def _from_main(config: Config, launch: Launch) -> bool:
    """Whether rank 0 alone builds the network and reads weights."""
    return starts_on_rank_0(config.machine, launch) and not config.task.everywhere


def _can_rehearse(weights: str) -> bool:
    """Whether a plan can take the weights as the run will: from files that are not too large to read for it.

    Raises ValueError for a name that timm does not know; its weights are left where they are.
    """
    if weights.startswith("timm:"):
        import timm

        name = weights.removeprefix("timm:")
        if ":" not in name and not timm.is_model(name):
            raise ValueError(f"weights={weights}: timm cannot provide them (RuntimeError: Unknown model ({name}))")
        return False
    path = Path(weights.removeprefix("local-dir:"))
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return max((file.stat().st_size for file in files), default=0) < READ_FOR_A_PLAN


def _check_memory(config: Config, launch: Launch, images_per_device: int, *, scored: bool) -> None:
    """Refuses batches that the loader's workers could not hand over."""
    machine = config.machine
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of too many workers: the loader says it
        workers = resolve_workers("auto" if machine.workers < 0 else machine.workers, local_world=launch.local_world)
    batch = max(images_per_device, (machine.eval_images_per_device or 2 * machine.images_per_device) if scored else 0)
    batch_bytes = batch * config.model.in_channels * max(input_size(config.model)) ** 2
    fit_prefetch(1, workers=workers, batch_bytes=batch_bytes, local_world=launch.local_world)


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
    if two_heads and task.num_classes is not None and not task.teaches_second_head:
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
