"""Bad images of a run: named once, counted per epoch, and an end where there are too many."""

import json
from collections.abc import Callable
from pathlib import Path


class BadDataError(OSError):
    """Data that a run cannot go on with. The text is for the user: nothing in the code is wrong."""


class Ledger:
    """Bad images of one rank: each is reported once, and too many in one epoch stop the run.

    limit: share of num_samples / world; one bad image is always let pass. file: one JSON record a line, or None.
    """

    def __init__(
        self, limit: float, num_samples: int, world: int, file: Path | None, report: Callable[[str], None]
    ) -> None:
        self.allowed = max(1, int(limit * num_samples / world))
        self.limit, self.file, self.report = limit, file, report
        self.known: dict[int, str] = {}
        self.epoch_rows: set[int] = set()

    def start_epoch(self) -> None:
        """The limit counts anew."""
        self.epoch_rows = set()

    def add(self, entries: list[tuple[int, str]]) -> None:
        """Raises BadDataError above the limit; the text holds the newest reason."""
        for row, reason in entries:
            self.epoch_rows.add(row)
            if row in self.known:
                continue
            self.known[row] = reason
            self.report(f"bad image left out: {reason}")
            if self.file is not None:
                with self.file.open("a") as file:
                    file.write(json.dumps({"row": row, "reason": reason}) + "\n")
        if len(self.epoch_rows) > self.allowed:
            raise BadDataError(
                f"{len(self.epoch_rows)} bad images in this epoch on this rank, over data.bad_limit={self.limit} "
                f"({self.allowed}); the last: {self.known[entries[-1][0]]}"
            )
