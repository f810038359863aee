"""Run by torchrun for tests/test_start.py: what each process holds before and after a task is laid out.

    torchrun --nproc-per-node 4 tests/start_worker.py CASES.json

A case is {"name", "words"}. Raises AssertionError where a weight or buffer differs, in any bit, from those of one process.
"""

import json
import sys
from pathlib import Path

import torch

from vitfw.config import load
from vitfw.launch import Launch, check_launch, detect_launch, join_processes, leave_processes, set_threads
from vitfw.parallel import place, whole
from vitfw.prepare import prepare

CLEAR = Path("/proc/self/clear_refs")  # "5" sets the peak to what is held now


def main(file: str) -> None:
    launch = detect_launch()
    cases = json.loads(Path(file).read_text())
    machine = load(cases[0]["words"]).machine
    set_threads(launch, machine)
    join_processes(launch, machine)
    for case in cases:
        config = load(case["words"])
        check_launch(launch, config.machine)
        before = memory("VmRSS")
        CLEAR.write_text("5")
        try:
            task = prepare(config, launch).task
        except ValueError as error:
            print(f"case {case['name']} rank {launch.rank} refused: {error}", flush=True)
            continue
        size = sum(value.numel() * value.element_size() for value in task.parameters()) / 1e6
        empty = any(parameter.is_meta for parameter in task.parameters())
        place(task, config.machine, launch)
        grown = memory("VmHWM") - before
        print(f"case {case['name']} rank {launch.rank} empty {empty} grown {grown / size:.2f}", flush=True)
        if case.get("compared", True):
            words = [word for word in case["words"] if not word.startswith(("machine.strategy", "machine.shard_size"))]
            compare(task, prepare(load(words), Launch("python")).task)
    leave_processes()


def compare(task: torch.nn.Module, alone: torch.nn.Module) -> None:
    for kind in ("named_parameters", "named_buffers"):
        mine, theirs = dict(getattr(task, kind)()), dict(getattr(alone, kind)())
        assert list(mine) == list(theirs), (mine.keys(), theirs.keys())
        for name, value in mine.items():
            assert torch.equal(whole(value), theirs[name].detach()), name
            assert value.requires_grad == theirs[name].requires_grad, name


def memory(name: str) -> float:
    """VmRSS: what this process holds; VmHWM: the most that it has held. MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main(sys.argv[1])
