"""`vitfw checkpoint`: what it says about files, and the files it makes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from vitfw import checkpoint, checkpoint_command
from vitfw.checkpoint import CheckpointError, Progress


def write(folder: Path, value: float, *, ema: float | None = None, config: str = "seed: 0\n", width: int = 4) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {
        "model": {"net.weight": torch.full((3, width), value), "net.count": torch.tensor(int(value))},
        "optimizer": {"net.weight": {"step": torch.tensor(2.0), "exp_avg": torch.full((3, width), value)}},
        "ema": None if ema is None else {"net.weight": torch.full((3, width), ema), "updates": torch.tensor(5)},
    }
    progress = Progress(step=2, images=64, best={"val/acc1": 71.5}, best_step={"val/acc1": 1})
    return checkpoint.save(folder, state, progress, config=config, versions={"torch": "2.14.1"})


def test_info_says_where_the_run_stood_and_what_is_inside(tmp_path: Path) -> None:
    text = checkpoint_command.info(write(tmp_path, 1.0, ema=2.0))
    for words in (
        "step 2, 64 images",
        "val/acc1 71.5 (step 1)",
        "checksums right",
        "5 updates",
        "torch 2.14.1",
        "13 values",
    ):
        assert words in text
    assert "not finite" not in text
    assert "not finite  1 tensors: net.weight" in checkpoint_command.info(_with_nan(tmp_path / "nan"))


def _with_nan(folder: Path) -> Path:
    path = write(folder, 1.0)
    state = checkpoint.load(path)
    state["model"] = state["model"] | {"net.weight": torch.full((3, 4), float("nan"))}
    torch.save(state, folder / "nan.ckpt")
    return folder / "nan.ckpt"


def test_diff_lists_what_differs_the_largest_first(tmp_path: Path) -> None:
    one, other = write(tmp_path / "a", 1.0, ema=1.0), write(tmp_path / "b", 3.0, ema=1.5, config="seed: 1\n")
    found = checkpoint_command.differences(one, other)
    assert [(entry.name, entry.largest) for entry in found] == [
        ("model/net.weight", 2.0),
        ("model/net.count", 2.0),
        ("optimizer/net.weight/exp_avg", 2.0),
        ("ema/net.weight", 0.5),
    ]
    text = checkpoint_command.diff_text(one, other)
    assert "config - seed: 0" in text and "config + seed: 1" in text
    assert checkpoint_command.diff_text(one, one).strip() == "equal bit for bit"
    wide = checkpoint_command.differences(one, write(tmp_path / "c", 1.0, width=5))
    assert "(3, 4) torch.float32 and (3, 5) torch.float32" in wide[0].text
    assert any(entry.text == f"only in {one}" for entry in wide)


@pytest.mark.parametrize(("which", "expected"), [("raw", 2.0), ("ema", 6.0)])
def test_average_is_the_mean_of_the_weights(tmp_path: Path, which: Any, expected: float) -> None:
    files = [write(tmp_path / str(value), value, ema=value + 4) for value in (1.0, 2.0, 3.0)]
    state = checkpoint.load(checkpoint_command.average(files, tmp_path / "mean.ckpt", which=which))
    assert torch.equal(state["model"]["net.weight"], torch.full((3, 4), expected))
    assert state["model"]["net.count"] == 3  # a counter is not averaged
    assert state["optimizer"] == {} and state["ema"] is None


def test_consolidate_leaves_the_weights(tmp_path: Path) -> None:
    path = write(tmp_path / "run" / "checkpoints", 1.0, ema=2.0)
    out = checkpoint_command.consolidate(tmp_path / "run", tmp_path / "weights.ckpt", which="ema")
    assert torch.equal(checkpoint.load(out)["model"]["net.weight"], torch.full((3, 4), 2.0))
    assert out.stat().st_size < path.stat().st_size


def test_mistakes_are_named(tmp_path: Path) -> None:
    one = write(tmp_path / "a", 1.0)
    with pytest.raises(CheckpointError, match="has no averaged weights; use which=raw"):
        checkpoint_command.consolidate(one, tmp_path / "x.ckpt", which="ema")
    with pytest.raises(CheckpointError, match="at least 2 checkpoints, got 1"):
        checkpoint_command.average([one], tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match=r"net.weight is \(3, 5\) in the file"):
        checkpoint_command.average([one, write(tmp_path / "b", 1.0, width=5)], tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match="exists already"):
        checkpoint_command.consolidate(one, one)
    with pytest.raises(CheckpointError, match=r"holds no last\.ckpt"):
        checkpoint_command.info(tmp_path)
    assert not (tmp_path / "x.ckpt").exists()


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = write(tmp_path / "a", 1.0), write(tmp_path / "b", 2.0)
    assert checkpoint_command.main(["info", str(one)]) == 0
    assert checkpoint_command.main(["diff", str(one), str(one)]) == 0
    assert checkpoint_command.main(["diff", str(one), str(other)]) == 1
    assert checkpoint_command.main(["average", str(one), str(other), "--out", str(tmp_path / "mean.ckpt")]) == 0
    assert checkpoint_command.main(["consolidate", str(one), "--out", str(tmp_path / "alone.ckpt")]) == 0
    assert "net.weight: differs by up to 1" in capsys.readouterr().out
