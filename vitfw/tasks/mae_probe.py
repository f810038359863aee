"""MAE's linear probe as published: a frozen encoder in evaluation mode, BatchNorm without affine, a linear layer.

`vitfw probe` is the quick way to judge features; this task is the published protocol, for comparison with its numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric, SumMetric

from vitfw.models.build import build_model
from vitfw.models.probe_head import ProbeHead
from vitfw.models.variants import ModelConfig
from vitfw.models.vit import ViT, parameter_layers
from vitfw.tasks.task import Batch, Monitor, Task, TaskConfig


@dataclass(frozen=True, kw_only=True)
class MaeProbeConfig(TaskConfig):
    """Section `task` for name=mae_probe. The feature is what `model.pool` says: cls (as published) or gap."""

    name: str = field(default="mae_probe", metadata={"help": "which task trains"})
    num_classes: int = field(default=0, metadata={"help": "classes of the head; 0: as many as the training data has"})

    def __post_init__(self) -> None:
        if self.num_classes < 0 or self.num_classes == 1:
            raise ValueError(f"task.num_classes={self.num_classes}: must be 2 or more, or 0 to take it from the data")


class MaeProbeTask(Task):
    """Trains `probe` alone. The network's own head always holds the probe with its BatchNorm folded in, so that what is
    evaluated, saved and exported is one plain ViT."""

    monitor = Monitor("acc1", "max")

    def __init__(self, net: ViT) -> None:
        super().__init__()
        self.net = net.requires_grad_(False)
        self.label_classes = net.num_classes
        self.probe = ProbeHead(net.embed_dim, net.num_classes)
        self.fold()
        self.train()

    def train(self, mode: bool = True) -> "MaeProbeTask":
        """The encoder stays in evaluation mode: no dropout, no drop-path."""
        super().train(mode)
        self.net.eval()
        return self

    def losses(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """Batch with `label` int64 [B] -> loss and acc1 (percent); all patches are visible."""
        with torch.no_grad():
            features = self.net(batch["image"], output="pooled")
        logits, label = self.probe(features), batch["label"]
        labelled = (label >= 0).sum().clamp(min=1)
        loss = F.cross_entropy(logits, label, ignore_index=-1, reduction="sum") / labelled
        hits = (logits.detach().argmax(dim=1) == label).sum() / labelled
        return {"loss": loss, "acc1": 100.0 * hits}

    def after_step(self, progress: float) -> None:
        self.probe.average_statistics()
        self.fold()

    def fold(self) -> None:
        """Writes the probe into the network's head."""
        self.probe.fold_into(self.net.get_submodule("head"))

    def measures(self) -> dict[str, Metric]:
        return {
            name: SumMetric(nan_strategy="disable").set_dtype(torch.float64) for name in ("loss", "hits", "samples")
        }

    def measure(self, batch: Batch, measures: Mapping[str, Metric]) -> None:
        logits, label = self.net(batch["image"]).float(), batch["label"]
        measures["loss"].update(F.cross_entropy(logits, label, ignore_index=-1, reduction="none").double().sum())
        measures["hits"].update((logits.argmax(dim=1) == label).sum().double())
        measures["samples"].update((label >= 0).sum().double())

    def results(self, measures: Mapping[str, Metric]) -> dict[str, float]:
        """acc1 in percent and the mean loss over the labelled images."""
        sums = {name: metric.compute().item() for name, metric in measures.items()}
        count = max(sums["samples"], 1.0)
        return {"acc1": 100.0 * sums["hits"] / count, "loss": sums["loss"] / count, "samples": sums["samples"]}

    @property
    def network(self) -> nn.Module:
        return self.net

    def parameter_layers(self, norm_layer: Literal["last_block", "head"]) -> dict[str, int]:
        place: Literal["block", "head"] = "head" if norm_layer == "head" else "block"
        layers = {f"net.{name}": at for name, at in parameter_layers(self.net, final_norm=place).items()}
        return layers | {name: self.net.depth + 1 for name, _ in self.named_parameters() if name.startswith("probe.")}


def build_mae_probe(config: MaeProbeConfig, model: ModelConfig, *, num_classes: int) -> MaeProbeTask:
    """The task over a fresh network, whose weights come from `weights=`.

    Raises ValueError where data and task disagree about the classes, and for networks without tokens.
    """
    wanted = config.num_classes or num_classes
    if wanted < 2 or num_classes > wanted:
        raise ValueError(
            f"task.num_classes={config.num_classes}, and the training data has {num_classes} classes: a probe needs 2 "
            "classes or more, and at least as many as the labels"
        )
    net = build_model(model, num_classes=wanted)
    if not isinstance(net, ViT):
        raise ValueError(
            f"model.variant={model.variant}: this probe reads a ViT of vitfw; for models of timm use `vitfw probe`"
        )
    if net.arch.distillation_token:
        raise ValueError("model.distillation_token=true: two heads cannot be probed at once; set it to false")
    return MaeProbeTask(net)
