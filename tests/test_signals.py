"""A signal at any moment of a run, from the first import to the last file: a status that is true, no traceback, and the same
command ends as the run that nobody disturbed. P04, P57."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, TINY

from vitfw.report.recorder import read_metrics

# name: what happens, the expected status of each process, and the last step done
MOMENTS: dict[str, tuple[dict[str, Any], list[int], int]] = {
    "data TERM": ({"place": "open data", "signals": ["TERM"]}, [75], 0),
    "data INT": ({"place": "open data", "signals": ["INT", "INT"]}, [75], 0),
    "task USR1": ({"place": "build task", "signals": ["USR1"]}, [75], 0),
    "first file": ({"place": "open run", "signals": ["TERM"]}, [75], 0),
    "second file": ({"place": "open run", "call": 2, "signals": ["TERM"]}, [75], 0),
    "loader": ({"place": "build loader", "signals": ["TERM"]}, [75], 0),
    "start text": ({"place": "start text", "signals": ["INT"]}, [75], 0),
    "step": ({"place": "step", "call": 4, "signals": ["USR1", "TERM", "INT"]}, [75], 4),
    "evaluation": ({"place": "measure", "call": 1, "signals": ["INT"]}, [75], 3),
    "now": ({"place": "step", "call": 5, "signals": ["INT", "INT"]}, [75], 4),
    "evaluated": ({"place": "evaluated", "call": 3, "signals": ["INT"]}, [0], 9),
    "last write": ({"place": "write", "call": 9, "signals": ["INT"]}, [0], 9),
    "close": ({"place": "close", "signals": ["INT"]}, [0], 9),
    "export": ({"place": "export", "signals": ["TERM"]}, [0], 9),
    "finish": ({"place": "finish", "signals": ["INT"]}, [0], 9),
    "one of two, data": ({"place": "open data", "signals": ["TERM"], "ranks": [1], "processes": 2}, [75, 75], 0),
    "both, task": ({"place": "build task", "signals": ["USR1"], "ranks": [0, 1], "processes": 2}, [75, 75], 0),
    "one of two, loader": ({"place": "build loader", "signals": ["TERM"], "ranks": [1], "processes": 2}, [75, 75], 0),
    "one of two, export": ({"place": "export", "signals": ["INT"], "ranks": [0], "processes": 2}, [0, 0], 9),
}
AGAIN = ["data TERM", "second file", "loader", "now", "one of two, loader"]  # the same command once more


def words(folder: Path, name: str) -> list[str]:
    return [*TINY, f"out={folder / name}", "machine.save_every_steps=1", "machine.eval_images_per_device=16"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[int]]]:
    """All moments in one process that imports once and forks."""
    folder = tmp_path_factory.mktemp("signals")
    cases: list[dict[str, Any]] = [{"name": "undisturbed", "words": words(folder, "undisturbed")}]
    for name, (case, _, _) in MOMENTS.items():
        cases.append({**case, "name": name, "words": words(folder, name)})
        if name in AGAIN:
            again = {"name": f"{name} again", "words": words(folder, name), "processes": case.get("processes", 1)}
            cases.append(again)
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "tests/signals_worker.py", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return folder, json.loads((folder / "results.json").read_text())


def steps(folder: Path) -> list[int]:
    return [record["step"] for record in read_metrics(folder, "train")] if (folder / "metrics.jsonl").exists() else []


@pytest.mark.parametrize("name", MOMENTS)
def test_a_signal_at_any_moment_ends_in_good_order(results: tuple[Path, dict[str, list[int]]], name: str) -> None:
    folder, statuses = results
    _, expected, last = MOMENTS[name]
    out = (folder / f"{name}.log").read_text()
    assert statuses[name] == expected, out
    assert "Traceback" not in out
    if name not in AGAIN:
        assert steps(folder / name) == list(range(1, last + 1))
    if expected[0] == 75:
        assert out.count("start the same command again") == 1  # one sentence, not one a process
        if name not in AGAIN:
            known = (folder / name / "config.yaml").exists()
            assert (folder / name / "stopped").exists() == known  # for launchers that cannot see the status
            assert not known or (folder / name / "stopped").read_text() == f"{last}\n"
            assert known or not (folder / name).exists() or not list((folder / name).glob("*.yaml"))
    else:
        assert "weights:" in out
        assert not (folder / name / "stopped").exists()
        assert (folder / name / "export" / "model.safetensors").exists()


@pytest.mark.parametrize("name", AGAIN)
def test_the_same_command_again_ends_as_the_run_that_nobody_disturbed(
    results: tuple[Path, dict[str, list[int]]], name: str
) -> None:
    folder, statuses = results
    assert set(statuses[f"{name} again"]) == {0}, (folder / f"{name} again.log").read_text()
    assert steps(folder / name) == list(range(1, 10))
    assert not (folder / name / "stopped").exists()
    ours, theirs = (
        [record["loss"] for record in read_metrics(folder / which, "train")] for which in (name, "undisturbed")
    )
    if "two" not in name:  # two processes mix other images with each other
        assert ours == theirs


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_torch_is_imported(tmp_path: Path, number: int) -> None:
    """The seconds of the documented command in which nothing of vitfw but `startup` is there."""
    command = [sys.executable, "train.py", *TINY, f"out={tmp_path / 'run'}"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + 60
        while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.01)
        os.kill(process.pid, number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    name = signal.Signals(number).name
    assert err == f"vitfw: stopped by {name} with nothing to save: start the same command again to go on\n"
    assert out == ""
    assert not (tmp_path / "run").exists()
