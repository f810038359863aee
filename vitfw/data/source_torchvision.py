"""Data sets of torchvision: torchvision:NAME:SPLIT:ROOT, for example torchvision:CIFAR10:train:/data.

SPLIT goes to the set's own `split` argument, or to `train` (train: true; test, val: false); `-` leaves it out.
Nothing is downloaded. Where the set lists its files, their bytes are kept; images it keeps as arrays become PNG.
"""

import inspect
from pathlib import Path
from typing import Any

from vitfw.data.source import Source, file_stamp, png
from vitfw.data.table import Label


def from_torchvision(name: str) -> Source:
    """Raises ValueError for an unknown set, a malformed name or split, and where torchvision does not find the files."""
    from torchvision import datasets

    parts = name.split(":", 2)
    if len(parts) != 3:
        raise ValueError(f"torchvision:{name}: write torchvision:NAME:SPLIT:ROOT, e.g. torchvision:CIFAR10:train:/data")
    kind, split, root = parts
    if kind not in datasets.__all__:
        raise ValueError(f"torchvision:{kind}: torchvision has no such data set; it has {', '.join(datasets.__all__)}")
    constructor = getattr(datasets, kind)
    accepted = inspect.signature(constructor).parameters
    options: dict[str, Any] = {}
    if split != "-":
        if "split" in accepted:
            options["split"] = split
        elif "train" in accepted:
            if split not in ("train", "test", "val"):
                raise ValueError(f"torchvision:{name}: the split {split!r} is not one of train, test, val")
            options["train"] = split == "train"
        else:
            raise ValueError(f"torchvision:{kind} has no splits; write torchvision:{kind}:-:{root}")
    try:
        dataset = constructor(root, **options)
    except Exception as error:  # each set has its own way of saying that files are missing or a split is unknown
        first = str(error).strip().split("\n")[0]
        raise ValueError(
            f"torchvision:{name}: torchvision cannot open it in {root!r} ({first}); nothing is downloaded"
        ) from error
    return _source(dataset)


def _source(dataset: Any) -> Source:
    files = _files(dataset)

    def load(place: int) -> bytes:
        return png(dataset[place][0]) if files is None else files[place].read_bytes()

    found = getattr(dataset, "targets", None)
    found = getattr(dataset, "_labels", None) if found is None else found
    if found is None or len(found) != len(dataset):
        found = [dataset[place][1] for place in range(len(dataset))]
    if not all(isinstance(int(label), int) for label in found):
        raise ValueError(f"{type(dataset).__name__}: its targets are no class numbers")
    labels: list[Label] = [int(label) for label in found]
    classes = getattr(dataset, "classes", None)
    keys = [f"{place:07d}" for place in range(len(labels))]
    if files is not None:
        keys = [f"{file.parent.name}/{file.stem}" for file in files]
    names = tuple(str(name) for name in classes) if classes else None
    return Source(keys, labels, names, load, None if files is None else lambda place: file_stamp(files[place]))


def _files(dataset: Any) -> list[Path] | None:
    """The image files in the order of the set, where it keeps such a list (under one of these names)."""
    for attribute in ("samples", "_image_files", "_images"):
        listed = getattr(dataset, attribute, None)
        if isinstance(listed, list) and listed and len(listed) == len(dataset):
            paths = [entry[0] if isinstance(entry, tuple) else entry for entry in listed]
            if all(isinstance(path, str | Path) for path in paths):
                return [Path(path) for path in paths]
    return None
