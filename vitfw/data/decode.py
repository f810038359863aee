"""Encoded bytes to an upright image with the wanted number of channels. Nothing in the data is ever executed.

channels 3: RGB; 1: grey; 2: grey + alpha; 4: RGB + alpha; any other number: a numpy array [H, W, C] uint8 (`.npy`,
which may hold the former, too).
With 1 or 3 channels, alpha is composed on a background, so that hidden colours of transparent pixels never show.
16-bit images are scaled to 8 bits (65535 -> 255).
"""

import io
import re
import warnings

import numpy as np
import torch
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # no format of Pillow that runs a program (EPS)
_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
NUMPY_MAGIC = b"\x93NUMPY"


class UndecodableError(ValueError):
    """The bytes are no image, or a damaged one."""


def decode(
    data: bytes, *, channels: int = 3, background: tuple[int, int, int] = (255, 255, 255), exif: bool = True
) -> Image.Image | torch.Tensor:
    """Encoded bytes -> PIL image in the mode of `channels`; for other numbers of channels a uint8 tensor [C, H, W].

    background: 0..255, under transparent pixels. exif: turn the image upright as its orientation tag says.
    A JPEG that needs no conversion comes back unread, so that a crop may read it at a smaller scale (`jpeg`);
    a truncated one then raises OSError at its first use. Raises UndecodableError for what is no whole image.
    """
    if data[:6] == NUMPY_MAGIC:
        return _decode_array(data, channels)
    if channels not in _MODES:
        raise UndecodableError(
            f"model.channels={channels} needs .npy images [H, W, {channels}]; this is another format"
        )
    try:
        with (
            warnings.catch_warnings()
        ):  # Pillow warns of broken EXIF blocks and odd palettes, which are dealt with here
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
            orientation = _orientation(image) if exif else 1
            if isinstance(image, JpegImageFile) and image.mode == _MODES[channels] and orientation == 1:
                return image
            converted = _convert(image, channels, background)
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise UndecodableError(f"{type(error).__name__}: {_without_address(error)}") from error
    return converted.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else converted


def _without_address(error: BaseException) -> str:
    """Pillow names the object that it read from, which says nothing to a reader and differs each time."""
    return re.sub(r" ?<_io\.BytesIO object at 0x[0-9a-f]+>", "", str(error)).strip()


def _orientation(image: Image.Image) -> int:
    """1..8; 1 where there is no tag or the block is broken (cameras write many of those)."""
    if isinstance(image, JpegImageFile) and "exif" not in image.info:
        return 1
    try:
        image.load()  # PNG may carry the block behind the pixels
        return int(image.getexif().get(_ORIENTATION, 1))
    except OSError:
        raise  # the pixels are damaged, not the block
    except (
        Exception
    ):  # Pillow's parser raises SyntaxError, KeyError, struct.error, TypeError and others on broken blocks
        return 1


def _convert(image: Image.Image, channels: int, background: tuple[int, int, int]) -> Image.Image:
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image, np.uint16) >> 8).astype(np.uint8))
    elif image.mode == "I":  # 32-bit integers, by convention of the format 16 bits of them in use
        image = Image.fromarray((np.clip(np.asarray(image), 0, 65535) >> 8).astype(np.uint8))
    elif image.mode == "F":
        image = Image.fromarray(np.clip(np.rint(np.asarray(image)), 0, 255).astype(np.uint8))
    mode = _MODES[channels]
    transparent = image.mode in ("LA", "PA", "La", "RGBA", "RGBa") or "transparency" in image.info
    if not transparent or channels in (2, 4):
        return image if image.mode == mode else image.convert(mode)
    image = image.convert("RGBA")
    under = Image.new("RGBA", image.size, (*background, 255))
    return Image.alpha_composite(under, image).convert(mode)


def _decode_array(data: bytes, channels: int) -> Image.Image | torch.Tensor:
    try:
        array = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise UndecodableError(f"damaged .npy: {error}") from error
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != channels:
        raise UndecodableError(f".npy of {array.dtype} {array.shape}, wanted uint8 [H, W, {channels}]")
    if channels in _MODES:  # as any other format, for the operations that work on Pillow's images
        return Image.fromarray(array[:, :, 0] if channels == 1 else np.ascontiguousarray(array))
    return torch.from_numpy(array).permute(2, 0, 1).contiguous()
