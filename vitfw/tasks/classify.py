"""Supervised classification with one label an image: ViT, DeiT and their relatives."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn
from torchmetrics import Metric

from vitfw.models.build import build_model, parameter_layers
from vitfw.models.label_scores import label_measures, label_results, measure_labels
from vitfw.models.losses import LossName, check_loss, classification_loss, mixed_accuracy
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

    def __post_init__(self) -> None:
        if self.num_classes < 0 or self.num_classes == 1:
            raise ValueError(f"task.num_classes={self.num_classes}: must be 2 or more, or 0 to take it from the data")
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"task.smoothing={self.smoothing}: must lie in [0, 1)")
        check_loss(self.loss, smoothing=self.smoothing, multi_label=False)


class ClassifyTask(Task):
    """Owns the network and its loss, with integer or soft targets."""

    monitor = Monitor("acc1", "max")

    def __init__(self, net: nn.Module, *, num_classes: int, loss: LossName = "softmax", smoothing: float = 0.0) -> None:
        super().__init__()
        self.net = net
        self.loss: LossName = loss
        self.classes = self.num_classes = num_classes
        self.smoothing = smoothing

    def losses(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """Batch with `label` int64 [B] or soft [B, K] -> loss, and acc1 in percent, which under mixup and CutMix counts each
        of the two labels by its share."""
        logits, target = self.net(batch["image"]), batch["label"]
        hits = mixed_accuracy(logits.detach(), target, smoothing=self.smoothing)
        return {"loss": classification_loss(self.loss, logits, target), "acc1": 100.0 * hits}

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
    return ClassifyTask(
        build_model(model, num_classes=wanted), num_classes=wanted, loss=config.loss, smoothing=config.smoothing
    )
