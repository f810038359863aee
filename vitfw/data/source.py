"""What `pack` asks of a source of images."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from vitfw.data.table import Label


class Source(NamedTuple):
    """keys [N] and labels [N] (None: unlabelled), classes or None, load(i) -> encoded bytes of image i, and stamp(i), which is
    another one when that image was changed (None: it cannot)."""

    keys: Sequence[str]
    labels: Sequence[Label]
    classes: tuple[str, ...] | None
    load: Callable[[int], bytes]
    stamp: Callable[[int], str] | None = None


def file_stamp(path: str | Path) -> str:
    """Size and time of a file."""
    status = Path(path).stat()
    return f"{status.st_size} {status.st_mtime_ns}"


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
