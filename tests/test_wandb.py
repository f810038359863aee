"""W&B beside the run itself: one whole run out of a job of several parts, and sweeps."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, TINY
from hypothesis import given
from hypothesis import strategies as st
from wandb_offline import read_history

from vitfw import cli
from vitfw.config import load
from vitfw.report.recorder import read_metrics
from vitfw.upload_command import send, whole_run


def record(step: int, attempt: int, split: str = "train", **values: Any) -> dict[str, Any]:
    head = {"step": step, "images": 32 * step, "epoch": step / 4, "attempt": attempt, "split": split, "time": 0.0}
    return head | values


class Client:
    """A dashboard that keeps what it is sent, and fails after a number of calls."""

    def __init__(self, fails_after: int = 1000) -> None:
        self.rows: list[dict[str, Any]] = []
        self.fails_after, self.on = fails_after, True

    def log(self, values: dict[str, Any], axes: dict[str, Any]) -> None:
        self.on = len(self.rows) < self.fails_after
        if self.on:
            self.rows.append({**values, "step": axes["step"], "attempt": axes["attempt"]})

    def close(self, *, status: int) -> None:
        assert status == 0


def test_two_parts_become_one_with_each_step_once() -> None:
    """P67, P68: killed after step 12 with a checkpoint at 10, gone on to 15."""
    records = [record(step, 0, loss=1.0) for step in range(1, 13)] + [
        record(step, 1, loss=2.0) for step in range(11, 16)
    ]
    records += [record(8, 0, "val", acc1=50.0), record(12, 0, "val", acc1=60.0), record(12, 1, "val", acc1=61.0)]
    client = Client()
    assert send(records, client) == 17  # type: ignore[arg-type]
    train = [row for row in client.rows if "train/loss" in row]
    assert [row["step"] for row in train] == list(range(1, 16))
    assert [row["train/loss"] for row in train] == [1.0] * 10 + [2.0] * 5
    assert [(row["step"], row["val/acc1"]) for row in client.rows if "val/acc1" in row] == [(8, 50.0), (12, 61.0)]
    assert [row["step"] for row in client.rows] == sorted(row["step"] for row in client.rows)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.sampled_from(["train", "val"])), max_size=40))
def test_every_place_comes_once_with_its_latest_attempt(places: list[tuple[int, int, str]]) -> None:
    found = whole_run([record(step, attempt, split) for step, attempt, split in places])
    assert {(row["step"], row["split"]): row["attempt"] for row in found} == {
        (step, split): max(a for s, a, t in places if (s, t) == (step, split)) for step, _, split in places
    }
    assert [row["step"] for row in found] == sorted(row["step"] for row in found)


def write_run(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({"optim": {"lr": 0.1}}))
    (folder / "provenance.json").write_text(json.dumps({"run_id": "run-1"}))
    rows = [record(1, 0, loss=3.0), record(2, 0, loss="nan"), record(2, 1, loss=1.5)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"torn')
    return folder


def test_the_command_makes_one_offline_run(tmp_path: Path) -> None:
    """As a process: W&B's own writer ends with it."""
    folder = write_run(tmp_path / "run")
    done = subprocess.run(
        [sys.executable, "-m", "vitfw.cli", "upload", str(folder)],
        env={**os.environ, "WANDB_MODE": "offline"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 of 2 records sent to W&B as run run-1-whole" in done.stdout
    [file] = folder.glob("wandb/offline-run-*/run-run-1-whole.wandb")
    assert [(row["step"], row["train/loss"]) for row in read_history(file)] == [(1, 3.0), (2, 1.5)]


def test_what_fails_is_counted_and_what_is_no_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert send([record(step, 0, loss=1.0) for step in range(5)], Client(fails_after=3)) == 3  # type: ignore[arg-type]
    import wandb

    def fail(**_: object) -> None:
        raise RuntimeError("no service today")

    monkeypatch.setattr(wandb, "init", fail)
    assert cli.main(["upload", str(write_run(tmp_path / "run"))]) == 1
    shown = capsys.readouterr()
    assert "no service today" in shown.err and "0 of 2 records sent" in shown.out
    assert cli.main(["upload", str(tmp_path)]) == 2
    assert "holds no run with records (config.yaml, provenance.json, metrics.jsonl missing)" in capsys.readouterr().err


# Sweeps


def sweep_words(**values: Any) -> list[str]:
    """The command that W&B's own agent makes of the sweep file for a trial with these values."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

    sweep = yaml.safe_load((ROOT / "launch" / "sweep.yaml").read_text())
    fixed = {key: entry["value"] for key, entry in sweep["parameters"].items() if "value" in entry}
    chosen = {key: entry["values"][0] for key, entry in sweep["parameters"].items() if "values" in entry}
    arguments = create_sweep_command_args({"args": {key: {"value": v} for key, v in (fixed | chosen | values).items()}})
    assert sweep["command"] == ["${env}", "bash", "launch/sweep.sh", "${args_no_hyphens}"]
    return arguments["args_no_hyphens"]


def test_the_words_of_a_trial_are_those_of_the_command_line() -> None:
    """P69: nested keys, lists, null and switches arrive in their type."""
    config = load(sweep_words(**{"optim.betas": [0.9, 0.95], "ema.decay": None, "machine.compile": True}))
    assert config.recipe == "digits" and config.optim.lr == 1e-3 and config.optim.betas == (0.9, 0.95)
    assert config.ema.decay is None and config.machine.compile is True
    with pytest.raises(ValueError, match=r"optim\.lrr=1: no such key; did you mean optim\.lr"):
        load(sweep_words(**{"optim.lrr": 1}))


def test_a_trial_runs_on_two_processes_with_the_same_values(tmp_path: Path) -> None:
    """P69, P70: both ranks train with the trial's rate; one W&B run, in a folder that the trial finds again."""
    own = {key: value for key, _, value in (word.partition("=") for word in TINY)} | {"train.epochs": 2}
    environment = {
        **os.environ, "PROCESSES": "2", "WANDB_SWEEP_ID": "sw", "WANDB_RUN_ID": "trial", "WANDB_MODE": "offline",
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "RUNS": str(tmp_path), "PYTHON": sys.executable,
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "launch/sweep.sh", *sweep_words(**own, **{"optim.lr": 0.0123})],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[:3000]
    folder = tmp_path / "sweep-sw" / "trial"
    assert yaml.safe_load((folder / "config.yaml").read_text())["optim"]["lr"] == 0.0123
    assert "0.0123 (absolute)" in done.stdout and "= 2 processes x" in done.stdout
    [file] = folder.glob("wandb/offline-run-*/run-*.wandb")
    rates = [row["train/learning_rate"] for row in read_history(file) if "train/learning_rate" in row]
    assert rates == [row["learning_rate"] for row in read_metrics(folder, "train")]
