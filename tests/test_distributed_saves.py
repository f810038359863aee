"""Checkpoints in parts from real processes: moved between worlds and strategies, and what happens when a writer fails."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny
from test_distributed import run_cells, trace

from vitfw import checkpoint, checkpoint_command
from vitfw.models.export import export_checkpoint
from vitfw.report.recorder import read_metrics
from vitfw.train import main

SAME = ["machine.images_per_device=8"]  # the same micro-batches for 1, 2 and 4 processes: the same random numbers
FSDP2 = ["machine.strategy=fsdp2"]
HSDP = ["machine.strategy=hsdp", "machine.shard_size=2"]
PART_OF_RANK_1 = {"rank": 1, "where": "part", "call": 2}  # the second save, after step 6


def cell(out: Path, *words: str, status: int = 0, inject: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"name": out.name, "words": tiny(*SAME, *words, f"out={out}"), "status": status, "inject": inject or []}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    moved, killed, untraced = folder / "moved", folder / "killed", "data.trace=false"
    fault = {"status": 1, "inject": [{**PART_OF_RANK_1, "do": "raise"}]}
    limit = {"status": 1, "inject": [{**PART_OF_RANK_1, "do": "limit"}]}
    slow = [{**PART_OF_RANK_1, "do": 1.0}]
    cells = [
        cell(moved, *FSDP2, "stop_after=2", status=75),
        cell(folder / "raised", *FSDP2, untraced, **fault),  # type: ignore[arg-type]
        cell(folder / "full", *FSDP2, untraced, **limit),  # type: ignore[arg-type]
        cell(folder / "slow", *FSDP2, inject=slow),
        cell(folder / "one file", *FSDP2, "stop_after=2", "machine.checkpoint_format=file", status=75),
        cell(folder / "copies", "machine.strategy=ddp", "stop_after=2", "machine.checkpoint_format=sharded", status=75),
        cell(killed, *FSDP2, inject=[{**PART_OF_RANK_1, "do": "KILL"}]),
    ]
    out = run_cells(2, cells, folder, status=1)  # the last one ends with the process
    (folder / "out.txt").write_text("\n".join(out))
    shutil.copytree(killed, folder / "as it was left", symlinks=True)
    assert main(tiny(*SAME, f"out={killed}")) == 0
    assert main(tiny(*SAME, f"out={moved}", "stop_after=4", "machine.checkpoint_format=sharded")) == 75
    run_cells(
        4,
        [
            cell(moved, *HSDP, "machine.keep_last=9", "stop_after=5", status=75),
            cell(moved, *FSDP2, "machine.keep_last=9", "stop_after=7", status=75),
            cell(moved, *HSDP, "machine.keep_last=9", "stop_after=8", status=75),
            cell(folder / "one file", *HSDP),
        ],
        folder,
    )
    assert main(tiny(*SAME, f"out={moved}", "machine.keep_last=9")) == 0
    assert main(tiny(*SAME, f"out={folder / 'uncut'}")) == 0
    return folder


def parts(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def by_step(folder: Path, split: str, name: str) -> dict[int, float]:
    """The last word on each step."""
    return {record["step"]: record[name] for record in read_metrics(folder, split)}


def same_run(ours: Path, uncut: Path, *, repeated: bool = False) -> None:
    """`repeated`: steps after the last save were done again, so their samples stand in the trace twice."""
    assert repeated or trace(ours) == trace(uncut)
    for split, name in (("train", "loss"), ("train", "gradient_norm"), ("val", "acc1"), ("val_ema", "acc1")):
        mine, theirs = (by_step(folder, split, name) for folder in (ours, uncut))
        assert mine == pytest.approx(theirs, rel=1e-4), (split, name)
    one, other = (checkpoint.load(folder / "checkpoints" / "last.ckpt") for folder in (ours, uncut))
    assert one["ema"]["updates"] == other["ema"]["updates"]
    assert {key: dict(entry).keys() for key, entry in one["optimizer"].items()} == {
        key: entry.keys() for key, entry in other["optimizer"].items()
    }
    for part in ("model", "ema"):
        for name, value in other[part].items():
            torch.testing.assert_close(one[part][name], value, rtol=1e-2, atol=5e-4)


def test_parts_move_from_2_to_1_to_4_processes_and_between_strategies(runs: Path) -> None:
    """Cut by two, taken on by one, then by four in copies of two, all in mid-epoch: the run that was never cut."""
    same_run(runs / "moved", runs / "uncut")
    saved = dict(checkpoint.step_files(runs / "moved" / "checkpoints"))
    written = [f"part-{rank:05d}.ckpt" for rank in range(4)]
    assert parts(saved[4]) == ["index.json", *written[:1]]
    assert parts(saved[5]) == ["index.json", *written[:2]]  # the second copy of the weights writes nothing
    assert parts(saved[7]) == ["index.json", *written]
    assert saved[9].is_file()


def test_each_process_writes_its_own_pieces_alone(runs: Path) -> None:
    """Of each tensor that is cut about a quarter in each file; what is not cut in the first one only."""
    folder = next(path for step, path in checkpoint.step_files(runs / "moved" / "checkpoints") if step == 7)
    index = json.loads((folder / "index.json").read_text())
    assert index["step"] == 7 and list(index["parts"]) == [f"part-{rank:05d}.ckpt" for rank in range(4)]
    trees = [torch.load(folder / name, weights_only=True)["part"] for name in index["parts"]]
    rows = [[tree["optimizer"]["net.blocks.0.attn.qkv.weight"]["exp_avg"][2].shape[0]] for tree in trees]
    assert rows == [[18]] * 4
    assert [tree["optimizer"]["net.blocks.0.attn.qkv.weight"]["step"] is None for tree in trees] == [False, *[True] * 3]
    assert ["config" in tree for tree in trees] == [True, False, False, False]


def test_one_file_can_be_asked_for_and_parts_too(runs: Path) -> None:
    same_run(runs / "one file", runs / "uncut")
    assert (runs / "copies" / "checkpoints" / "last.ckpt").is_dir()
    assert parts(runs / "copies" / "checkpoints" / "last.ckpt") == ["index.json", "part-00000.ckpt"]


@pytest.mark.parametrize(("name", "word"), [("raised", "a fault of rank 1"), ("full", "File too large")])
def test_a_part_that_fails_ends_the_run_on_all_ranks_with_the_older_checkpoint(
    runs: Path, name: str, word: str
) -> None:
    out = (runs / "out.txt").read_text()
    assert re.search(rf"{name}/checkpoints/step-000000006.ckpt could not be written.*rank 1: .*{word}", out)
    names = parts(runs / name / "checkpoints")
    assert [entry for entry in names if entry.startswith((".", "step"))] == ["step-000000003.ckpt"]
    found = checkpoint.newest(runs / name / "checkpoints")
    assert found is not None and found[1].step == 3 and found[2] == []


def test_a_process_that_is_killed_while_it_writes_leaves_the_older_checkpoint(runs: Path) -> None:
    """Nothing that looks like a save, and the run goes on, here as one process, to the end of the run that nobody killed."""
    found = checkpoint.newest(runs / "as it was left" / "checkpoints")
    assert found is not None and found[1].step == 3 and found[2] == []
    saves = [path.name for _, path in checkpoint.step_files(runs / "as it was left" / "checkpoints")]
    assert saves == ["step-000000003.ckpt"]
    same_run(runs / "killed", runs / "uncut", repeated=True)
    assert not [name for name in parts(runs / "killed" / "checkpoints") if name.startswith(".")]


def test_a_slow_writer_changes_nothing(runs: Path) -> None:
    same_run(runs / "slow", runs / "uncut")


def test_parts_are_exported_and_consolidated(runs: Path, tmp_path: Path) -> None:
    """As of the file that they make, and loaded by timm without a word."""
    import timm

    folder = runs / "as it was left" / "checkpoints" / "last.ckpt"
    assert "checksums right" in checkpoint_command.info(folder)
    one = checkpoint_command.consolidate(folder, tmp_path / "one.ckpt", which="all")
    assert checkpoint_command.differences(folder, one) == []
    for which in ("raw", "ema"):
        out = export_checkpoint(folder, tmp_path / which, which=which).folder  # type: ignore[arg-type]
        state = timm.create_model(f"local-dir:{out}", pretrained=True).state_dict()
        stored = checkpoint.load(one)["model" if which == "raw" else "ema"]
        assert all(torch.equal(value, stored[f"net.{name}"]) for name, value in state.items())
