"""Workers and shared memory follow what the job may use."""

from pathlib import Path

import pytest
from conftest import tiny

from vitfw.data import resources
from vitfw.data.resources import fit_prefetch, resolve_workers, usable_cpus
from vitfw.train import main


@pytest.fixture
def cpus(monkeypatch):
    def set_cpus(affinity: int, quota: int | None = None, **variables: str):
        for name in ("SLURM_CPUS_PER_TASK", "PBS_NCPUS", "SLURM_LOCALID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(resources.os, "sched_getaffinity", lambda pid: set(range(affinity)))
        monkeypatch.setattr(resources, "_cgroup_cpus", lambda: quota)

    return set_cpus


def test_workers__p88_from_what_the_job_may_use(cpus):
    cpus(1)
    assert resolve_workers("auto") == 0
    cpus(2)
    assert resolve_workers("auto", local_world=2) == 0 and resolve_workers("auto") == 1
    cpus(8, SLURM_CPUS_PER_TASK="8")
    assert resolve_workers("auto") == 7
    cpus(64, SLURM_CPUS_PER_TASK="8")
    assert usable_cpus() == 8
    cpus(64, SLURM_CPUS_PER_TASK="8", SLURM_LOCALID="0")
    assert resolve_workers("auto", local_world=8) == 7  # the scheduler's number is already per rank
    cpus(64, quota=4)
    assert resolve_workers("auto") == 3


def test_workers__given_numbers(cpus):
    cpus(2)
    assert resolve_workers(0) == 0 and resolve_workers(2) == 2
    with pytest.warns(UserWarning, match=r"machine.workers=4 for each of 1 .* only 2 CPU.*auto would take 1"):
        assert resolve_workers(4) == 4
    for wrong in (-1, True, "many"):
        with pytest.raises(ValueError, match="must be auto, or a number"):
            resolve_workers(wrong)  # type: ignore[arg-type]


def test_shared_memory__p87_need_and_free_size_are_stated(monkeypatch):
    monkeypatch.setattr(resources, "free_shared_memory", lambda: 64_000_000)
    batch_bytes = 256 * 3 * 224 * 224
    with pytest.raises(
        ValueError, match=r"1541 MB of shared memory .*8 workers x 5 batches of 39 MB.*64 MB of /dev/shm"
    ):
        fit_prefetch(4, workers=8, batch_bytes=batch_bytes)
    with pytest.warns(UserWarning, match=r"each worker keeps 1 batch\(es\) ready instead of 4"):
        assert fit_prefetch(4, workers=8, batch_bytes=3_000_000) == 1
    assert fit_prefetch(4, workers=0, batch_bytes=batch_bytes) == 4
    monkeypatch.setattr(resources, "free_shared_memory", lambda: 10**10)
    assert fit_prefetch(4, workers=8, batch_bytes=batch_bytes) == 4


def test_shared_memory__a_run_is_refused_before_its_folder_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The evaluation's batch counts too: of 16 and 32 images of 64 bytes the larger one."""
    monkeypatch.setattr(resources, "free_shared_memory", lambda: 4000)
    words = tiny("machine.workers=1", "machine.images_per_device=16", f"out={tmp_path / 'run'}")
    assert main(words) == 2
    text = capsys.readouterr().err
    assert "0.0041 MB of shared memory are needed (1 workers x 2 batches of 0.002 MB" in text and "0.004 MB of" in text
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(resources, "free_shared_memory", lambda: 2 * 64 * 32)
    with pytest.warns(UserWarning, match=r"each worker keeps 1 batch\(es\) ready instead of 2"):
        assert main([*words, "stop_after=1"]) == 75
