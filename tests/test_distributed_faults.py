"""What happens when something happens to one of two processes: signals, bad numbers, a full disk, an exception."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny
from test_distributed import run_cells, trace, values

from vitfw import checkpoint
from vitfw.report.recorder import read_metrics
from vitfw.tasks.classify import ClassifyTask
from vitfw.train import main

# three bad steps of rank 1 in a row, read by the host two steps later: step 8 ends with the weights saved after step 6
BACK = ["guard.patience=3", "machine.images_per_device=16"]
NANS = [{"rank": 1, "where": "losses", "call": call, "do": "nan"} for call in (4, 5, 6)]
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
    "back ddp": {"words": BACK, "inject": NANS},
    "back fsdp2": {"words": [*BACK, "machine.strategy=fsdp2"], "inject": NANS},
    "back bf16": {
        "words": [*BACK, "machine.strategy=fsdp2", "machine.precision=bf16", "guard.raise_precision=attention"],
        "inject": NANS,
    },
    "spike": {
        "words": ["train.epochs=10", "eval.every_epochs=0", "guard.spike=10", "guard.window=20"],
        "inject": [{"rank": 1, "where": "losses", "call": 25, "do": "spike"}],
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
        cells.append({"name": name, **cell, "words": [*tiny(*cell.get("words", [])), f"out={out}"]})
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


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process that sums two micro-batches a step, the second of them bad in steps 4, 5 and 6."""
    folder, calls = tmp_path_factory.mktemp("alone") / "run", 0
    losses = ClassifyTask.losses

    def faulty(self: ClassifyTask, batch: Any, progress: float) -> Any:
        nonlocal calls
        calls += 1
        result = losses(self, batch, progress)
        return result | {"loss": result["loss"] + math.nan} if calls in (8, 10, 12) else result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClassifyTask, "losses", faulty)
        assert main([*tiny(*BACK), f"out={folder}"]) == 0
    return folder


@pytest.mark.parametrize("name", ["back ddp", "back fsdp2", "back bf16"])
def test_bad_steps_of_one_rank_bring_back_the_last_checkpoint_on_both(
    faults: tuple[Path, str], alone: Path, name: str
) -> None:
    """P29: the samples are named, their steps are not shown again, the run goes on with what follows; as in one process."""
    folder, out = faults
    state, expected = last(folder, name), last(alone.parent, "run")
    assert (
        "3 steps in a row had a loss or gradient that is not finite, or a spike: back to the weights of step 6" in out
    )
    assert trace(folder / name) == trace(alone)  # every window of data once, the bad one included
    assert len(trace(alone)) == 9
    assert (state["guard"]["skipped"], state["guard"]["rollbacks"]) == (3, 1)
    counts = {entry["step"].item() for entry in state["optimizer"].values()}
    assert counts == {4.0}  # steps 1 to 3 and 9: what 7 and 8 did to weights and moments is gone
    assert all(value.isfinite().all() for part in ("model", "ema") for value in state[part].values())
    for rank in (0, 1):
        lines = [json.loads(line) for line in (folder / name / f"skipped-rank{rank}.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [4, 5, 6]
        shown = (folder / name / f"trace-train-rank{rank}.jsonl").read_text().splitlines()
        assert [line["keys"] for line in lines] == [json.loads(shown[step])["keys"] for step in (3, 4, 5)]
    losses, reference = values(folder / name, "train", "loss"), values(alone, "train", "loss")
    assert [str(loss) for loss in losses[3:6]] == [str(loss) for loss in reference[3:6]] == ["nan"] * 3
    rtol = 2e-3 if name == "back bf16" else 1e-5
    good = [0, 1, 2, 6, 7, 8]
    assert [losses[step] for step in good] == pytest.approx([reference[step] for step in good], rel=rtol)
    assert state["guard"]["raised"] == (name == "back bf16")
    if name == "back bf16":
        assert "on with new data; from here on attention in float32" in out
    for key, value in expected["model"].items() if name != "back bf16" else ():
        torch.testing.assert_close(
            state["model"][key], value, rtol=1e-2, atol=5e-4, msg=lambda text, n=key: f"{n}: {text}"
        )


def test_a_spike_of_one_rank_is_skipped_on_both(faults: tuple[Path, str]) -> None:
    folder, _ = faults
    state = last(folder, "spike")
    assert (state["guard"]["skipped"], state["guard"]["rollbacks"]) == (1, 0)
    assert {entry["step"].item() for entry in state["optimizer"].values()} == {29.0}
    for rank in (0, 1):
        lines = [json.loads(line) for line in (folder / "spike" / f"skipped-rank{rank}.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [25]
        assert float(lines[0]["gradient_norm"]) > 100  # finite: the rank itself saw nothing wrong


def test_a_full_disk_ends_the_run_on_all_ranks_with_the_older_checkpoint(faults: tuple[Path, str]) -> None:
    folder, out = faults
    assert last(folder, "full")["progress"]["step"] == 3
    assert "no space left on device" in out


def test_an_exception_on_one_rank_ends_all_with_its_message(faults: tuple[Path, str]) -> None:
    """P58."""
    _, out = faults
    assert "RuntimeError: a fault of rank 1" in out
    assert "cell raise: status 1" in out
