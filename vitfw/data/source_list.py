"""Images listed in a table: FILE.csv with the columns path and label, or FILE.jsonl with path, label or labels.

Paths are relative to the table. Labels are all numbers, or all class names (numbered in sorted order, or as the given class
list says); in JSONL `labels` is a list of either, for multi-label data. Without labels: unlabelled.
"""

import csv
import json
import re
from pathlib import Path
from typing import Any

from vitfw.data.shard import is_ambiguous
from vitfw.data.source import Source, file_stamp
from vitfw.data.table import MAX_LABEL, Label

Row = tuple[int, dict[str, Any]]  # line of the table, its fields
MEANT_AS_LABEL = {"class", "classes", "category", "categories", "target", "targets", "class_id", "label_id", "labels"}


def from_list(table: Path, classes: tuple[str, ...] | None) -> Source:
    """Raises ValueError that names the table and the line for a missing path, a missing file, or an odd label."""
    try:
        rows = _csv_rows(table) if table.suffix.lower() == ".csv" else _jsonl_rows(table)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{table}: is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from error
    if not rows:
        raise ValueError(f"{table}: lists no image")
    paths, raw = [], []
    for line, row in rows:
        path = row.get("path")
        if not path or not isinstance(path, str):
            raise ValueError(f"{table}, line {line}: no path; needed are path and label (has: {', '.join(row)})")
        if not (table.parent / path).is_file():
            raise ValueError(f"{table}, line {line}: no such file: {table.parent / path}")
        paths.append(table.parent / path)
        raw.append(row.get("labels", row.get("label")))
    if all(value is None for value in raw):
        refuse_other_names(str(table), {name for _, row in rows for name in row})
    labels, names = _labels(table, [line for line, _ in rows], raw, classes)
    keys = [str(Path(row["path"]).with_suffix("")) for _, row in rows]
    return Source(keys, labels, names, lambda place: paths[place].read_bytes(), lambda place: file_stamp(paths[place]))


def refuse_other_names(where: str, columns: set[str]) -> None:
    """Raises ValueError where nothing is called a label, and something is called what others call one."""
    meant = sorted(name for name in columns if name.strip().lower() in MEANT_AS_LABEL)
    if meant:
        raise ValueError(
            f"{where}: no column is named label, but {meant[0]!r} may be meant; rename it, or take it away"
        )


def _csv_rows(table: Path) -> list[Row]:
    with table.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        header = [name.strip().lower() for name in next(reader, [])]
        if "path" not in header:
            separated = header and any(sign in header[0] for sign in ";\t")
            hint = "; separate columns by commas" if separated else ""
            raise ValueError(f"{table}: the first line must name the columns path and label, it is {header}{hint}")
        if len(set(header)) < len(header):
            raise ValueError(f"{table}: the first line names a column twice: {', '.join(header)}")
        rows = []
        for fields in reader:
            if len(fields) > len(header):
                raise ValueError(f"{table}, line {reader.line_num}: {len(fields)} fields for {len(header)} columns")
            row = {name: value.strip() for name, value in zip(header, fields, strict=False) if value.strip()}
            if row:
                rows.append((reader.line_num, row))
    return rows


def _jsonl_rows(table: Path) -> list[Row]:
    rows = []
    for number, text in enumerate(table.read_text(encoding="utf-8-sig").splitlines(), start=1):
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


def _labels(
    table: Path, lines: list[int], raw: list[Any], classes: tuple[str, ...] | None
) -> tuple[list[Label], tuple[str, ...] | None]:
    if all(value is None for value in raw):
        return [None for _ in raw], classes
    flat = []
    for line, value in zip(lines, raw, strict=True):
        if value is None:
            raise ValueError(f"{table}, line {line}: no label, while others have one")
        items = value if isinstance(value, list) else [value]
        flat += items
        for item in items:
            _check_label(f"{table}, line {line}", item)
    numbers = {str(item): number for item in flat if (number := _as_number(item)) is not None}
    if len(numbers) < len({str(item) for item in flat}):
        names = classes if classes is not None else tuple(sorted({str(item) for item in flat}))
        classes, numbers = names, {name: place for place, name in enumerate(names)}
    elif classes is not None:
        odd = next((str(item) for item in flat if isinstance(item, str) and _may_be_name(item, classes)), None)
        if odd is not None:
            raise ValueError(
                f"{table}: the label {odd!r} may be the class number {numbers[odd]}, or the name of class {classes.index(odd)}; "
                "give class numbers of their own place in the list, or names that are no numbers"
            )
    for line, value in zip(lines, raw, strict=True):
        unknown = next(
            (item for item in (value if isinstance(value, list) else [value]) if str(item) not in numbers), None
        )
        if unknown is not None:
            raise ValueError(f"{table}, line {line}: the label {unknown!r} is not among the {len(numbers)} classes")
    labels: list[Label] = [
        tuple(numbers[str(item)] for item in value) if isinstance(value, list) else numbers[str(value)] for value in raw
    ]
    return labels, classes


def _check_label(where: str, item: Any) -> None:
    if isinstance(item, bool) or not isinstance(item, int | float | str):
        raise ValueError(f"{where}: the label {item!r} is neither a number nor a class name")
    number = _as_number(item)
    if (number is None and not isinstance(item, str)) or (number is not None and not 0 <= number <= MAX_LABEL):
        raise ValueError(f"{where}: the label {item!r} is no class number (0, 1, 2, ...)")


def _as_number(item: Any) -> int | None:
    """3, "3", and, since tables of floats write them so, 3.0 and "3.0"; a name gives None."""
    text = str(item)
    return int(text.partition(".")[0]) if re.fullmatch(r"-?\d+(\.0*)?", text, re.ASCII) else None


def _may_be_name(item: str, classes: tuple[str, ...]) -> bool:
    return item in classes and is_ambiguous(item, classes.index(item))
