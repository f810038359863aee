"""A network opened from any place, and the sets it is run on: what evaluation, probes and the ladder share.

How images are prepared comes from the weights, so a result belongs to them and not to the words of a command.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
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
from vitfw.data.patterns import is_remote
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
        inside = folder if (folder / LAST).exists() else folder / "checkpoints"
        if not (inside / LAST).exists():
            raise ValueError(f"{place}: neither an export nor a run folder with checkpoints; name the file itself")
        place = str(inside / LAST)  # a run that has not finished, or the folder of its checkpoints
    source = read(place, which=which)
    network, classes = build_for(source)
    load_weights(network, place, LoadConfig(which=which, head="keep" if classes else "auto"))
    if source.preprocessing is None:
        raise ValueError(f"{place}: the file does not say how images are prepared; use a checkpoint or export of vitfw")
    device = device_of(launch, machine)
    return Opened(network.to(device).eval(), classes, source.preprocessing, source.place, source.entry, device)


def open_set(data: DataConfig, pattern: str, key: str) -> Samples:
    """Images named by another key than data.val, with everything else as the section says; errors name `key`."""
    try:
        return open_split(replace(data, val=pattern), "val")
    except (ValueError, OSError) as error:
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(str(error).replace(f"data.val={pattern}", f"{key}={pattern}", 1)) from error


def for_head(opened: Opened, samples: Samples, key: str, launch: Launch) -> Samples:
    """The same images with labels that count the network's outputs; matched by name where both sides name classes.

    Raises ValueError where the network does not know a class of the set.
    """
    theirs = opened.preprocessing.class_names
    if opened.classes and theirs:
        samples = by_name(samples, theirs, key, f"the weights at {opened.place}", launch)
    highest = _highest(samples)
    if opened.classes and highest >= opened.classes:
        raise ValueError(
            f"{key} has labels up to {highest}, the network at {opened.place} has {opened.classes} outputs"
        )
    return samples


def by_name(samples: Samples, names: tuple[str, ...], key: str, owner: str, launch: Launch) -> Samples:
    """The same images with labels that count `names`. A set without class names stays as it is.

    Raises ValueError for a class that is not among `names`: a number alone would score one class as another.
    """
    own = samples.classes
    if own is None or own == names or not samples.labelled:
        return samples
    places = {name: place for place, name in enumerate(names)}
    unknown = [name for name in own if name not in places]
    if unknown:
        raise ValueError(
            f"{key}: {len(unknown)} of its {len(own)} classes are unknown to {owner}: {', '.join(unknown[:3])}; known "
            f"are {len(names)}: {', '.join(names[:3])}, ... Name them alike, for shards by data.classes=FILE"
        )
    if launch.is_main and own != names[: len(own)]:
        print(f"note: {key} lists its {len(own)} classes otherwise than {owner}; they are matched by name", flush=True)
    columns = np.array([places[name] for name in own], np.int32)
    table = samples.table
    if samples.multi_label:
        table = table._replace(label_value=columns[table.label_value])
    else:
        table = table._replace(label=np.where(table.label >= 0, columns[table.label], np.int32(-1)))
    return Samples(samples.names, samples.starts, table, classes=names, sources=samples.sources, remote=samples.remote)


def named(names: Sequence[str] | None, count: int) -> tuple[str, ...]:
    """A name for each of `count` outputs: an output beyond the list is called by its number."""
    known = tuple(names or ())[:count]
    return known + tuple(str(number) for number in range(len(known), count))


def shared_images(ours: Samples, theirs: Samples) -> int:
    """How many images of `theirs` are the same bytes of the same files as images of `ours`, however either is written."""
    return len(_places(ours) & _places(theirs))


def _places(samples: Samples) -> set[tuple[str, int]]:
    """(file, offset in it) of every image."""
    files = [name if is_remote(name) else os.path.realpath(name) for name in samples.names]
    found: set[tuple[str, int]] = set()
    for file, start, end in zip(files, samples.starts, samples.starts[1:], strict=False):
        for row in range(int(start), int(end)):
            offset = int(samples.table.offset[row])
            found.add((file, offset) if offset >= 0 else (str(Path(file) / samples.key(row)), -1))
    return found


def _highest(samples: Samples) -> int:
    """The largest label of any image, -1 without one."""
    values = samples.table.label_value if samples.multi_label else samples.table.label
    return int(values.max()) if len(values) else -1


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
    """The set data.SPLIT (or `samples`) in the evaluation view, at the weights' own size or another.

    Labels of data.SPLIT are counted as the head's outputs are (see `for_head`); `samples` are taken as they are.
    """
    if samples is None:
        samples = for_head(opened, open_split(data, split), f"data.{split}", launch)
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
