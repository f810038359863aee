"""How well logits name the one label of each image: the measures of an evaluation, for every task that classifies."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassStatScores


def label_measures(num_classes: int) -> dict[str, Metric]:
    """Fresh metrics; with 5 classes or fewer top-5 says nothing, and is left out."""
    found: dict[str, Metric] = {
        # a sum: where NaN may pass, torchmetrics' MeanMetric ignores weights, and padding would count as images of loss 0
        "loss": SumMetric(nan_strategy="disable").set_dtype(torch.float64),
        "classes": MulticlassStatScores(num_classes, average=None, ignore_index=-1, validate_args=False),
    }
    if num_classes > 5:
        found["acc5"] = MulticlassAccuracy(num_classes, top_k=5, average="micro", ignore_index=-1, validate_args=False)
    return found


def measure_labels(measures: Mapping[str, Metric], logits: Tensor, label: Tensor) -> None:
    """Adds logits [B, K] and labels int64 [B]; rows with label -1 (padding, unlabelled) count nowhere."""
    logits = logits.float()
    loss = F.cross_entropy(logits, label, ignore_index=-1, reduction="none")
    measures["loss"].update(loss.double())
    for name in measures.keys() - {"loss"}:
        measures[name].update(logits, label)


def label_results(measures: Mapping[str, Metric]) -> dict[str, float]:
    """loss, acc1 (hits / images), acc5, mean_class_acc over the classes that occur, in percent; samples counted.

    Called on all ranks, since sums are combined here. A model that answers NaN has no accuracy: argmax would call it
    class 0.
    """
    scores = measures["classes"].compute()  # [K, 5]: hits, false positives, true negatives, misses, support
    hits, support = scores[:, 0].double(), scores[:, 4].double()
    present, images = support > 0, support.sum().item()
    loss = measures["loss"].compute().item() / max(images, 1.0)
    if loss != loss or images == 0:
        hits = hits * float("nan")
    values = {"acc1": 100.0 * hits.sum().item() / max(images, 1.0), "loss": loss}
    if "acc5" in measures:
        values["acc5"] = 100.0 * measures["acc5"].compute().item()
    return values | {"mean_class_acc": 100.0 * (hits[present] / support[present]).mean().item(), "samples": images}
