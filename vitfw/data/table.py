"""The rows of an index as numpy arrays: no Python object a sample, so forked workers share them without copying.

24 bytes a sample beside its key: offset 8, size 4, end of its key 8, label 4. N samples, T bytes of keys, L labels.
"""

import json
import os
import shutil
import threading
import zipfile
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np

FORMAT = 2  # raised when the arrays below change, so that older files are built again
_PARSING = threading.Lock()
MAX_SIZE = (1 << 32) - 1  # bytes of one image
MAX_LABEL = (
    10_000_000  # far above any list of classes: a larger number is a slip, and a head for it would fill the memory
)


Label = int | tuple[int, ...] | None


class Table(NamedTuple):
    """offset [N] int64 (-1: a file of its own, named by the key), size [N] uint32, key_end [N] int64 into key_text [T]
    uint8, label [N] int32 (-1: none). Multi-label: label_end [N] int64 into label_value [L] int32, else both empty."""

    offset: np.ndarray
    size: np.ndarray
    key_end: np.ndarray
    key_text: np.ndarray
    label: np.ndarray
    label_end: np.ndarray
    label_value: np.ndarray

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        return sum(array.nbytes for array in self)


def make_table(offsets: list[int], sizes: list[int], keys: list[str], labels: list[Label]) -> Table:
    """Rows to arrays; if any label is a tuple, all are stored as multi-label (a single label is a tuple of one)."""
    texts = [key.encode("utf-8", "surrogateescape") for key in keys]
    multi = any(isinstance(label, tuple) for label in labels)
    rows = (
        [(() if label is None else label if isinstance(label, tuple) else (label,)) for label in labels]
        if multi
        else []
    )
    return Table(
        offset=np.array(offsets, np.int64),
        size=np.array(sizes, np.uint32),
        key_end=np.cumsum([len(text) for text in texts], dtype=np.int64),
        key_text=np.frombuffer(b"".join(texts), np.uint8),
        label=np.array([-1 if label is None or multi else label for label in labels], np.int32),
        label_end=np.cumsum([len(row) for row in rows], dtype=np.int64) if multi else np.zeros(0, np.int64),
        label_value=np.array([value for row in rows for value in row], np.int32),
    )


def join(tables: list[Table]) -> Table:
    """The rows of several tables behind each other. Multi-label wins: single labels become rows of one."""
    multi = any(len(table.label_end) for table in tables)
    if multi:
        tables = [_as_multi(table) for table in tables]
    keys = np.cumsum([0, *(len(table.key_text) for table in tables)])
    values = np.cumsum([0, *(len(table.label_value) for table in tables)])
    return Table(
        offset=np.concatenate([table.offset for table in tables]),
        size=np.concatenate([table.size for table in tables]),
        key_end=np.concatenate([table.key_end + start for table, start in zip(tables, keys[:-1], strict=True)]),
        key_text=np.concatenate([table.key_text for table in tables]),
        label=np.concatenate([table.label for table in tables]),
        label_end=np.concatenate([table.label_end + start for table, start in zip(tables, values[:-1], strict=True)]),
        label_value=np.concatenate([table.label_value for table in tables]),
    )


def _as_multi(table: Table) -> Table:
    if len(table.label_end) or not len(table.label):
        return table
    known = table.label >= 0
    return table._replace(
        label=np.full_like(table.label, -1), label_end=np.cumsum(known, dtype=np.int64), label_value=table.label[known]
    )


def take(table: Table, rows: np.ndarray) -> Table:
    """The given rows, in the given order."""
    key_end, key_text = _take_ragged(table.key_end, table.key_text, rows)
    label_end, label_value = table.label_end, table.label_value
    if len(label_end):
        label_end, label_value = _take_ragged(label_end, label_value, rows)
    return Table(table.offset[rows], table.size[rows], key_end, key_text, table.label[rows], label_end, label_value)


def _take_ragged(ends: np.ndarray, values: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[rows]
    lengths = ends[rows] - starts
    new_ends = np.cumsum(lengths, dtype=np.int64)
    places = np.arange(new_ends[-1] if len(rows) else 0) + np.repeat(starts - (new_ends - lengths), lengths)
    return new_ends, values[places]


def shared(table: Table, folder: Path) -> Table:
    """The same rows, mapped from a file in `folder`, so that all processes of a node hold them in memory once.

    The file is named by the content, so it is never out of date. Where the folder cannot be written, `table` itself.
    """
    digest = sha256()
    for array in table:
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    place = folder / f"{digest.hexdigest()[:24]}-{FORMAT}"
    try:
        if not place.exists():
            temporary = folder / f".{place.name}.{os.getpid()}.tmp"
            temporary.mkdir(parents=True)
            for name, array in table._asdict().items():
                np.save(temporary / f"{name}.npy", array)
            with suppress(OSError):  # another rank was first; its folder has the same content
                temporary.rename(place)
            shutil.rmtree(temporary, ignore_errors=True)
        mapped = (np.load(place / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in Table._fields)
        return Table(*(np.asarray(array) for array in mapped))  # plain arrays over the mapping: faster to look up
    except OSError:
        return table


def save(path: Path, table: Table, about: dict[str, object]) -> None:
    """Writes table and description to one file, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    about_bytes = np.frombuffer(json.dumps({"format": FORMAT, **about}).encode(), np.uint8)
    try:
        with temporary.open("wb") as file:
            np.savez(file, about=about_bytes, **table._asdict())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path) -> tuple[Table, dict[str, object]] | None:
    """What `save` wrote; None if there is none that can be read, of this format and whole (it is then rebuilt)."""
    try:
        # numpy parses headers with Python's ast, which in CPython 3.11 fails now and then when threads do it at once
        with _PARSING, np.load(path, allow_pickle=False) as arrays:
            about = json.loads(arrays["about"].tobytes())
            if about.get("format") != FORMAT:
                return None
            return Table(*(arrays[name] for name in Table._fields)), about
    except (OSError, zipfile.BadZipFile, ValueError, KeyError, EOFError):  # json errors are ValueErrors
        return None
