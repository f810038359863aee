"""Run by torchrun for tests/test_supervised.py: several runs in one set of processes, and what the live optimiser held at each
step of each.

    torchrun --nproc-per-node N tests/groups_worker.py CELLS.json

A cell is {"name", "words", "status": what the command should return}. For each, `NAME.jsonl` beside the file gets a line a step:
{parameter name: [learning rate, weight decay]}, read as the optimiser takes the step.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from vitfw import train as command
from vitfw.config import load
from vitfw.launch import check_launch, detect_launch, join_processes, leave_processes, set_threads

records: list[dict[str, Any]] = []


def record(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """What a step is about to use, by the names that the groups carry."""
    rows = {}
    for group in optimizer.param_groups:
        assert len(group["names"]) == len(group["params"])
        rows |= {name: [group["lr"], group["weight_decay"]] for name in group["names"]}
    records.append(rows)


def main(file: str) -> int:
    launch, folder = detect_launch(), Path(file).parent
    cells = json.loads(Path(file).read_text())
    first = load(cells[0]["words"]).machine
    set_threads(launch, first)
    join_processes(launch, first)
    register_optimizer_step_pre_hook(record)
    failed = 0
    for cell in cells:
        config = load(cell["words"])
        check_launch(launch, config.machine)
        status = command.train(config, launch, cell["words"])
        if launch.is_main:
            with (folder / f"{cell['name']}.jsonl").open("a") as lines:
                lines.writelines(f"{json.dumps(row)}\n" for row in records)
        records.clear()
        if status != cell["status"]:
            print(f"cell {cell['name']}: status {status}, not {cell['status']}", flush=True)
            failed += 1
    leave_processes()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
