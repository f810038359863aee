"""Where `pack` takes images from, by the name a user gives."""

from pathlib import Path

import numpy as np
from PIL import Image

from vitfw.data.index import open_samples, parse_classes
from vitfw.data.shuffle import shuffled_rows
from vitfw.data.source import Source, file_stamp, png
from vitfw.data.source_arrow import from_arrow
from vitfw.data.source_list import from_list
from vitfw.data.source_torchvision import from_torchvision
from vitfw.data.table import Label
from vitfw.seeding import derive


def from_samples(pattern: str, classes: str | None) -> Source:
    """A folder of class folders, or existing shards (to shuffle or resize them again)."""
    samples = open_samples(pattern, classes=classes)

    keys = [samples.key(row) for row in range(len(samples))]
    labels: list[Label] = [None if samples.labels[row] < 0 else int(samples.labels[row]) for row in range(len(samples))]
    if samples.multi_label:
        labels = [tuple(int(number) for number in np.flatnonzero(samples.label(row))) for row in range(len(samples))]
    if Path(samples.names[0]).is_dir():
        files = [Path(samples.names[samples.shard(row)]) / key for row, key in enumerate(keys)]
        keys = [key.rpartition(".")[0] for key in keys]
        return Source(keys, labels, samples.classes, samples.read, lambda row: file_stamp(files[row]))
    return Source(keys, labels, samples.classes, samples.read)


def from_digits(split: str) -> Source:
    """scikit-learn's 1,797 digits, 8 x 8 grey, 0..16 scaled to 0..255. `val`: a fixed fifth of each class."""
    if split not in ("train", "val"):
        raise ValueError(f"digits:{split}: the splits are train and val")
    from sklearn.datasets import load_digits

    images, targets = load_digits(return_X_y=True)
    chosen = []
    for label in range(10):
        rows = np.flatnonzero(targets == label)
        rows = rows[shuffled_rows(len(rows), derive(0, "digits", label))]
        held_out = round(len(rows) / 5)
        chosen.append(rows[:held_out] if split == "val" else rows[held_out:])
    rows = np.sort(np.concatenate(chosen))
    pixels = np.rint(np.asarray(images) * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8)
    return Source(
        keys=[f"{row:04d}" for row in rows],
        labels=[int(targets[row]) for row in rows],
        classes=tuple(str(digit) for digit in range(10)),
        load=lambda place: png(Image.fromarray(pixels[rows[place]])),
    )


def _is_arrow(name: str) -> bool:
    return name.endswith(".parquet") or (Path(name) / "dataset_info.json").exists() or any(Path(name).glob("*.parquet"))


def _names_its_classes(name: str) -> bool:
    return name.startswith(("digits:", "torchvision:")) or _is_arrow(name)


def open_source(name: str, *, classes: str | None = None) -> Source:
    """The source a user named:

    FOLDER of class folders, or existing shards (patterns); FILE.csv, FILE.jsonl (`source_list`);
    FILES.parquet, or a folder saved by Hugging Face datasets (`source_arrow`);
    torchvision:NAME:SPLIT:ROOT (`source_torchvision`); digits:SPLIT.
    """
    if classes is not None and _names_its_classes(name):
        raise ValueError(
            f"--classes={classes}: {name} names its classes itself; the option is for folders, lists and shards"
        )
    if name.startswith("digits:"):
        return from_digits(name.removeprefix("digits:"))
    if name.startswith("torchvision:"):
        return from_torchvision(name.removeprefix("torchvision:"))
    known = None if classes is None else parse_classes(Path(classes).read_text(), classes)
    if name.lower().endswith((".csv", ".jsonl")):
        return from_list(Path(name), known)
    if name.lower().endswith((".json", ".tsv", ".txt")):
        raise ValueError(
            f"{name}: a list of images is a .csv with the columns path and label, or a .jsonl with an object a line"
        )
    if _is_arrow(name):
        return from_arrow(name)
    return from_samples(name, classes)
