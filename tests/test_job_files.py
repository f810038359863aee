"""launch/job.sh: what a job file makes of a run's end, whatever launcher stands between and whoever gets the signal."""

import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import ROOT


def attend(folder: Path, run: str, *, forward: str = "") -> subprocess.Popen[bytes]:
    """A job file whose run is a few words of bash; ends with STATUS."""
    script = f'set -euo pipefail; PYTHON=python; . launch/job.sh; check_words seed=1 "out={folder}"'
    script += f'; FORWARD="{forward}" attend bash -c \'{run}\'; exit "$STATUS"'
    return subprocess.Popen(["bash", "-c", script], cwd=ROOT)


@pytest.mark.parametrize("status", [0, 1, 2, 75])
def test_the_status_of_the_run_is_that_of_the_job(tmp_path: Path, status: int) -> None:
    assert attend(tmp_path, f"exit {status}").wait(timeout=30) == status


@pytest.mark.parametrize("place", ["stopped", "probe-seed0/stopped"])
def test_a_new_mark_speaks_for_a_launcher_that_hides_the_status(tmp_path: Path, place: str) -> None:
    """That of a ladder lies in the folder of its rung."""
    (tmp_path / place).parent.mkdir(exist_ok=True)
    write = f"echo 5 > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/{place}"
    assert attend(tmp_path, f"{write}; exit 1").wait(timeout=30) == 75
    assert attend(tmp_path, "exit 1").wait(timeout=30) == 1  # it is an old one now: this run failed
    assert attend(tmp_path, f"rm {tmp_path}/{place}; exit 1").wait(timeout=30) == 1
    (tmp_path / place).write_text("5\n")
    assert attend(tmp_path, f"{write}; exit 1").wait(timeout=30) == 75  # stopped again


def test_the_shell_outlives_the_signals_that_its_run_gets_as_well(tmp_path: Path) -> None:
    job = attend(tmp_path, f"touch {tmp_path}/started; sleep 1; exit 75")
    wait_for(tmp_path / "started")
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
        job.send_signal(number)
        time.sleep(0.1)
    assert job.wait(timeout=30) == 75


def test_signals_are_passed_on_where_only_the_shell_gets_them(tmp_path: Path) -> None:
    run = f'trap "exit 75" TERM; touch {tmp_path}/started; while true; do sleep 0.05; done'
    job = attend(tmp_path, run, forward="TERM USR1 INT")
    wait_for(tmp_path / "started")
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=30) == 75


def test_a_run_folder_must_be_named() -> None:
    script = "PYTHON=python; . launch/job.sh; check_words recipe=digits"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert "out=FOLDER is missing" in done.stderr


def wait_for(path: Path) -> None:
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.02)
