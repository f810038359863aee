"""A few kills of the soak in tests/soak.py, which does as many as one likes."""

import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.parametrize(
    ("processes", "words"), [(1, []), (2, []), (2, ["machine.strategy=fsdp2"])], ids=["1", "2", "cut"]
)
def test_a_run_killed_at_random_moments_loses_and_doubles_nothing(processes: int, words: list[str]) -> None:
    """In a process of its own: it forks, which a process with threads must not do."""
    command = [sys.executable, "tests/soak.py", "8" if processes == 1 else "3", str(processes), "1", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "'kills': " in done.stdout
