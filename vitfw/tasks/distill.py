"""Distillation: a frozen teacher looks at the student's own batch, and the student learns to answer alike.

With `model.distillation_token` it is DeiT's (Touvron et al. 2021): the teacher trains a second token with its own head,
and both heads' logits are averaged in evaluation. Without, one head learns from labels and teacher together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torchmetrics import Metric

from vitfw.models.build import build_model, parameter_layers
from vitfw.models.label_scores import label_measures, label_results, measure_labels
from vitfw.models.layers import Linear
from vitfw.models.losses import (
    LossName,
    check_loss,
    classification_loss,
    distillation_loss,
    feature_loss,
    mixed_accuracy,
)
from vitfw.models.teacher import Teacher, check_class_names, check_teacher, load_teacher
from vitfw.models.variants import ModelConfig, input_size
from vitfw.models.vit import ViT
from vitfw.tasks.task import Batch, Monitor, Task, TaskConfig


@dataclass(frozen=True, kw_only=True)
class DistillConfig(TaskConfig):
    """Section `task` for name=distill."""

    everywhere: ClassVar[bool] = True  # the teacher is no part of the task's state: each rank reads it

    name: str = field(default="distill", metadata={"help": "which task trains"})
    num_classes: int = field(default=0, metadata={"help": "classes of the head; 0: as many as the training data has"})
    loss: LossName = field(
        default="softmax",
        metadata={"help": "of the labels: softmax; bce (target above 0, mean); sigmoid (summed over classes)"},
    )
    smoothing: float = field(default=0.0, metadata={"help": "label smoothing, folded into the targets once"})
    teacher: str | None = field(
        default=None, metadata={"help": "timm:NAME (published weights), an export or run folder, or a checkpoint"}
    )
    teacher_mean: tuple[float, ...] | None = field(
        default=None, metadata={"help": "mean of each channel, in 0 to 1, that the teacher wants; null: its own word"}
    )
    teacher_std: tuple[float, ...] | None = field(
        default=None, metadata={"help": "deviation of each channel that the teacher wants; null: its own word"}
    )
    teacher_size: int | None = field(
        default=None, metadata={"help": "side in pixels that the teacher's view is resized to; null: the student's"}
    )
    form: Literal["hard", "soft", "feature"] = field(
        default="hard",
        metadata={"help": "hard: the teacher's best class; soft: its distribution; feature: its pooled vector"},
    )
    weight: float = field(
        default=0.5, metadata={"help": "loss = (1 - weight) x loss of the labels + weight x loss of the teacher"}
    )
    temperature: float = field(default=1.0, metadata={"help": "softens both distributions; of form=soft only"})
    per: Literal["element", "image"] = field(
        default="element",
        metadata={"help": "form=soft divides by images x classes (element, DeiT's code) or by images (Hinton et al.)"},
    )

    def __post_init__(self) -> None:
        if self.num_classes < 0 or self.num_classes == 1:
            raise ValueError(f"task.num_classes={self.num_classes}: must be 2 or more, or 0 to take it from the data")
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"task.smoothing={self.smoothing}: must lie in [0, 1)")
        check_loss(self.loss, smoothing=self.smoothing, multi_label=False)
        if not 0 < self.weight <= 1:
            raise ValueError(f"task.weight={self.weight}: must lie in (0, 1]; without a teacher use task.name=classify")
        if not self.temperature > 0:
            raise ValueError(f"task.temperature={self.temperature}: must be above 0")
        for key, value in (("temperature", 1.0), ("per", "element")):
            if self.form != "soft" and getattr(self, key) != value:
                raise ValueError(f"task.{key}={getattr(self, key)}: only task.form=soft reads it, not {self.form}")
        if self.teacher_size is not None and self.teacher_size < 1:
            raise ValueError(f"task.teacher_size={self.teacher_size}: must be 1 pixel or more, or null")
        self._check_statistics()

    def _check_statistics(self) -> None:
        mean, std = self.teacher_mean, self.teacher_std
        if (mean is None) != (std is None) or (mean and std and len(mean) != len(std)):
            raise ValueError(
                f"task.teacher_mean={mean}, task.teacher_std={std}: set both, with one number a channel, or none"
            )
        if std is not None and not all(value > 0 for value in std):
            raise ValueError(f"task.teacher_std={std}: each must be above 0")


class DistillTask(Task):
    """Owns the student and, to compare features, a projection to the teacher's width; the teacher stays outside of it."""

    monitor = Monitor("acc1", "max")
    teaches_second_head = True

    def __init__(self, net: nn.Module, teacher: Teacher, config: DistillConfig, *, num_classes: int) -> None:
        super().__init__()
        self.net, self.teacher, self.config = net, teacher, config
        self.classes = self.num_classes = num_classes
        self.smoothing = config.smoothing
        width: Any = net.embed_dim
        self.projection = None
        if config.form == "feature":
            self.projection = Linear(width, teacher.width, init="timm")

    def see_classes(self, counts: Tensor, names: tuple[str, ...] | None = None) -> None:
        """Raises ValueError where the teacher's logits and the labels number the classes differently."""
        if self.config.form != "feature":
            check_class_names(self.teacher, names)

    def losses(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """Batch with `label` int64 [B] or soft [B, K] and `normalisation` [2, C] -> `loss` and its two parts, acc1 of
        what evaluation would answer; of the teacher its acc1 and how often the student answers as it does (percent)."""
        images, target, config = batch["image"], batch["label"], self.config
        if config.form == "feature":
            heads, features = self._with_features(images)
            told = self.teacher(images, batch["normalisation"], output="pooled")
            taught, shown = feature_loss(features, told), {}
        else:
            heads = self.net(images)
            student = heads[1] if isinstance(heads, tuple) else heads
            told = self.teacher(images, batch["normalisation"])
            taught = distillation_loss(student, told, form=config.form, temperature=config.temperature, per=config.per)
            shown = {
                "teacher_acc1": 100.0 * mixed_accuracy(told, target, smoothing=self.smoothing),
                "agreement": 100.0 * (student.detach().argmax(1) == told.argmax(1)).float().mean(),
            }
        pair = heads if isinstance(heads, tuple) else (heads, heads)
        answer = ((pair[0] + pair[1]) / 2).detach()
        labels = classification_loss(config.loss, pair[0], target)
        return {
            "loss": (1 - config.weight) * labels + config.weight * taught,
            "label_loss": labels,
            "distillation_loss": taught,
            "acc1": 100.0 * mixed_accuracy(answer, target, smoothing=self.smoothing),
            **shown,
        }

    def _with_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, K] and the projected representation [B, width of the teacher], from one pass: the class token, or
        the mean of the patches where the model pools them."""
        assert isinstance(self.net, ViT) and self.projection is not None, "build_distill sees to it"
        taken = self.net(images, blocks=[-1])
        tokens = taken.blocks[self.net.depth - 1]
        pooled = tokens[:, 0] if self.net.arch.pool == "cls" else tokens[:, self.net.num_prefix_tokens :].mean(1)
        return taken.output, self.projection(pooled)

    def measures(self) -> dict[str, Metric]:
        return label_measures(self.classes)

    def measure(self, batch: Batch, measures: Mapping[str, Metric]) -> None:
        measure_labels(measures, self.net(batch["image"]), batch["label"])

    def results(self, measures: Mapping[str, Metric]) -> dict[str, float]:
        """As `classify`: of the student alone, with the mean of both heads where it has two."""
        return label_results(measures)

    @property
    def network(self) -> nn.Module:
        return self.net

    def parameter_layers(self, norm_layer: Literal["last_block", "head"]) -> dict[str, int]:
        place: Literal["block", "head"] = "head" if norm_layer == "head" else "block"
        layers = {f"net.{name}": layer for name, layer in parameter_layers(self.net, final_norm=place).items()}
        top = max(layers.values())
        return layers | {name: top for name, _ in self.named_parameters() if name.startswith("projection.")}


def build_distill(config: DistillConfig, model: ModelConfig, *, num_classes: int) -> DistillTask:
    """The task over a fresh student and a loaded teacher.

    Inside `torch.device("meta")`, as for a plan, no weights are read. Raises ValueError where data, student and teacher
    do not fit together.
    """
    if config.teacher is None:
        raise ValueError("task.teacher is missing: timm:NAME, an export or run folder, or a checkpoint of vitfw")
    wanted = config.num_classes or num_classes
    if wanted < 2 or num_classes > wanted:
        raise ValueError(
            f"task.num_classes={config.num_classes}, and the training data has {num_classes} classes: distillation needs "
            "2 classes or more, and at least as many as the labels; where nothing is labelled, name the teacher's number"
        )
    net = build_model(model, num_classes=wanted)  # before the teacher, whose building draws random numbers
    _check_student(config, model, net)
    statistics = None
    if config.teacher_mean is not None and config.teacher_std is not None:
        statistics = config.teacher_mean, config.teacher_std
    teacher = load_teacher(config.teacher, statistics=statistics, size=config.teacher_size)
    classes = None if config.form == "feature" else wanted
    image = (model.in_channels, *input_size(model))
    check_teacher(teacher, image=image, num_classes=classes, own_statistics=statistics is not None)
    return DistillTask(net, teacher, config, num_classes=wanted)


def _check_student(config: DistillConfig, model: ModelConfig, net: nn.Module) -> None:
    """Raises ValueError for a student that would not learn all that it answers with."""
    two_heads = isinstance(net, ViT) and net.arch.distillation_token
    if config.form == "feature" and not isinstance(net, ViT):
        raise ValueError(f"task.form=feature with model.variant={model.variant}: the student must be a ViT of vitfw")
    if config.form == "feature" and two_heads:
        raise ValueError(
            "task.form=feature teaches a vector and no head, so the distillation head would stay untrained; set "
            "model.distillation_token=false, or task.form=hard or soft"
        )
    if config.weight == 1 and two_heads:
        raise ValueError(
            "task.weight=1 leaves the class head untrained, and evaluation averages both heads; set task.weight below "
            "1, or model.distillation_token=false"
        )
