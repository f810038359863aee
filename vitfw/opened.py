"""A network opened from any place, and the sets it is run on: what evaluation, probes and the ladder share.

How images are prepared comes from the weights, so a result belongs to them and not to the words of a command.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from vitfw.checkpoint import LAST
from vitfw.data.augment import AugmentConfig, eval_transform
from vitfw.data.dataset import Transform
from vitfw.data.index import Samples
from vitfw.data.loader import Loader, build_eval_loader
from vitfw.data.mix import BatchAugment
from vitfw.data.section import DataConfig, open_split
from vitfw.evaluate.predictions import Predictions, predict
from vitfw.launch import (
    Launch,
    MachineConfig,
    check_launch,
    detect_launch,
    device_of,
    join_processes,
    set_threads,
    uses_gpu,
)
from vitfw.models.export import build_for
from vitfw.models.load_report import LoadConfig
from vitfw.models.preprocess import Preprocessing
from vitfw.models.reading import Which, read
from vitfw.models.weights import load as load_weights
from vitfw.sharded import is_folder
from vitfw.tasks.task import Batch

Section = TypeVar("Section")


@dataclass(frozen=True)
class Opened:
    """A network with its weights on its device, and how its images are prepared."""

    network: nn.Module
    classes: int
    preprocessing: Preprocessing
    place: str
    entry: str
    device: torch.device

    @property
    def channels(self) -> int:
        return len(self.preprocessing.mean)


@dataclass(frozen=True)
class EvaluationSet:
    """One set, ready for one network: `predict` passes over this rank's share and gives all rows on all ranks."""

    opened: Opened
    samples: Samples
    loader: Loader
    prepare: Callable[[Batch], Batch]
    autocast: Callable[[], AbstractContextManager[None]]

    def predict(self, network: nn.Module | None = None) -> Predictions:
        return predict(
            network or self.opened.network,
            self.loader,
            prepare=self.prepare,
            device=self.opened.device,
            autocast=self.autocast,
        )


def parse(schema: type[Section], words: Sequence[str]) -> Section:
    """Words key=value -> a frozen section. Raises ValueError naming the word, and the nearest key or what is allowed."""
    merged, seen = OmegaConf.structured(schema), {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key or key.startswith("-"):
            raise ValueError(f"{word}: not of the form key=value")
        if seen.setdefault(key, value) != value:
            raise ValueError(f"{key} is given twice with different values: {seen[key]} and {value}")
        try:
            merged = OmegaConf.merge(merged, OmegaConf.from_dotlist([word]))
        except (OmegaConfBaseException, ValueError) as error:
            raise ValueError(f"{word}: {str(error).splitlines()[0]}") from error
    try:
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except (OmegaConfBaseException, ValueError) as error:
        raise ValueError(str(error).splitlines()[0]) from error


def start(machine: MachineConfig) -> Launch:
    """Joins the processes as the launcher started them."""
    launch = detect_launch()
    check_launch(launch, machine)
    set_threads(launch, machine)
    join_processes(launch, machine)
    return launch


def open_network(place: str, launch: Launch, machine: MachineConfig, *, which: Which = "auto") -> Opened:
    """Reads weights and builds the network they describe.

    Raises ValueError where they do not say which network it is, or how images are prepared.
    """
    folder = Path(place)
    exported = (folder / "config.json").exists() or (folder / "export").exists()
    if folder.is_dir() and not exported and not is_folder(folder):
        place = str(folder / "checkpoints" / LAST)  # a run that has not finished
    source = read(place, which=which)
    network, classes = build_for(source)
    load_weights(network, place, LoadConfig(which=which, head="keep" if classes else "auto"))
    if source.preprocessing is None:
        raise ValueError(f"{place}: the file does not say how images are prepared; use a checkpoint or export of vitfw")
    device = device_of(launch, machine)
    return Opened(network.to(device).eval(), classes, source.preprocessing, source.place, source.entry, device)


def augment_of(preprocessing: Preprocessing) -> AugmentConfig:
    """The `augment` section whose evaluation does what these weights expect."""
    return AugmentConfig(
        mean=preprocessing.mean,
        std=preprocessing.std,
        eval_crop=preprocessing.crop if preprocessing.resize == "cover" else None,
        eval_interpolation=preprocessing.interpolation,  # type: ignore[arg-type] - AugmentConfig knows the names
        eval_resize=preprocessing.resize,  # type: ignore[arg-type]
    )


def evaluation_set(
    opened: Opened,
    data: DataConfig,
    machine: MachineConfig,
    launch: Launch,
    *,
    split: Literal["train", "val"] = "val",
    samples: Samples | None = None,
    transform: Transform | None = None,
    size: int | None = None,
) -> EvaluationSet:
    """The set data.SPLIT (or `samples`) in the evaluation view, at the weights' own size or another."""
    if samples is None:
        samples = open_split(data, split)
    if samples.multi_label and samples.num_classes < opened.classes:
        samples = samples.with_classes(opened.classes)  # no image of this set shows the head's last classes
    augment = augment_of(opened.preprocessing)
    pixels = opened.preprocessing.size if size is None else (size, size)
    to_device = BatchAugment(augment, channels=opened.channels).to(opened.device)
    loader = build_eval_loader(
        samples,
        transform or eval_transform(augment, size=pixels, channels=opened.channels),
        data=data,
        batch=machine.eval_images_per_device or 2 * machine.images_per_device,
        rank=launch.rank,
        world=launch.world,
        workers="auto" if machine.workers < 0 else machine.workers,
        local_world=launch.local_world,
        channels=opened.channels,
        image_size=max(pixels),
        pin_memory=uses_gpu(machine),
    )

    def prepare(batch: Batch) -> Batch:
        return to_device({key: value.to(opened.device) for key, value in batch.items()}, training=False)

    return EvaluationSet(opened, samples, loader, prepare, lambda: autocast_of(machine, opened.device))


def autocast_of(machine: MachineConfig, device: torch.device) -> AbstractContextManager[Any]:
    """The machine's precision, outside a trainer."""
    if machine.precision == "fp32":
        return nullcontext()
    kind = torch.bfloat16 if machine.precision == "bf16" else torch.float16
    return torch.autocast(device.type, dtype=kind)
