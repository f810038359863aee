"""The job files in launch/ on a real SLURM of two nodes: whatever interrupts a job, it comes back and ends as the uncut run."""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS), str(TESTS / "slurm")]

import cluster  # noqa: E402
from conftest import ROOT, TINY  # noqa: E402
from test_distributed import trace, values  # noqa: E402

from vitfw.report.recorder import read_metrics  # noqa: E402
from vitfw.train import main  # noqa: E402

REASON = cluster.missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

WORDS = [*TINY, "machine.images_per_device=16"]
JOBS = {
    "srun": ["--ntasks-per-node=1", "launch/slurm.sbatch"],
    "torchrun": ["launch/slurm_torchrun.sbatch"],
}


class Slurm:
    """The running cluster and what a user types at it."""

    def __init__(self, folder: Path) -> None:
        self.environment = cluster.environment_of(folder) | {
            "PYTHON": "tests/slurm/slow_python",
            "REAL_PYTHON": sys.executable,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }

    def run(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def submit(self, *words: str) -> str:
        return self.run("sbatch", "--parsable", *words).strip()

    def state(self, job: str) -> str:
        fields = self.run("scontrol", "-o", "show", "job", job)
        return fields.split("JobState=")[1].split()[0]

    def maps_of(self, script: str) -> str:
        """What the processes of a script of this job's cluster have mapped, from the youngest on."""
        found = ""
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_text().split("\0")
                if any(word.endswith(script) for word in words) and self.environment["SLURM_CONF"] in (
                    process / "environ"
                ).read_text(errors="replace"):
                    found += (process / "maps").read_text()
        return found

    def resume(self, node: str) -> None:
        """Brings a node back; it may come back by itself at any moment, and then takes no such command."""
        end = time.monotonic() + 60
        while "down" in self.run("sinfo", "-h", "-n", node, "-o", "%t"):
            command = ["scontrol", "update", f"nodename={node}", "state=resume"]
            subprocess.run(command, env=self.environment, capture_output=True, timeout=60, check=False)
            assert time.monotonic() < end, f"{node} stays down"
            time.sleep(0.5)

    def wait(self, job: str, *states: str, seconds: float = 240) -> None:
        end = time.monotonic() + seconds
        while (now := self.state(job)) not in states:
            assert time.monotonic() < end, f"job {job} is {now}, not {states}"
            time.sleep(0.3)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with tempfile.TemporaryDirectory(prefix="vitfw-slurm-") as name:  # pytest's own folder is closed to munge
        folder = Path(name)
        try:
            cluster.up(folder)
            yield Slurm(folder)
        finally:
            cluster.down(folder)


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uncut") / "run"
    assert main([*WORDS, f"out={folder}"]) == 0
    return folder


def wait_for_step(folder: Path, step: int, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not (folder / "metrics.jsonl").exists() or not [
        r for r in read_metrics(folder, "train") if r["step"] >= step
    ]:
        assert time.monotonic() < end, f"{folder} did not reach step {step}"
        time.sleep(0.1)


CASES = [
    ("srun", "signal"),
    ("torchrun", "signal"),
    ("srun", "preemption"),
    ("torchrun", "preemption"),
    ("srun", "requeue"),
    ("srun", "node down"),
    ("srun", "time limit"),
]
# SLURM looks at its clock every 30 s, so that this signal comes 25 to 55 s after the start of a job of a minute
SHORT = ["--time=1", "--signal=USR1@5", "--export=ALL,FIRST_ATTEMPT=6"]


@pytest.mark.parametrize(("launcher", "cause"), CASES)
def test_an_interrupted_job_returns_and_ends_as_the_uncut_run(
    slurm: Slurm, uncut: Path, tmp_path: Path, launcher: str, cause: str
) -> None:
    """P57, and Lightning's own requeue, which waits for ever here: rank 1 is slow, so no two ranks are at the same place."""
    folder, log = tmp_path / "run", tmp_path / "log.txt"
    options = ["--nodes=2", f"--output={log}", *(SHORT if cause == "time limit" else [])]
    job = slurm.submit(*options, *JOBS[launcher], *WORDS, f"out={folder}")
    wait_for_step(folder, 2)
    if cause == "time limit":
        slurm.wait(job, "PENDING", "REQUEUED", "COMPLETING", seconds=120)
    elif cause == "signal":
        slurm.run("scancel", "--signal=USR1", job)
    elif cause == "requeue":
        slurm.run("scontrol", "requeue", job)
    elif cause == "preemption":
        urgent = slurm.submit(
            "--partition=urgent", "--nodes=2", "--ntasks-per-node=4", "--output=/dev/null", "--wrap=sleep 1"
        )
        slurm.wait(urgent, "COMPLETED")
    else:
        slurm.run("scontrol", "update", "nodename=node2", "state=down", "reason=test")
        slurm.wait(job, "PENDING", "REQUEUED", "COMPLETING")
        slurm.resume("node2")
    time.sleep(1)
    slurm.wait(job, "COMPLETED", "FAILED", "CANCELLED")
    text = log.read_text()
    assert slurm.state(job) == "COMPLETED", text[-4000:]
    assert values(folder, "train", "loss") == pytest.approx(values(uncut, "train", "loss"), rel=1e-5), text[-4000:]
    assert values(folder, "val", "loss") == pytest.approx(values(uncut, "val", "loss"), rel=1e-5)
    if cause in ("signal", "preemption", "time limit"):  # these leave time to save: nothing is done twice
        assert trace(folder) == trace(uncut)
        assert [record["step"] for record in read_metrics(folder, "train")] == list(range(1, 10))
    assert {record["attempt"] for record in read_metrics(folder, "train")} == {0, 1}


def test_a_signal_before_there_is_a_run_folder_brings_the_job_back(slurm: Slurm, uncut: Path, tmp_path: Path) -> None:
    """Nothing is there to leave a mark in: the status says it."""
    folder, log = tmp_path / "run", tmp_path / "log.txt"
    job = slurm.submit("--nodes=2", f"--output={log}", *JOBS["srun"], *WORDS, f"out={folder}")
    slurm.wait(job, "RUNNING")
    end = time.monotonic() + 60
    while "libtorch" not in slurm.maps_of("slow_train.py"):
        assert time.monotonic() < end
        time.sleep(0.05)
    slurm.run("scancel", "--signal=USR1", job)
    time.sleep(1)
    slurm.wait(job, "COMPLETED", "FAILED", "CANCELLED")
    text = log.read_text()
    assert slurm.state(job) == "COMPLETED", text[-4000:]
    assert text.count("stopped by SIGUSR1 with nothing to save") == 1
    assert "Traceback" not in text
    assert values(folder, "train", "loss") == pytest.approx(values(uncut, "train", "loss"), rel=1e-5)


def test_an_array_is_one_run_a_line(slurm: Slurm, tmp_path: Path) -> None:
    runs = tmp_path / "runs.txt"
    runs.write_text("".join(f"train.seed={seed} out={tmp_path / f'run{seed}'}\n" for seed in (1, 2)))
    words = [word for word in TINY if not word.startswith("train.epochs")] + ["train.epochs=2"]
    log = f"--output={tmp_path}/log-%a.txt"
    job = slurm.submit("--array=1-2", "--ntasks=1", log, "launch/slurm_array.sbatch", str(runs), *words)
    for part in (f"{job}_1", f"{job}_2"):
        slurm.wait(part, "COMPLETED", "FAILED")
    for seed in (1, 2):
        text = (tmp_path / f"log-{seed}.txt").read_text()
        assert [record["step"] for record in read_metrics(tmp_path / f"run{seed}", "train")] == [1, 2, 3, 4, 5, 6], text
    assert values(tmp_path / "run1", "train", "loss") != values(tmp_path / "run2", "train", "loss")


def test_a_job_without_a_run_folder_is_refused_at_once(slurm: Slurm, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    job = slurm.submit("--nodes=2", f"--output={log}", *JOBS["srun"], *TINY)
    slurm.wait(job, "FAILED")
    assert "out=FOLDER is missing" in log.read_text()


def test_python_without_srun_in_a_job_of_two_tasks_is_refused_in_seconds(slurm: Slurm, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    wrapped = f"{sys.executable} train.py {' '.join(TINY)} out={tmp_path / 'run'}"
    job = slurm.submit("--nodes=2", "--ntasks-per-node=1", f"--output={log}", f"--wrap={wrapped}")
    slurm.wait(job, "FAILED")
    assert "this SLURM job has 2 tasks (SLURM_NTASKS), but python was started once" in log.read_text()
    assert not (tmp_path / "run").exists()


def test_the_job_files_say_what_a_requeue_needs() -> None:
    """P57: signal early enough, requeue, one launcher each."""
    for file in sorted((ROOT / "launch").glob("*.sbatch")):
        text = file.read_text()
        assert "#SBATCH --requeue" in text
        assert "#SBATCH --signal=USR1@300" in text
        assert "#SBATCH --open-mode=append" in text
        assert text.count("\nrun srun --kill-on-bad-exit=1") == 1
