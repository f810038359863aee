"""Stopping on request: a signal sets a flag, all ranks agree on the step, the run saves and ends with status 75."""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from vitfw.run import write_text
from vitfw.startup import LeaveNow

MARKER = "stopped"  # file in the run folder while the run wants the same command again: torchrun hides exit statuses
SPARE_SECONDS = 120  # kept for the save where SLURM says when the job will end; of a short job a quarter of its time

T = TypeVar("T")


class Answer(IntEnum):
    """What all ranks agreed on; the largest of what they brought."""

    GO_ON = 0
    STOP = 1
    FAILED = 2  # rank 0 could not write a checkpoint


class StoppedError(Exception):
    """Raised inside an evaluation that all ranks leave at the same batch."""


class StopRequest:
    """The flag of this process and the agreement of all.

    A handler only sets the flag: saving inside a handler can deadlock, because another rank may sit in a collective at
    that moment. The flags are combined by an asynchronous all-reduce on a group of its own that is read one step later,
    so no step waits for it and all ranks stop after the same one. Further signals change nothing; only where one process
    runs by itself, a second Ctrl-C means now.
    """

    def __init__(self, stop_signal: Literal["USR1", "USR2"] = "USR1", *, wall_minutes: float = 0.0) -> None:
        self.signal: int | None = None
        self.agreed_to_stop = False
        self.signals = (signal.SIGTERM, signal.SIGINT, getattr(signal, f"SIG{stop_signal}"))
        self.deadline = deadline(wall_minutes)
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._group: Any = dist.new_group(backend="gloo") if several else None
        self._pending: tuple[Any, torch.Tensor] | None = None
        self._previous: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def install(self) -> None:
        for number in self.signals:
            self._previous.setdefault(number, signal.signal(number, self._handle))

    def uninstall(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal == signal.SIGINT and self._group is None:
            raise LeaveNow("left at once: start the same command again to go on from the last checkpoint")
        if self.signal is None:
            self.signal = number

    def asked(self) -> bool:
        """Whether this process was asked to stop, by a signal or by the clock."""
        return self.signal is not None or time.time() >= self.deadline

    def agreed(self, *, failed: bool = False) -> Answer:
        """Called by all ranks after each step: the same answer on all of them, one step after the first flag."""
        own = Answer.FAILED if failed else Answer.STOP if self.asked() else Answer.GO_ON
        answer = own if self._group is None else self._read()
        self.agreed_to_stop |= answer is Answer.STOP
        if self._group is not None and answer is Answer.GO_ON:
            flag = torch.tensor([int(own)], dtype=torch.int32)
            self._pending = dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True), flag
        return answer

    def watch(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches of an evaluation; raises StoppedError on all ranks together. Every rank has as many batches."""
        for batch in batches:
            if self.agreed() is Answer.STOP:
                raise StoppedError
            yield batch

    def _read(self) -> Answer:
        if self._pending is None:
            return Answer.GO_ON
        work, flag = self._pending
        work.wait()
        self._pending = None
        return Answer(int(flag.item()))


def deadline(wall_minutes: float) -> float:
    """Seconds since 1970 after which the run should save and stop: `wall_minutes` from now, and shortly before SLURM
    ends the job where it says when; infinity without either."""
    end = time.time() + 60 * wall_minutes if wall_minutes else float("inf")
    job_end = os.environ.get("SLURM_JOB_END_TIME", "")
    if not job_end.isdigit():
        return end
    left = int(job_end) - time.time()
    return min(end, int(job_end) - min(SPARE_SECONDS, left / 4))


def mark_stopped(folder: Path, step: int) -> None:
    """Leaves the marker for launchers that cannot see the exit status. Rank 0 only."""
    write_text(folder / MARKER, f"{step}\n")
