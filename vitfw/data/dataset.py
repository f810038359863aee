"""Draw -> one training sample: read, decode, augment with a seed of its own. Holds no state, so workers hold none."""

import random
from collections.abc import Callable
from typing import Literal, Protocol, TypedDict, runtime_checkable

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, get_worker_info

from vitfw.data.decode import UndecodableError, decode
from vitfw.data.index import Samples
from vitfw.data.order import Draw
from vitfw.data.part import read_part
from vitfw.data.policies import Policy
from vitfw.seeding import derive

MAX_REPLACEMENTS = 16  # tries to find a sound image in place of a bad one, before the data set is given up

Transform = Callable[[Image.Image], torch.Tensor]


@runtime_checkable
class RegionTransform(Protocol):
    """A transform whose first act may be to cut a box and resize it: the reader then does that, as fast as it can.

    size: (height, width) of the result. policy.interpolation: of that resizing; policy.operations and
    policy.color_jitter: steps behind it that need a PIL image. box(height, width) draws (top, left, height, width), or
    None where all of the image is needed; finish takes the resized box and does the rest. The transform called on a
    whole image draws and does the same.
    """

    size: tuple[int, int]
    policy: Policy

    def box(self, height: int, width: int) -> tuple[int, int, int, int] | None: ...

    def finish(self, image: Image.Image | torch.Tensor) -> torch.Tensor: ...


class Sample(TypedDict):
    """image uint8 [C, H, W]; label int, or float32 [K]; index: row (-1: padding); bad: (row, reason) of bad images."""

    image: torch.Tensor
    label: int | np.ndarray
    index: int
    bad: list[tuple[int, str]]


class ImageDataset(Dataset[Sample]):
    """`dataset[Draw(epoch, index, repeat)]` -> Sample. Its pixels are a pure function of (seed, epoch, index, repeat).

    transform: PIL image (or uint8 tensor [C, H, W] for many-channel data) -> uint8 tensor [C, H, W], of one size.
    on_bad_sample: `raise` names the shard and the key; `skip` reports it and, in training (`replace`), shows another
    image in its place, chosen from the same seed, so that batch shapes stay equal on all ranks. In evaluation the
    place becomes padding (label -1), because a replacement would count twice.
    """

    def __init__(
        self,
        samples: Samples,
        transform: Transform,
        *,
        seed: int,
        channels: int = 3,
        background: tuple[int, int, int] = (255, 255, 255),
        exif: bool = True,
        on_bad_sample: Literal["raise", "skip"] = "raise",
        replace: bool = True,
    ) -> None:
        self.samples, self.transform, self.seed = samples, transform, seed
        self.channels, self.background, self.exif = channels, background, exif
        self.on_bad_sample, self.replace = on_bad_sample, replace
        self._region = transform if isinstance(transform, RegionTransform) else None
        self._shape: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, draw: Draw) -> Sample:
        if draw.index < 0:
            return self._padding([])
        bad: dict[int, str] = {}
        index = draw.index
        for attempt in range(MAX_REPLACEMENTS):
            try:
                image = self.load(Draw(draw.epoch, index, draw.repeat))
            except UndecodableError as error:
                if self.on_bad_sample == "raise":
                    raise
                bad[index] = str(error)
                if not self.replace:
                    return self._padding(list(bad.items()))
                index = derive(self.seed, "replace", *draw, attempt) % len(self.samples)
            else:
                return Sample(image=image, label=self.samples.label(index), index=index, bad=list(bad.items()))
        raise UndecodableError(f"{MAX_REPLACEMENTS} images in a row cannot be decoded; one of them: {bad[draw.index]}")

    def load(self, draw: Draw) -> torch.Tensor:
        """The augmented image uint8 [C, H, W]. Raises UndecodableError that names shard and key.

        Errors of the store (a missing file, a failing disk) are not excused by on_bad_sample: they raise OSError.
        """
        data = self.samples.read(draw.index)
        try:
            image = decode(data, channels=self.channels, background=self.background, exif=self.exif)
            return self._augment(image, derive(self.seed, "augment", *draw))
        except UndecodableError as error:
            raise UndecodableError(f"{self.samples.place(draw.index)}: {error}") from error
        except MemoryError as error:
            raise UndecodableError(f"{self.samples.place(draw.index)}: too large for the memory at hand") from error
        except OSError as error:  # Pillow reads a JPEG at its first use, inside the transform
            raise UndecodableError(f"{self.samples.place(draw.index)}: {type(error).__name__}: {error}") from error

    def _augment(self, image: Image.Image | torch.Tensor, seed: int) -> torch.Tensor:
        states = None
        if get_worker_info() is None:  # in the main process the streams belong to the training step
            states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            # Only the CPU generator: torch.manual_seed would also reseed (or queue a reseed of) every accelerator.
            random.seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)
            torch.default_generator.manual_seed(seed)
            result = self._transformed(image)
        finally:
            if states is not None:
                random.setstate(states[0])
                np.random.set_state(states[1])
                torch.set_rng_state(states[2])
        if not isinstance(result, torch.Tensor) or result.dtype != torch.uint8 or result.ndim != 3:
            raise TypeError(f"the transform must give a uint8 tensor [C, H, W], not {type(result).__name__}")
        self._shape = tuple(result.shape)
        return result

    def _transformed(self, image: Image.Image | torch.Tensor) -> torch.Tensor:
        region = self._region
        if region is None or not isinstance(image, Image.Image):
            return self.transform(image)  # type: ignore[arg-type]
        box, interpolation = region.box(image.height, image.width), region.policy.interpolation
        if box is None:
            return region.finish(image)
        if image.mode not in ("L", "RGB") or (interpolation != "bicubic" and interpolation != "bilinear"):
            return region.finish(image.crop((box[1], box[0], box[1] + box[3], box[0] + box[2])))
        part = read_part(image, box, region.size, interpolation)
        if region.policy.operations or region.policy.color_jitter:
            bands = [Image.fromarray(band) for band in part.numpy()]  # merging bands is 6 times as fast as a transpose
            return region.finish(Image.merge(image.mode, bands))
        return region.finish(part)

    def _padding(self, bad: list[tuple[int, str]]) -> Sample:
        if self._shape is None:  # only known after a first image: make one
            plain = Image.new({1: "L", 2: "LA", 4: "RGBA"}.get(self.channels, "RGB"), (64, 64))
            blank = plain if self.channels <= 4 else torch.zeros(self.channels, 64, 64, dtype=torch.uint8)
            self._augment(blank, 0)
        assert self._shape is not None
        label = np.full(self.samples.num_classes, -1.0, np.float32) if self.samples.multi_label else -1
        return Sample(image=torch.zeros(self._shape, dtype=torch.uint8), label=label, index=-1, bad=bad)
