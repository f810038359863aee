"""Stop requests: what sets the flag, what does not, and a real signal to a real command."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, TINY
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from torch.utils.data import DataLoader

from vitfw import checkpoint
from vitfw.data.loader import WorkerStart
from vitfw.launch import Launch, MachineConfig
from vitfw.preempt import SPARE_SECONDS, Answer, StoppedError, StopRequest, deadline
from vitfw.report.recorder import read_metrics
from vitfw.startup import LeaveNow
from vitfw.tasks.classify import ClassifyTask
from vitfw.train import main
from vitfw.trainer import build_trainer


@pytest.fixture
def request_stop() -> StopRequest:
    return StopRequest()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_sets_a_flag_and_nothing_else(request_stop: StopRequest, number: int) -> None:
    before = {each: signal.getsignal(each) for each in request_stop.signals}
    request_stop.install()
    request_stop.install()  # again, as at the start of training: the handlers of before are not forgotten
    try:
        assert request_stop.agreed() is Answer.GO_ON
        os.kill(os.getpid(), number)
        assert request_stop.agreed() is Answer.STOP
        if number != signal.SIGINT:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), signal.SIGINT)
        assert request_stop.agreed() is Answer.STOP
        assert request_stop.agreed_to_stop
    finally:
        request_stop.uninstall()
    assert {each: signal.getsignal(each) for each in request_stop.signals} == before


def test_a_second_ctrl_c_of_one_process_means_now(request_stop: StopRequest) -> None:
    request_stop.install()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(LeaveNow, match="start the same command again"):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        request_stop.uninstall()


def test_the_second_signal_is_configurable() -> None:
    assert StopRequest("USR2").signals[-1] == signal.SIGUSR2


def test_an_evaluation_is_left_between_two_batches(request_stop: StopRequest) -> None:
    seen = []
    with pytest.raises(StoppedError):
        for batch in request_stop.watch(range(10)):
            seen.append(batch)
            if batch == 3:
                request_stop.signal = signal.SIGTERM
    assert seen == [0, 1, 2, 3]


def test_a_failed_write_outranks_a_stop(request_stop: StopRequest) -> None:
    request_stop.signal = signal.SIGTERM
    assert request_stop.agreed(failed=True) is Answer.FAILED


def test_the_clock_is_ours_or_slurms(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    assert deadline(0.0) == float("inf")
    assert deadline(10.0) == pytest.approx(now + 600, abs=5)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(now) + 3600))
    assert deadline(0.0) == int(now) + 3600 - SPARE_SECONDS
    assert deadline(10.0) == pytest.approx(now + 600, abs=5)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(now) + 60))  # a short job must not be over before it begins
    assert deadline(0.0) == pytest.approx(now + 45, abs=3)
    assert StopRequest(wall_minutes=1e-9).agreed() in (Answer.STOP, Answer.GO_ON)
    time.sleep(0.01)
    assert StopRequest(wall_minutes=1e-9).deadline < time.time() + 1


def test_loader_workers_outlive_the_signals_that_a_scheduler_sends_to_all() -> None:
    """P57: torch ends a worker at SIGTERM, and the run with it, before it could save."""
    loader = DataLoader(
        torch.utils.data.TensorDataset(torch.arange(64.0)), batch_size=4, num_workers=1, worker_init_fn=WorkerStart()
    )
    batches = iter(loader)
    next(batches)
    for worker in batches._workers:  # type: ignore[attr-defined]
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            os.kill(worker.pid, number)
    assert len(list(batches)) == 15


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise SystemExit(3)", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_a_process_that_leaves_its_loader_behind_ends(end: str) -> None:
    """Workers that ignored TERM for good would keep it waiting for ever."""
    script = f"""
        import os, signal, sys, torch
        from torch.utils.data import DataLoader, TensorDataset
        from vitfw.data.loader import WorkerStart
        loader = DataLoader(TensorDataset(torch.arange(64.0)), batch_size=4, num_workers=2, persistent_workers=True,
                            worker_init_fn=WorkerStart())
        batches = iter(loader)
        next(batches)
        kept = [batches, loader, loader._iterator]
        print(*(worker.pid for worker in batches._workers), flush=True)
        {end}
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert done.returncode in (3, -signal.SIGTERM), done.stderr
    end_of_workers = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in done.stdout.split()):
        assert time.monotonic() < end_of_workers, "a worker outlived its process"
        time.sleep(0.1)


def test_the_private_names_of_lightning_that_are_replaced_exist() -> None:
    """Its own signal handling talks to other ranks inside a handler; see trainer.build_trainer."""
    assert callable(_SignalConnector.register_signal_handlers)
    assert callable(_TrainingEpochLoop._broadcast_sigterm_tensor)
    trainer = build_trainer(MachineConfig(device="cpu"), Launch("python"), accumulation=1, callbacks=[])
    assert isinstance(trainer._signal_connector, _SignalConnector)
    assert isinstance(trainer.fit_loop.epoch_loop, _TrainingEpochLoop)
    before = signal.getsignal(signal.SIGTERM)
    trainer._signal_connector.register_signal_handlers()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_run_stopped_in_its_last_evaluation_makes_up_for_it_without_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step is left then, but the run is not finished: it has no result."""
    real, calls = ClassifyTask.measure, []

    def measure(self: ClassifyTask, batch: Any, measures: Any) -> None:
        calls.append(len(batch["image"]))
        if len(calls) == 60:  # the third evaluation: 12 batches, raw and averaged weights
            os.kill(os.getpid(), signal.SIGTERM)
        real(self, batch, measures)

    monkeypatch.setattr(ClassifyTask, "measure", measure)
    folder = tmp_path / "run"
    words = [*TINY, f"out={folder}", "machine.eval_images_per_device=32"]
    assert main(words) == 75
    progress = checkpoint.load(folder / "checkpoints" / "last.ckpt")["progress"]
    assert (progress["step"], progress["evaluated"]) == (9, 6)
    assert main(words) == 0
    progress = checkpoint.load(folder / "checkpoints" / "last.ckpt")["progress"]
    assert (progress["step"], progress["evaluated"]) == (9, 9)
    assert [record["step"] for record in read_metrics(folder, "val")] == [3, 6, 9]
    assert [record["step"] for record in read_metrics(folder, "train")] == list(range(1, 10))


def test_a_real_signal_to_the_documented_command(tmp_path: Path) -> None:
    """P04: status 75, a checkpoint of the last step done, a word with the step; the same command goes on."""
    folder = tmp_path / "run"
    words = [word for word in TINY if not word.startswith("train.epochs")] + ["train.epochs=2000", f"out={folder}"]
    command = [sys.executable, "train.py", *words, "eval.every_epochs=0", "ema.decay=null"]
    command = [word for word in command if word not in ("eval.every_epochs=1", "ema.decay=0.9")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + 120
        while not (folder / "metrics.jsonl").exists() or len(read_metrics(folder)) < 4:
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    found = checkpoint.newest(folder / "checkpoints")
    assert found is not None
    step = found[1].step
    assert step == read_metrics(folder, "train")[-1]["step"] >= 4
    assert f"stopped and saved at step {step:,}" in out
    assert (folder / "stopped").read_text() == f"{step}\n"
