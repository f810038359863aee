"""`vitfw shards verify` and `vitfw shards info`: is this data set whole, and what is in it?"""

import io
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
from PIL import Image

from vitfw.data.decode import NUMPY_MAGIC, UndecodableError, decode
from vitfw.data.index import Samples, classes_beside, open_samples, parse_classes
from vitfw.data.manifest import checksum, listed, lost_shards, manifest_of
from vitfw.data.mixing import shard_mixing
from vitfw.data.patterns import expand, split_list, split_slice
from vitfw.data.shard import index_shard
from vitfw.data.tar import DamagedTarError


@dataclass
class Verification:
    """What a check of every image found. problems: one line each; empty for a sound data set."""

    images: int = 0
    problems: list[str] = field(default_factory=list)
    sizes: Counter[int] = field(default_factory=Counter)
    labels: Counter[int] = field(default_factory=Counter)
    duplicates: int = 0

    @property
    def sound(self) -> bool:
        """Nothing would be skipped, refused or trained on twice without being meant to."""
        return not self.problems

    def describe(self) -> str:
        """The report: counts, histograms of short sides and labels, then the problems."""
        lines = [f"{self.images:,} images decoded, {self.duplicates} duplicates, {len(self.problems)} problems"]
        lines.append("short side: " + ", ".join(f"{side} px: {count}" for side, count in sorted(self.sizes.items())))
        if self.labels:
            counts = np.array(list(self.labels.values()))
            lines.append(f"{len(counts)} labels, {counts.min()} to {counts.max()} images each")
        return "\n".join([*lines, *self.problems])


def verify(pattern: str, *, classes: str | None = None, threads: int = 4, progress: bool = False) -> Verification:
    """Reads and decodes every image of shards or folders. Several patterns (train, val) are compared for equal images.

    Found and named: shards that are missing or renamed, truncated or damaged archives, split or repeated keys, missing
    labels or images, undecodable images, keys repeated in another shard of a pattern, equal images (with their labels where
    these differ), and shards whose SHA-256 is not that of the manifest that `pack` wrote.
    """
    found = Verification()
    seen_images: dict[bytes, tuple[str, str]] = {}
    for part in split_list(pattern):
        body, bounds = split_slice(part)
        if bounds is not None:
            raise ValueError(f"pattern {part!r}: whole shards are verified; leave the slice away")
        seen_keys: dict[str, str] = {}
        names = expand(body)
        found.problems += lost_shards(names)
        for name in _watch(names, progress):
            samples = _open_one(name, classes, found)
            if samples is not None:
                _check_images(samples, found, seen_images, seen_keys, threads)
    return found


def _open_one(name: str, classes: str | None, found: Verification) -> Samples | None:
    """The sound keys of one shard or folder, with its problems noted; None where the archive cannot be read."""
    path = Path(name)
    if not path.is_file():
        return open_samples(name, classes=classes)
    records, manifest = listed(path), manifest_of(path)
    if path.name in records and checksum(path) != records[path.name]["sha256"]:
        found.problems.append(f"{name}: its SHA-256 is not the one in {manifest.name}: changed after packing")
    if records and path.name not in records:
        found.problems.append(
            f"{name}: is not among the shards that {manifest.name} lists: renamed, or of another pack"
        )
    known = classes_beside(name) if classes is None else parse_classes(Path(classes).read_text(), classes)
    try:
        table, problems = index_shard(path, known)
    except DamagedTarError as error:
        found.problems.append(str(error))
        return None
    found.problems += problems
    return Samples([name], np.array([0, len(table.offset)]), table, classes=known)


def _check_images(
    samples: Samples,
    found: Verification,
    seen_images: dict[bytes, tuple[str, str]],
    seen_keys: dict[str, str],
    threads: int,
) -> None:
    with ThreadPoolExecutor(threads) as pool:
        for first_row in range(0, len(samples), 1000):  # not all at once: a pool keeps a record of each task
            rows = range(first_row, min(first_row + 1000, len(samples)))
            for row, (digest, side, error) in zip(rows, pool.map(partial(_check_one, samples), rows), strict=True):
                place, label = samples.place(row), str(samples.label(row))
                found.images += 1
                if error is not None:
                    found.problems.append(f"{place}: cannot be decoded: {error}")
                else:
                    found.sizes[side] += 1
                key = samples.key(row)
                if seen_keys.setdefault(key, place) != place:
                    found.problems.append(f"{place}: this key is also in {seen_keys[key]}")
                first, first_label = seen_images.setdefault(digest, (place, label))
                if first != place:
                    found.duplicates += 1
                    differs = f", with label {label} here and {first_label} there" if label != first_label else ""
                    found.problems.append(f"{place}: the same image as {first}{differs}")
                if samples.labelled and not samples.multi_label:
                    found.labels[int(samples.labels[row])] += 1


def _check_one(samples: Samples, row: int) -> tuple[bytes, int, str | None]:
    """SHA-256 of the bytes, short side in pixels (0 where undecodable), and the reason if it cannot be decoded."""
    data = samples.read(row)
    digest = sha256(data).digest()
    try:
        if data[:6] == NUMPY_MAGIC:
            array = np.load(io.BytesIO(data), allow_pickle=False)
            decode(data, channels=array.shape[-1] if array.ndim else 0)
            return digest, min(array.shape[:2]), None
        image = decode(data)
        assert isinstance(image, Image.Image)
        image.load()
        return digest, min(image.size), None
    except (UndecodableError, OSError, ValueError, EOFError) as error:
        return digest, 0, str(error)


def _watch(names: list[str], progress: bool) -> Iterable[str]:
    if not progress:
        return names
    from tqdm import tqdm

    return tqdm(names, unit="shard")


def info(pattern: str, *, classes: str | None = None) -> str:
    """What is in a data set, without decoding: counts, shards, labels, mixing, keys, fingerprint; builds indexes."""
    samples = open_samples(pattern, classes=classes, on_problem="skip")
    sizes = samples.shard_sizes
    lines = [samples.describe()]
    lines.append(f"shards: {len(sizes)}, {sizes.min()} to {sizes.max()} samples each")
    if samples.labelled and not samples.multi_label:
        counts = np.bincount(samples.labels, minlength=samples.num_classes)
        empty = int((counts == 0).sum())
        lines.append(f"labels: {counts.min()} to {counts.max()} images a class, {empty} classes without images")
        lines.append(f"mixing: {shard_mixing(samples):.2f} (1: classes shuffled over the shards, 0: one class a shard)")
    if samples.classes is not None:
        lines.append(f"classes: {', '.join(samples.classes[:5])}{', ...' if len(samples.classes) > 5 else ''}")
    lines.append("first keys: " + ", ".join(samples.key(row) for row in range(min(3, len(samples)))))
    lines.append(f"fingerprint: {samples.fingerprint()} (keys, labels and sizes in order)")
    lines += [f"warning: {line}" for line in lost_shards(samples.names)]
    return "\n".join(lines)
