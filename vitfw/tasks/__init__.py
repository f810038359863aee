"""The dict of tasks: to add one, write its file, import it here and add a line."""

from collections.abc import Callable
from typing import Any

from vitfw.models.variants import ModelConfig
from vitfw.tasks.classify import ClassifyConfig, build_classify
from vitfw.tasks.distill import DistillConfig, build_distill
from vitfw.tasks.mae import MaeConfig, build_mae
from vitfw.tasks.mae_probe import MaeProbeConfig, build_mae_probe
from vitfw.tasks.multi_label import MultiLabelConfig, build_multi_label
from vitfw.tasks.task import Task, TaskConfig

# name -> (its config dataclass, its builder (config, model config, num_classes of the data) -> task)
TASKS: dict[str, tuple[type[TaskConfig], Callable[..., Task]]] = {
    "classify": (ClassifyConfig, build_classify),
    "distill": (DistillConfig, build_distill),
    "mae": (MaeConfig, build_mae),
    "mae_probe": (MaeProbeConfig, build_mae_probe),
    "multi_label": (MultiLabelConfig, build_multi_label),
}


def build_task(config: Any, model: ModelConfig, *, num_classes: int) -> Task:
    """The task of this section over a fresh model. `num_classes` is what the data has (0: no labels)."""
    return TASKS[config.name][1](config, model, num_classes=num_classes)
