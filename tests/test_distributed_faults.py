"""What happens when something happens to one of two processes: signals, bad numbers, a full disk, an exception."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY
from test_distributed import run_cells

from vitfw import checkpoint
from vitfw.report.recorder import read_metrics

CELLS: dict[str, dict[str, Any]] = {
    "term": {"status": 75, "inject": [{"rank": 1, "where": "losses", "call": 4, "do": "TERM"}]},
    "evaluation": {
        "status": 75,
        "words": ["machine.eval_images_per_device=16"],
        "inject": [{"rank": 0, "where": "measure", "call": 2, "do": "USR1"}],
    },
    "evaluation again": {"folder": "evaluation", "words": ["machine.eval_images_per_device=16"]},
    "twice": {
        "status": 75,
        "words": ["machine.stop_signal=USR2"],
        "inject": [
            {"rank": 0, "where": "losses", "call": 4, "do": "USR2"},
            {"rank": 0, "where": "losses", "call": 5, "do": "TERM"},
            {"rank": "all", "where": "save", "call": 2, "do": "INT"},
            {"rank": "all", "where": "save", "call": 2, "do": "TERM"},
            {"rank": "all", "where": "save", "call": 2, "do": 0.3},
        ],
    },
    "slow": {
        "status": 75,
        "words": ["machine.strategy=fsdp2"],
        "inject": [
            {"rank": 1, "where": "losses", "call": 4, "do": 1.0},
            {"rank": 0, "where": "losses", "call": 4, "do": "TERM"},
        ],
    },
    "wall": {"status": 75, "words": ["machine.wall_minutes=0.000001"]},
    "nan ddp": {"inject": [{"rank": 1, "where": "losses", "call": 5, "do": "nan"}]},
    "nan fsdp2": {
        "words": ["machine.strategy=fsdp2"],
        "inject": [{"rank": 1, "where": "losses", "call": 5, "do": "nan"}],
    },
    "full": {"status": 1, "inject": [{"rank": 0, "where": "save", "call": 2, "do": "full"}]},
    "raise": {"status": 1, "inject": [{"rank": 1, "where": "losses", "call": 3, "do": "raise"}]},
}


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("faults")
    cells = []
    for name, cell in CELLS.items():
        out = folder / cell.get("folder", name)
        cells.append({"name": name, **cell, "words": [*TINY, f"out={out}", *cell.get("words", [])]})
    out, err = run_cells(2, cells, folder)
    return folder, out + err


def last(folder: Path, name: str) -> dict[str, Any]:
    found = checkpoint.newest(folder / name / "checkpoints")
    assert found is not None and found[2] == []
    return checkpoint.load(found[0])


def steps(folder: Path, split: str = "train") -> list[int]:
    return [record["step"] for record in read_metrics(folder, split)]


def test_a_signal_to_one_rank_stops_both_after_the_same_step(faults: tuple[Path, str]) -> None:
    """P04: one step later, with a whole checkpoint, status 75, a marker for the launcher and a word with the step."""
    folder, out = faults
    assert last(folder, "term")["progress"]["step"] == 5
    assert steps(folder / "term") == [1, 2, 3, 4, 5]
    assert (folder / "term" / "stopped").read_text() == "5\n"
    assert "stopped and saved at step 5: start the same command again to go on" in out


def test_a_signal_in_an_evaluation_ends_it_and_the_next_start_makes_up_for_it(faults: tuple[Path, str]) -> None:
    folder, _ = faults
    assert steps(folder / "evaluation", "val") == [3, 6, 9]
    attempts = {record["step"]: record["attempt"] for record in read_metrics(folder / "evaluation", "val")}
    assert attempts == {3: 1, 6: 1, 9: 1}
    assert steps(folder / "evaluation") == list(range(1, 10))
    assert not (folder / "evaluation" / "stopped").exists()
    best_step = last(folder, "evaluation")["progress"]["best_step"]
    for name, key in (("best.ckpt", "val/acc1"), ("best_ema.ckpt", "val_ema/acc1")):  # the first one may be the best
        assert checkpoint.load(folder / "evaluation" / "checkpoints" / name)["progress"]["step"] == best_step[key]


def test_further_signals_change_nothing_not_even_in_the_save(faults: tuple[Path, str]) -> None:
    folder, _ = faults
    assert last(folder, "twice")["progress"]["step"] in (5, 6)
    assert (folder / "twice" / "stopped").exists()


def test_a_slow_rank_does_not_lock_the_others(faults: tuple[Path, str]) -> None:
    folder, _ = faults
    assert last(folder, "slow")["progress"]["step"] == 5


def test_the_wall_time_stops_as_a_signal_does(faults: tuple[Path, str]) -> None:
    folder, _ = faults
    assert last(folder, "wall")["progress"]["step"] == 2


@pytest.mark.parametrize("name", ["nan ddp", "nan fsdp2"])
def test_a_bad_loss_on_one_rank_skips_the_step_on_both(faults: tuple[Path, str], name: str) -> None:
    folder, _ = faults
    state = last(folder, name)
    assert state["guard"]["skipped"] == 1
    assert all(value.isfinite().all() for part in ("model", "ema") for value in state[part].values())
    assert {entry["step"].item() for entry in state["optimizer"].values()} == {8.0}  # 9 steps, one of them skipped
    for rank in (0, 1):
        lines = (folder / name / f"skipped-rank{rank}.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [5]
        assert len(json.loads(lines[0])["keys"]) == 16


def test_a_full_disk_ends_the_run_on_all_ranks_with_the_older_checkpoint(faults: tuple[Path, str]) -> None:
    folder, out = faults
    assert last(folder, "full")["progress"]["step"] == 3
    assert "no space left on device" in out


def test_an_exception_on_one_rank_ends_all_with_its_message(faults: tuple[Path, str]) -> None:
    """P58."""
    _, out = faults
    assert "RuntimeError: a fault of rank 1" in out
    assert "cell raise: status 1" in out
