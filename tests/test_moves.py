"""Saved under each strategy and number of processes, taken on under each other, in mid-epoch: always the uncut run."""

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from conftest import TINY
from test_distributed import run_cells, trace, values

from vitfw import checkpoint
from vitfw.train import main

LAYOUTS = {
    "single": (1, "single"),
    "ddp x2": (2, "ddp"),
    "ddp x4": (4, "ddp"),
    "fsdp2 x2": (2, "fsdp2"),
    "fsdp2 x4": (4, "fsdp2"),
    "hsdp 2x2": (4, "hsdp"),
}
PAIRS = list(itertools.permutations(LAYOUTS, 2))
CUT = 4  # of 9 steps, 3 an epoch


def words(layout: str, out: Path) -> list[str]:
    found = [*TINY, "machine.images_per_device=8", f"machine.strategy={LAYOUTS[layout][1]}", f"out={out}"]
    return [*found, "machine.shard_size=2"] if layout.startswith("hsdp") else found


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `uncut` and a run for each pair, all runs of one number of processes in one torchrun."""
    folder = tmp_path_factory.mktemp("moved")
    assert main(words("single", folder / "uncut")) == 0
    for count in (1, 2, 4):
        begun = [layout for layout, (processes, _) in LAYOUTS.items() if processes == count]
        cells = [
            {"name": layout, "words": [*words(layout, folder / layout), f"stop_after={CUT}"], "status": 75}
            for layout in begun
        ]
        run_cells(count, cells, folder)
    for first, second in PAIRS:
        shutil.copytree(folder / first, folder / f"{first} to {second}", symlinks=True)
    for count in (1, 2, 4):
        pairs = [(first, second) for first, second in PAIRS if LAYOUTS[second][0] == count]
        names = {pair: f"{pair[0]} to {pair[1]}" for pair in pairs}
        cells = [{"name": name, "words": words(second, folder / name)} for (_, second), name in names.items()]
        run_cells(count, cells, folder)
    return folder


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_run_saved_under_one_and_taken_on_under_another_is_the_uncut_run(
    moved: Path, first: str, second: str
) -> None:
    """P03, P48, P51: the same samples in each global batch, the same rates, losses, scores and averages."""
    ours, uncut = moved / f"{first} to {second}", moved / "uncut"
    assert trace(ours) == trace(uncut)
    assert values(ours, "train", "learning_rate") == values(uncut, "train", "learning_rate")
    for split, name in (("train", "loss"), ("train", "gradient_norm"), ("val", "loss"), ("val_ema", "loss")):
        assert values(ours, split, name) == pytest.approx(values(uncut, split, name), rel=1e-4), (split, name)
    one, other = (checkpoint.load(folder / "checkpoints" / "last.ckpt") for folder in (ours, uncut))
    assert one["ema"]["updates"] == other["ema"]["updates"] == 9
    for part in ("model", "ema"):
        for name, value in other[part].items():
            torch.testing.assert_close(
                one[part][name], value, rtol=1e-2, atol=5e-4, msg=lambda text, n=name: f"{n}: {text}"
            )
    assert one["progress"]["attempt"] == 1
