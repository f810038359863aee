"""Small data sets for the tests: coloured noise as shards or as folders of classes."""

import io
import tarfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2

to_uint8 = v2.PILToTensor()


def picture(number: int, size: int = 8, image_format: str = "PNG") -> bytes:
    """Encoded RGB noise, different for each number."""
    pixels = np.random.default_rng(number).integers(0, 256, (size, size, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, image_format)
    return buffer.getvalue()


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    """A tar with these members, in this order."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def make_shards(folder: Path, sizes: list[int], *, size: int = 8, classes: int = 3, bad: tuple[int, ...] = ()) -> str:
    """Shards s00.tar, ... of these sizes; keys 000, 001, ... count on; label = number % classes. Returns their pattern.

    bad: numbers of samples whose PNG is cut in the middle.
    """
    number = 0
    for shard, count in enumerate(sizes):
        members = []
        for _ in range(count):
            data = picture(number, size)
            members += [(f"{number:03d}.png", data[: len(data) // 2] if number in bad else data)]
            members += [(f"{number:03d}.cls", str(number % classes).encode())]
            number += 1
        write_tar(folder / f"s{shard:02d}.tar", members)
    return str(folder / f"s{{00..{len(sizes) - 1:02d}}}.tar")


def make_folder(folder: Path, counts: dict[str, int], *, size: int = 8) -> str:
    """A folder of class folders with PNG files."""
    number = 0
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for _ in range(count):
            (folder / name / f"{number:03d}.png").write_bytes(picture(number, size))
            number += 1
    return str(folder)


def noisy(image: Image.Image) -> torch.Tensor:
    """A transform that draws from all three generators; 8 x 8 out."""
    import random

    pixels = to_uint8(image.resize((8, 8))).clone()
    pixels[0, 0, 0] = random.randrange(256)
    pixels[0, 0, 1] = int(np.random.randint(256))
    pixels[0, 1] = torch.randint(0, 256, (8,), dtype=torch.uint8)
    return pixels
