"""Signals outside the training itself: a process that has nothing to save leaves in good order.

Imports nothing heavy: it must stand before the seconds that importing torch takes, when a signal would otherwise end the
process without a word, or with a traceback.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

STOPPED = 75  # exit status: start the same command again
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)  # which one stops a run is not known so early


class LeaveNow(BaseException):
    """Raised by a signal's handler where nothing is lost by leaving; the text is for the user. No Exception, so that
    nothing on the way takes it for an error of its own."""


class Signals:
    """The first signal of this process while it has nothing to save.

    A process by itself leaves at once. One of several keeps the signal until all ask each other (`launch.on_any`): the
    others would meet it in a collective that it has left.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.alone = True

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.number is None:
            self.number = number
            if self.alone:
                raise LeaveNow(leaving_text(number))


def leaving_text(number: int | None) -> str:
    by = "" if number is None else f" by {signal.Signals(number).name}"
    return f"stopped{by} with nothing to save: start the same command again to go on"


@contextlib.contextmanager
def leave_on_signal(*, to_the_end: bool = False) -> Iterator[Signals]:
    """Catches signals inside, for what has no handler of its own. `to_the_end`: the process leaves afterwards, so further
    signals are ignored instead of disturbing that."""
    signals = Signals()
    before = {number: signal.signal(number, signals.handle) for number in SIGNALS}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if to_the_end else handler)


def run(command: Callable[[], int], *, to_the_end: bool = False) -> int:
    """The status of a command that may import for seconds before it has handlers of its own; see `leave_on_signal`."""
    try:
        with leave_on_signal(to_the_end=to_the_end):
            return command()
    except LeaveNow as stop:
        say(f"vitfw: {stop}")
        return STOPPED


def say(text: str) -> None:
    """One line on the error stream, once and not once a process; known before any process has met another."""
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        print(text, file=sys.stderr, flush=True)
