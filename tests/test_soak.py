"""A few kills of the soak in tests/soak.py, which does as many as one likes."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_killed_at_random_moments_loses_and_doubles_nothing(tmp_path: Path, processes: int) -> None:
    """In a process of its own: it forks, which a process with threads must not do."""
    command = [sys.executable, "tests/soak.py", "8" if processes == 1 else "3", str(processes), "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "'kills': " in done.stdout
