"""A run that was stopped and started again is the run that was never stopped: samples, learning rates, losses, weights."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import ROOT, TINY, tiny, torchrun
from safetensors.torch import load_file

from vitfw import checkpoint
from vitfw.config import load
from vitfw.report.recorder import read_metrics
from vitfw.run import package_versions
from vitfw.train import main

STEPS = 9


def final(folder: Path) -> dict[str, Any]:
    return checkpoint.load(folder / "checkpoints" / "last.ckpt")


def trace(folder: Path) -> list[tuple[int, int, tuple[str, ...]]]:
    """(epoch, images before the step, sorted keys of the step) over all ranks, in order."""
    steps: dict[tuple[int, int], list[str]] = {}
    for file in sorted(folder.glob("trace-train-rank*.jsonl")):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            steps.setdefault((record["epoch"], record["images"]), []).extend(record["keys"])
    return [(*place, tuple(sorted(keys))) for place, keys in sorted(steps.items())]


def values(folder: Path, split: str, name: str) -> dict[int, float]:
    return {record["step"]: record[name] for record in read_metrics(folder, split)}


def assert_same_tensors(one: dict[str, Any], other: dict[str, Any], *, rtol: float = 0.0, atol: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, dict):
            assert_same_tensors(value, other[name], rtol=rtol, atol=atol)
        else:
            torch.testing.assert_close(
                value, other[name], rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
            )


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uncut") / "run"
    assert main([*TINY, f"out={folder}"]) == 0
    return folder


@pytest.mark.parametrize("cut", range(1, STEPS))
def test_stopping_after_any_step_changes_nothing(uncut: Path, tmp_path: Path, cut: int) -> None:
    """Inside an epoch and at its end, bit for bit on one process: every sample once, same rates, losses, weights, averages."""
    folder = tmp_path / "run"
    words = [*TINY, f"out={folder}"]
    assert main([*words, f"stop_after={cut}"]) == 75
    assert final(folder)["progress"]["step"] == cut
    assert main(words) == 0
    assert trace(folder) == trace(uncut)
    for split, name in (
        ("train", "loss"),
        ("train", "learning_rate"),
        ("train", "gradient_norm"),
        ("val", "loss"),
        ("val_ema", "loss"),
    ):
        assert values(folder, split, name) == values(uncut, split, name), name
    assert len(read_metrics(folder, "val")) == 3  # one an epoch, whatever the cut
    for part in ("model", "optimizer", "ema"):
        assert_same_tensors(final(folder)[part], final(uncut)[part])


def test_two_processes_cut_and_continued_by_one_and_by_two(uncut: Path, tmp_path: Path) -> None:
    """Elastic: 2 processes stop in mid-epoch, 1 goes on, 2 finish; each global batch holds the samples of the uncut run."""
    folder = tmp_path / "run"
    words = [*TINY, f"out={folder}", "machine.images_per_device=16"]
    first = torchrun(2, [*words, "stop_after=2"])
    assert final(folder)["progress"]["step"] == 2, first.stderr
    assert main([*words, "stop_after=5"]) == 75
    last = torchrun(2, words)
    assert last.returncode == 0, last.stderr
    assert trace(folder) == trace(uncut)
    # micro-batches of 16 draw other mixup partners than one of 32, so the reference is one process with two of them
    reference = tmp_path / "reference"
    assert main([*TINY, f"out={reference}", "machine.images_per_device=16"]) == 0
    ours, theirs = values(folder, "train", "loss"), values(reference, "train", "loss")
    assert ours.keys() == theirs.keys() == set(range(1, STEPS + 1))
    for step, loss in theirs.items():
        assert ours[step] == pytest.approx(loss, rel=1e-5), step
    assert values(folder, "train", "learning_rate") == values(reference, "train", "learning_rate")
    assert values(folder, "val", "acc1") == values(reference, "val", "acc1")
    assert_same_tensors(final(folder)["model"], final(reference)["model"], rtol=1e-3, atol=1e-4)


def test_two_processes_stopped_equal_two_processes_uncut(tmp_path: Path) -> None:
    """Stopped at the end of an epoch, then inside the next one."""
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    for step in (3, 4):
        torchrun(2, [*TINY, f"out={cut}", f"stop_after={step}"])
        assert final(cut)["progress"]["step"] == step
    assert torchrun(2, [*TINY, f"out={cut}"]).returncode == 0
    assert torchrun(2, [*TINY, f"out={whole}"]).returncode == 0
    assert trace(cut) == trace(whole)
    assert values(cut, "train", "loss") == values(whole, "train", "loss")
    assert values(cut, "train", "learning_rate") == values(whole, "train", "learning_rate")
    assert len(read_metrics(cut, "val")) == 3
    assert_same_tensors(final(cut)["model"], final(whole)["model"])


def test_workers_change_nothing(uncut: Path, tmp_path: Path) -> None:
    for workers in (1, 2):
        folder = tmp_path / f"workers{workers}"
        assert main([*TINY, f"out={folder}", f"machine.workers={workers}"]) == 0
        assert values(folder, "train", "loss") == values(uncut, "train", "loss")
        assert trace(folder) == trace(uncut)


def test_a_damaged_last_checkpoint_falls_back_to_the_one_before(
    uncut: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    words = [*TINY, f"out={folder}"]
    assert main([*words, "stop_after=3"]) == 75
    assert main([*words, "stop_after=5"]) == 75
    last = folder / "checkpoints" / "last.ckpt"
    data = bytearray(last.read_bytes())
    data[len(data) // 2] ^= 0xFF
    last.write_bytes(data)
    assert main(words) == 0
    assert "passed over a damaged checkpoint" in capsys.readouterr().out
    assert values(folder, "train", "loss") == values(uncut, "train", "loss")
    assert [record["attempt"] for record in read_metrics(folder, "train") if record["step"] == 4] == [1, 2]


def test_another_configuration_is_refused_with_the_differences(uncut: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, f"out={uncut}", "optim.lr=0.5"]) == 2
    error = capsys.readouterr().err
    assert "holds a run with another configuration: optim.lr: 0.002 -> 0.5" in error
    assert "resume=changed" in error


def test_a_folder_of_an_older_version_goes_on_and_says_so(
    uncut: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keys that did not exist when the run began count as their defaults; a value that differs from the default is a change."""
    words = [*TINY, f"out={tmp_path / 'run'}"]
    assert main([*words, "stop_after=4"]) == 75
    config, provenance = tmp_path / "run" / "config.yaml", tmp_path / "run" / "provenance.json"
    stored, record = yaml.safe_load(config.read_text()), json.loads(provenance.read_text())
    del stored["eval"]["train_images"], stored["guard"]
    del stored["optim"]["lr"]  # TINY sets it: a key of an older version that had no lr cannot have meant this one
    record["attempts"][0]["versions"]["torch"] = "1.0"
    provenance.write_text(json.dumps(record))
    config.write_text(yaml.safe_dump(stored))
    capsys.readouterr()
    assert main(words) == 2
    assert "optim.lr: None -> 0.002." in capsys.readouterr().err
    config.write_text(yaml.safe_dump(stored | {"optim": stored["optim"] | {"lr": 0.002}}))
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert f"other versions than in the attempt before: torch 1.0 -> {package_versions()['torch']}" in shown
    added = next(line for line in shown.splitlines() if "count as their defaults" in line)
    assert added.endswith("eval.train_images, guard")
    assert_same_tensors(final(tmp_path / "run")["model"], final(uncut)["model"])
    assert yaml.safe_load(config.read_text())["guard"] == json.loads(json.dumps(asdict(load(words).guard)))
    assert json.loads(provenance.read_text())["attempts"][1]["notes"]


def test_a_finished_run_says_so_and_ends_with_0(uncut: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (uncut / "metrics.jsonl").read_bytes()
    assert main([*TINY, f"out={uncut}"]) == 0
    assert "this run is finished" in capsys.readouterr().out
    assert (uncut / "metrics.jsonl").read_bytes() == before


def test_without_a_readable_checkpoint_the_start_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TINY, f"out={tmp_path / 'run'}"]
    assert main([*words, "stop_after=2"]) == 75
    for file in (tmp_path / "run" / "checkpoints").iterdir():
        file.write_bytes(b"nothing")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("vitfw: no checkpoint in") and "choose another out= to start anew" in error
    assert "Traceback" not in error
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_makes_its_export_again(uncut: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    shutil.copytree(uncut, folder)
    first = load_file(folder / "export" / "model.safetensors")
    shutil.rmtree(folder / "export")
    (folder / "stopped").write_text("9\n")
    assert main([*TINY, f"out={folder}"]) == 0
    out = capsys.readouterr().out
    assert "it is made again from the checkpoints" in out
    assert str(folder / "export") in out
    assert_same_tensors(load_file(folder / "export" / "model.safetensors"), first)
    assert not (folder / "stopped").exists()
    (folder / "export" / "model.safetensors").unlink()
    shutil.rmtree(folder / "checkpoints")
    assert main([*TINY, f"out={folder}"]) == 2
    assert "a finished run whose export/ and checkpoints/ are gone" in capsys.readouterr().err


def test_a_moved_folder_goes_on_where_it_lies(uncut: Path, tmp_path: Path) -> None:
    """P62: no path is remembered: the best so far stays the best under the new name, and the old name stays empty."""
    assert main([*TINY, f"out={tmp_path / 'a'}", "stop_after=4"]) == 75
    (tmp_path / "a").rename(tmp_path / "c")
    assert main([*TINY, f"out={tmp_path / 'c'}"]) == 0
    assert not (tmp_path / "a").exists()
    ours, theirs = (final(folder)["progress"] for folder in (tmp_path / "c", uncut))
    assert (ours["best"], ours["best_step"]) == (theirs["best"], theirs["best_step"])
    best = checkpoint.load(tmp_path / "c" / "checkpoints" / "best.ckpt")
    assert best["progress"]["step"] == theirs["best_step"]["val/acc1"]


def test_a_run_that_starts_from_another_leaves_its_folder_alone(uncut: Path, tmp_path: Path) -> None:
    """P62: every file of the first run, byte for byte."""
    before = {path: path.read_bytes() for path in sorted(uncut.rglob("*")) if path.is_file()}
    words = tiny(f"weights={uncut / 'checkpoints' / 'last.ckpt'}", "optim.lr=0.004", f"out={tmp_path / 'b'}")
    assert main(words) == 0
    assert {path: path.read_bytes() for path in sorted(uncut.rglob("*")) if path.is_file()} == before


def test_a_folder_with_other_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert main([*TINY, f"out={tmp_path}"]) == 2
    assert "not empty and holds no run" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_changed_data_are_refused_on_a_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The order is a function of the data set: with other images it is another order, and samples would come twice or never."""
    for name in ("train-00000.tar", "train-00001.tar"):
        shutil.copy(ROOT / "data" / "digits" / name, tmp_path / name)
    words = tiny(f"out={tmp_path / 'run'}", f"data.train={tmp_path}/train-*.tar", "data.fraction=1")
    assert main([*words, "stop_after=2"]) == 75
    (tmp_path / "train-00001.tar").unlink()
    assert main(words) == 2
    assert "images of data.train:" in capsys.readouterr().err


def test_a_change_that_the_weights_cannot_follow_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TINY, f"out={tmp_path / 'run'}"]
    assert main([*words, "stop_after=2"]) == 75
    before = (tmp_path / "run" / "config.yaml").read_bytes()
    assert main([*tiny("model.depth=3"), f"out={tmp_path / 'run'}", "resume=changed"]) == 2
    assert "the checkpoint's model does not fit: missing net.blocks.2" in capsys.readouterr().err
    assert (tmp_path / "run" / "config.yaml").read_bytes() == before
    assert main([*words, "stop_after=3"]) == 75


def test_a_start_that_was_killed_at_once_can_be_started_again(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / ".config.yaml.tmp").write_text("model: {")
    assert main([*TINY, f"out={tmp_path / 'run'}", "stop_after=1"]) == 75


def test_stop_after_a_step_that_is_done_stops_at_once(tmp_path: Path) -> None:
    words = [*TINY, f"out={tmp_path / 'run'}"]
    assert main([*words, "stop_after=3"]) == 75
    assert main([*words, "stop_after=2"]) == 75
    assert final(tmp_path / "run")["progress"]["step"] == 3


def test_a_run_without_its_checkpoints_says_that_it_begins_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TINY, f"out={tmp_path / 'run'}"]
    assert main([*words, "stop_after=2"]) == 75
    for file in (tmp_path / "run" / "checkpoints").iterdir():
        file.unlink()
    assert main([*words, "stop_after=1"]) == 75
    assert "holds no checkpoint, although this run has begun before" in capsys.readouterr().out


def test_a_changed_run_that_has_nothing_left_to_train_is_refused(
    uncut: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shorter than what is done, or finished: config.yaml would claim what was never trained. The folder stays as it was."""
    shutil.copytree(uncut, tmp_path / "run")
    words = tiny(f"out={tmp_path / 'run'}", "resume=changed")
    before = {name: (tmp_path / "run" / name).read_bytes() for name in ("config.yaml", "provenance.json")}
    for change, ends in (("optim.lr=0.5", "9"), ("train.epochs=2", "6")):
        assert main([*tiny(change), *words[-2:]]) == 2
        error = capsys.readouterr().err
        assert f"the run has done 9 steps, and with {change.partition('=')[0]}: " in error
        assert (
            f"it ends after {ends}: nothing is left to train. Lengthen it (train.epochs), or start a new run" in error
        )
    assert main([*tiny("train.global_batch=16"), *words[-2:]]) == 2
    assert "train.global_batch: 32 -> 16: this run has done 9 steps of its own batch" in capsys.readouterr().err
    assert before == {name: (tmp_path / "run" / name).read_bytes() for name in before}
    assert main([*tiny("train.epochs=4"), *words[-2:]]) == 0  # longer is a change that can be taken up
    assert final(tmp_path / "run")["progress"]["step"] == 12


def test_the_runs_own_record_without_its_parts_is_named(
    uncut: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(uncut, tmp_path / "run")
    file = tmp_path / "run" / "provenance.json"
    whole = json.loads(file.read_text())
    for damage in ({"attempts": None}, {"run_id": None}, {"attempts": [1]}):
        file.write_text(json.dumps(whole | damage))
        assert main([*TINY, f"out={tmp_path / 'run'}"]) == 2
        assert "provenance.json is not what a run writes" in capsys.readouterr().err
