"""`vitfw show reconstruct PLACE IMAGES... -o panel.png`: what a masked autoencoder makes of any images."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
import yaml
from PIL import Image
from torch import Tensor

from vitfw import checkpoint
from vitfw.data.augment import eval_transform
from vitfw.data.mix import BatchAugment
from vitfw.models.load_report import LoadConfig
from vitfw.models.mae_weights import (
    PUBLISHED_DECODER,
    PUBLISHED_DECODER_HEADS,
    PUBLISHED_ENCODER_HEADS,
    decoder_sizes,
    decoder_state,
    encoder_sizes,
)
from vitfw.models.model_config import ModelConfig
from vitfw.models.preprocess import Preprocessing
from vitfw.models.reading import Source, model_section, read
from vitfw.opened import augment_of
from vitfw.report.reconstruct import panel_of
from vitfw.sharded import is_folder
from vitfw.tasks.mae import MaeConfig, MaeTask, build_mae

IMAGENET = Preprocessing(size=(224, 224), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


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
    parser.add_argument("--heads", type=int, help="of the encoder of a published file whose size is none of MAE's own")
    parser.add_argument("--decoder-heads", type=int, help="the same of its decoder")
    given = parser.parse_args(list(words))
    heads = given.heads, given.decoder_heads
    task, preprocessing = open_mae(given.place, plain_target=given.plain_target, heads=heads)
    images = read_images(given.images, preprocessing)
    batch = {"image": images, "index": torch.arange(len(images)) + given.seed * len(images)}
    panel = panel_of(
        task,
        batch,
        count=len(images),
        mean=preprocessing.mean,
        std=preprocessing.std,
        caption="/".join(Path(given.place).parts[-3:]),
    )
    panel.save(given.out)
    print(f"wrote {given.out}: {len(images)} images, {panel.width} x {panel.height} pixels")
    return 0


def open_mae(
    place: str, *, plain_target: bool = False, heads: tuple[int | None, int | None] = (None, None)
) -> tuple[MaeTask, Preprocessing]:
    """A masked autoencoder with its weights, in evaluation mode, and how its images are prepared.

    plain_target, heads (of encoder and decoder): what a published file does not say. Raises ValueError for files
    without a decoder and for those that do not say what they hold.
    """
    path = Path(place)
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints" / checkpoint.LAST
    in_parts = is_folder(path)
    if not path.is_file() and not in_parts and not (path / "config.json").is_file():
        raise ValueError(f"{place}: no such checkpoint; give a run folder, a checkpoint, or a published file of MAE")
    if path.suffix == ".ckpt" or in_parts:
        return _open_own(path)
    task = _open_published(read(path), plain_target, heads)
    if task.encoder.in_channels != len(IMAGENET.mean):
        raise ValueError(
            f"{place}: takes images of {task.encoder.in_channels} channels and does not say how they are normalised; "
            "use a checkpoint of vitfw"
        )
    return task, dataclasses.replace(IMAGENET, size=task.encoder.arch.image)


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
        raise _no_decoder(str(path))
    model, config = model_section(path), MaeConfig(**section)
    assert model is not None
    labels = state["model"].get("probe.head.bias")
    task = build_mae(config, model, num_classes=0 if labels is None else len(labels))
    task.load_state_dict(state["model"])
    return task.eval(), Preprocessing.from_plain(state["preprocessing"])


def _open_published(source: Source, plain_target: bool, heads: tuple[int | None, int | None]) -> MaeTask:
    """Sizes are read off the tensors; the heads of the published sizes are known, others must be told."""
    found = decoder_state(source, LoadConfig())
    if not found:
        raise _no_decoder(source.place)
    model, decoder = encoder_sizes(source, LoadConfig()), decoder_sizes(found)
    if heads[0] is not None:
        model["heads"] = heads[0]
    if "heads" not in model:
        raise ValueError(
            f"{source.place}: an encoder of width {model['width']} is none of the published ones "
            f"({', '.join(map(str, PUBLISHED_ENCODER_HEADS))}), and no tensor shows its heads: give --heads"
        )
    published = (decoder["decoder_width"], decoder["decoder_depth"]) == PUBLISHED_DECODER
    decoder["decoder_heads"] = heads[1] or (PUBLISHED_DECODER_HEADS if published else None)
    if decoder["decoder_heads"] is None:
        raise ValueError(
            f"{source.place}: a decoder of {decoder['decoder_width']} x {decoder['decoder_depth']} is not the published "
            f"one ({PUBLISHED_DECODER[0]} x {PUBLISHED_DECODER[1]}), and no tensor shows its heads: give --decoder-heads"
        )
    config = MaeConfig(normalise_target=not plain_target, **decoder)
    task = build_mae(config, ModelConfig(variant="mae_b16", **model), num_classes=0)
    task.load_weights(source.place, LoadConfig())
    return task.eval()


def _no_decoder(place: str) -> ValueError:
    return ValueError(
        f"{place}: holds no decoder weights (it is an encoder alone, for fine-tuning), so it cannot reconstruct images; "
        "use a checkpoint of the pretraining run, or the published file with decoder weights"
    )
