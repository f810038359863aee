"""The robustness sets of `vitfw eval`: each is another evaluation set with its own rule for the score."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitfw.data.augment import eval_transform
from vitfw.data.decode import UndecodableError, decode
from vitfw.data.index import Samples
from vitfw.data.section import DataConfig
from vitfw.evaluate.corruptions import SEVERITIES, SIDE, STRENGTHS, Corrupted
from vitfw.evaluate.robustness import ALEXNET, among, class_columns, corruption_errors, real_answers, real_scores
from vitfw.evaluate.scores import classification_scores
from vitfw.launch import Launch, MachineConfig
from vitfw.opened import Opened, augment_of, evaluation_set, open_set


@dataclass(frozen=True, kw_only=True)
class RobustnessConfig:
    """Section `robustness` of `vitfw eval`: the sets that are present."""

    v2: str | None = field(default=None, metadata={"help": "ImageNet-V2, a folder or shards"})
    sketch: str | None = field(default=None, metadata={"help": "ImageNet-Sketch"})
    a: str | None = field(default=None, metadata={"help": "ImageNet-A: judged among its 200 classes"})
    r: str | None = field(default=None, metadata={"help": "ImageNet-R: judged among its 200 classes"})
    c: str | None = field(default=None, metadata={"help": "ImageNet-C: the folder of CORRUPTION/SEVERITY folders"})
    real: str | None = field(default=None, metadata={"help": "real.json; data.val must be ImageNet's validation set"})
    cifar_c: bool = field(default=False, metadata={"help": "corrupt data.val (32 x 32 pixels) on the fly"})
    frost: str | None = field(default=None, metadata={"help": "photographs of ice for cifar_c; null: without frost"})

    def __post_init__(self) -> None:
        if self.frost is not None and not self.cifar_c:
            raise ValueError(f"robustness.frost={self.frost}: only robustness.cifar_c=true reads it")


@dataclass(frozen=True)
class RobustnessSets:
    """val: the images of data.val. named: {set: (its images, the network's column of each of its classes [k])}.
    answers: ReaL labels of every image of data.val."""

    val: Samples
    named: dict[str, tuple[Samples, np.ndarray]]
    answers: list[list[int]] | None


def open_robustness(opened: Opened, config: RobustnessConfig, data: DataConfig, val: Samples) -> RobustnessSets:
    """Everything that the section names, opened before any image is looked at, so that no pass is lost to a slip.

    The sets of robustness.c are opened one by one later; that all are there, and the first is one, is known here. Raises
    ValueError or OSError for what is no such set, where classes cannot be matched by name, or for the size of pictures.
    """
    patterns = {name: pattern for name in ("v2", "sketch", "a", "r") if (pattern := getattr(config, name)) is not None}
    named = {name: _open_named(opened, data, pattern, name) for name, pattern in patterns.items()}
    for place in _c_folders(config.c).values():
        if not place.is_dir():
            raise ValueError(f"robustness.c={config.c}: {place} is missing; mCE needs all 15 x 5 folders")
    for place in list(_c_folders(config.c).values())[:1]:
        _open_named(opened, data, str(place), "c")
    answers = None
    if config.real is not None:
        answers = real_answers(Path(config.real), [val.key(row) for row in range(len(val))])
    if config.cifar_c:
        _check_sides(val)
    return RobustnessSets(val, named, answers)


def robustness_results(
    opened: Opened,
    sets: RobustnessSets,
    config: RobustnessConfig,
    data: DataConfig,
    machine: MachineConfig,
    launch: Launch,
) -> dict[str, Any]:
    """{set: its scores} of every set that the section names; entered by all ranks."""

    def scores(samples: Samples, columns: np.ndarray) -> dict[str, float]:
        found = evaluation_set(opened, data, machine, launch, samples=samples)
        kept = among(found.predict(), columns)
        return classification_scores(kept.logits, kept.labels)

    results: dict[str, Any] = {name: scores(*found) for name, found in sets.named.items()}
    if sets.answers is not None:
        predictions = evaluation_set(opened, data, machine, launch, samples=sets.val).predict()
        answers = [sets.answers[int(row)] for row in predictions.index]
        results["real"] = real_scores(predictions.logits, answers)
    if config.c is not None:
        errors: dict[str, list[float]] = {}
        for (corruption, _), place in _c_folders(config.c).items():
            accuracy = scores(*_open_named(opened, data, str(place), "c"))["acc1"]
            errors.setdefault(corruption, []).append(100.0 - accuracy)
        results["c"] = corruption_errors(errors, relative_to_alexnet=True)
    if config.cifar_c:
        results["cifar_c_generated"] = _cifar_c(opened, sets.val, config, data, machine, launch)
    return results


def _open_named(opened: Opened, data: DataConfig, pattern: str, name: str) -> tuple[Samples, np.ndarray]:
    """A set with its own class list (folder names, or classes.txt beside its shards), and the network's columns of it."""
    samples = open_set(replace(data, classes=None), pattern, f"robustness.{name}")
    return samples, class_columns(_names(opened, name), _classes(samples, name))


def _c_folders(folder: str | None) -> dict[tuple[str, int], Path]:
    """(corruption, severity) -> its folder in ImageNet-C."""
    if folder is None:
        return {}
    return {(kind, severity): Path(folder) / kind / str(severity) for kind in ALEXNET for severity in SEVERITIES}


def _check_sides(samples: Samples) -> None:
    """Refuses pictures that the strengths of CIFAR-C are not meant for. One that cannot be read is left to the pass."""
    for row in range(len(samples)):  # on every rank, so that all refuse: small pictures, and few
        try:
            picture = decode(samples.read(row))
        except (UndecodableError, OSError):
            continue
        width, height = picture.size if isinstance(picture, Image.Image) else picture.shape[:0:-1]
        if (width, height) != (SIDE, SIDE):
            raise ValueError(
                f"robustness.cifar_c=true: {samples.place(row)} is {width} x {height} pixels; the strengths are those "
                f"of {SIDE} x {SIDE} pictures"
            )


def _cifar_c(
    opened: Opened,
    samples: Samples,
    config: RobustnessConfig,
    data: DataConfig,
    machine: MachineConfig,
    launch: Launch,
) -> dict[str, Any]:
    """Mean error of each corruption over its severities, with the one that was left out named."""
    clean = eval_transform(augment_of(opened.preprocessing), size=opened.preprocessing.size, channels=opened.channels)
    names = [name for name in STRENGTHS if name != "frost" or config.frost is not None]
    errors: dict[str, list[float]] = {}
    for name in names:
        for severity in SEVERITIES:
            transform = Corrupted(name, severity, clean, frost=config.frost)
            predictions = evaluation_set(opened, data, machine, launch, samples=samples, transform=transform).predict()
            accuracy = classification_scores(predictions.logits, predictions.labels)["acc1"]
            errors.setdefault(name, []).append(100.0 - accuracy)
    result: dict[str, Any] = dict(corruption_errors(errors, relative_to_alexnet=False))
    return result if config.frost is not None else result | {"left_out": "frost"}


def _names(opened: Opened, name: str) -> tuple[str, ...]:
    if not opened.preprocessing.class_names:
        raise ValueError(
            f"robustness.{name}: the weights at {opened.place} do not name their classes, so those of the set cannot "
            "be matched; use weights that were trained with class names (folders or classes.txt)"
        )
    return opened.preprocessing.class_names


def _classes(samples: Samples, name: str) -> tuple[str, ...]:
    if samples.classes is None:
        raise ValueError(f"robustness.{name}: the set does not name its classes; use folders, or add classes.txt")
    return samples.classes
