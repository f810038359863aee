"""A ladder on the digits that takes seconds, for the tests of ladders."""

from pathlib import Path

import torch

from vitfw.ladder import run_ladder
from vitfw.models.build import build_model
from vitfw.models.export import export
from vitfw.models.model_config import ModelConfig
from vitfw.models.preprocess import Preprocessing
from vitfw.train import train

RUNGS = ("probe", "last_block", "full")
SMALL = [
    "recipe=ladder_digits",
    "data.per_class=6",
    "train.epochs=2",
    "train.global_batch=20",
    "last_block.optim.warmup_epochs=0",
    "full.optim.warmup_epochs=0",
    "machine.workers=0",
    "machine.threads=1",
    "model.depth=2",
    "model.width=24",
    "model.heads=2",
    "model.position=learned",
    "log.progress=off",
]
# the probe alone
ALONE = [*(word for word in SMALL if not word.startswith(("last_block", "full"))), "ladder.rungs=[probe]"]


def weights(folder: Path) -> str:
    torch.manual_seed(0)
    config = ModelConfig(
        variant="vit_ti2", image_size=8, in_channels=1, width=24, depth=2, heads=2, mlp_ratio=2.0, pool="gap",
        class_token=False,
    )  # fmt: skip
    prepared = Preprocessing(size=(8, 8), mean=(0.5,), std=(0.5,), crop=1.0)
    export(build_model(config, num_classes=10), folder, preprocessing=prepared)
    return str(folder)


def run(words: list[str]) -> int:
    return run_ladder(words, train)
