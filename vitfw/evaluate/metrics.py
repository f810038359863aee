"""Exact evaluation: each sample counts once, for any number of ranks, batch size and workers."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from vitfw.tasks.task import Batch, Task


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Section `eval`."""

    every_epochs: float = field(default=1.0, metadata={"help": "epochs between evaluations; 0: at the end alone"})

    train_images: int = field(
        default=0,
        metadata={
            "help": "training images scored as evaluation sees them (split train_clean): accuracy that mixing cannot blur"
        },
    )

    def __post_init__(self) -> None:
        if self.train_images < 0:
            raise ValueError(f"eval.train_images={self.train_images}: must be 0 (off) or more")
        if self.every_epochs < 0:
            raise ValueError(f"eval.every_epochs={self.every_epochs}: must be 0 (at the end alone) or more")


Weights = Mapping[str, Callable[[], AbstractContextManager[None]]]


@torch.no_grad()
def evaluate(
    task: Task,
    loader: Iterable[Batch],
    *,
    prepare: Callable[[Batch], Batch],
    autocast: Callable[[], AbstractContextManager[None]],
    weights: Weights,
    device: torch.device,
    look: Callable[[Batch], None] | None = None,
) -> dict[str, dict[str, float]]:
    """{name of the weights: {result: value}} over one pass of the loader; entered by all ranks together.

    `prepare` brings a batch to the device and normalises it. `weights` names the sets of weights to score, each with a
    context that puts it in place (the raw weights need none): images are decoded once for all of them. `look` is shown the
    first batch, prepared, with the raw weights in place.
    """
    was_training = task.training
    task.eval()
    measures = {name: {key: metric.to(device) for key, metric in task.measures().items()} for name in weights}
    try:
        for batch in loader:
            prepared = prepare(batch)
            if look is not None:
                with autocast():
                    look(prepared)
                look = None
            for name, in_place in weights.items():
                with in_place(), autocast():
                    task.measure(prepared, measures[name])
        return {name: task.results(measures[name]) for name in weights}
    finally:
        task.train(was_training)
