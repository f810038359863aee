"""Classification with any number of labels an image: a yes or no for each class."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric, SumMetric
from torchmetrics.classification import MultilabelAveragePrecision, MultilabelStatScores

from vitfw.models.build import build_model, parameter_layers
from vitfw.models.losses import classification_loss
from vitfw.models.variants import ModelConfig
from vitfw.tasks.task import Batch, Monitor, Task, TaskConfig


@dataclass(frozen=True, kw_only=True)
class MultiLabelConfig(TaskConfig):
    """Section `task` for name=multi_label."""

    name: str = field(default="multi_label", metadata={"help": "which task trains"})
    num_classes: int = field(default=0, metadata={"help": "classes of the head; 0: as many as the training data has"})
    loss: Literal["sigmoid", "bce"] = field(
        default="sigmoid",
        metadata={"help": "sigmoid: summed over classes; bce: target above 0 is a yes, mean over classes (DeiT III)"},
    )
    smoothing: float = field(
        default=0.0, metadata={"help": "draws each target towards 1/2 by this share, folded into the targets once"}
    )

    def __post_init__(self) -> None:
        if self.num_classes < 0:
            raise ValueError(f"task.num_classes={self.num_classes}: must be 1 or more, or 0 to take it from the data")
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"task.smoothing={self.smoothing}: must lie in [0, 1)")
        if self.loss == "bce" and self.smoothing:
            raise ValueError(
                f"task.smoothing={self.smoothing} with task.loss=bce: its targets are 'above 0', so smoothing would make "
                "every class positive; set task.smoothing=0, or use task.loss=sigmoid"
            )


class MultiLabelTask(Task):
    """Owns the network. An image of none of the classes is a row of zeros, and counts."""

    monitor = Monitor("map", "max")
    multi_label = True

    def __init__(self, net: nn.Module, *, num_classes: int, loss: Literal["sigmoid", "bce"], smoothing: float) -> None:
        super().__init__()
        self.net, self.smoothing = net, smoothing
        self.loss: Literal["sigmoid", "bce"] = loss
        self.classes = self.num_classes = num_classes

    def losses(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """Batch with `label` float [B, K], mixed or not -> `loss`."""
        return {"loss": classification_loss(self.loss, self.net(batch["image"]), _rows(batch))}

    def measures(self) -> dict[str, Metric]:
        rows: dict[str, Any] = {"ignore_index": -1, "validate_args": False}  # a row of -1 fills up the last batch
        return {
            "loss": SumMetric(nan_strategy="disable").set_dtype(torch.float64),
            "precision": MultilabelAveragePrecision(self.classes, average="none", **rows),
            "counts": MultilabelStatScores(self.classes, average="none", **rows),
        }

    def measure(self, batch: Batch, measures: Mapping[str, Metric]) -> None:
        logits, labels = self.net(batch["image"]).float(), _rows(batch)
        losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none").sum(1)
        measures["loss"].update((losses.double() * (labels[:, 0] >= 0)).sum())
        for name in ("precision", "counts"):
            measures[name].update(logits.sigmoid(), labels.long())

    def results(self, measures: Mapping[str, Metric]) -> dict[str, float]:
        """map and f1_macro over the classes that occur, f1_micro, in percent; F1 at probability 0.5. The loss is summed over
        classes, mean over images."""
        # of one class torchmetrics gives the row, or the number, itself
        counts = measures["counts"].compute().double().reshape(self.classes, 5)
        hits, claims, rejected, misses, support = counts.unbind(1)  # [K] each
        samples = (hits + claims + rejected + misses)[0].item()
        present = support > 0
        with warnings.catch_warnings():  # a class that does not occur is left out below
            warnings.filterwarnings("ignore", message="No positive samples found in target")
            precision = measures["precision"].compute().double().reshape(self.classes)
        f1 = 2 * hits / (2 * hits + claims + misses).clamp(min=1)
        loss = measures["loss"].compute().item() / max(samples, 1.0)
        if loss != loss or not present.any():  # a model that answers NaN has no score, nor has a set without a label
            precision, f1, hits = precision * float("nan"), f1 * float("nan"), hits * float("nan")
        total = 2 * hits.sum() + claims.sum() + misses.sum()
        return {
            "map": 100.0 * precision[present].mean().item(),
            "f1_macro": 100.0 * f1[present].mean().item(),
            "f1_micro": 100.0 * (2 * hits.sum() / total.clamp(min=1)).item(),
            "loss": loss,
            "classes_scored": float(present.sum().item()),
            "samples": samples,
        }

    @property
    def network(self) -> nn.Module:
        return self.net

    def parameter_layers(self, norm_layer: Literal["last_block", "head"]) -> dict[str, int]:
        place: Literal["block", "head"] = "head" if norm_layer == "head" else "block"
        return {f"net.{name}": layer for name, layer in parameter_layers(self.net, final_norm=place).items()}


def _rows(batch: Batch) -> Tensor:
    if not batch["label"].is_floating_point():
        raise ValueError("task.name=multi_label: the data has one label an image; use task.name=classify")
    return batch["label"]


def build_multi_label(config: MultiLabelConfig, model: ModelConfig, *, num_classes: int) -> MultiLabelTask:
    """The task over a fresh network. Raises ValueError where data and task disagree about the classes."""
    wanted = config.num_classes or num_classes
    if wanted < 1 or num_classes > wanted:
        raise ValueError(
            f"task.num_classes={config.num_classes}, and the training data has {num_classes} classes: this task needs "
            "labelled data, and at least as many classes as the labels"
        )
    net = build_model(model, num_classes=wanted)
    return MultiLabelTask(net, num_classes=wanted, loss=config.loss, smoothing=config.smoothing)
