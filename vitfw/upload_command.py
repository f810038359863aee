"""`vitfw upload RUN_FOLDER`: one whole W&B run out of `metrics.jsonl`, whatever was online, offline, stopped or killed meanwhile.

W&B cannot join the offline parts of a job that was stopped and went on: a later part takes the place of the earlier one. The
run's own records are complete, so a new run is made of them.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from vitfw.report.dashboard import Dashboard, start_wandb
from vitfw.report.recorder import read_metrics

HEAD = ("step", "images", "epoch", "attempt")


def whole_run(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each step of each split once, in the order of steps: a step done again counts as its latest attempt did it."""
    latest: dict[tuple[int, str], dict[str, Any]] = {}
    for record in records:
        place = record["step"], record["split"]
        if place not in latest or record["attempt"] >= latest[place]["attempt"]:
            latest[place] = record
    return sorted(latest.values(), key=lambda record: record["step"])


def send(records: Sequence[dict[str, Any]], dashboard: Dashboard) -> int:
    """Sends them as training itself would have, and returns how many arrived."""
    sent = 0
    for record in whole_run(records):
        numbers = {name: float(value) for name, value in record.items() if name not in (*HEAD, "split", "time")}
        dashboard.log({f"{record['split']}/{name}": value for name, value in numbers.items()}, record)
        if not dashboard.on:
            break
        sent += 1
    dashboard.close(status=0)
    return sent


def main(words: list[str]) -> int:
    """RUN_FOLDER: status 0 when everything was sent, 1 when W&B failed. Raises ValueError where there is no run."""
    parser = argparse.ArgumentParser(prog="vitfw upload", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="run folder")
    parser.add_argument("--project", default="vitfw", help="W&B project")
    parser.add_argument("--entity", help="W&B team or user")
    parser.add_argument("--name", help="W&B run name; default: the run folder's")
    given = parser.parse_args(words)
    folder: Path = given.folder
    missing = [name for name in ("config.yaml", "provenance.json", "metrics.jsonl") if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder}: holds no run with records ({', '.join(missing)} missing)")
    records = read_metrics(folder)
    run_id = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))["run_id"]
    dashboard = start_wandb(
        folder,
        run_id=f"{run_id}-whole",
        project=given.project,
        entity=given.entity,
        name=given.name,
        config=yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")),
        resume="never",
    )
    sent, wanted = send(records, dashboard), len(whole_run(records))
    print(f"{sent} of {wanted} records sent to W&B as run {run_id}-whole")
    return int(sent < wanted)
