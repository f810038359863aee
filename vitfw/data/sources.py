"""Where `pack` takes images from: keys, labels, class names, and a function for the encoded bytes of one image."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from vitfw.data.index import open_samples
from vitfw.data.shuffle import shuffled_rows
from vitfw.data.table import Label
from vitfw.seeding import derive


class Source(NamedTuple):
    """keys [N] and labels [N] (None: unlabelled), classes or None, and load(i) -> (bytes, extension) of image i."""

    keys: Sequence[str]
    labels: Sequence[Label]
    classes: tuple[str, ...] | None
    load: Callable[[int], tuple[bytes, str]]


def png(image: Image.Image) -> bytes:
    """Lossless bytes of an image."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def from_samples(pattern: str, classes: str | None) -> Source:
    """A folder of class folders, or existing shards (to shuffle or resize them again)."""
    samples = open_samples(pattern, classes=classes)

    def load(row: int) -> tuple[bytes, str]:
        data = samples.read(row)
        return data, extension_of(data)

    keys = [samples.key(row) for row in range(len(samples))]
    labels: list[Label] = [None if samples.labels[row] < 0 else int(samples.labels[row]) for row in range(len(samples))]
    if samples.multi_label:
        labels = [tuple(int(number) for number in np.flatnonzero(samples.label(row))) for row in range(len(samples))]
    if Path(samples.names[0]).is_dir():
        keys = [key.rpartition(".")[0] for key in keys]
    return Source(keys, labels, samples.classes, load)


def extension_of(data: bytes) -> str:
    """jpg, png, ... from the first bytes. Raises ValueError for what is none of the accepted formats."""
    signatures = {
        b"\xff\xd8\xff": "jpg",
        b"\x89PNG": "png",
        b"BM": "bmp",
        b"GIF8": "gif",
        b"II*\0": "tif",
        b"MM\0*": "tif",
        b"P6": "ppm",
        b"P5": "pgm",
        b"\x93NUMPY": "npy",
    }
    for signature, extension in signatures.items():
        if data.startswith(signature):
            return extension
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    raise ValueError(f"bytes {data[:8]!r} begin no accepted image format")


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
        load=lambda place: (png(Image.fromarray(pixels[rows[place]])), "png"),
    )


def open_source(name: str, *, classes: str | None = None) -> Source:
    """The source a user named: a folder, shards, `digits:train`."""
    if name.startswith("digits:"):
        return from_digits(name.removeprefix("digits:"))
    return from_samples(name, classes)
