"""`vitfw show reconstruct PLACE IMAGES... -o panel.png`: what a masked autoencoder makes of any images."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import yaml
from PIL import Image
from torch import Tensor

from vitfw import checkpoint
from vitfw.data.augment import eval_transform
from vitfw.data.mix import BatchAugment
from vitfw.models.mae_weights import from_published, refuse_without_decoder
from vitfw.models.model_config import ModelConfig
from vitfw.models.preprocess import Preprocessing
from vitfw.models.reading import model_section, read
from vitfw.opened import augment_of
from vitfw.report.reconstruct import panel_of
from vitfw.tasks.mae import MaeConfig, MaeTask, build_mae

IMAGENET = Preprocessing(size=(224, 224), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
PUBLISHED_WIDTHS = {768: "b", 1024: "l", 1280: "h"}  # widths of the encoders that were published
PUBLISHED_DECODER_HEADS = 16


def show_reconstruct(words: Sequence[str]) -> int:
    """PLACE IMAGES... -o panel.png: original, masked, output and pasted-in of a masked autoencoder"""
    parser = argparse.ArgumentParser(prog="vitfw show reconstruct", description=show_reconstruct.__doc__)
    parser.add_argument("place", help="run folder or checkpoint of recipe mae_*, or a published file with its decoder")
    parser.add_argument("images", nargs="+", help="image files")
    parser.add_argument("-o", "--out", default="panel.png", help="the PNG to write")
    parser.add_argument("--seed", type=int, default=0, help="another number draws other masks")
    parser.add_argument(
        "--plain-target",
        action="store_true",
        help="a published file that was trained on pixels that are not normalised",
    )
    given = parser.parse_args(list(words))
    task, preprocessing = open_mae(given.place, plain_target=given.plain_target)
    images = read_images(given.images, preprocessing)
    batch = {"image": images, "index": torch.arange(len(images)) + given.seed * len(images)}
    panel = panel_of(
        task,
        batch,
        count=len(images),
        mean=preprocessing.mean,
        std=preprocessing.std,
        caption=Path(given.place).name,
    )
    panel.save(given.out)
    print(f"wrote {given.out}: {len(images)} images, {panel.width} x {panel.height} pixels")
    return 0


def open_mae(place: str, *, plain_target: bool = False) -> tuple[MaeTask, Preprocessing]:
    """A masked autoencoder with its weights, in evaluation mode, and how its images are prepared.

    Raises ValueError for files without a decoder and for those that do not say what they hold.
    """
    path = Path(place)
    if path.is_dir():
        path = path / "checkpoints" / checkpoint.LAST
    if not path.is_file():
        raise ValueError(f"{place}: no such checkpoint; give a run folder, a checkpoint, or a published file of MAE")
    if path.suffix == ".ckpt":
        return _open_own(path)
    state = dict(read(path).state)
    refuse_without_decoder(state, str(path))
    return _open_published(state, place, plain_target), IMAGENET


def read_images(paths: Sequence[str], preprocessing: Preprocessing) -> Tensor:
    """Image files -> float [B, C, H, W] as the network takes them."""
    augment, channels = augment_of(preprocessing), len(preprocessing.mean)
    transform = eval_transform(augment, size=preprocessing.size, channels=channels)
    mode = {1: "L", 3: "RGB"}.get(channels)
    if mode is None:
        raise ValueError(f"this network takes images of {channels} channels; image files have 1 or 3")
    pixels = torch.stack([transform(Image.open(path).convert(mode)) for path in paths])
    return BatchAugment(augment, channels=channels)({"image": pixels}, training=False)["image"]


def _open_own(path: Path) -> tuple[MaeTask, Preprocessing]:
    state = checkpoint.load(path)
    section = (yaml.safe_load(state["config"]) or {}).get("task") or {}
    if section.get("name") != "mae":
        refuse_without_decoder(state["model"], str(path))
    model, config = model_section(path), MaeConfig(**section)
    assert model is not None
    labels = state["model"].get("probe.head.bias")
    task = build_mae(config, model, num_classes=0 if labels is None else len(labels))
    task.load_state_dict(state["model"])
    return task.eval(), Preprocessing.from_plain(state["preprocessing"])


def _open_published(state: dict[str, Tensor], place: str, plain_target: bool) -> MaeTask:
    """Sizes are read off the tensors; heads and image size are those of the published models."""
    width, patch = state["cls_token"].shape[2], state["patch_embed.proj.weight"].shape[2]
    if width not in PUBLISHED_WIDTHS:
        raise ValueError(
            f"{place}: an encoder of width {width} is none of the published ones "
            f"({', '.join(f'{name} {size}' for size, name in PUBLISHED_WIDTHS.items())}), so its heads are unknown"
        )
    depth = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("decoder_blocks."))
    config = MaeConfig(
        decoder_width=state["mask_token"].shape[2],
        decoder_depth=depth,
        decoder_heads=PUBLISHED_DECODER_HEADS,
        normalise_target=not plain_target,
    )
    task = build_mae(config, ModelConfig(variant=f"mae_{PUBLISHED_WIDTHS[width]}{patch}"), num_classes=0)
    task.load_state_dict(from_published(state))
    return task.eval()
