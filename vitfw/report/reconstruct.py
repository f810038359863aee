"""Pictures of masked autoencoding: original, masked, prediction, and the prediction pasted between the visible patches.

A model with normalised targets predicts each patch without its mean and deviation. To show its output as pixels, these
are taken from the true patch, which the model has not seen: the caption says so, and the prediction is shown in its own
space as well, beside its target. What it says about visible patches was never trained: it is left out there, and the
caption speaks of it where the whole output is shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from vitfw.models.masks import binary_mask
from vitfw.models.patches import normalise_patches, patch_statistics, patchify, unpatchify
from vitfw.tasks.mae import MaeTask
from vitfw.tasks.task import Batch, Task

SPREAD = 2.0  # target and prediction are shown from -2 (black) to 2 (white) deviations
SMALLEST, LARGEST = 112, 448  # pixels of a picture's longer side, after enlarging small images by whole factors
FONT, LINE, GAP, LOSS = 12, 18, 4, 48  # pixels: letters, a line of them, between pictures, the column of losses
TRUE_STATISTICS = "pixels of the output: with mean and deviation of each TRUE patch, which the model has not seen"
NO_STATISTICS = "pixels of the output: as predicted"
UNTRAINED = "what it says about visible patches is never trained"


@dataclass(frozen=True)
class Reconstruction:
    """columns: (title, pictures uint8 [B, C, H, W]) from left to right; losses: of each image [B]; source: where the
    statistics of the shown pixels come from."""

    columns: tuple[tuple[str, Tensor], ...]
    losses: Tensor
    source: str

    def picture(self, title: str) -> Tensor:
        return dict(self.columns)[title]


@torch.no_grad()
def reconstruct(
    task: MaeTask, images: Tensor, numbers: Tensor, *, mean: Sequence[float], std: Sequence[float]
) -> Reconstruction:
    """Images [B, C, H, W] as the network takes them, numbers of the masks -> pictures.

    mean, std: of each channel for pixels in 0 to 1, the inverse of what made the images. Entered in evaluation mode,
    by all ranks of a sharded task.
    """
    grid, patch = task.grid(images), task.encoder.patch_size
    visible, removed = task.masks(images, numbers)
    tokens = task.encoder(images, keep=visible, output="tokens")
    predicted = task.decoder(tokens, visible, removed, grid=grid, everywhere=True).float()
    true = patchify(images, patch).float()
    hidden = binary_mask(removed, true.shape[1])[:, :, None].bool()
    columns = [
        ("original", images.float()),
        ("masked", unpatchify(torch.where(hidden, _grey(true, mean, std), true), patch, grid)),
    ]
    pixels = predicted
    if task.config.normalise_target:
        centre, deviation = patch_statistics(true)
        pixels = predicted * deviation + centre
    columns += [
        ("output", unpatchify(pixels, patch, grid)),
        ("pasted in", unpatchify(torch.where(hidden, pixels, true), patch, grid)),
    ]
    shown = [(title, _to_pixels(value, mean, std)) for title, value in columns]
    if task.config.normalise_target:
        for title, patches in (("output, normalised", predicted), ("target, normalised", normalise_patches(true))):
            space = 0.5 + unpatchify(torch.where(hidden, patches, 0.0), patch, grid) / (2 * SPREAD)
            shown.insert(2, (title, _to_bytes(space)))
    target = task.targets(images, removed)
    chosen = predicted[torch.arange(len(images), device=images.device)[:, None], removed]
    losses = (chosen - target).square().flatten(1).mean(1)
    source = TRUE_STATISTICS if task.config.normalise_target else NO_STATISTICS
    return Reconstruction(tuple(shown), losses, source)


def draw_panel(made: Reconstruction, *, caption: str) -> Image.Image:
    """One row an image, one column a kind of picture, its loss at the end; titles above, lines of caption below."""
    _, _, height, width = made.columns[0][1].shape
    factor = max(1, -(-SMALLEST // max(height, width)))
    shrink = min(1.0, LARGEST / max(height * factor, width * factor))
    size = (round(width * factor * shrink), round(height * factor * shrink))
    font, rows = ImageFont.load_default(FONT), len(made.losses)
    texts = [caption, made.source, UNTRAINED]
    across = len(made.columns) * (size[0] + GAP) + GAP
    panel = Image.new(
        "RGB",
        (
            max(across + LOSS, *(int(font.getlength(text)) + 2 * GAP for text in texts)),
            LINE + rows * (size[1] + GAP) + LINE * len(texts) + GAP,
        ),
        "white",
    )
    draw = ImageDraw.Draw(panel)
    for column, (title, pictures) in enumerate(made.columns):
        left = GAP + column * (size[0] + GAP)
        draw.text((left, 2), title, fill="black", font=font)
        for row, picture in enumerate(pictures):
            resample = Image.Resampling.NEAREST if shrink == 1.0 else Image.Resampling.LANCZOS
            panel.paste(_as_image(picture).resize(size, resample), (left, LINE + row * (size[1] + GAP)))
    draw.text((across, 2), "loss", fill="black", font=font)
    for row, loss in enumerate(made.losses.tolist()):
        draw.text((across, LINE + row * (size[1] + GAP)), f"{loss:.3f}", fill="black", font=font)
    for line, text in enumerate(texts):
        draw.text((GAP, panel.height - LINE * (len(texts) - line)), text, fill="black", font=font)
    return panel


def panel_of(
    task: MaeTask, batch: Batch, *, count: int, mean: Sequence[float], std: Sequence[float], caption: str
) -> Image.Image:
    """The first `count` images of a prepared evaluation batch, each under the mask that evaluation gives it."""
    images, index = batch["image"][:count], batch["index"][:count]
    made = reconstruct(task, images, task.fixed_masks(images, index), mean=mean, std=std)
    masks = f"{task.config.mask} mask, {task.config.mask_ratio:.0%} removed"
    return draw_panel(made, caption=f"{caption}; {masks}; {_channels(images.shape[1])}")


def save_training_panel(
    task: Task,
    batch: Batch,
    folder: Path | None,
    *,
    step: int,
    mean: Sequence[float],
    std: Sequence[float],
    count: int = 6,
) -> Path | None:
    """Writes `FOLDER/step-STEP.png` for an MAE task, and does nothing for others. Called on all ranks in evaluation mode,
    with the first batch of the evaluation set, so the images are the same through training; `folder` None: not written."""
    if not isinstance(task, MaeTask):
        return None
    panel = panel_of(task, batch, count=count, mean=mean, std=std, caption=f"step {step}")
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:08d}.png"
    panel.save(path)
    return path


def _grey(patches: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Patches [B, N, P] of mid-grey pixels, in the space of the network's images."""
    channel = [(0.5 - m) / s for m, s in zip(mean, std, strict=True)]
    return patches.new_tensor(channel).repeat(patches.shape[2] // len(channel)).expand_as(patches)


def _to_pixels(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    scale = images.new_tensor(list(std)).view(1, -1, 1, 1)
    return _to_bytes(images * scale + images.new_tensor(list(mean)).view(1, -1, 1, 1))


def _to_bytes(images: Tensor) -> Tensor:
    return (255 * images).round().clamp(0, 255).to(torch.uint8).cpu()


def _as_image(picture: Tensor) -> Image.Image:
    """uint8 [C, H, W]: three or more channels as red, green, blue, fewer as grey of the first."""
    if picture.shape[0] < 3:
        return Image.fromarray(picture[0].numpy()).convert("RGB")
    return Image.fromarray(picture[:3].permute(1, 2, 0).contiguous().numpy())


def _channels(count: int) -> str:
    return {1: "grey", 3: "colour"}.get(count, f"{'channels 1 to 3' if count > 3 else 'channel 1'} of {count}")
