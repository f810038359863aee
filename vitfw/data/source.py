"""What `pack` asks of a source of images."""

import io
from collections.abc import Callable, Sequence
from typing import NamedTuple

from PIL import Image

from vitfw.data.table import Label


class Source(NamedTuple):
    """keys [N] and labels [N] (None: unlabelled), classes or None, and load(i) -> encoded bytes of image i."""

    keys: Sequence[str]
    labels: Sequence[Label]
    classes: tuple[str, ...] | None
    load: Callable[[int], bytes]


def png(image: Image.Image) -> bytes:
    """Lossless bytes of an image."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


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
