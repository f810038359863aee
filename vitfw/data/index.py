"""`open_samples("train-{0000..1281}.tar")`: every image of the shards by row number, read in place.

One pass over each shard gives a table (offset, size, key, label) that is kept beside the shard as `X.tar.idx`, or in a
cache folder where that cannot be written, and built again when size or modification time of the shard changes. Shards
are indexed in parallel.
"""

import os
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Literal

import numpy as np

from vitfw.data import table as tables
from vitfw.data.folder import index_folder
from vitfw.data.patterns import expand, is_remote, slice_bounds, split_list, split_slice
from vitfw.data.shard import index_shard
from vitfw.data.table import Table
from vitfw.seeding import derive

MAX_OPEN_FILES = 128  # descriptors a process keeps open


class Samples:
    """N images of S shards (tars, or folders of files) by row 0..N-1, with keys and labels.

    names: S files or folders. starts [S + 1]: first row of each. sources [S]: which pattern of the list a shard came
    from. classes: their names, if known. Files are opened on first use in each process, and the object pickles and
    forks cheaply.
    """

    def __init__(
        self,
        names: Sequence[str],
        starts: np.ndarray,
        table: Table,
        *,
        classes: tuple[str, ...] | None = None,
        sources: np.ndarray | None = None,
    ) -> None:
        assert len(starts) == len(names) + 1 and starts[-1] == len(table.offset), "each row belongs to one shard"
        self.names = list(names)
        self.starts = starts
        self.table = table
        self.classes = classes
        self.sources = np.zeros(len(names), np.int32) if sources is None else sources
        self._open_files: OrderedDict[str, int] = OrderedDict()
        self._check_labels()

    def _check_labels(self) -> None:
        values = self.table.label_value if self.multi_label else self.table.label
        if self.classes is not None and len(values) and values.max() >= len(self.classes):
            bad = int(values.max())
            row = int(np.argmax(values))
            row = int(np.searchsorted(self.table.label_end, row, side="right")) if self.multi_label else row
            limit = len(self.classes) - 1
            raise ValueError(f"{self.place(row)} has label {bad}, but the class list has the labels 0..{limit}")

    def __len__(self) -> int:
        return len(self.table.offset)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_open_files": OrderedDict()}

    @property
    def multi_label(self) -> bool:
        """Each sample has a set of labels instead of one."""
        return len(self.table.label_end) > 0

    @property
    def labelled(self) -> bool:
        """False for images without labels (pretraining)."""
        return self.multi_label or bool((self.table.label >= 0).any())

    @property
    def labels(self) -> np.ndarray:
        """[N] int32, -1 where there is none (and everywhere for multi-label)."""
        return self.table.label

    @property
    def num_classes(self) -> int:
        """From the class list if there is one, else the largest label + 1; 0 without labels."""
        if self.classes is not None:
            return len(self.classes)
        values = self.table.label_value if self.multi_label else self.table.label
        return int(values.max()) + 1 if len(values) else 0

    @property
    def shard_sizes(self) -> np.ndarray:
        """[S] int64: samples in each shard."""
        return np.diff(self.starts)

    def shard(self, row: int) -> int:
        """Number of the shard that holds a row."""
        return int(np.searchsorted(self.starts, row, side="right")) - 1

    def key(self, row: int) -> str:
        """Member name without extension (tar), or path below the root (folder)."""
        start = self.table.key_end[row - 1] if row else 0
        return self.table.key_text[start : self.table.key_end[row]].tobytes().decode("utf-8", "surrogateescape")

    def label(self, row: int) -> int | np.ndarray:
        """An int (-1: none), or for multi-label a float32 array [K] of zeros and ones."""
        if not self.multi_label:
            return int(self.table.label[row])
        start = self.table.label_end[row - 1] if row else 0
        target = np.zeros(self.num_classes, np.float32)
        target[self.table.label_value[start : self.table.label_end[row]]] = 1.0
        return target

    def place(self, row: int) -> str:
        """Shard and key, for messages."""
        return f"{self.names[self.shard(row)]}: {self.key(row)}"

    def read(self, row: int) -> bytes:
        """The encoded image. Raises OSError naming shard and key where the file is gone or shorter than indexed."""
        name = self.names[self.shard(row)]
        offset = int(self.table.offset[row])
        if offset < 0:
            return (Path(name) / self.key(row)).read_bytes()
        size = int(self.table.size[row])
        data = os.pread(self._descriptor(name), size, offset)
        if len(data) != size:
            raise OSError(f"{self.place(row)}: {len(data)} of {size} bytes at {offset}: the shard changed while in use")
        return data

    def _descriptor(self, name: str) -> int:
        if name in self._open_files:
            self._open_files.move_to_end(name)
            return self._open_files[name]
        descriptor = os.open(name, os.O_RDONLY)
        self._open_files[name] = descriptor
        if len(self._open_files) > MAX_OPEN_FILES:
            os.close(self._open_files.popitem(last=False)[1])
        return descriptor

    def select(self, rows: np.ndarray) -> "Samples":
        """A subset, in the order of the shards; rows that are not sorted are sorted."""
        rows = np.sort(np.asarray(rows, np.int64))
        starts = np.searchsorted(rows, self.starts)
        filled = np.flatnonzero(np.diff(starts))
        return Samples(
            [self.names[shard] for shard in filled],
            np.append(starts[filled], len(rows)),
            tables.take(self.table, rows),
            classes=self.classes,
            sources=self.sources[filled],
        )

    def describe(self) -> str:
        """One line: images, shards, bytes, classes."""
        size = int(self.table.size.sum(dtype=np.int64))
        where = f"{len(self.names)} shard{'s' * (len(self.names) != 1)}" if size else "folders"
        volume = f", {size / 1e9:.2f} GB" if size >= 1e8 else f", {size / 1e6:.2f} MB" if size else ""
        labels = f", {self.num_classes} classes" if self.labelled else ", no labels"
        return f"{len(self):,} images in {where}{volume}{labels}{' (multi-label)' * self.multi_label}"

    def fingerprint(self) -> str:
        """Hash of all keys, labels and sizes in order: two runs with the same one saw the same set."""
        digest = sha256()
        for array in (self.starts, *self.table[1:]):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()[:16]


def open_samples(
    pattern: str,
    *,
    classes: str | Sequence[str] | None = None,
    on_problem: Literal["raise", "skip"] = "raise",
    cache: str | None = None,
    threads: int = 8,
) -> Samples:
    """Shards or folders by pattern (see `patterns`): `a-{00..07}.tar`, `a-*.tar[:99%]`, `folder`, `x/*.tar, y/*.tar`.

    classes: names, or a file with one name a line; by default the `classes.txt` beside the first shard, if any.
    on_problem: split, repeated, unlabelled or imageless keys raise ValueError, or are left out with a warning.
    cache: folder for indexes that cannot be kept beside their shard.
    """
    parts = []
    known = _read_classes(classes)
    for source, text in enumerate(split_list(pattern)):
        body, bounds = split_slice(text)
        samples = _open_source(expand(body), known, on_problem, cache, threads)
        if bounds is not None:
            first, last = slice_bounds(bounds, len(samples))
            samples = samples.select(shuffled_rows(len(samples), derive(0, "slice"))[first:last])
        samples.sources = np.full(len(samples.names), source, np.int32)
        parts.append(samples)
    return _join(parts, pattern)


def shuffled_rows(num_rows: int, seed: int) -> np.ndarray:
    """A permutation of 0..num_rows-1 as a pure function of the seed: rows sorted by splitmix64 of (seed, row).

    Written out because numpy promises no equal stream between its releases. splitmix64 is a bijection: no ties.
    """
    value = np.arange(num_rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed & ((1 << 64) - 1))
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(value ^ (value >> np.uint64(31)), kind="stable")


def _read_classes(classes: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if classes is None:
        return None
    names = tuple(Path(classes).read_text().split("\n")) if isinstance(classes, str) else tuple(classes)
    names = names[:-1] if names and names[-1] == "" else names
    if len(set(names)) < len(names) or "" in names or not names:
        raise ValueError(f"classes {classes!r}: names must be given once each, one a line, without empty lines")
    return names


def _open_source(
    names: list[str], classes: tuple[str, ...] | None, on_problem: str, cache: str | None, threads: int
) -> Samples:
    beside = Path(names[0]).parent / "classes.txt"
    if classes is None and not Path(names[0]).is_dir() and not is_remote(names[0]) and beside.exists():
        classes = _read_classes(str(beside))
    with ThreadPoolExecutor(threads) as pool:
        results = list(pool.map(lambda name: _index_one(name, classes, cache), names))
    found = {result[1] for result in results if result[1] is not None}
    if len(found) > 1:
        raise ValueError(f"{names[0]!r} and the folders beside it have different classes; give data.classes")
    problems = [problem for result in results for problem in result[2]]
    if problems:
        text = f"{len(problems)} problem(s) in the shards, the first of them:\n  " + "\n  ".join(problems[:3])
        if on_problem == "raise":
            raise ValueError(f"{text}\n(data.on_bad_sample=skip leaves these samples out)")
        warnings.warn(f"{text}\nThese samples are left out.", stacklevel=3)
    starts = np.cumsum([0, *(len(result[0].offset) for result in results)])
    return Samples(
        names, starts, tables.join([result[0] for result in results]), classes=found.pop() if found else classes
    )


def _index_one(
    name: str, classes: tuple[str, ...] | None, cache: str | None
) -> tuple[Table, tuple[str, ...] | None, list[str]]:
    """Table, classes (of a folder) and problems of one shard or folder, from the stored index if it is still right."""
    if is_remote(name):
        raise ValueError(f"{name!r}: remote shards are opened through remote.open_remote")
    path = Path(name)
    if path.is_dir():
        table, names = index_folder(path, classes)
        return table, names, []
    status = path.stat()
    about = {
        "size": status.st_size,
        "modified_ns": status.st_mtime_ns,
        "classes": sha256("\n".join(classes or ()).encode()).hexdigest()[:16],
    }
    places = [path.with_name(path.name + ".idx")]
    if cache is not None:
        places.append(Path(cache) / f"{sha256(str(path.resolve()).encode()).hexdigest()[:24]}.idx")
    for place in places:
        stored = tables.load(place)
        if stored is not None and all(stored[1].get(key) == value for key, value in about.items()):
            return stored[0], None, list(stored[1]["problems"])  # type: ignore[arg-type]
    table, problems = index_shard(path, classes)
    for place in places:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            tables.save(place, table, {**about, "problems": problems})
            break
        except OSError:
            continue  # read-only data folder: the next place, or built again at the next start
    return table, None, problems


def _join(parts: list[Samples], pattern: str) -> Samples:
    classes = {part.classes for part in parts}
    if len(classes) > 1:
        raise ValueError(f"the sources of {pattern!r} have different class lists; give data.classes")
    if len({part.labelled for part in parts}) > 1:
        raise ValueError(f"some sources of {pattern!r} have labels and others have none; they cannot be mixed")
    if sum(len(part) for part in parts) == 0:
        raise ValueError(f"{pattern!r} holds no sample")
    if len(parts) == 1:
        return parts[0]
    return Samples(
        [name for part in parts for name in part.names],
        np.cumsum([0, *(size for part in parts for size in part.shard_sizes)]),
        tables.join([part.table for part in parts]),
        classes=classes.pop(),
        sources=np.concatenate([part.sources for part in parts]),
    )
