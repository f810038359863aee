"""Two starts of one run folder: the second waits, is refused in a sentence, and disturbs nothing."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, TINY

from vitfw import folder_lock
from vitfw.folder_lock import FolderLock
from vitfw.report.recorder import read_metrics
from vitfw.run import RunError
from vitfw.train import main

HOLD = """
import sys, time
from pathlib import Path
from vitfw.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""


def hold(folder: Path, seconds: float) -> subprocess.Popen[str]:
    """Another process that holds the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), str(seconds)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_second_start_is_refused_with_the_process_that_is_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TINY, f"out={tmp_path / 'run'}"]
    assert main([*words, "stop_after=2"]) == 75
    before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    monkeypatch.setattr(FolderLock.acquire, "__defaults__", (0.2,))
    with hold(tmp_path / "run", 60) as other:
        try:
            assert main(words) == 2
            shown = capsys.readouterr()
            assert f"another start of this run is at work (process {other.pid} on " in shown.err
            assert "stop it, or choose another out=" in shown.err
        finally:
            other.kill()
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == before
    assert len(read_metrics(tmp_path / "run", "train")) == 2
    assert main(words) == 0  # a lock ends with its process, killed or not


def test_a_second_start_goes_on_when_the_first_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with hold(tmp_path / "run", 1.0):
        begin, lock = time.monotonic(), FolderLock(tmp_path / "run")
        lock.acquire(30)
        assert 0.2 < time.monotonic() - begin < 25
    assert "waiting up to 30 s for its end" in capsys.readouterr().out
    assert f"process {os.getpid()} on " in (tmp_path / "run" / ".lock").read_text()
    lock.release()


def test_a_folder_that_is_no_runs_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    FolderLock(tmp_path).acquire()
    FolderLock(tmp_path / "notes.txt").acquire()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_file_system_without_locks_is_no_reason_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(folder_lock.fcntl, "lockf", none)
    lock = FolderLock(tmp_path / "run")
    lock.acquire()
    lock.release()


def test_processes_of_one_run_share_it(tmp_path: Path) -> None:
    """Rank 0 alone takes it, so the others are no second start; and a released lock is free for the next."""
    lock = FolderLock(tmp_path / "run")
    lock.acquire()
    lock.release()
    with hold(tmp_path / "run", 1.0), pytest.raises(RunError):
        FolderLock(tmp_path / "run").acquire(0)
