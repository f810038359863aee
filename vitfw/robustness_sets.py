"""The robustness sets of `vitfw eval`: each is another evaluation set with its own rule for the score."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vitfw.data.augment import eval_transform
from vitfw.data.index import Samples
from vitfw.data.section import DataConfig
from vitfw.evaluate.corruptions import SEVERITIES, STRENGTHS, Corrupted
from vitfw.evaluate.robustness import ALEXNET, among, class_columns, corruption_errors, real_answers, real_scores
from vitfw.evaluate.scores import classification_scores
from vitfw.launch import Launch, MachineConfig
from vitfw.opened import EvaluationSet, Opened, augment_of, evaluation_set


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


def robustness_results(
    opened: Opened, config: RobustnessConfig, data: DataConfig, machine: MachineConfig, launch: Launch
) -> dict[str, Any]:
    """{set: its scores} of every set that the section names; entered by all ranks.

    Raises ValueError for what is no such set, and where classes cannot be matched by name.
    """

    def open_set(pattern: str) -> EvaluationSet:
        """A set with its own class list: folder names, or classes.txt beside its shards."""
        return evaluation_set(opened, replace(data, val=pattern, classes=None), machine, launch)

    results: dict[str, Any] = {}
    for name in ("v2", "sketch", "a", "r"):
        pattern = getattr(config, name)
        if pattern is not None:
            found = open_set(pattern)
            kept = among(found.predict(), class_columns(_names(opened, name), _classes(found.samples, name)))
            results[name] = classification_scores(kept.logits, kept.labels)
    if config.real is not None:
        found = evaluation_set(opened, data, machine, launch)
        predictions = found.predict()
        keys = [found.samples.key(int(row)) for row in predictions.index]
        results["real"] = real_scores(predictions.logits, real_answers(Path(config.real), keys))
    if config.c is not None:
        errors: dict[str, list[float]] = {}
        for corruption in ALEXNET:
            for severity in SEVERITIES:
                place = Path(config.c) / corruption / str(severity)
                if not place.is_dir():
                    raise ValueError(f"robustness.c={config.c}: {place} is missing; mCE needs all 15 x 5 folders")
                found = open_set(str(place))
                kept = among(found.predict(), class_columns(_names(opened, "c"), _classes(found.samples, "c")))
                accuracy = classification_scores(kept.logits, kept.labels)["acc1"]
                errors.setdefault(corruption, []).append(100.0 - accuracy)
        results["c"] = corruption_errors(errors, relative_to_alexnet=True)
    if config.cifar_c:
        results["cifar_c_generated"] = _cifar_c(opened, config, data, machine, launch)
    return results


def _cifar_c(
    opened: Opened, config: RobustnessConfig, data: DataConfig, machine: MachineConfig, launch: Launch
) -> dict[str, Any]:
    """Mean error of each corruption over its severities, with the one that was left out named."""
    clean = eval_transform(augment_of(opened.preprocessing), size=opened.preprocessing.size, channels=opened.channels)
    names = [name for name in STRENGTHS if name != "frost" or config.frost is not None]
    errors: dict[str, list[float]] = {}
    for name in names:
        for severity in SEVERITIES:
            transform = Corrupted(name, severity, clean, frost=config.frost)
            predictions = evaluation_set(opened, data, machine, launch, transform=transform).predict()
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
