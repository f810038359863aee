"""One shard (a plain tar in WebDataset's layout) to the rows of an index, in one pass over its headers and labels.

A sample is `KEY.IMAGE` beside `KEY.cls` (a number, or a class name) or `KEY.json` ({"label": 3} or {"labels": [1, 4]}, where
numbers are numbers and texts are class names). The key ends at the last dot, so names with dots, folders and capitals are
kept apart; `KEY.mask.png` beside `KEY.png` is refused, since it may be another sample or not. All members of a sample stand
next to each other; whatever breaks this is a problem of that key, and the sample is never trained on silently.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from vitfw.data.patterns import IMAGE_EXTENSIONS
from vitfw.data.table import MAX_LABEL, Label, Table, make_table
from vitfw.data.tar import Member, read_members

LABEL_EXTENSIONS = ("cls", "json")


def index_shard(path: Path, classes: Sequence[str] | None, *, name: str | None = None) -> tuple[Table, list[str]]:
    """The sound samples of a shard and the problems found, one line each with shard (its name), key and cure.

    Raises tar.DamagedTarError where the archive itself is damaged.
    """
    shown = name or str(path)
    groups, problems = _group(path, shown)
    numbers = {name: place for place, name in enumerate(classes or ())}
    rows: list[tuple[str, Member, Label]] = []
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for key, (image, labels) in groups.items():
            try:
                rows.append((key, image, _read_label(descriptor, labels, numbers)))
            except ValueError as error:
                problems[key] = f"{shown}: key {key!r}: {error}"
    finally:
        os.close(descriptor)
    if any(label is not None for _, _, label in rows):
        for key, _, label in rows:
            if label is None:
                problems[key] = f"{shown}: key {key!r} has an image but no label, while others have one"
        rows = [row for row in rows if row[2] is not None]
    table = make_table(
        [image.offset for _, image, _ in rows],
        [image.size for _, image, _ in rows],
        [key for key, _, _ in rows],
        [label for _, _, label in rows],
    )
    return table, list(problems.values())


def _group(path: Path, name: str) -> tuple[dict[str, tuple[Member, dict[str, Member]]], dict[str, str]]:
    """Members by key: {key: (image, {extension: label member})} for the sound ones, {key: problem} for the others."""
    images: dict[str, Member] = {}
    labels: dict[str, dict[str, Member]] = {}
    problems: dict[str, str] = {}
    current: str | None = None
    for member in read_members(path):
        key, _, extension = member.name.rpartition(".")
        extension = extension.lower()
        is_label = extension in LABEL_EXTENSIONS
        if not (is_label or extension in IMAGE_EXTENSIONS) or key.rpartition("/")[2].startswith("."):
            continue  # captions, arrays, hidden files: never read
        if key != current and (key in images or key in labels) and not (current and key.startswith(f"{current}.")):
            problem = (
                f"{name}: the members of key {key!r} do not stand next to each other, or the key is repeated; "
                "write them one after another (tar --sort=name)"
            )
        elif not is_label and key in images:
            problem = f"{name}: key {key!r} has two images; give each its own key"
        elif is_label and extension in labels.get(key, {}):
            problem = f"{name}: key {key!r} has two labels .{extension}"
        else:
            problem = None
        if problem is not None:
            problems.setdefault(key, problem)
        if current is None or not key.startswith(f"{current}."):  # what continues a key stands inside its sample
            current = key
        if is_label:
            labels.setdefault(key, {})[extension] = member
        else:
            images[key] = member
    for key in labels.keys() - images.keys():
        problems.setdefault(
            key, f"{name}: key {key!r} has a label but no image ({', '.join(IMAGE_EXTENSIONS[:4])}, ...)"
        )
    for key in images:
        base = next((key[:at] for at, sign in enumerate(key) if sign == "." and key[:at] in images), None)
        if base is not None and key not in labels:
            why = f"continues the key {base!r}, as a mask of it would; leave it out of the shard, or rename it"
            problems.setdefault(key, f"{name}: key {key!r} {why}")
    sound = {key: (image, labels.get(key, {})) for key, image in images.items() if key not in problems}
    return sound, dict(sorted(problems.items()))


def _read_label(descriptor: int, members: dict[str, Member], numbers: dict[str, int]) -> Label:
    if "cls" in members:
        text = os.pread(descriptor, members["cls"].size, members["cls"].offset).decode("utf-8", "replace").strip()
        return _number(text, numbers)
    if "json" not in members:
        return None
    content = json.loads(os.pread(descriptor, members["json"].size, members["json"].offset))
    if not isinstance(content, dict):
        raise ValueError(f"the json is a {type(content).__name__}, not an object with 'label' or 'labels'")
    value = content.get("labels", content.get("label"))
    if isinstance(value, list):
        return tuple(_named(item, numbers) for item in value)
    return None if value is None else _named(value, numbers)


def _named(value: object, numbers: dict[str, int]) -> int:
    """In JSON a text that is a class name is that name, even where it looks like a number."""
    return numbers[value] if isinstance(value, str) and value in numbers else _number(value, numbers)


def is_ambiguous(name: str, number: int) -> bool:
    """Whether a class name is itself a number, and another than the class's own: as text it may mean either."""
    return name.isdecimal() and int(name) != number


def _number(value: object, numbers: dict[str, int]) -> int:
    if isinstance(value, str) and value in numbers:
        if is_ambiguous(value, numbers[value]):
            raise ValueError(
                f"the label {value!r} may be the class number {int(value)}, or the name of class {numbers[value]}; write it "
                f'as json, {{"label": {numbers[value]}}}, or take the class list away'
            )
        return numbers[value]
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"the label {value!r} is neither a number nor a class name")
    try:
        number = int(value)
    except ValueError:
        known = f"the {len(numbers)} known classes" if numbers else "no class list was given"
        raise ValueError(f"the label {value!r} is not a number, and as a class name: {known}") from None
    if number > MAX_LABEL:
        raise ValueError(f"the label {number} is larger than any class number (up to {MAX_LABEL})")
    if number < 0:
        raise ValueError(f"the label {number} is negative; leave the label member away for unlabelled images")
    return number
