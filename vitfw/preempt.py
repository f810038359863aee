"""Stopping on request: a signal sets a flag, all ranks agree on the step, then the run saves and ends with status 75."""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

STOPPED = 75  # EX_TEMPFAIL: start the same command again
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """The flag of this process and the agreement of all.

    A handler only sets the flag: saving inside a handler can deadlock, because another rank may sit in a collective at that
    moment. The flags are combined by an asynchronous all-reduce on a group of its own that is read one step later, so no
    step waits for it and all ranks stop after the same one.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() and dist.get_world_size() > 1 else None
        self._pending: tuple[Any, torch.Tensor] | None = None
        self._previous: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def install(self) -> None:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)

    def uninstall(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal is not None:
            raise KeyboardInterrupt  # a second Ctrl-C means now
        self.signal = number

    def agreed(self) -> bool:
        """Called by all ranks after each step: True on all of them at the same step, one step after the first flag."""
        if self._group is None:
            return self.signal is not None
        answer = self._read()
        if not answer:
            flag = torch.tensor([0 if self.signal is None else 1], dtype=torch.int32)
            self._pending = dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True), flag
        return answer

    def _read(self) -> bool:
        if self._pending is None:
            return False
        work, flag = self._pending
        work.wait()
        self._pending = None
        return bool(flag.item())
