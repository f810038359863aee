"""A contact sheet of real samples before and after augmentation, for `vitfw show augment`."""

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from vitfw.data.augment import AugmentConfig, Size, eval_transform, statistics, train_transform
from vitfw.data.mix import BatchAugment
from vitfw.seeding import derive, seed_all

_MARGIN, _HEADER = 4, 18  # pixels


def contact_sheet(
    images: Sequence[Image.Image | Tensor],
    config: AugmentConfig,
    path: Path,
    *,
    size: Size,
    channels: int = 3,
    views: int = 4,
    seed: int = 0,
) -> Path:
    """Writes a PNG, one row a sample: as evaluation sees it, `views` training views, the same after the batch level.

    A batch is one column, so a mixed image shows its partner from another row. Colours are those before normalising.

    Raises:
        ValueError: no image, or less than one view.
    """
    if not images or views < 1:
        raise ValueError(f"contact sheet: {len(images)} images and views={views}; both must be at least 1")
    train, evaluate = (
        train_transform(config, size=size, channels=channels),
        eval_transform(config, size=size, channels=channels),
    )
    augment = BatchAugment(config, channels=channels, num_classes=len(images))
    columns = [("evaluation", torch.stack([evaluate(image) for image in images]))]
    batches = []
    for view in range(views):
        rows = []
        for row, image in enumerate(images):
            seed_all(derive(seed, "sheet", row, view))
            rows.append(train(image))
        batches.append(torch.stack(rows))
        columns.append((f"view {view}", batches[-1]))
    for view, batch in enumerate(batches):
        seed_all(derive(seed, "sheet", view))
        mixed = augment({"image": batch, "label": torch.arange(len(images))}, training=True)["image"]
        columns.append((f"batch {view}", _to_bytes(mixed, config, channels)))
    _draw(columns, size).save(path)
    return path


def _to_bytes(images: Tensor, config: AugmentConfig, channels: int) -> Tensor:
    """Normalised float [B, C, H, W] -> uint8; erased noise beyond the colours is cut off."""
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in statistics(config, channels))
    return ((images * std + mean) * 255).round().clamp(0, 255).byte()


def _draw(columns: list[tuple[str, Tensor]], size: Size) -> Image.Image:
    height, width = size[0] + _MARGIN, size[1] + _MARGIN
    rows = len(columns[0][1])
    sheet = Image.new("RGB", (_MARGIN + len(columns) * width, _HEADER + rows * height), "white")
    pen = ImageDraw.Draw(sheet)
    for number, (title, tensors) in enumerate(columns):
        pen.text((_MARGIN + number * width, 2), title, fill="black")
        for row, tensor in enumerate(tensors):
            picture = (
                tensor[:3] if tensor.shape[0] >= 3 else tensor[:1].expand(3, -1, -1)
            )  # many channels: the first three
            sheet.paste(
                Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy()),
                (_MARGIN + number * width, _HEADER + row * height),
            )
    return sheet
