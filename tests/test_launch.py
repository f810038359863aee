"""How a process learns what it is part of: every launch that makes sense, and one sentence for each that does not."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, TINY, tiny
from hypothesis import given
from hypothesis import strategies as st

from vitfw.launch import (
    Launch,
    MachineConfig,
    _first_host,
    _srun_port,
    check_launch,
    detect_launch,
    join_processes,
    resolve_strategy,
    split_batch,
)
from vitfw.report.recorder import read_metrics

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SRUN = BATCH | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Launch("python")),
        (TORCHRUN, Launch("torchrun", 3, 4, 1, 2)),
        (SRUN, Launch("srun", 3, 4, 1, 2)),
        (SRUN | TORCHRUN, Launch("torchrun", 3, 4, 1, 2)),  # torchrun inside srun
        (BATCH | {"SLURM_NTASKS": "1"}, Launch("python")),  # a job file of one task, without srun
        (BATCH | {"SLURM_NTASKS": "1", "SLURM_STEP_ID": "4294967291"}, Launch("python")),
        (SRUN | {"SLURM_JOB_NAME": "bash"}, Launch("srun", 3, 4, 1, 2)),  # Lightning would not see this one
    ],
)
def test_what_each_environment_means(environment: dict[str, str], expected: Launch) -> None:
    assert detect_launch(environment) == expected


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (BATCH, "4 tasks (SLURM_NTASKS), but python was started once"),  # hangs for half an hour elsewhere
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "3,1"}, "4 tasks on 2 nodes (3,1)"),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "5"}, "5 tasks on 2 nodes"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK is missing"),
        ({"WORLD_SIZE": "2"}, "RANK is missing"),
        (TORCHRUN | {"RANK": "4"}, "rank 4 of 4"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "2 of 2"),
        (TORCHRUN | {"WORLD_SIZE": "three"}, "WORLD_SIZE=three is not a number"),
        (TORCHRUN | {"WORLD_SIZE": "5"}, "of 5"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "mpirun started 4 processes"),
    ],
)
def test_an_inconsistent_launch_is_one_sentence(environment: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        detect_launch(environment)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("launch", "machine", "words"),
    [
        (Launch("torchrun", 0, 2, 0, 2), {"devices": 4}, "--nproc-per-node 4"),
        (Launch("srun", 0, 4, 0, 2), {"nodes": 3}, "srun started 2 on each of 2"),
        (Launch("python"), {"devices": 8}, "python started 1"),
        (Launch("torchrun", 0, 2, 0, 2), {"strategy": "single"}, "torchrun started 2 processes"),
        (Launch("torchrun", 0, 4, 0, 4), {"strategy": "hsdp"}, "machine.shard_size=4 of 4"),
        (Launch("torchrun", 0, 4, 0, 4), {"strategy": "hsdp", "shard_size": 3}, "machine.shard_size=3 of 4"),
        (Launch("torchrun", 0, 2, 0, 2), {"strategy": "fsdp2", "precision": "fp16"}, "use bf16 or fp32"),
        (Launch("python"), {"precision": "fp16"}, "fp16 needs a GPU"),
    ],
)
def test_a_machine_that_was_not_started_is_refused(launch: Launch, machine: dict, words: str) -> None:
    with pytest.raises(ValueError, match="machine") as error:
        check_launch(launch, MachineConfig(device="cpu", **machine))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("strategy", "world", "expected"),
    [("auto", 1, "single"), ("auto", 2, "ddp"), ("ddp", 1, "single"), ("fsdp2", 1, "fsdp2"), ("fsdp2", 4, "fsdp2")],
)
def test_strategy_follows_the_processes(strategy: str, world: int, expected: str) -> None:
    machine = MachineConfig(strategy=strategy)  # type: ignore[arg-type]
    assert resolve_strategy(Launch("torchrun", 0, world, 0, world), machine) == expected


def test_hsdp_shards_inside_a_node() -> None:
    assert resolve_strategy(Launch("torchrun", 0, 4, 0, 2), MachineConfig(strategy="hsdp")) == "hsdp"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("devices", -1), ("keep_last", 0), ("images_per_device", 0), ("workers", -2), ("rendezvous_seconds", 0),
        ("recompute_every", -1), ("keep_best", 0), ("wall_minutes", -1.0), ("shard_size", 2),
    ],
)  # fmt: skip
def test_the_machine_section_names_the_key_and_the_value(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"machine.{key}={value}"):
        MachineConfig(**{key: value})  # type: ignore[arg-type]


@given(st.integers(1, 64), st.integers(1, 4096), st.integers(1, 512))
def test_a_global_batch_is_split_exactly_or_refused(world: int, global_batch: int, limit: int) -> None:
    try:
        images, accumulation = split_batch(global_batch, world, limit)
    except ValueError as error:
        assert f"train.global_batch={global_batch}" in str(error)
        return
    assert images * accumulation * world == global_batch
    assert images <= limit
    assert accumulation == 1 or images >= limit / 4


def test_a_remainder_names_the_nearest_batch() -> None:
    with pytest.raises(ValueError, match=r"train.global_batch=100 does not divide among 8 processes.* 96"):
        split_batch(100, 8, 64)


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [("node1", "node1"), ("a,b", "a"), ("node[03-05,9],other", "node03"), ("gpu-[7]", "gpu-7"), ("x,node[1-2]", "x")],
)
def test_first_host_of_a_node_list(nodelist: str, first: str) -> None:
    assert _first_host(nodelist) == first


def test_two_jobs_and_two_steps_get_ports_of_their_own() -> None:
    """P59."""
    ports = {_srun_port({"SLURM_JOB_ID": job, "SLURM_STEP_ID": step}) for job in ("41", "42") for step in ("0", "1")}
    assert len(ports) == 4
    assert all(10000 <= port <= 65535 for port in ports)


def test_a_process_that_never_comes_is_noticed_in_seconds() -> None:
    """P59: with the address, and what to change, instead of the collectives' half hour."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "train.py", *TINY, "machine.rendezvous_seconds=2"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29613"},
    )
    assert done.returncode == 2, done.stderr
    assert "rank 0 of 2 could not join the others at 127.0.0.1:29613 within 2 s" in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - started < 90


def test_a_taken_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """P59: another job of this host holds MASTER_PORT."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        words = f"could not join the others at 127.0.0.1:{port} within 2 s .*another job may hold the port"
        with pytest.raises(ConnectionError, match=words):
            join_processes(Launch("torchrun", 0, 2, 0, 2), MachineConfig(device="cpu", rendezvous_seconds=2))


def test_each_process_of_a_node_takes_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first collective: objects are sent by way of the current GPU, and NCCL refuses one GPU for two ranks."""
    store, calls = dist.HashStore(), []
    store.set("here/0", "1")
    monkeypatch.setattr("vitfw.launch.uses_gpu", lambda machine: True)
    monkeypatch.setattr("vitfw.launch.TCPStore", lambda *args, **options: store)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("current", device)))
    monkeypatch.setattr(
        dist, "init_process_group", lambda *args, **options: calls.append(("join", options["device_id"]))
    )
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29613")
    join_processes(Launch("torchrun", 1, 2, 1, 2), MachineConfig())
    assert calls == [("current", torch.device("cuda", 1)), ("join", torch.device("cuda", 1))]


def test_two_jobs_at_once_on_one_host(tmp_path: Path) -> None:
    """P59: the documented command, twice."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    words = tiny("train.epochs=2", "machine.images_per_device=16")
    jobs = []
    for name in ("one", "two"):
        with (tmp_path / f"{name}.txt").open("wb") as log:
            command = [*launcher, *words, f"out={tmp_path / name}"]
            jobs.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT))
    for job, name in zip(jobs, ("one", "two"), strict=True):
        assert job.wait(timeout=240) == 0, (tmp_path / f"{name}.txt").read_text()[-3000:]
    one, two = (read_metrics(tmp_path / name, "train") for name in ("one", "two"))
    assert [record["loss"] for record in one] == [record["loss"] for record in two]
