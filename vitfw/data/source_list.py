"""Images listed in a table: FILE.csv with the columns path and label, or FILE.jsonl with path, label or labels.

Paths are relative to the table. A label is a number, or a class name (all of them then; numbered in sorted order, or
as the given class list says); in JSONL `labels` is a list of either, for multi-label data. Without labels: unlabelled.
"""

import csv
import json
from pathlib import Path
from typing import Any

from vitfw.data.source import Source
from vitfw.data.table import Label


def from_list(table: Path, classes: tuple[str, ...] | None) -> Source:
    """Raises ValueError that names the table and the line for a missing path, a missing file, or an odd label."""
    rows = _csv_rows(table) if table.suffix == ".csv" else _jsonl_rows(table)
    paths, raw = [], []
    for line, row in rows:
        if not row.get("path"):
            raise ValueError(f"{table}, line {line}: no path; needed are path and label (has: {', '.join(row)})")
        path = table.parent / row["path"]
        if not path.is_file():
            raise ValueError(f"{table}, line {line}: no such file: {path}")
        paths.append(path)
        raw.append(row.get("labels", row.get("label")))
    labels, names = _labels(table, raw, classes)

    keys = [str(Path(row["path"]).with_suffix("")) for _, row in rows]
    return Source(keys, labels, names, lambda place: paths[place].read_bytes())


def _csv_rows(table: Path) -> list[tuple[int, dict[str, Any]]]:
    with table.open(newline="") as file:
        reader = csv.DictReader(file)
        rows = [(reader.line_num, {key: value for key, value in row.items() if value}) for row in reader]
    if "path" not in (reader.fieldnames or ()):
        raise ValueError(f"{table}: the first line must name the columns path and label, it is {reader.fieldnames}")
    return rows


def _jsonl_rows(table: Path) -> list[tuple[int, dict[str, Any]]]:
    rows = []
    for number, text in enumerate(table.read_text().splitlines(), start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{table}, line {number}: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{table}, line {number}: not an object with path and label")
        rows.append((number, row))
    return rows


def _labels(table: Path, raw: list[Any], classes: tuple[str, ...] | None) -> tuple[list[Label], tuple[str, ...] | None]:
    if all(value is None for value in raw):
        return [None for _ in raw], classes
    missing = next((place for place, value in enumerate(raw) if value is None), None)
    if missing is not None:
        raise ValueError(f"{table}: entry {missing + 1} has no label, while others have one")
    flat = [item for value in raw for item in (value if isinstance(value, list) else [value])]
    if all(str(item).isdecimal() and not isinstance(item, bool) for item in flat):
        number = {str(item): int(item) for item in flat}
    else:
        names = classes if classes is not None else tuple(sorted({str(item) for item in flat}))
        classes, number = names, {name: place for place, name in enumerate(names)}
    unknown = next((str(item) for item in flat if str(item) not in number), None)
    if unknown is not None:
        raise ValueError(f"{table}: the label {unknown!r} is not among the {len(number)} classes")
    labels: list[Label] = []
    for value in raw:
        many = isinstance(value, list)
        labels.append(tuple(number[str(item)] for item in value) if many else number[str(value)])
    return labels, classes
