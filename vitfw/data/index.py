"""`open_samples("train-{0000..1281}.tar")`: every image of the shards by row number, read in place.

One pass over each shard gives a table (offset, size, key, label) that is kept beside the shard as `X.tar.idx`, or in a
cache folder where that cannot be written, and built again when size or modification time of the shard changes. Shards
are indexed in parallel.
"""

import copy
import os
import warnings
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Literal

import numpy as np

from vitfw.data import table as tables
from vitfw.data.manifest import lost_shards
from vitfw.data.patterns import expand, is_remote, slice_bounds, split_list, split_slice
from vitfw.data.remote import RemoteCache, default_folder, read_if_there
from vitfw.data.shuffle import shuffled_rows
from vitfw.data.stored import stored_index
from vitfw.data.table import Table
from vitfw.seeding import derive

MAX_OPEN_FILES = 128  # descriptors a process keeps open
SHARED_ABOVE = 100_000_000  # bytes of an index from which on the ranks of a node share one copy


class Samples:
    """N images of S shards (tars, or folders of files) by row 0..N-1, with keys and labels.

    names: S files or folders. starts [S + 1]: first row of each. sources [S]: which pattern of the list a shard came
    from. classes: their names, if known. num_classes: as given, else their number, else the largest label + 1; 0 without labels.
    labelled: false for images without labels (pretraining).
    Files are opened on first use in each process, and the object pickles and forks cheaply.
    """

    def __init__(
        self,
        names: Sequence[str],
        starts: np.ndarray,
        table: Table,
        *,
        classes: tuple[str, ...] | None = None,
        num_classes: int | None = None,
        sources: np.ndarray | None = None,
        remote: RemoteCache | None = None,
    ) -> None:
        assert len(starts) == len(names) + 1 and starts[-1] == len(table.offset), "each row belongs to one shard"
        self.names = list(names)
        self.starts = starts
        self.table = table
        self.classes = classes
        self.sources = np.zeros(len(names), np.int32) if sources is None else sources
        self.remote = remote
        self._open_files: OrderedDict[str, int] = OrderedDict()
        self._check_labels()
        values = self.table.label_value if self.multi_label else self.table.label
        self.labelled = self.multi_label or bool((self.table.label >= 0).any())
        highest = int(values.max()) + 1 if len(values) else 0
        known = highest if classes is None else len(classes)
        self.num_classes = known if num_classes is None else num_classes

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
    def labels(self) -> np.ndarray:
        """[N] int32, -1 where there is none (and everywhere for multi-label)."""
        return self.table.label

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
        if is_remote(name):
            assert self.remote is not None, "remote samples come with their cache"
            descriptor = self.remote.open(name)
            self._close_removed()
        else:
            descriptor = os.open(name, os.O_RDONLY)
        self._open_files[name] = descriptor
        if len(self._open_files) > MAX_OPEN_FILES:
            os.close(self._open_files.popitem(last=False)[1])
        return descriptor

    def _close_removed(self) -> None:
        """Lets go of copies that the cache has removed, so that the disk gets their room back."""
        for name, descriptor in list(self._open_files.items()):
            if os.fstat(descriptor).st_nlink == 0:
                os.close(self._open_files.pop(name))

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
            num_classes=self.num_classes,
            sources=self.sources[filled],
            remote=self.remote,
        )

    def with_classes(self, count: int) -> "Samples":
        """The same images counted among `count` classes, at least those they have: so wide are rows of several labels."""
        if count < self.num_classes:
            raise ValueError(f"labels up to {self.num_classes - 1} do not fit among {count} classes")
        other = copy.copy(self)
        other.num_classes, other._open_files = count, OrderedDict()
        return other

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
    cache_bytes: int = 100_000_000_000,
    threads: int = 8,
) -> Samples:
    """Shards or folders by pattern (see `patterns`): `a-{00..07}.tar`, `a-*.tar[:99%]`, `folder`, `x/*.tar, y/*.tar`.

    classes: names, or a file with one name a line; by default the `classes.txt` beside the first shard, if any.
    on_problem: split, repeated, unlabelled or imageless keys raise ValueError, or are left out with a warning.
    cache: folder for indexes that cannot be kept beside their shard, and for copies of remote shards (of cache_bytes
    in all); default see `remote.default_folder`.
    """
    parts, whole = [], []
    known = _read_classes(classes)
    remote = RemoteCache(folder=Path(cache) if cache is not None else default_folder(), limit=cache_bytes)
    for source, text in enumerate(split_list(pattern)):
        body, bounds = split_slice(text)
        samples = _open_source(expand(body), known, on_problem, remote, threads)
        if bounds is None:
            whole += samples.names
        else:
            first, last = slice_bounds(bounds, len(samples))
            samples = samples.select(shuffled_rows(len(samples), derive(0, "slice"))[first:last])
        samples.sources = np.full(len(samples.names), source, np.int32)
        parts.append(samples)
    samples = _join(parts, pattern)
    _warn_of_shards(whole, samples, pattern)
    if samples.table.num_bytes > SHARED_ABOVE:
        samples.table = tables.shared(samples.table, remote.folder / "joined")
    return samples


def _warn_of_shards(whole: list[str], samples: Samples, pattern: str) -> None:
    """Of shards that are used twice as a whole, and of those that were packed and are not there."""
    twice = next((name for name, count in Counter(whole).items() if count > 1), None)
    if twice is not None:
        warnings.warn(f"{pattern!r} names {twice} in two of its parts: its samples come twice", stacklevel=3)
    lost = lost_shards(samples.names)
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        warnings.warn(f"{lost[0]}{more}; the set is smaller than what was packed", stacklevel=3)


def _read_classes(classes: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if classes is None:
        return None
    return parse_classes(Path(classes).read_text() if isinstance(classes, str) else "\n".join(classes), str(classes))


def parse_classes(text: str, where: str) -> tuple[str, ...]:
    """Class names, one a line; `where` names the file in the error."""
    names = tuple(text.removesuffix("\n").split("\n"))
    if len(set(names)) < len(names) or "" in names:
        raise ValueError(f"classes in {where}: each name must stand there once, one a line, without empty lines")
    return names


def classes_beside(name: str) -> tuple[str, ...] | None:
    """From the classes.txt in the folder of a shard."""
    beside = f"{name.rpartition('/')[0]}/classes.txt" if "/" in name else "classes.txt"
    if is_remote(name):
        content = read_if_there(beside)
        return None if content is None else parse_classes(content.decode(), beside)
    if Path(name).is_dir() or not Path(beside).exists():
        return None
    return parse_classes(Path(beside).read_text(), beside)


def _open_source(
    names: list[str], classes: tuple[str, ...] | None, on_problem: str, remote: RemoteCache, threads: int
) -> Samples:
    classes = classes if classes is not None else classes_beside(names[0])
    with ThreadPoolExecutor(threads) as pool:
        results = list(pool.map(lambda name: stored_index(name, classes, remote), names))
    found = {result.classes for result in results if result.classes is not None}
    if len(found) > 1:
        raise ValueError(f"{names[0]!r} and the folders beside it have different classes; give data.classes")
    problems = [problem for result in results for problem in result.problems]
    if problems:
        text = f"{len(problems)} problem(s) in the shards, the first of them:\n  " + "\n  ".join(problems[:3])
        if on_problem == "raise":
            raise ValueError(f"{text}\n(data.on_broken_key=skip leaves these samples out)")
        warnings.warn(f"{text}\nThese samples are left out.", stacklevel=3)
    starts = np.cumsum([0, *(len(result.table.offset) for result in results)])
    table = tables.join([result.table for result in results])
    return Samples(names, starts, table, classes=found.pop() if found else classes, remote=remote)


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
        num_classes=max(part.num_classes for part in parts),
        remote=parts[0].remote,
        sources=np.concatenate([part.sources for part in parts]),
    )
