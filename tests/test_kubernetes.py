"""launch/kubernetes.yaml says what a restart needs, and its two pods, here two processes, stop together and go on together."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, TINY, tiny

from vitfw.config import load
from vitfw.report.recorder import read_metrics

SERVICE, JOB = yaml.safe_load_all((ROOT / "launch" / "kubernetes.yaml").read_text())
POD: dict[str, Any] = JOB["spec"]["template"]["spec"]
TRAIN: dict[str, Any] = POD["containers"][0]
ENVIRONMENT = {entry["name"]: entry["value"] for entry in TRAIN["env"]}
SCRIPT = (ROOT / "launch" / "kubernetes.sh").read_text()


def test_the_pods_find_each_other() -> None:
    assert (SERVICE["kind"], JOB["kind"]) == ("Service", "Job")
    assert SERVICE["spec"]["clusterIP"] == "None" and SERVICE["spec"]["publishNotReadyAddresses"] is True
    assert SERVICE["spec"]["selector"] == {"job-name": JOB["metadata"]["name"]}
    assert JOB["spec"]["completionMode"] == "Indexed"  # which gives pod 0 the name that HEAD says
    assert POD["subdomain"] == SERVICE["metadata"]["name"]
    assert ENVIRONMENT["HEAD"] == f"{JOB['metadata']['name']}-0.{SERVICE['metadata']['name']}"
    assert JOB["spec"]["completions"] == JOB["spec"]["parallelism"] == int(ENVIRONMENT["NODES"])
    assert TRAIN["resources"]["limits"]["nvidia.com/gpu"] == int(ENVIRONMENT["PROCESSES"])


def test_a_pod_that_stopped_and_saved_is_started_again_as_often_as_it_takes() -> None:
    """P57: status 75 and evictions do not count, a refusal ends the job, and a save has time before the pod is killed."""
    assert POD["restartPolicy"] == "Never"  # what podFailurePolicy asks for
    assert JOB["spec"]["podReplacementPolicy"] == "Failed"
    rules = JOB["spec"]["podFailurePolicy"]["rules"]
    by_status = {rule["onExitCodes"]["values"][0]: rule for rule in rules if "onExitCodes" in rule}
    assert {status: rule["action"] for status, rule in by_status.items()} == {2: "FailJob", 75: "Ignore"}
    assert all(rule["onExitCodes"]["operator"] == "In" for rule in by_status.values())
    assert all(rule["onExitCodes"]["containerName"] == TRAIN["name"] for rule in by_status.values())
    (evicted,) = [rule for rule in rules if "onPodConditions" in rule]
    assert evicted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    shutdown = int(SCRIPT.split("--shutdown-timeout ")[1].split()[0])
    assert 120 <= shutdown < POD["terminationGracePeriodSeconds"]


def test_the_words_are_right_and_the_run_lies_where_all_pods_see_it() -> None:
    config = load([*TRAIN["args"], "dry_run=true"])
    assert config.machine.devices in (0, int(ENVIRONMENT["PROCESSES"]))
    assert config.machine.nodes in (0, int(ENVIRONMENT["NODES"]))
    mounts = {mount["mountPath"]: mount["name"] for mount in TRAIN["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert "persistentVolumeClaim" in volumes[mounts["/" + str(config.out).split("/")[1]]]
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert TRAIN["command"] == ["/vitfw/launch/kubernetes.sh"]
    assert os.access(ROOT / "launch" / "kubernetes.sh", os.X_OK)


class Pods:
    """The two pods of the job, started anew as the job would do it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.attempt = folder, 0

    def start(self, words: list[str], pods: int = 2) -> list[subprocess.Popen[bytes]]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {
            **os.environ,
            "PYTHON": "tests/slurm/slow_python",
            "REAL_PYTHON": sys.executable,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "NODES": "2",
            "PROCESSES": "1",
            "HEAD": "127.0.0.1",
            "PORT": str(port),
        }
        self.attempt += 1
        started = []
        for pod in range(pods):
            with self.log(pod).open("wb") as log:
                command = ["launch/kubernetes.sh", *words]
                mine = environment | {"JOB_COMPLETION_INDEX": str(pod)}
                started.append(subprocess.Popen(command, env=mine, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT))
        return started

    def log(self, pod: int) -> Path:
        return self.folder / f"pod{pod}-{self.attempt}.txt"


@pytest.fixture
def pods(tmp_path: Path) -> Pods:
    return Pods(tmp_path)


def test_one_pod_is_told_to_stop_and_all_come_back(pods: Pods, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [*TINY, "machine.images_per_device=16", f"out={folder}"]
    first = pods.start(words)
    end = time.monotonic() + 240
    while not (folder / "metrics.jsonl").exists() or len(read_metrics(folder, "train")) < 2:
        assert time.monotonic() < end, pods.log(0).read_text()[-3000:]
        time.sleep(0.05)
    first[1].send_signal(signal.SIGTERM)
    assert [pod.wait(timeout=240) for pod in first] == [75, 75], pods.log(0).read_text()[-3000:]
    done = len(read_metrics(folder, "train"))
    assert (folder / "stopped").read_text() == f"{done}\n"
    second = pods.start(words)
    assert [pod.wait(timeout=240) for pod in second] == [0, 0], pods.log(0).read_text()[-3000:]
    records = read_metrics(folder, "train")
    assert [record["step"] for record in records] == list(range(1, 10))
    assert [record["attempt"] for record in records] == [0] * done + [1] * (9 - done)


def test_wrong_words_are_a_refusal_before_torchrun_hides_the_status(pods: Pods, tmp_path: Path) -> None:
    (pod,) = pods.start([*tiny("optim.lrr=1"), f"out={tmp_path / 'run'}"], pods=1)
    assert pod.wait(timeout=120) == 2
    assert "optim.lrr=1: no such key; did you mean" in pods.log(0).read_text()
