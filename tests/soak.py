"""Kills runs with -9 at random moments, again and again, and checks after each kill that nothing was lost or doubled.

    python tests/soak.py [KILLS=200] [PROCESSES=1] [SEED=0] [key=value ...]

Words such as machine.strategy=fsdp2 go to every run.

tests/test_soak.py runs a few of them. Moments fall into start-up, training, evaluation, saving and export alike, because the
time of each kill is drawn over a whole run's length.
"""

import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from conftest import TINY  # noqa: E402

from vitfw import checkpoint  # noqa: E402
from vitfw.fit import build_fit  # noqa: E402, F401 - imported once, before the forks
from vitfw.report.recorder import read_metrics  # noqa: E402
from vitfw.train import main  # noqa: E402

STEPS = 9
WORDS = [*TINY, "machine.save_every_steps=1"]


def soak(kills: int, processes: int, seed: int, folder: Path, words: Sequence[str] = ()) -> dict[str, int]:
    """Runs until `kills` starts were killed; returns what happened. Raises AssertionError at the first loss."""
    reference = folder / "reference"
    seconds = start(reference, processes, words).wait_for_end()
    assert status_of(reference) == "finished", "the run that nobody kills must finish"
    expected = losses(reference)
    draw, done = random.Random(seed), {"kills": 0, "runs": 0, "before the first checkpoint": 0}
    while done["kills"] < kills:
        done["runs"] += 1
        out = folder / f"run{done['runs']}"
        best = 0
        while status_of(out) != "finished":
            job = start(out, processes, words)
            if done["kills"] < kills and job.kill_after(draw.uniform(0.0, 1.1 * seconds)):
                done["kills"] += 1
            else:
                job.wait_for_end()
            step = check(out, best)
            done["before the first checkpoint"] += step == 0
            best = max(best, step)
        assert losses(out) == expected, f"{out}: other losses than the run that nobody killed"
        assert best == STEPS
        shutil.rmtree(out)
    return done


class Job:
    """One start of the run: processes forked from this one, which has imported everything, so that a start takes a second
    and most kills fall into what the run itself does."""

    def __init__(self, words: list[str], processes: int, log: Path) -> None:
        self.log = log
        self.started = time.monotonic()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.left = set()
        for rank in range(processes):
            pid = os.fork()
            if pid == 0:
                os._exit(self.child(words, rank, processes, port))
            self.left.add(pid)

    def child(self, words: list[str], rank: int, processes: int, port: int) -> int:
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        if processes > 1:
            place = {"RANK": rank, "WORLD_SIZE": processes, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": processes}
            os.environ.update({key: str(value) for key, value in place.items()})
            os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"})
        try:
            return main(words)
        except BaseException:
            return 1

    def kill_after(self, seconds: float) -> bool:
        """Kills all processes; False where the run had ended before."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.ended():
                return False
            time.sleep(0.005)
        for pid in self.left:
            os.kill(pid, signal.SIGKILL)
        for pid in self.left:
            os.waitpid(pid, 0)
        return True

    def ended(self) -> bool:
        for pid in list(self.left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self.left.remove(pid)
                assert os.waitstatus_to_exitcode(status) == 0, self.log.read_text()[-6000:]
        return not self.left

    def wait_for_end(self, seconds: float = 300) -> float:
        end = time.monotonic() + seconds
        while not self.ended():
            assert time.monotonic() < end, "the run does not end"
            time.sleep(0.01)
        return time.monotonic() - self.started


def start(out: Path, processes: int, words: Sequence[str]) -> Job:
    return Job([*WORDS, *words, f"out={out}"], processes, out.with_suffix(".log"))


def status_of(out: Path) -> str:
    file = out / "provenance.json"
    if not file.exists():
        return "absent"
    return "finished" if json.loads(file.read_text()).get("finished") else "started"


def check(out: Path, best: int) -> int:
    """The newest checkpoint is whole and no older than the one seen before; returns its step."""
    found = checkpoint.newest(out / "checkpoints")
    step = 0 if found is None else found[1].step
    assert step >= best, f"{out}: the newest checkpoint went back from step {best} to {step}"
    if found is not None:
        assert found[2] == [], f"{out}: damaged files {found[2]}"
        state = checkpoint.load(found[0])
        assert all(value.isfinite().all() for value in state["model"].values())
    return step


def losses(out: Path) -> dict[int, tuple[float, tuple[str, ...]]]:
    """Of each step the loss, and the keys its images had, as the last attempt that did it wrote them down."""
    values = {record["step"]: record["loss"] for record in read_metrics(out, "train")}
    keys: dict[int, dict[int, list[str]]] = {}
    for rank, file in enumerate(sorted(out.glob("trace-train-rank*.jsonl"))):
        for line in file.read_text().splitlines():
            if not line.endswith("}"):
                continue  # torn by the kill
            record = json.loads(line)
            step = record["epoch"] * 3 + record["images"] // 32 + 1
            keys.setdefault(step, {})[rank] = record["keys"]
    together = {step: tuple(sorted(key for part in ranks.values() for key in part)) for step, ranks in keys.items()}
    return {step: (values[step], together[step]) for step in sorted(values)}


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:] if "=" not in word]
    kills, processes, seed = [*numbers, *(200, 1, 0)[len(numbers) :]]
    with tempfile.TemporaryDirectory() as name:
        print(soak(kills, processes, seed, Path(name), [word for word in sys.argv[1:] if "=" in word]))
