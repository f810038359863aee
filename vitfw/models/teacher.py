"""A frozen network that teaches another one: any model of timm, a folder, or a checkpoint of vitfw.

A `Teacher` is no `nn.Module` on purpose. A task that holds one neither saves, trains, averages, shards nor compiles it,
and DDP neither reduces its gradients nor sends its buffers around.
"""

import json
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitfw.models.build import TimmModel
from vitfw.models.export import build_for
from vitfw.models.load_report import LoadConfig
from vitfw.models.preprocess import Preprocessing
from vitfw.models.reading import UntrustedError, read
from vitfw.models.weights import load
from vitfw.sharded import is_folder

Statistics = tuple[tuple[float, ...], tuple[float, ...]]  # mean and deviation of each channel, for images in 0 to 1


class Teacher:
    """Called with the student's images it answers in evaluation mode, without gradient, on the images' device."""

    def __init__(
        self,
        net: nn.Module,
        place: str,
        statistics: Statistics,
        *,
        size: int | None = None,
        class_names: tuple[str, ...] = (),
    ) -> None:
        """`net`: a ViT or a TimmModel. `size`: side in pixels that images are resized to; None: as they come.
        `class_names`: of its logits, where its place names them."""
        self.net: Any = net.eval().requires_grad_(False)
        self.place, self.size, self.class_names = place, size, class_names
        self.width, self.num_classes = int(self.net.embed_dim), int(self.net.num_classes)
        self.normalisation = torch.tensor(statistics)  # [2, C]: mean, deviation
        self.device = self.normalisation.device

    @torch.no_grad()
    def __call__(
        self, images: Tensor, normalisation: Tensor, *, output: Literal["logits", "pooled"] = "logits"
    ) -> Tensor:
        """Images [B, C, H, W] as the student sees them: augmented, mixed, and normalised with `normalisation` [2, C]
        (mean, deviation) -> logits [B, K], or the head's input [B, D]."""
        if self.device != images.device:
            self.net.to(images.device)
            self.normalisation, self.device = self.normalisation.to(images.device), images.device
        images = renormalise(images, normalisation, self.normalisation)
        if self.size is not None:
            images = F.interpolate(images, (self.size, self.size), mode="bicubic", antialias=True)
        return self.net(images, output=output)


def renormalise(images: Tensor, given: Tensor, wanted: Tensor) -> Tensor:
    """Images [B, C, H, W] normalised with `given` [2, C] -> the same images normalised with `wanted`.

    Exact for mixed images too, since both are affine: what was mixed in one normalisation is mixed in the other.
    """
    (mean, std), (own_mean, own_std) = (values[:, :, None, None] for values in (given, wanted))
    return images * (std / own_std) + (mean - own_mean) / own_std


def load_teacher(place: str, *, statistics: Statistics | None = None, size: int | None = None) -> Teacher:
    """Reads `timm:NAME` (published weights), an export, a timm or a run folder, or a checkpoint of vitfw.

    `statistics` overrules what the place says about its images. Inside `torch.device("meta")` no weights are read.

    Raises ValueError naming task.teacher, where nothing can be loaded, or nobody says how images are normalised.
    """
    try:
        net, told = _from_timm(place.removeprefix("timm:")) if place.startswith("timm:") else _from_disk(place)
    except UntrustedError as error:
        raise ValueError(
            f"task.teacher={place}: {error.place} needs code to be read{error.need}, which could do anything; convert it to "
            ".safetensors once"
        ) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"task.teacher={place}: its config.json is damaged ({error})") from error
    except ValueError as error:
        raise ValueError(f"task.teacher={place}: {error}") from error
    if statistics is None:
        if told is None:
            raise ValueError(
                f"task.teacher={place}: it does not say how its images were normalised; set task.teacher_mean and "
                "task.teacher_std, one number a channel"
            )
        statistics = told.mean, told.std
    return Teacher(net, place, statistics, size=size, class_names=() if told is None else told.class_names)


def check_teacher(
    teacher: Teacher, *, image: tuple[int, int, int], num_classes: int | None, own_statistics: bool = False
) -> None:
    """Shows the teacher one image [C, H, W] of zeros. `num_classes` None: its logits are not used. `own_statistics`: how it
    wants images normalised stands in the configuration.

    Raises ValueError naming the key, where channels, size or classes do not fit.
    """
    channels = teacher.normalisation.shape[1]
    if channels != image[0] and own_statistics:
        raise ValueError(
            f"task.teacher_mean and task.teacher_std have {channels} numbers, the images have {image[0]} channel(s); give "
            "one number a channel"
        )
    if channels != image[0]:
        raise ValueError(
            f"task.teacher={teacher.place}: it takes {channels} channels, the student's images have {image[0]}; choose "
            f"another teacher, or model.in_channels={channels}"
        )
    if num_classes is not None and teacher.num_classes != num_classes:
        raise ValueError(
            f"task.teacher={teacher.place}: it knows {teacher.num_classes} classes, the student {num_classes}; choose a "
            "teacher of the same classes in the same order, or task.form=feature, which needs none"
        )
    try:
        teacher(torch.zeros(1, *image), torch.tensor([[0.0] * channels, [1.0] * channels]))
    except (RuntimeError, AssertionError, ValueError) as error:
        size = f"{teacher.size} x {teacher.size}" if teacher.size else f"{image[1]} x {image[2]}"
        first = str(error).strip().split("\n")[0]
        raise ValueError(
            f"task.teacher={teacher.place}: it cannot take images of {size} pixels ({first}); set task.teacher_size to "
            "the side that it was trained with"
        ) from error


def check_class_names(teacher: Teacher, names: tuple[str, ...] | None) -> None:
    """Raises ValueError where the teacher's classes and those of the data are named, and stand for different things."""
    if not names or not teacher.class_names:
        return
    for place, (theirs, ours) in enumerate(zip(teacher.class_names, names, strict=False)):
        if theirs != ours:
            raise ValueError(
                f"task.teacher={teacher.place}: class {place} is {theirs!r} for the teacher and {ours!r} in data.train; "
                "give data.classes in the teacher's order (folders), pack the shards with --classes in that order, or "
                "choose a teacher of these classes"
            )


def _on_meta() -> bool:
    return torch.get_default_device().type == "meta"


def _from_timm(name: str) -> tuple[nn.Module, Preprocessing]:
    """`local-dir:FOLDER` or a name. On the meta device only what timm knows about it."""
    import timm

    try:
        net = timm.create_model(name, pretrained=not _on_meta())
    except Exception as error:  # unknown name, no published weights, no network, files missing
        first = str(error).strip().split("\n")[0]
        raise ValueError(f"timm cannot provide it ({type(error).__name__}: {first})") from error
    config: Any = net.pretrained_cfg
    size = config["input_size"]
    return TimmModel(name, net, (size[1], size[2])), Preprocessing.from_timm_config(config)


def _from_disk(place: str) -> tuple[nn.Module, Preprocessing | None]:
    folder = Path(place.removeprefix("local-dir:"))
    in_parts = is_folder(folder)  # a checkpoint
    if folder.is_dir() and not in_parts and not (folder / "config.json").is_file():
        if not (folder / "export" / "config.json").is_file():
            raise ValueError(
                "the folder has neither config.json nor export/config.json; of a run that has not finished name a "
                "checkpoint, such as checkpoints/best.ckpt"
            )
        folder = folder / "export"
    if (
        folder.is_dir()
        and not in_parts
        and "architecture" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    ):
        return _from_timm(f"local-dir:{folder}")
    source = read(folder)
    net, classes = build_for(source)
    if not _on_meta():
        load(net, folder, LoadConfig(head="keep" if classes else "auto"))
    return net, source.preprocessing
