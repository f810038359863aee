"""Other test sets of the same classes: ImageNet-V2, -A, -R, -Sketch, ReaL labels, and -C with its mCE.

Sources: Recht et al. 2019 (V2), Hendrycks et al. 2021 (A, R), Wang et al. 2019 (Sketch), Beyer et al. 2020 (ReaL),
Hendrycks and Dietterich 2019 (C). N images, K classes of the model, k classes of a set.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from vitfw.evaluate.predictions import Predictions

# Error of AlexNet in percent, mean over the five severities: the unit of mCE. Hendrycks and Dietterich 2019, table 1.
ALEXNET = {
    "gaussian_noise": 88.6428,
    "shot_noise": 89.4468,
    "impulse_noise": 92.2640,
    "defocus_blur": 81.9880,
    "glass_blur": 82.6268,
    "motion_blur": 78.5948,
    "zoom_blur": 79.8360,
    "snow": 86.6816,
    "frost": 82.6572,
    "fog": 81.9324,
    "brightness": 56.4592,
    "contrast": 85.3204,
    "elastic_transform": 64.6056,
    "pixelate": 71.7840,
    "jpeg_compression": 60.6500,
}


def class_columns(model: Sequence[str], subset: Sequence[str]) -> np.ndarray:
    """Class names of the model [K] and of a set [k] -> int64 [k]: the model's column of each class of the set.

    A and R hold 200 of ImageNet's classes: their images are judged among these alone. Raises ValueError for names that
    the model does not know; sets and model must name classes alike (folders n01440764, ...).
    """
    places = {name: place for place, name in enumerate(model)}
    unknown = [name for name in subset if name not in places]
    if unknown:
        raise ValueError(
            f"{len(unknown)} of the set's {len(subset)} classes are unknown to the model: {', '.join(unknown[:3])}; "
            f"its classes are named {', '.join(list(model)[:3])}, ...: give data.classes for the one or the other"
        )
    return np.array([places[name] for name in subset], np.int64)


def among(predictions: Predictions, columns: np.ndarray) -> Predictions:
    """Predictions [N, K] and `class_columns` [k] -> predictions [N, k] whose labels count the set's own classes."""
    return Predictions(predictions.index, predictions.labels, predictions.logits[:, columns])


def real_answers(path: Path, keys: Sequence[str]) -> list[list[int]]:
    """The ReaL file (50,000 lists of classes, in the order of ILSVRC2012_val_00000001 ...) -> those of `keys`.

    Raises ValueError for a key without an image number, and for a number beyond the file.
    """
    try:
        answers = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"robustness.real={path}: {error}; expected the lists of real.json") from error
    if not isinstance(answers, list) or not all(isinstance(entry, list) for entry in answers):
        raise ValueError(f"robustness.real={path}: must hold a list of lists of class numbers (real.json)")
    numbers = []
    for key in keys:
        found = re.search(r"(?:val_)?(\d{8})", Path(key).name)
        if found is None or not 1 <= int(found[1]) <= len(answers):
            raise ValueError(f"{key!r} names no image of ILSVRC2012_val_00000001 to {len(answers):08d}: no ReaL label")
        numbers.append(int(found[1]) - 1)
    return [answers[number] for number in numbers]


def real_scores(logits: np.ndarray, answers: Sequence[Sequence[int]]) -> dict[str, float]:
    """Logits [N, K], answers of each image -> acc1: the class called is one of them. Images without answer drop out."""
    called = logits.argmax(axis=1)
    kept = [row for row, answer in enumerate(answers) if answer]
    if not kept:
        raise ValueError("no image has a ReaL label")
    hits = sum(int(called[row]) in answers[row] for row in kept)
    return {
        "acc1": 100.0 * hits / len(kept),
        "samples": float(len(kept)),
        "without_answer": float(len(answers) - len(kept)),
    }


def corruption_errors(errors: Mapping[str, Sequence[float]], *, relative_to_alexnet: bool) -> dict[str, float]:
    """{corruption: error in percent at each severity} -> {corruption: its mean, "mean_error": theirs, "mce": ...}.

    mce only for ImageNet-C, and only of all 15 corruptions at 5 severities: the mean of error / AlexNet's error, in
    percent. A part of them would be another number under the same name.
    """
    means = {name: float(np.mean(list(values))) for name, values in errors.items()}
    if not means:
        raise ValueError("no corruption was measured")
    result = dict(means) | {"mean_error": float(np.mean(list(means.values())))}
    if relative_to_alexnet:
        missing = sorted(ALEXNET.keys() - errors.keys())
        short = sorted(name for name in ALEXNET.keys() & errors.keys() if len(errors[name]) != 5)
        if missing or short:
            raise ValueError(f"mCE needs 15 corruptions at 5 severities; missing: {', '.join(missing + short)}")
        result["mce"] = float(np.mean([100.0 * means[name] / ALEXNET[name] for name in ALEXNET]))
    return result
