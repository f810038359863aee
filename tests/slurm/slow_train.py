"""train.py with steps that take their time, those of rank 1 even more: a signal then finds the ranks at different places.

FIRST_ATTEMPT: seconds of a step in a job's first attempt, so that it comes to its time limit and the next one ends soon.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from vitfw.startup import run


def command() -> int:
    from vitfw.launch import detect_launch
    from vitfw.tasks.classify import ClassifyTask
    from vitfw.train import main

    seconds = 0.2 + 0.4 * detect_launch().rank
    if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        seconds = float(os.environ.get("FIRST_ATTEMPT", seconds))
    losses = ClassifyTask.losses

    def slow(self: ClassifyTask, batch: Any, progress: float) -> Any:
        time.sleep(seconds)
        return losses(self, batch, progress)

    ClassifyTask.losses = slow
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run(command, to_the_end=True))
