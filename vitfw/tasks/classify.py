"""Supervised classification with one label an image: ViT, DeiT and their relatives."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from vitfw.models.build import build_model, parameter_layers
from vitfw.models.label_scores import label_measures, label_results, measure_labels
from vitfw.models.losses import (
    LossName,
    adjust_logits,
    balanced_weights,
    check_loss,
    classification_loss,
    mixed_accuracy,
)
from vitfw.models.variants import ModelConfig
from vitfw.tasks.task import Batch, Monitor, Task, TaskConfig


@dataclass(frozen=True, kw_only=True)
class ClassifyConfig(TaskConfig):
    """Section `task` for name=classify."""

    name: str = field(default="classify", metadata={"help": "which task trains"})
    num_classes: int = field(default=0, metadata={"help": "classes of the head; 0: as many as the training data has"})
    loss: LossName = field(
        default="softmax",
        metadata={"help": "softmax; bce (DeiT III: target above 0, mean); sigmoid (AugReg: summed over classes)"},
    )
    smoothing: float = field(default=0.0, metadata={"help": "label smoothing, folded into the targets once"})

    class_weights: Literal["none", "sqrt", "balanced"] = field(
        default="none",
        metadata={"help": "weight of a class in the loss: 1, its training images to the power -1/2, or -1"},
    )
    logit_adjustment: float = field(
        default=0.0,
        metadata={"help": "times the log of each class's share, added to the logits in training (long tails)"},
    )

    def __post_init__(self) -> None:
        if self.logit_adjustment < 0:
            raise ValueError(
                f"task.logit_adjustment={self.logit_adjustment}: must be 0 (off) or more; 1 is the usual value"
            )
        if self.num_classes < 0 or self.num_classes == 1:
            raise ValueError(f"task.num_classes={self.num_classes}: must be 2 or more, or 0 to take it from the data")
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"task.smoothing={self.smoothing}: must lie in [0, 1)")
        check_loss(self.loss, smoothing=self.smoothing, multi_label=False)


class ClassifyTask(Task):
    """Owns the network and its loss, with integer or soft targets."""

    monitor = Monitor("acc1", "max")

    class_weights: Tensor | None
    logit_shift: Tensor | None

    def __init__(self, net: nn.Module, config: ClassifyConfig | None = None, *, num_classes: int) -> None:
        super().__init__()
        self.net = net
        self.config = config = config or ClassifyConfig()
        self.classes = self.num_classes = num_classes
        self.smoothing = config.smoothing
        self.register_buffer("class_weights", None, persistent=False)
        self.register_buffer("logit_shift", None, persistent=False)

    def see_classes(self, counts: Tensor, names: tuple[str, ...] | None = None) -> None:
        counts = torch.nn.functional.pad(counts, (0, self.classes - len(counts)))
        power = {"none": 0.0, "sqrt": 0.5, "balanced": 1.0}[self.config.class_weights]
        if power:
            self.class_weights = balanced_weights(counts, power)
        if self.config.logit_adjustment:
            self.logit_shift = adjust_logits(torch.zeros(1, self.classes), counts, self.config.logit_adjustment)

    def losses(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """Batch with `label` int64 [B] or soft [B, K] -> loss, and acc1 in percent, which under mixup and CutMix counts each
        of the two labels by its share."""
        logits, target = self.net(batch["image"]), batch["label"]
        hits = mixed_accuracy(logits.detach(), target, smoothing=self.smoothing)
        if self.logit_shift is not None:
            logits = logits + self.logit_shift
        loss = classification_loss(self.config.loss, logits, target, class_weights=self.class_weights)
        return {"loss": loss, "acc1": 100.0 * hits}

    def measures(self) -> dict[str, Metric]:
        return label_measures(self.classes)

    def measure(self, batch: Batch, measures: Mapping[str, Metric]) -> None:
        measure_labels(measures, self.net(batch["image"]), batch["label"])

    def results(self, measures: Mapping[str, Metric]) -> dict[str, float]:
        """loss, acc1 (hits / images), acc5, mean_class_acc over the classes that occur, in percent; samples counted."""
        return label_results(measures)

    @property
    def network(self) -> nn.Module:
        return self.net

    def parameter_layers(self, norm_layer: Literal["last_block", "head"]) -> dict[str, int]:
        place: Literal["block", "head"] = "head" if norm_layer == "head" else "block"
        return {f"net.{name}": layer for name, layer in parameter_layers(self.net, final_norm=place).items()}


def build_classify(config: ClassifyConfig, model: ModelConfig, *, num_classes: int) -> ClassifyTask:
    """The task over a fresh network. Raises ValueError where data and task disagree about the classes."""
    wanted = config.num_classes or num_classes
    if wanted < 2:
        raise ValueError(
            f"task.num_classes={config.num_classes} and the training data has {num_classes} classes: "
            "classification needs labelled data with at least 2 classes"
        )
    if num_classes > wanted:
        raise ValueError(
            f"task.num_classes={config.num_classes}, but the training data has labels up to {num_classes - 1}"
        )
    return ClassifyTask(build_model(model, num_classes=wanted), config, num_classes=wanted)
