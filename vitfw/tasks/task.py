"""The seam between a method and the rest: a task owns its networks and its loss, and knows no Lightning, optimiser or rank."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor, nn
from torchmetrics import Metric

from vitfw.models.load_report import LoadConfig, LoadReport
from vitfw.models.weights import load

Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Section `task`: `name` picks the task, whose own dataclass adds its keys."""

    everywhere: ClassVar[bool] = False  # every rank builds the task with its weights, whatever the strategy

    name: str = field(default="classify", metadata={"help": "which task trains"})


class Monitor(NamedTuple):
    """The result that decides which checkpoint is the best."""

    name: str
    mode: Literal["max", "min"]

    def better(self, value: float, best: float | None) -> bool:
        """NaN never wins; a tie keeps the earlier one."""
        if value != value:
            return False
        return best is None or (value > best if self.mode == "max" else value < best)


class Task(nn.Module, ABC):
    """Subclasses are final. A batch holds `image` float [B, C, H, W], normalised, in training `normalisation`
    float32 [2, C] (the mean and deviation used), and what the loader put beside it."""

    monitor: Monitor
    num_classes: int | None = None  # None: labels are not used in training, so nothing mixes or smooths them
    smoothing: float = 0.0
    multi_label: bool = False  # labels are sets: `label` float32 [B, K]
    teaches_second_head: bool = False  # of a network with a distillation token

    @abstractmethod
    def losses(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """Batch -> {"loss": scalar to minimise, name: scalar to show, ...}. `progress` is the share of the run done, 0 to 1."""

    @abstractmethod
    def measures(self) -> dict[str, Metric]:
        """Fresh metric objects for one evaluation."""

    @abstractmethod
    def measure(self, batch: Batch, measures: Mapping[str, Metric]) -> None:
        """Adds a batch to the measures, in evaluation mode. Rows with `index` -1 are padding and must not count."""

    @abstractmethod
    def results(self, measures: Mapping[str, Metric]) -> dict[str, float]:
        """The numbers of an evaluation, the same on every rank; called on all ranks, since metrics are combined here."""

    @property
    @abstractmethod
    def network(self) -> nn.Module:
        """What the run is for: the network that is exported."""

    @abstractmethod
    def parameter_layers(self, norm_layer: Literal["last_block", "head"]) -> dict[str, int]:
        """{parameter name: place in the network}: 0 the embeddings, i + 1 block i, depth + 1 the head. For layer decay; it
        depends on the network alone, so frozen parts and wrappers change nothing. `norm_layer`: where the final norm counts."""

    def load_weights(self, place: str, config: LoadConfig) -> LoadReport:
        """Starts from the weights at `place` (the key `weights`): the network, and what else of the task they hold."""
        return load(self.network, place, config)

    def see_classes(self, counts: Tensor, names: tuple[str, ...] | None = None) -> None:
        """Told once, before training: int64 [K], the training images of each class, and the classes' names where known."""

    def after_step(self, progress: float) -> None:
        """Called once after each optimiser step, for teachers that follow and schedules of the task's own."""

    def cost_text(self) -> str | None:
        """A line for the start-up summary about what a step costs, where that is not what the model's size suggests."""
        return None
