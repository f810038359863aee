"""Sharded runs start with the weights of one process, bit for bit, and only rank 0 ever holds all of them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, tiny

from vitfw import checkpoint

FSDP2 = ["machine.strategy=fsdp2"]
HSDP = ["machine.strategy=hsdp", "machine.shard_size=2"]
MAE = ["recipe=mae_digits", "task.decoder_width=24", "task.decoder_heads=2", "augment.mixup=0", "augment.cutmix=0"]
TIMM = ["recipe=deit_ti", "model.variant=timm:test_efficientnet", "model.image_size=32", "model.in_channels=1"]
TIMM += [
    "augment.statistics=inception",
    "data.train=data/digits/train-*.tar",
    "task.num_classes=10",
    "train.global_batch=32",
    "train.seed=0",
]
CASES: dict[str, list[str]] = {
    "classify": [*FSDP2, "task.class_weights=balanced", "task.logit_adjustment=1.0"],
    "copies": [*HSDP, "model.position=learned", "model.class_token=true", "model.registers=3"],
    "frozen": [*FSDP2, "freeze.rung=last_block"],
    "mae": [*HSDP, *MAE],
    "timm": [*FSDP2, *TIMM],
    "distill": [*FSDP2, "task.name=distill", "task.teacher=WEIGHTS"],
    "weights": [*HSDP, "weights=WEIGHTS", "load.which=raw"],
    "missing": [*FSDP2, "weights=/nowhere/last.ckpt"],
    "large": [*FSDP2, "model.width=768", "model.depth=12", "model.heads=12", "model.mlp_ratio=4"],
}


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What four processes said."""
    folder = tmp_path_factory.mktemp("start")
    weights = make_weights(folder)
    cases = []
    for name, words in CASES.items():
        own = [word.replace("WEIGHTS", str(weights)) for word in words] + [f"out={folder / name}"]
        own = ["machine=cpu", "machine.threads=1", *own] if name == "timm" else tiny(*own)
        cases.append({"name": name, "words": own, "compared": name != "large"})
    (folder / "cases.json").write_text(json.dumps(cases))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = [*launcher, "tests/start_worker.py", str(folder / "cases.json")]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=600)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def make_weights(folder: Path) -> Path:
    from vitfw.train import main

    assert main(tiny("train.epochs=1", "optim.warmup_epochs=0", f"out={folder / 'run'}")) == 0
    return folder / "run" / "checkpoints" / checkpoint.LAST


def said(output: str, name: str) -> dict[int, Any]:
    """{rank: (whether it began with nothing, growth in sizes of the network)}"""
    found = re.findall(rf"case {name} rank (\d) empty (\w+) grown ([\d.]+)", output)
    return {int(rank): (empty == "True", float(grown)) for rank, empty, grown in found}


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("missing", "large")])
def test_every_process_has_its_part_of_the_weights_of_one_process(output: str, name: str) -> None:
    """The worker compared every parameter and buffer, those that no checkpoint holds too. A teacher is everywhere."""
    everywhere = name == "distill"
    assert {rank: empty for rank, (empty, _) in said(output, name).items()} == {
        rank: rank > 0 and not everywhere for rank in range(4)
    }


def test_only_rank_0_ever_holds_a_whole_network(output: str) -> None:
    """Of 86 million parameters on 4 processes: one network on rank 0, a quarter (and a little) elsewhere."""
    grown = {rank: growth for rank, (_, growth) in said(output, "large").items()}
    assert 0.9 < grown[0] < 1.5
    assert all(growth < 0.6 for rank, growth in grown.items() if rank)


def test_weights_that_rank_0_cannot_read_are_refused_on_all_ranks(output: str) -> None:
    refused = re.findall(r"case missing rank (\d) refused: weights=/nowhere/last.ckpt: no such file", output)
    assert sorted(refused) == ["0", "1", "2", "3"]


def test_one_process_and_copies_start_whole() -> None:
    from vitfw.launch import Launch
    from vitfw.machine import MachineConfig
    from vitfw.parallel import starts_on_rank_0

    torchrun = {world: Launch("torchrun", world=world, local_world=world) for world in (1, 2)}
    for strategy, world, expected in (("fsdp2", 2, True), ("fsdp2", 1, False), ("ddp", 2, False), ("auto", 2, False)):
        machine = MachineConfig(device="cpu", strategy=strategy)  # type: ignore[arg-type]
        assert starts_on_rank_0(machine, torchrun[world]) is expected
    assert torch.get_default_device().type == "cpu"
