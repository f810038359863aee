"""Run by torchrun for the tests of several processes: many runs in one set of processes, since starting them costs most.

    torchrun --nproc-per-node N tests/strategies_worker.py CELLS.json

A cell is {"name", "words", "status": expected, "freeze": prefixes of parameters that are not trained, "inject": faults}; a
fault is {"rank", "where": a key of PLACES, "call": number from 1, "do": a signal's name, "nan", "spike", "raise", "full", "limit"
(the system itself takes no more than 4 kB a file), or seconds}.
Each runs as `train.py` would run it.
"""

import dataclasses
import json
import math
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from vitfw import checkpoint, prepare, sharded
from vitfw import train as command
from vitfw.config import load
from vitfw.launch import check_launch, detect_launch, join_processes, set_threads
from vitfw.tasks.classify import ClassifyTask

PLACES: dict[str, tuple[Any, str]] = {
    "losses": (ClassifyTask, "losses"),
    "measure": (ClassifyTask, "measure"),
    "save": (checkpoint, "save"),
    "part": (sharded, "write_file"),
}
ORIGINALS = {place: getattr(*target) for place, target in PLACES.items()}
PREPARE = prepare.prepare


def main(file: str) -> int:
    launch = detect_launch()
    cells = json.loads(Path(file).read_text())
    first = load(cells[0]["words"])
    set_threads(launch, first.machine)
    join_processes(launch, dataclasses.replace(first.machine, strategy="fsdp2", shard_size=0))
    for cell in cells:
        config = load(cell["words"])
        freeze(cell.get("freeze", []))
        inject(launch.rank, cell.get("inject", []))
        started = time.monotonic()
        try:
            check_launch(launch, config.machine)
            status = command.train(config, launch, cell["words"])
        except ValueError:
            traceback.print_exc()
            status = 2
        print(f"cell {cell['name']}: status {status} after {time.monotonic() - started:.1f} s", flush=True)
        if status != cell.get("status", 0):
            os._exit(3)  # the other ranks may be anywhere: torchrun ends them
        if status != 1:
            dist.barrier()
    return 0


def freeze(prefixes: list[str]) -> None:
    """Puts freezing into the preparation, as a fine-tuning stage does it."""

    def frozen(*args: Any) -> Any:
        prepared = PREPARE(*args)
        for name, parameter in prepared.task.named_parameters():
            if name.startswith(tuple(prefixes)):
                parameter.requires_grad_(False)
        return prepared

    prepare.prepare = frozen if prefixes else PREPARE


def inject(rank: int, faults: list[dict[str, Any]]) -> None:
    for place, (owner, name) in PLACES.items():
        wanted = [fault for fault in faults if fault["where"] == place and fault["rank"] in (rank, "all")]
        setattr(owner, name, with_faults(ORIGINALS[place], wanted) if wanted else ORIGINALS[place])


def with_faults(original: Callable[..., Any], faults: list[dict[str, Any]]) -> Callable[..., Any]:
    calls = 0

    def faulty(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        due = [
            fault["do"] for fault in faults if fault["call"] == calls or (fault.get("on") and calls >= fault["call"])
        ]
        for what in due:
            if isinstance(what, float):
                time.sleep(what)
            elif what == "raise":
                raise RuntimeError(f"a fault of rank {os.environ['RANK']}")
            elif what == "full":
                raise OSError("no space left on device")
            elif what == "limit":
                return limited(original, *args, **kwargs)
            elif what not in ("nan", "spike"):
                os.kill(os.getpid(), getattr(signal, f"SIG{what}"))
        result = original(*args, **kwargs)
        if "spike" in due:
            result = result | {"loss": result["loss"] * 1e4}
        return result | {"loss": result["loss"] + math.nan} if "nan" in due else result

    return faulty


def limited(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        return call(*args, **kwargs)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
