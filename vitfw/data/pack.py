"""Images to shards: `pack("photos/train", "shards", prefix="train")` writes shards/train-00000.tar, ...

What a shard holds is a pure function of the source, the options and the seed, to the last byte: times and owners are
fixed. A shard is written under a temporary name and renamed when it is whole, so a killed pack leaves nothing that
looks complete, and the same command again keeps the finished shards and makes the missing ones.
Beside the shards: classes.txt (one name a line, its line number is the label) and PREFIX.json (options, and per shard
the number of samples, bytes and SHA-256).
"""

import io
import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from vitfw.data.decode import decode
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
    plan = {
        "format": 1,
        "source": source.rstrip("/").rpartition("/")[2],
        "options": asdict(options),
        "samples": len(order),
    }
    plan["digest"] = _digest(plan, keys, opened.labels, order)
    manifest = out / f"{prefix}.json"
    _start(manifest, plan, out, prefix)
    _write_classes(out / "classes.txt", opened.classes)
    parts = [order[first : first + options.shard_size] for first in range(0, len(order), options.shard_size)]
    shards = [out / f"{prefix}-{number:05d}.tar" for number in range(len(parts))]

    def write(number: int) -> dict[str, object]:
        record = _write_shard(shards[number], opened, keys, parts[number], options)
        keep_index(shards[number], opened.classes, str(record["sha256"]))
        return record

    with ThreadPoolExecutor(threads) as pool:
        records = []
        for number, record in enumerate(_watch(pool.map(write, range(len(parts))), len(parts), progress)):
            records.append({"shard": shards[number].name, **record})
    _write_whole(manifest, (json.dumps({**plan, "shards": records}, indent=1) + "\n").encode())
    report(f"{len(order):,} images in {len(shards)} shards of up to {options.shard_size}: {out}/{prefix}-*.tar")
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


def _digest(plan: dict[str, object], keys: list[str], labels, order: np.ndarray) -> str:
    digest = sha256(json.dumps(plan, sort_keys=True).encode())
    for row in order:
        digest.update(f"{keys[row]}\t{labels[row]}\n".encode())
    return digest.hexdigest()


def _start(manifest: Path, plan: dict[str, object], out: Path, prefix: str) -> None:
    """Leaves the plan behind before the first shard, so that a restart knows what the shards found are parts of."""
    if manifest.exists():
        if json.loads(manifest.read_text()).get("digest") != plan["digest"]:
            raise ValueError(
                f"{out} holds shards {prefix}-*.tar of another source or other options; "
                "remove them, or choose another prefix"
            )
        return
    if any(out.glob(f"{prefix}-*.tar")):
        raise ValueError(
            f"{out} holds shards {prefix}-*.tar, but no {manifest.name}; remove them, or choose another prefix"
        )
    _write_whole(manifest, (json.dumps(plan, indent=1) + "\n").encode())


def _write_classes(path: Path, classes: tuple[str, ...] | None) -> None:
    if classes is None:
        return
    if any("\n" in name for name in classes):
        raise ValueError("a class name holds a line break; it cannot be written to classes.txt")
    text = "".join(f"{name}\n" for name in classes)
    if path.exists() and path.read_text() != text:
        raise ValueError(f"{path} holds other classes; labels of the new shards would mean something else")
    _write_whole(path, text.encode())


def _write_whole(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _write_shard(
    path: Path, source: Source, keys: list[str], rows: np.ndarray, options: PackOptions
) -> dict[str, object]:
    """Writes one shard unless it is there already, and describes it."""
    if not path.exists():
        from webdataset.writer import TarWriter

        buffer = io.BytesIO()  # a shard is some hundred MB at most, and so hashed and written in one go
        with TarWriter(
            buffer, encoder=False, mtime=0, user="vitfw", group="vitfw", mode=0o644, compress=False
        ) as writer:
            for row in rows:
                data, extension = _encoded(source, int(row), keys[row], options)
                label = _label_member(source.labels[row])
                writer.write({"__key__": keys[row], extension: data, **label})
        _write_whole(path, buffer.getvalue())
    content = path.read_bytes()
    return {"samples": len(rows), "bytes": len(content), "sha256": sha256(content).hexdigest()}


def _label_member(label: Label) -> dict[str, bytes]:
    if label is None:
        return {}
    if isinstance(label, tuple):
        return {"json": json.dumps({"labels": list(label)}).encode()}
    return {"cls": str(label).encode()}


def _encoded(source: Source, row: int, key: str, options: PackOptions) -> tuple[bytes, str]:
    data = source.load(row)
    try:
        if options.encode == "keep":
            return data, extension_of(data)
        image = decode(data)
        assert isinstance(image, Image.Image)
        image.load()
    except (ValueError, OSError) as error:
        raise ValueError(f"{key}: {error}; mend or remove the image") from error
    if options.short_side is not None and min(image.size) > options.short_side:
        scale = options.short_side / min(image.size)
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        image = image.resize(size, Image.Resampling.BICUBIC, reducing_gap=None)
    buffer = io.BytesIO()
    quality = {} if options.encode == "png" else {"quality": options.quality}
    image.save(buffer, options.encode.upper(), **quality)
    return buffer.getvalue(), _FORMATS[options.encode]
