"""`metrics.jsonl`: everything a run says, one JSON record a line, append-only; the dashboard is a view of the same records."""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vitfw.report.dashboard import Dashboard


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Section `log`: what is shown and written; nothing here changes the result."""

    every: int = field(default=10, metadata={"help": "steps between training records"})
    progress: Literal["auto", "bar", "lines", "off"] = field(
        default="auto", metadata={"help": "auto: a bar in a terminal, a line each epoch elsewhere"}
    )
    wandb: bool = field(
        default=False, metadata={"help": "send the same records to W&B (offline without key or network)"}
    )
    project: str = field(default="vitfw", metadata={"help": "W&B project"})
    entity: str | None = field(default=None, metadata={"help": "W&B team or user"})
    name: str | None = field(default=None, metadata={"help": "W&B run name; default: the run folder's"})

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"log.every={self.every}: must be at least 1 step")


class Recorder:
    """Writes records on rank 0; on the other ranks `folder` is None and every call does nothing.

    A record: step, images, epoch (a fraction), attempt, split, time (seconds since 1970), and the values. A run that goes
    on from an older checkpoint writes the repeated steps again under its own attempt number.
    """

    def __init__(self, folder: Path | None, *, attempt: int, dashboard: Dashboard | None = None) -> None:
        self._file = None if folder is None else (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._attempt = attempt
        self._dashboard = dashboard

    def write(self, split: str, values: Mapping[str, float], *, step: int, images: int, epoch: float) -> None:
        if self._file is None:
            return
        head = {"step": step, "images": images, "epoch": round(epoch, 6), "attempt": self._attempt, "split": split}
        numbers = {name: _json_number(value) for name, value in values.items()}
        self._file.write(json.dumps(head | {"time": round(time.time(), 3)} | numbers) + "\n")
        self._file.flush()
        if self._dashboard is not None:
            self._dashboard.log({f"{split}/{name}": value for name, value in values.items()}, head)

    def close(self, *, status: int) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._dashboard is not None:
            self._dashboard.close(status=status)


def read_metrics(folder: Path, split: str | None = None) -> list[dict[str, Any]]:
    """The records of a run, in order; a line torn by a kill in mid-write is left out."""
    records = []
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if split is None or record["split"] == split:
            records.append(record)
    return records


def _json_number(value: float) -> float | str:
    """JSON has no NaN: such a value is written as text, so that every reader can read the file."""
    return value if math.isfinite(value) else str(value)
