"""Images to shards: `pack("photos/train", "shards", prefix="train")` writes shards/train-00000.tar, ...

What a shard holds is a pure function of the source, the options and the seed, to the last byte: times and owners are
fixed. A shard is written under a temporary name and renamed when it is whole, so a killed pack leaves nothing that
looks complete, and the same command again keeps the finished shards and makes the missing ones, after it has seen that the
source is still the same (names, labels, and of files their sizes and times).
Beside the shards: classes.txt (one name a line, its line number is the label) and PREFIX.json (options, and per shard
the number of samples, bytes and SHA-256).
"""

import io
import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from vitfw.data.decode import decode
from vitfw.data.manifest import Record, begin, write_manifest, write_whole
from vitfw.data.shard import is_ambiguous
from vitfw.data.shuffle import shuffled_rows
from vitfw.data.source import Source, extension_of
from vitfw.data.sources import open_source
from vitfw.data.stored import keep_index
from vitfw.data.table import Label
from vitfw.seeding import derive

_FORMATS = {"jpeg": "jpg", "png": "png", "webp": "webp"}


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """How images become shards."""

    shard_size: int = field(default=1000, metadata={"help": "samples of a shard"})
    seed: int = field(default=0, metadata={"help": "of the shuffle over all classes"})
    short_side: int | None = field(
        default=None, metadata={"help": "resize so that the short side has these pixels; only shrinks"}
    )
    encode: Literal["keep", "jpeg", "png", "webp"] = field(
        default="keep", metadata={"help": "format; keep: the bytes as they are"}
    )
    quality: int = field(default=95, metadata={"help": "of jpeg and webp, 1..100"})
    on_bad_image: Literal["raise", "skip"] = field(
        default="raise", metadata={"help": "skip: leave images out that cannot be read or encoded, and say so"}
    )

    def __post_init__(self) -> None:
        if self.shard_size < 1:
            raise ValueError(f"shard_size={self.shard_size}: must be 1 or more")
        if not 1 <= self.quality <= 100:
            raise ValueError(f"quality={self.quality}: must be 1..100")
        if self.short_side is not None and self.short_side < 1:
            raise ValueError(f"short_side={self.short_side}: must be 1 or more pixels")
        if self.short_side is not None and self.encode == "keep":
            raise ValueError(
                f"short_side={self.short_side} with encode=keep: resized images need encode=jpeg, png or webp"
            )


def pack(
    source: str,
    out: str | Path,
    *,
    prefix: str = "train",
    options: PackOptions | None = None,
    classes: str | None = None,
    threads: int = 4,
    report: Callable[[str], None] = print,
    progress: bool = False,
) -> list[Path]:
    """Packs a source (see `sources.open_source`) into OUT/PREFIX-00000.tar, ...; returns the shards.

    Raises ValueError where OUT holds shards of this prefix that were packed otherwise, and where an image is damaged.
    """
    options = options or PackOptions()
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    opened = open_source(source, classes=classes)
    if not opened.keys:
        raise ValueError(f"{source!r} holds no image")
    order = shuffled_rows(len(opened.keys), derive(options.seed, "pack"))
    keys = _clean_keys(opened.keys)
    told = {key: value for key, value in asdict(options).items() if (key, value) != ("on_bad_image", "raise")}
    plan: dict[str, Any] = {
        "format": 1,
        "source": source.rstrip("/").rpartition("/")[2],
        "options": told,
        "samples": len(order),
    }
    plan["digest"] = _digest(plan, keys, opened, order)
    manifest = out / f"{prefix}.json"
    _check_classes(out / "classes.txt", opened.classes)
    records = begin(manifest, plan, prefix)
    if opened.classes is not None:
        write_whole(out / "classes.txt", _class_lines(opened.classes))
    parts = [order[first : first + options.shard_size] for first in range(0, len(order), options.shard_size)]
    shards = [out / f"{prefix}-{number:05d}.tar" for number in range(len(parts))]

    lock = threading.Lock()

    def write(number: int) -> None:
        path = shards[number]
        if path.name in records:
            return
        record = _write_shard(path, opened, keys, parts[number], options, report)
        keep_index(path, opened.classes, record["sha256"])
        with lock:
            records[path.name] = record
            write_manifest(manifest, plan, list(records.values()))

    with ThreadPoolExecutor(threads) as pool:
        for _ in _watch(pool.map(write, range(len(parts))), len(parts), progress):
            pass
    total = sum(record["samples"] for record in records.values())
    report(
        f"{total:,} images {_labels_text(opened)} in {len(shards)} shards of up to {options.shard_size}: {out}/{prefix}-*.tar"
    )
    return shards


def _watch(results, total: int, progress: bool):
    if not progress:
        return results
    from tqdm import tqdm

    return tqdm(results, total=total, unit="shard")


def _clean_keys(keys) -> list[str]:
    """Keys of letters, digits, `_`, `-` and `/` (dots end a key in other readers), made unique by a number."""
    used: dict[str, int] = {}
    clean = []
    for key in keys:
        name = re.sub(r"[^A-Za-z0-9_/-]", "_", key).strip("/") or "_"
        used[name] = used.get(name, 0) + 1
        while used[name] > 1 and f"{name}_{used[name]}" in used:
            used[name] += 1
        if used[name] > 1:
            name = f"{name}_{used[name]}"
            used[name] = 1
        clean.append(name)
    return clean


def _digest(plan: dict[str, object], keys: list[str], source: Source, order: np.ndarray) -> str:
    digest = sha256(json.dumps(plan, sort_keys=True).encode())
    for row in order:
        stamp = "" if source.stamp is None else f"\t{source.stamp(int(row))}"
        digest.update(f"{keys[row]}\t{source.labels[row]}{stamp}\n".encode())
    return digest.hexdigest()


def _labels_text(source: Source) -> str:
    """What the labels are, in words, since labels that were not found would else go unseen."""
    if all(label is None for label in source.labels):
        return "without labels"
    used = {
        item
        for label in source.labels
        if label is not None
        for item in (label if isinstance(label, tuple) else (label,))
    }
    if source.classes is not None:
        return f"of {len(source.classes)} classes"
    top = max(used, default=-1) + 1
    rare = f", of which {len(used):,} have an image" if len(used) < top else ""
    return f"of {top:,} classes (numbers without names{rare})"


def _check_classes(path: Path, classes: tuple[str, ...] | None) -> None:
    if classes is None:
        return
    if any("\n" in name for name in classes):
        raise ValueError("a class name holds a line break; it cannot be written to classes.txt")
    if path.exists() and path.read_bytes() != _class_lines(classes):
        raise ValueError(f"{path} holds other classes; labels of the new shards would mean something else")


def _class_lines(classes: tuple[str, ...]) -> bytes:
    return "".join(f"{name}\n" for name in classes).encode()


def _write_shard(
    path: Path, source: Source, keys: list[str], rows: np.ndarray, options: PackOptions, report: Callable[[str], None]
) -> Record:
    """Writes one shard and describes it."""
    from webdataset.writer import TarWriter

    numeric = any(is_ambiguous(name, place) for place, name in enumerate(source.classes or ()))
    buffer, count = io.BytesIO(), 0  # a shard is some hundred MB at most, and so hashed and written in one go
    with TarWriter(buffer, encoder=False, mtime=0, user="vitfw", group="vitfw", mode=0o644, compress=False) as writer:
        for row in rows:
            try:
                data, extension = _encoded(source, int(row), keys[row], options)
            except ValueError as error:
                if options.on_bad_image == "raise":
                    raise
                report(f"left out: {error}")
                continue
            writer.write(
                {"__key__": keys[row], extension: data, **_label_member(source.labels[row], numeric_names=numeric)}
            )
            count += 1
    content = buffer.getvalue()
    write_whole(path, content)
    return {"shard": path.name, "samples": count, "bytes": len(content), "sha256": sha256(content).hexdigest()}


def _label_member(label: Label, *, numeric_names: bool) -> dict[str, bytes]:
    """`numeric_names`: there are class names that are numbers, so that as a text a number could be taken for a name."""
    if label is None:
        return {}
    if isinstance(label, tuple):
        return {"json": json.dumps({"labels": list(label)}).encode()}
    return {"json": json.dumps({"label": label}).encode()} if numeric_names else {"cls": str(label).encode()}


def _encoded(source: Source, row: int, key: str, options: PackOptions) -> tuple[bytes, str]:
    try:
        data = source.load(row)
        if options.encode == "keep":
            return data, extension_of(data)
        image = decode(data)
        assert isinstance(image, Image.Image)
        image.load()
    except (ValueError, OSError) as error:
        raise ValueError(f"{key}: {error}; mend it, or leave such images out (--on-bad-image skip)") from error
    if options.short_side is not None and min(image.size) > options.short_side:
        scale = options.short_side / min(image.size)
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        image = image.resize(size, Image.Resampling.BICUBIC, reducing_gap=None)
    buffer = io.BytesIO()
    quality = {} if options.encode == "png" else {"quality": options.quality}
    image.save(buffer, options.encode.upper(), **quality)
    return buffer.getvalue(), _FORMATS[options.encode]
