"""Which checkpoint is the best, over resumes, ties and NaN."""

import json
from pathlib import Path

import pytest
import torch
from conftest import tiny

from vitfw import after_step, checkpoint
from vitfw.train import main


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The accuracies that the evaluations of a run will find, in order; the losses beside them are real."""
    left: list[float] = []
    real = after_step.evaluate

    def scripted(*arguments, **options):
        found = real(*arguments, **options)
        score = left.pop(0)
        return {split: values | {"acc1": score} for split, values in found.items()}

    monkeypatch.setattr(after_step, "evaluate", scripted)
    return left


def best(folder: Path) -> tuple[float | None, int | None, int | None]:
    """(best value, its step by the record, step of the weights in best.ckpt)"""
    progress = checkpoint.load(folder / "checkpoints" / "last.ckpt")["progress"]
    file = folder / "checkpoints" / "best.ckpt"
    kept = checkpoint.load(file)["progress"]["step"] if file.exists() else None
    return progress["best"].get("val/acc1"), progress["best_step"].get("val/acc1"), kept


def test_the_best_is_kept_over_a_resume(tmp_path: Path, scores: list[float]) -> None:
    """P63: 0.5, 0.8, then a stop, then 0.6: the best stays 0.8 with its weights, and is what is exported."""
    words = tiny(f"out={tmp_path / 'run'}", "ema.decay=null", "machine.keep_last=1")
    scores += [0.5, 0.8, 0.6]
    assert main([*words, "stop_after=7"]) == 75
    assert best(tmp_path / "run") == (0.8, 6, 6)
    kept = checkpoint.load(tmp_path / "run" / "checkpoints" / "best.ckpt")["model"]
    assert main(words) == 0
    assert best(tmp_path / "run") == (0.8, 6, 6)
    for name, value in checkpoint.load(tmp_path / "run" / "checkpoints" / "best.ckpt")["model"].items():
        assert torch.equal(value, kept[name])
    assert json.loads((tmp_path / "run" / "provenance.json").read_text())["finished"]["val/acc1"] == 0.8


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([float("nan"), 0.4, 0.3], (0.4, 6, 6)),
        ([0.8, 0.8, 0.8], (0.8, 3, 3)),
        ([0.2, float("nan"), 0.2], (0.2, 3, 3)),
        ([float("nan")] * 3, (None, None, None)),
    ],
    ids=["first", "tie", "middle", "all"],
)
def test_nan_never_wins_and_a_tie_keeps_the_earlier(
    tmp_path: Path, scores: list[float], found: list[float], expected: tuple[float | None, int | None, int | None]
) -> None:
    """P63."""
    scores += found
    assert main(tiny(f"out={tmp_path / 'run'}", "ema.decay=null")) == 0
    assert best(tmp_path / "run") == expected


def test_a_run_in_a_moved_folder_keeps_its_best(tmp_path: Path, scores: list[float]) -> None:
    """P62: the best and its file go with the folder."""
    words = tiny("ema.decay=null")
    scores += [0.8, 0.5, 0.9]
    assert main([*words, f"out={tmp_path / 'a'}", "stop_after=4"]) == 75
    (tmp_path / "a").rename(tmp_path / "c")
    assert main([*words, f"out={tmp_path / 'c'}", "stop_after=7"]) == 75
    assert best(tmp_path / "c") == (0.8, 3, 3)
    assert main([*words, f"out={tmp_path / 'c'}"]) == 0
    assert best(tmp_path / "c") == (0.9, 9, 9)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("lost", ["missing", "of an older step", "of a later step"])
def test_names_that_a_kill_left_wrong_are_mended(tmp_path: Path, scores: list[float], lost: str) -> None:
    """P63: a save gets its own name first, then `last` and `best`: killed in between, the next start makes up for it."""
    words = tiny(f"out={tmp_path / 'run'}", "ema.decay=null", "machine.keep_last=5")
    folder = tmp_path / "run" / "checkpoints"
    scores += [0.5, 0.8, 0.6]
    assert main([*words, "stop_after=6"]) == 75
    for name in ("best.ckpt", "last.ckpt"):
        (folder / name).unlink()
        if lost != "missing":
            source = folder / "step-000000003.ckpt"
            if lost == "of a later step":
                state = checkpoint.load(source)
                state["progress"]["step"] = 8
                source = folder / "other"
                torch.save(state, source)
            (folder / name).hardlink_to(source)
    assert main([*words, "stop_after=7"]) == 75
    assert best(tmp_path / "run") == (0.8, 6, 6)
    assert main(words) == 0
    assert best(tmp_path / "run") == (0.8, 6, 6)


def test_a_best_that_is_gone_is_said_and_the_last_is_exported(
    tmp_path: Path, scores: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    words = tiny(f"out={tmp_path / 'run'}", "ema.decay=null", "machine.keep_last=1")
    scores += [0.8, 0.5, 0.5]
    assert main([*words, "stop_after=7"]) == 75
    (tmp_path / "run" / "checkpoints" / "best.ckpt").unlink()
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "note: best.ckpt of step 3 is gone" in shown and "the last weights are exported instead" in shown
