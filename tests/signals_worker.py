"""Sends a signal to a run at exact moments, in real processes forked from one that has imported everything.

    python tests/signals_worker.py FOLDER

A case is {"name", "place": a key of PLACES, "call": which call of it from 1, "signal", "processes", "rank": which one gets it,
"words"}. Writes FOLDER/results.json: {name: exit statuses}, and the processes' output to FOLDER/NAME.log.
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import timm  # noqa: E402, F401 - once, before the forks

from vitfw import checkpoint, fit, prepare, run, summary  # noqa: E402
from vitfw.after_step import AfterStep  # noqa: E402
from vitfw.report.recorder import Recorder  # noqa: E402
from vitfw.startup import run as run_command  # noqa: E402
from vitfw.tasks.classify import ClassifyTask  # noqa: E402
from vitfw.train import main  # noqa: E402

PLACES: dict[str, tuple[Any, str]] = {
    "open data": (prepare, "open_data"),
    "build task": (prepare, "build_task"),
    "open run": (run, "write_text"),
    "build loader": (fit, "build_train_loader"),
    "start text": (summary, "start_text"),
    "step": (ClassifyTask, "losses"),
    "measure": (ClassifyTask, "measure"),
    "write": (checkpoint, "save"),
    "evaluated": (AfterStep, "_keep_score"),
    "close": (Recorder, "close"),
    "export": (fit, "export_checkpoint"),
    "finish": (run, "mark_finished"),
}


def start(case: dict[str, Any], folder: Path) -> list[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = case.get("processes", 1)
    children = []
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            log = os.open(folder / f"{case['name']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            if processes > 1:
                place = {"RANK": rank, "WORLD_SIZE": processes, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": processes}
                os.environ.update({key: str(value) for key, value in place.items()})
                os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"})
            status = 99  # a traceback
            try:
                if rank in case.get("ranks", [0]):
                    inject(case)
                status = run_command(lambda: main(case["words"]), to_the_end=True)
            finally:
                sys.stdout.flush()
                os._exit(status)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def inject(case: dict[str, Any]) -> None:
    """Sends the signals of a case to this very process, where it stands."""
    if case.get("place") is None:
        return
    owner, name = PLACES[case["place"]]
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == case.get("call", 1):
            for each in case["signals"]:
                os.kill(os.getpid(), getattr(signal, f"SIG{each}"))
        return original(*args, **kwargs)

    setattr(owner, name, interrupted)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    cases = json.loads((place / "cases.json").read_text())
    results = {}
    for case in cases:
        started = time.monotonic()
        results[case["name"]] = start(case, place)
        print(f"{case['name']}: {results[case['name']]} after {time.monotonic() - started:.1f} s")
    (place / "results.json").write_text(json.dumps(results))
