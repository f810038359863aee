"""The `data` section of the configuration, and what it opens: samples and their order."""

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from vitfw.data.index import Samples, open_samples
from vitfw.data.mixing import shard_mixing
from vitfw.data.order import TrainOrder
from vitfw.data.patterns import is_remote
from vitfw.data.shuffle import shuffled_rows
from vitfw.seeding import derive


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which images, in which order, and what happens to bad ones."""

    train: str | None = field(
        default=None, metadata=_help("shards or folder: a-{000..099}.tar, a-*.tar[:99%], lists with commas")
    )
    val: str | None = field(default=None, metadata=_help("shards or folder for evaluation, as data.train"))
    classes: str | None = field(
        default=None, metadata=_help("file of class names, one a line; default: classes.txt beside the shards")
    )
    fraction: float = field(
        default=1.0, metadata=_help("share of the training images used, 0..1, the same in each class")
    )
    per_class: int | None = field(default=None, metadata=_help("training images of each class used (few-shot)"))
    subset_seed: int = field(default=0, metadata=_help("chooses the images of fraction and per_class"))
    weights: tuple[float, ...] | None = field(
        default=None, metadata=_help("share of the draws from each pattern of data.train")
    )
    balance: Literal["none", "sqrt", "class"] = field(
        default="none", metadata=_help("draws of a class: by its size, by the root of its size, or equal")
    )
    window: int = field(default=64, metadata=_help("shards whose samples are shuffled together; 0: all"))
    on_bad_sample: Literal["raise", "skip"] = field(default="skip", metadata=_help("an image that cannot be decoded"))
    on_broken_key: Literal["raise", "skip"] = field(
        default="raise", metadata=_help("a key of a shard that is split, repeated, or lacks its image or label")
    )
    bad_limit: float = field(
        default=0.01, metadata=_help("share of bad images in an epoch that stops the run (one is always let pass)")
    )
    exif: bool = field(default=True, metadata=_help("turn images upright as their orientation tag says"))
    background: tuple[int, int, int] = field(
        default=(255, 255, 255), metadata=_help("colour under transparent pixels, 0..255")
    )
    cache: str | None = field(
        default=None, metadata=_help("folder for indexes and remote shards that cannot lie beside the data")
    )
    cache_gb: float = field(default=100.0, metadata=_help("largest size of the copies of remote shards, in 1e9 bytes"))
    trace: bool = field(default=False, metadata=_help("write the keys of every batch, per rank, to the run folder"))

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction <= 1.0:
            raise ValueError(f"data.fraction={self.fraction}: must be over 0 and at most 1")
        if self.per_class is not None and self.per_class < 1:
            raise ValueError(f"data.per_class={self.per_class}: must be 1 or more, or null")
        if self.per_class is not None and self.fraction < 1.0:
            raise ValueError(f"data.per_class={self.per_class} and data.fraction={self.fraction}: give one of them")
        if self.weights is not None and (not self.weights or min(self.weights) <= 0):
            raise ValueError(f"data.weights={self.weights}: one number over 0 for each pattern of data.train")
        if self.weights is not None and self.balance != "none":
            raise ValueError(f"data.weights={self.weights} and data.balance={self.balance}: give one of them")
        if self.window < 0:
            raise ValueError(f"data.window={self.window}: must be 0 (all shards) or more")
        if not 0.0 <= self.bad_limit <= 1.0:
            raise ValueError(f"data.bad_limit={self.bad_limit}: must be a share, 0..1")
        if self.cache_gb <= 0:
            raise ValueError(f"data.cache_gb={self.cache_gb}: must be over 0")
        if len(self.background) != 3 or not all(0 <= value <= 255 for value in self.background):
            raise ValueError(f"data.background={self.background}: must be three numbers 0..255")


def open_split(data: DataConfig, split: Literal["train", "val"]) -> Samples:
    """The samples of data.train (with fraction or per_class applied) or of data.val.

    Raises ValueError where none is named or the data are not sound, OSError where they cannot be read; both name the key.
    """
    pattern = data.train if split == "train" else data.val
    if pattern is None:
        raise ValueError(
            f"data.{split} is not given; name shards or a folder, for example data.{split}=/data/{split}-*.tar"
        )
    if data.classes is not None and not Path(data.classes).is_file():
        raise ValueError(
            f"data.classes={data.classes}: no such file; one class name a line, in the order of the labels"
        )
    try:
        samples = open_samples(
            pattern,
            classes=data.classes,
            on_problem=data.on_broken_key,
            cache=data.cache,
            cache_bytes=int(data.cache_gb * 1e9),
        )
    except (ValueError, OSError) as error:
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"data.{split}={pattern}: {error}") from error
    if split == "train" and (data.fraction < 1.0 or data.per_class is not None):
        samples = samples.select(_subset_rows(samples, data))
    return samples


def open_data(data: DataConfig, *, num_classes: int = 0) -> tuple[Samples, Samples | None]:
    """Training and evaluation samples; None where data.val is not given. Both must have the same classes.

    num_classes: of the head, where the task says so; it may have more classes than the training images show.
    """
    train = open_split(data, "train")
    wide = max(num_classes, train.num_classes)
    if train.multi_label:
        train = train.with_classes(wide)
    if data.val is None:
        return train, None
    val = open_split(data, "val")
    _check_largest(val)
    if train.classes is not None and val.classes is not None and train.classes != val.classes:
        raise ValueError(
            f"data.train has {len(train.classes)} classes ({train.classes[0]}, ...), data.val has {len(val.classes)} "
            f"({val.classes[0]}, ...), and they differ; give data.classes"
        )
    if train.labelled and val.labelled and val.num_classes > wide:
        raise ValueError(
            f"data.val has labels up to {val.num_classes - 1}, data.train only up to {train.num_classes - 1}; "
            f"give data.classes, or task.num_classes={val.num_classes}"
        )
    return train, val.with_classes(wide) if val.multi_label and wide >= val.num_classes else val


def _subset_rows(samples: Samples, data: DataConfig) -> np.ndarray:
    """Rows of the subset: of each class (all images are one class without labels) the first of a fixed shuffle."""
    if data.per_class is not None and (not samples.labelled or samples.multi_label):
        raise ValueError(f"data.per_class={data.per_class} needs images with one label each")
    order = shuffled_rows(len(samples), derive(data.subset_seed, "subset"))
    labels = samples.labels[order]
    chosen = []
    for label in np.unique(labels):
        rows = order[labels == label]
        wanted = data.per_class if data.per_class is not None else max(1, round(data.fraction * len(rows)))
        if wanted > len(rows):
            raise ValueError(f"data.per_class={wanted}, but class {label} has {len(rows)} images")
        chosen.append(rows[:wanted])
    return np.concatenate(chosen)


def check_repeats(data: DataConfig, repeats: int) -> None:
    """Refuses two ways to repeat images at once."""
    if repeats > 1 and (data.balance != "none" or data.weights is not None):
        raise ValueError(
            f"augment.repeats={repeats} with data.balance={data.balance}, data.weights={data.weights}: both repeat images, "
            "and together the length of an epoch has no meaning; use one of them"
        )


def _check_cache(samples: Samples, window: int) -> None:
    """Remote shards of one window are read in random order: if they did not fit, they would be fetched many times."""
    if samples.remote is None or not samples.remote.versions:
        return
    sizes = sorted((samples.remote.versions[name].size for name in samples.names if is_remote(name)), reverse=True)
    need, limit = sum(sizes[: window or None]), samples.remote.limit
    if need > limit:
        raise ValueError(
            f"data.window={window} shards take up to {need / 1e9:.3g} GB, but the cache of remote shards holds "
            f"data.cache_gb={limit / 1e9:.3g}; raise it, or lower data.window (0 is all shards)"
        )


def _check_largest(samples: Samples) -> None:
    """Evaluation reads its shards one after another; yet each must fit the cache."""
    sizes = [] if samples.remote is None else [about.size for about in samples.remote.versions.values()]
    if samples.remote is not None and max(sizes, default=0) > samples.remote.limit:
        raise ValueError(
            f"data.val has a shard of {max(sizes) / 1e9:.3g} GB, more than the cache of remote shards holds "
            f"(data.cache_gb={samples.remote.limit / 1e9:.3g}); raise it"
        )


def build_train_order(
    samples: Samples,
    *,
    data: DataConfig,
    seed: int,
    global_batch: int,
    images_per_device: int,
    rank: int = 0,
    world: int = 1,
    repeats: int = 1,
) -> TrainOrder:
    """The order of `order.TrainOrder` for these samples, with data.window, data.balance and data.weights applied."""
    check_repeats(data, repeats)
    groups, shares = _groups(samples, data)
    _check_cache(samples, data.window if groups is None else 0)
    if groups is None and 0 < data.window < len(samples.names) and shard_mixing(samples) < 0.5:
        warnings.warn(
            f"the shards of data.train hold few classes each (mixing {shard_mixing(samples):.2f} of 1), so batches "
            f"from data.window={data.window} of {len(samples.names)} shards lack most classes; "
            "set data.window=0 or pack again",
            stacklevel=2,
        )
    return TrainOrder(
        num_samples=len(samples),
        shard_sizes=samples.shard_sizes,
        global_batch=global_batch,
        images_per_device=images_per_device,
        seed=seed,
        rank=rank,
        world=world,
        repeats=repeats,
        window=data.window,
        groups=groups,
        shares=shares,
    )


def _groups(samples: Samples, data: DataConfig) -> tuple[list[np.ndarray] | None, list[float] | None]:
    if data.balance != "none":
        if not samples.labelled or samples.multi_label:
            raise ValueError(f"data.balance={data.balance} needs images with one label each")
        order = np.argsort(samples.labels, kind="stable")
        counts = np.bincount(samples.labels)
        groups = [rows for rows in np.split(order, np.cumsum(counts)[:-1]) if len(rows)]
        return groups, [len(rows) ** 0.5 if data.balance == "sqrt" else 1.0 for rows in groups]
    if data.weights is not None:
        source = np.repeat(samples.sources, samples.shard_sizes)
        if len(data.weights) != source.max() + 1:
            raise ValueError(
                f"data.weights={data.weights} has {len(data.weights)} numbers, data.train {source.max() + 1} patterns"
            )
        return [np.flatnonzero(source == number) for number in range(len(data.weights))], list(data.weights)
    return None, None
