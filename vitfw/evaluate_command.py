"""`vitfw eval PLACE data.val=...` and `vitfw predict PLACE IMAGES...`: what the commands do, as functions.

PLACE is anything that names its network: a run folder, a checkpoint, an export, `timm:NAME`. How images are prepared
comes from it too, so a result belongs to the weights and not to the words.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitfw.data.augment import eval_transform
from vitfw.data.decode import UndecodableError, decode
from vitfw.data.index import Samples
from vitfw.data.mix import BatchAugment
from vitfw.data.section import DataConfig, open_split
from vitfw.evaluate.calibration import fit_temperature, reliability, softmax
from vitfw.evaluate.multilabel import fit_thresholds, multilabel_scores
from vitfw.evaluate.predictions import Predictions, write_predictions
from vitfw.evaluate.resolution import at_size
from vitfw.evaluate.scores import class_table, classification_scores, confusion_matrix
from vitfw.launch import Launch, MachineConfig
from vitfw.models.reading import Which
from vitfw.opened import (
    Opened,
    augment_of,
    autocast_of,
    evaluation_set,
    for_head,
    named,
    open_network,
    open_set,
    parse,
    shared_images,
    start,
)
from vitfw.robustness_sets import RobustnessConfig, open_robustness, robustness_results
from vitfw.run import write_text


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """The words of `vitfw eval`."""

    data: DataConfig = field(default_factory=DataConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    out: str | None = field(default=None, metadata={"help": "folder for results; default: only the text"})
    which: Which = field(default="auto", metadata={"help": "raw or averaged weights; auto: averaged where there are"})
    predictions: str | None = field(default=None, metadata={"help": "file for one row an image: .csv or .parquet"})
    calibrate: str | None = field(
        default=None, metadata={"help": "images never trained on, beside data.val: temperature, thresholds"}
    )
    sizes: tuple[int, ...] = field(default=(), metadata={"help": "image sides in pixels to test as well"})
    crop: float | None = field(default=None, metadata={"help": "centre crop / short side; default: the weights' own"})
    robustness: RobustnessConfig = field(default_factory=RobustnessConfig)

    def __post_init__(self) -> None:
        if self.crop is not None and not 0 < self.crop <= 1:
            raise ValueError(f"crop={self.crop}: must lie in (0, 1]")
        if any(size < 1 for size in self.sizes):
            raise ValueError(f"sizes={list(self.sizes)}: image sides in pixels, each 1 or more")


def evaluate_place(place: str, words: Sequence[str]) -> dict[str, Any]:
    """`vitfw eval`: everything that was asked for, printed, and written to `out`; the results on every rank."""
    config = parse(EvaluateConfig, words)
    launch = start(config.machine)
    opened = open_network(place, launch, config.machine, which=config.which)
    if opened.classes < 1:
        raise ValueError(
            f"{place}: the network has no head with classes, so there is no answer to score; "
            "vitfw probe says what its features are worth"
        )
    if config.crop is not None:
        opened = dataclasses.replace(opened, preprocessing=dataclasses.replace(opened.preprocessing, crop=config.crop))
    samples, held = _sets(opened, config, launch)
    sets = open_robustness(opened, config.robustness, config.data, samples)  # faults are met before the passes
    results, texts = _main_results(opened, config, launch, samples, held)
    for name, value in robustness_results(opened, sets, config.robustness, config.data, config.machine, launch).items():
        results[name] = value
        texts.append(f"{name:<14} {json.dumps(value)}")
    if launch.is_main:
        if config.out is not None:
            Path(config.out).mkdir(parents=True, exist_ok=True)
            write_text(Path(config.out) / "results.json", json.dumps(results, indent=2) + "\n")
        print("\n".join(texts), flush=True)
    return results


def _sets(opened: Opened, config: EvaluateConfig, launch: Launch) -> tuple[Samples, Samples | None]:
    """The images of data.val and of calibrate=, which must be others. Raises ValueError for what cannot be scored."""
    samples = for_head(opened, open_split(config.data, "val"), "data.val", launch)
    if not samples.labelled:
        raise ValueError(f"data.val={config.data.val} has no labels: it can be predicted (vitfw predict), not scored")
    if config.calibrate is None:
        return samples, None
    held = for_head(opened, open_set(config.data, config.calibrate, "calibrate"), "calibrate", launch)
    if not held.labelled:
        raise ValueError(f"calibrate={config.calibrate} has no labels: temperature and thresholds are fitted to them")
    if both := shared_images(samples, held):
        raise ValueError(
            f"calibrate={config.calibrate}: {both:,} of its {len(held):,} images are in data.val itself: fitting there "
            "would flatter the result"
        )
    return samples, held


def _main_results(
    opened: Opened, config: EvaluateConfig, launch: Launch, samples: Samples, kept: Samples | None
) -> tuple[dict[str, Any], list[str]]:
    """Results on data.val: scores, per-class table, confusion, calibration (on the images `kept`), other sizes."""
    found = evaluation_set(opened, config.data, config.machine, launch, samples=samples)
    predictions = found.predict()
    held = None if kept is None else evaluation_set(opened, config.data, config.machine, launch, samples=kept).predict()
    prepared = opened.preprocessing
    results: dict[str, Any] = {
        "weights": opened.place,
        "entry": opened.entry,
        "data": config.data.val,
        "images_in_set": len(found.samples),
        "preprocessing": {key: value for key, value in prepared.plain().items() if key != "class_names"},
    }
    if len(predictions.index) < len(found.samples):
        results["left_out"] = len(found.samples) - len(predictions.index)
    names = named(found.samples.classes or prepared.class_names, opened.classes)
    if predictions.multi_label:
        thresholds = np.zeros(opened.classes) if held is None else fit_thresholds(held.logits, held.labels).values
        results["scores"] = multilabel_scores(predictions.logits, predictions.labels, thresholds)
        results["thresholds"] = thresholds.tolist()
        results["thresholds_from"] = config.calibrate or "probability 0.5"
    else:
        results |= _single_label(predictions, held, config.calibrate, names)
    if config.sizes:
        results["sizes"] = {str(size): _at_size(opened, config, launch, found.samples, size) for size in config.sizes}
    if config.predictions is not None and launch.is_main:
        write_predictions(Path(config.predictions), predictions, key=found.samples.key, classes=names)
    shown = {**results["scores"], **results.get("calibrated", {})}
    lines = [f"{opened.place} ({opened.entry}) on {config.data.val}:"]
    width = 2 + max(map(len, shown))
    lines += [f"{name:<{width}}{value:,.6g}" for name, value in shown.items()]
    lines += [f"{'size ' + size:<{width}}{json.dumps(value)}" for size, value in results.get("sizes", {}).items()]
    if "left_out" in results:
        lines.append(f"{results['left_out']} images could not be read and count nowhere")
    return results, lines


def _single_label(
    predictions: Predictions, held: Predictions | None, source: str | None, names: tuple[str, ...]
) -> dict[str, Any]:
    logits, labels = predictions.logits, predictions.labels
    confusion = confusion_matrix(logits, labels)
    diagram = reliability(softmax(logits), labels)
    results: dict[str, Any] = {
        "scores": classification_scores(logits, labels),
        "classes": [dataclasses.asdict(row) for row in class_table(confusion, names)],
        "confusion": confusion.tolist(),
        "reliability": {name: np.asarray(value).tolist() for name, value in vars(diagram).items()},
    }
    if held is not None:
        temperature = fit_temperature(held.logits, held.labels)
        scaled = classification_scores(logits / temperature, labels)
        results["calibrated"] = {"temperature": temperature} | {
            f"{name}_calibrated": scaled[name] for name in ("nll", "ece", "ece_classwise", "brier")
        }
        results["calibrated_on"] = f"{len(held.labels):,} images of {source}"
    return results


def _at_size(opened: Opened, config: EvaluateConfig, launch: Launch, samples: Samples, size: int) -> dict[str, float]:
    other = evaluation_set(opened, config.data, config.machine, launch, samples=samples, size=size)
    predictions = other.predict(at_size(opened.network, size))
    return classification_scores(predictions.logits, predictions.labels)


@dataclass(frozen=True, kw_only=True)
class PredictConfig:
    """The words of `vitfw predict`."""

    machine: MachineConfig = field(default_factory=MachineConfig)
    which: Which = field(default="auto", metadata={"help": "raw or averaged weights"})
    top: int = field(default=5, metadata={"help": "classes shown for each image"})

    def __post_init__(self) -> None:
        if self.top < 1:
            raise ValueError(f"top={self.top}: must be at least 1")


def predict_images(place: str, images: Sequence[str], words: Sequence[str] = ()) -> list[list[tuple[str, float]]]:
    """`vitfw predict`: image files in, (class name, probability) of the best classes out, printed as well.

    A single process; images one at a time, so any number and shape of them works. One that cannot be read is named on
    stderr and has no answers; the others go on.
    """
    config = parse(PredictConfig, words)
    if not images:
        raise ValueError("no image is named: vitfw predict PLACE IMAGE...")
    missing = [name for name in images if not Path(name).is_file()]
    if missing:
        raise ValueError(f"{missing[0]}: no such image file{f' (and {len(missing) - 1} more)' * (len(missing) > 1)}")
    opened = open_network(place, Launch("python"), config.machine, which=config.which)
    if opened.classes < 2:
        raise ValueError(f"{place}: the network has no head with classes; there is nothing to predict")
    augment = augment_of(opened.preprocessing)
    transform = eval_transform(augment, size=opened.preprocessing.size, channels=opened.channels)
    to_device = BatchAugment(augment, channels=opened.channels).to(opened.device)
    names = named(opened.preprocessing.class_names, opened.classes)
    answers: list[list[tuple[str, float]]] = []
    for name in images:
        try:
            pixels = transform(decode(Path(name).read_bytes(), channels=opened.channels))
        except (UndecodableError, OSError) as error:  # Pillow's word for a truncated file is OSError
            print(f"vitfw: {name}: {error}", file=sys.stderr, flush=True)
            answers.append([])
            continue
        batch = to_device({"image": pixels[None].to(opened.device)}, training=False)
        with torch.no_grad(), autocast_of(config.machine, opened.device):
            logits = opened.network(batch["image"]).float().cpu().numpy()
        shares = softmax(logits)[0]
        best = np.argsort(-shares, kind="stable")[: config.top]
        answers.append([(names[number], float(shares[number])) for number in best])
        print(f"{name}\t" + "\t".join(f"{label} {share:.4f}" for label, share in answers[-1]), flush=True)
    return answers
