"""Machines that leave and join a running job: launch/torchrun.sh with NODES=1:2, two agents on one host."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, TINY
from test_distributed import values

from vitfw.report.recorder import read_metrics
from vitfw.train import main

EPOCHS, STEPS = 20, 60
WORDS = [word for word in TINY if not word.startswith(("train.epochs", "eval."))]
WORDS += [f"train.epochs={EPOCHS}", "eval.every_epochs=0", "machine.images_per_device=16", "machine.save_every_steps=1"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Agents:
    """Starts agents of one job, and ends what is left of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, []
        self.environment = {
            **os.environ,
            "PYTHON": "tests/slurm/slow_python",
            "REAL_PYTHON": sys.executable,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "NODES": "1:2",
            "HEAD": "127.0.0.1",
            "PORT": str(free_port()),
            "PROCESSES": "1",
            "RUN_ID": "7",
            "RESTARTS": "5",
            "LAST_CALL": "3",
        }

    def start(self) -> subprocess.Popen[bytes]:
        with (self.folder / f"agent{len(self.started)}.txt").open("wb") as log:
            command = ["launch/torchrun.sh", *WORDS, f"out={self.folder / 'run'}"]
            agent = subprocess.Popen(command, env=self.environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        self.started.append(agent)
        return agent

    def wait_for_the_meeting_point(self, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", int(self.environment["PORT"])), 1),
            ):
                return
            time.sleep(0.1)
        raise AssertionError("the first agent does not open its store")

    def lose(self, agent: subprocess.Popen[bytes]) -> None:
        """As when a machine fails: agent and worker are gone without a word."""
        for pid in [*children(agent.pid), agent.pid]:
            os.kill(pid, signal.SIGKILL)
        agent.wait()

    def end(self) -> None:
        for agent in self.started:
            if agent.poll() is None:
                self.lose(agent)


def children(pid: int) -> list[int]:
    return [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    found = Agents(tmp_path)
    yield found
    found.end()


def test_two_machines_one_machine_and_two_again(agents: Agents, tmp_path: Path) -> None:
    """The second machine fails, the first goes on alone from the last checkpoint, a third one joins: losses as uncut."""
    folder = tmp_path / "run"

    def wait_for(step: int) -> int:
        end = time.monotonic() + 240
        while True:
            records = read_metrics(folder, "train") if (folder / "metrics.jsonl").exists() else []
            if records and records[-1]["step"] >= step:
                return records[-1]["step"]
            assert time.monotonic() < end, (tmp_path / "agent0.txt").read_text()[-4000:]
            time.sleep(0.2)

    first = agents.start()
    agents.wait_for_the_meeting_point()  # whoever is first on this host keeps it, and that one must stay
    second = agents.start()
    at = wait_for(3)
    agents.lose(second)
    at = wait_for(at + 4)
    third = agents.start()
    assert first.wait(timeout=300) == 0, (tmp_path / "agent0.txt").read_text()[-4000:]
    third.wait(timeout=60)
    assert main([*WORDS, f"out={tmp_path / 'uncut'}"]) == 0
    records = {record["step"]: record for record in read_metrics(folder, "train")}
    assert sorted(records) == list(range(1, STEPS + 1))
    assert {record["attempt"] for record in records.values()} >= {0, 1, 2}
    expected = values(tmp_path / "uncut", "train", "loss")
    assert [records[step]["loss"] for step in sorted(records)] == pytest.approx(expected, rel=1e-4)
    log = (tmp_path / "agent0.txt").read_text()
    for processes in ("1 (torchrun", "2 (torchrun"):
        assert f"processes     {processes}" in log
