"""PREFIX.json beside packed shards: what they were packed from and how, and of each shard its samples, bytes and SHA-256.

`pack` writes it before the first shard and again after each one, so that a restart knows which shards are whole, and readers
know which ones there should be.
"""

import json
import os
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

Record = dict[str, Any]  # shard (name), samples, bytes, sha256


def write_whole(path: Path, data: bytes) -> None:
    """Replaces a file in one step, flushed to the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_manifest(path: Path, plan: dict[str, Any], records: Sequence[Record]) -> None:
    shards = {"shards": sorted(records, key=lambda record: record["shard"])} if records else {}
    write_whole(path, (json.dumps({**plan, **shards}, indent=1) + "\n").encode())


def begin(path: Path, plan: dict[str, Any], prefix: str) -> dict[str, Record]:
    """Records of the shards that an earlier pack of this plan finished, by name; else leaves the plan behind.

    Raises ValueError where shards of this prefix were packed otherwise, and where a finished one is no longer what was packed.
    """
    out = path.parent
    if not path.exists():
        if any(out.glob(f"{prefix}-*.tar")):
            raise ValueError(
                f"{out} holds shards {prefix}-*.tar, but no {path.name}; remove them, or choose another prefix"
            )
        write_manifest(path, plan, ())
        return {}
    found = json.loads(path.read_text())
    if found.get("digest") != plan["digest"]:
        raise ValueError(
            f"{out} holds shards {prefix}-*.tar of another source or other options, or the images have changed since; "
            f"remove {path.name} and the shards, or choose another prefix"
        )
    finished = {record["shard"]: record for record in found.get("shards", ()) if (out / record["shard"]).exists()}
    for name, record in finished.items():
        if checksum(out / name) != record["sha256"]:
            raise ValueError(f"{out / name} is no longer what was packed (SHA-256); remove it, and it is packed again")
    return finished


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        digest = sha256()
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def manifest_of(shard: Path) -> Path:
    """Where the manifest of PREFIX-00000.tar would be."""
    return shard.with_name(f"{shard.name.rpartition('-')[0]}.json")


def listed(shard: Path) -> dict[str, Record]:
    """The records beside a shard by name; empty without a manifest, and for a file of that name that is none."""
    path = manifest_of(shard)
    try:
        content = json.loads(path.read_text())
        return {record["shard"]: record for record in content["shards"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def lost_shards(names: Sequence[str]) -> list[str]:
    """Shards that a manifest beside these names, and that are not on the disk, one line each."""
    lines = []
    for path in dict.fromkeys(manifest_of(Path(name)) for name in names if Path(name).is_file()):
        records = listed(path.with_name(f"{path.stem}-00000.tar"))
        gone = [name for name in records if not path.with_name(name).exists()]
        lines += [f"{path.with_name(name)}: listed in {path.name}, but not there: lost or renamed" for name in gone]
    return lines
