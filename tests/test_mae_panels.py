"""The pictures of masked autoencoding tell the truth: exact predictions give the input back, and sources are named."""

from pathlib import Path

import pytest
import torch
from torch import nn

from vitfw.models.model_config import ModelConfig
from vitfw.models.patches import normalise_patches, patchify
from vitfw.report.reconstruct import NO_STATISTICS, TRUE_STATISTICS, draw_panel, reconstruct, save_training_panel
from vitfw.tasks.classify import ClassifyConfig, build_classify
from vitfw.tasks.mae import MaeConfig, MaeTask, build_mae

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def small_task(**options) -> MaeTask:
    torch.manual_seed(0)
    model = ModelConfig(variant="mae_ti4", image_size=16, width=32, depth=1, heads=2)
    config = MaeConfig(**({"decoder_width": 24, "decoder_depth": 1, "decoder_heads": 2} | options))
    return build_mae(config, model, num_classes=0).eval()


def pixels_and_images(count: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 pixels, and the images the network gets."""
    pixels = torch.randint(256, (count, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return pixels, (pixels / 255 - mean) / std


class ExactDecoder(nn.Module):
    """Predicts each patch's true target."""

    def __init__(self, images: torch.Tensor, *, normalise: bool):
        super().__init__()
        patches = patchify(images, (4, 4))
        self.answer = normalise_patches(patches) if normalise else patches

    def forward(self, tokens, visible, removed, *, grid, everywhere):
        return self.answer


@pytest.mark.parametrize("normalise", [True, False])
def test_exact_prediction_gives_the_input_back(normalise: bool) -> None:
    """P81: to one grey level, with the source of the statistics named."""
    task = small_task(normalise_target=normalise)
    pixels, images = pixels_and_images()
    task.decoder = ExactDecoder(images, normalise=normalise)  # type: ignore[assignment]
    numbers = torch.rand(4, 16)
    made = reconstruct(task, images, numbers, mean=MEAN, std=STD)
    for title in ("original", "output", "pasted in"):
        assert (made.picture(title).int() - pixels.int()).abs().max() <= 1, title
    assert made.losses.max() < 1e-8
    assert made.source == (TRUE_STATISTICS if normalise else NO_STATISTICS)
    assert ("output, normalised" in dict(made.columns)) == normalise
    if normalise:  # an exact prediction is its target, and visible patches show nothing
        target = made.picture("target, normalised")
        assert torch.equal(made.picture("output, normalised"), target)
        visible, _ = task.masks(images, numbers)
        shown = patchify(target.float(), (4, 4))
        assert (shown[torch.arange(4)[:, None], visible] == 128).all()


def test_masked_and_pasted_pictures() -> None:
    task = small_task()
    pixels, images = pixels_and_images()
    numbers = torch.rand(4, 16)
    made = reconstruct(task, images, numbers, mean=MEAN, std=STD)
    _, removed = task.masks(images, numbers)
    mask = torch.zeros(4, 16).scatter_(1, removed, 1.0).view(4, 1, 4, 4)
    hidden = mask.repeat_interleave(4, 2).repeat_interleave(4, 3).bool().expand(-1, 3, -1, -1)
    assert (made.picture("masked")[hidden].int() - 128).abs().max() <= 1  # grey where nothing is seen
    for title in ("masked", "pasted in"):
        assert (made.picture(title)[~hidden].int() - pixels[~hidden].int()).abs().max() <= 1
    assert torch.equal(made.picture("pasted in")[hidden], made.picture("output")[hidden])
    loss, _ = task.reconstruct(images, numbers)
    torch.testing.assert_close(made.losses, loss)


def test_predictions_of_visible_patches_do_not_count() -> None:
    """P81: other values there leave the losses as they are; one other value on a removed patch moves its image's loss."""
    task = small_task()
    _, images = pixels_and_images()
    task.decoder = ExactDecoder(images, normalise=True)  # type: ignore[assignment]
    numbers = torch.rand(4, 16)
    visible, removed = task.masks(images, numbers)
    for image in range(4):
        task.decoder.answer[image, visible[image]] += 3.0
    assert reconstruct(task, images, numbers, mean=MEAN, std=STD).losses.max() < 1e-8
    task.decoder.answer[0, removed[0, 0], 0] += 1.0
    losses = reconstruct(task, images, numbers, mean=MEAN, std=STD).losses
    assert losses[0].item() == pytest.approx(1 / (12 * 48), rel=1e-3)
    assert losses[1:].max() < 1e-8


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_panel_has_a_row_an_image_and_a_column_a_picture(channels: int) -> None:
    model = ModelConfig(
        variant="mae_ti4", image_height=8, image_width=16, in_channels=channels, width=32, depth=1, heads=2
    )
    task = build_mae(MaeConfig(decoder_width=24, decoder_depth=1, decoder_heads=2), model, num_classes=0).eval()
    images = torch.randn(2, channels, 8, 16)
    made = reconstruct(task, images, torch.rand(2, 8), mean=[0.5] * channels, std=[0.5] * channels)
    panel = draw_panel(made, caption="a caption")
    assert panel.size[0] >= 6 * 112
    assert panel.size[1] >= 2 * 56
    assert panel.mode == "RGB"


def test_training_panels_show_the_same_images_and_masks(tmp_path: Path) -> None:
    task = small_task()
    _, images = pixels_and_images()
    batch = {"image": images, "index": torch.arange(4)}
    first = save_training_panel(task, batch, tmp_path / "a", step=5, mean=MEAN, std=STD)
    torch.manual_seed(99)
    again = save_training_panel(task, batch, tmp_path / "b", step=5, mean=MEAN, std=STD)
    assert first is not None
    assert again is not None
    assert first.name == "step-00000005.png"
    assert first.read_bytes() == again.read_bytes()
    assert save_training_panel(task, batch, None, step=5, mean=MEAN, std=STD) is None
    other = build_classify(
        ClassifyConfig(), ModelConfig(variant="vit_ti4", image_size=16, width=32, depth=1, heads=2), num_classes=3
    )
    assert save_training_panel(other, batch, tmp_path / "c", step=5, mean=MEAN, std=STD) is None
    assert not (tmp_path / "c").exists()
