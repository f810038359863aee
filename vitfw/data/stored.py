"""The index of one shard: read from where it was kept, or built and kept.

Kept beside the shard as `X.tar.idx`, else in the cache folder; for a remote shard in the cache folder, or taken from
the store (`X.tar.idx` beside it, which `pack` writes), so that nothing need be downloaded to begin.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from vitfw.data import table as tables
from vitfw.data.folder import index_folder
from vitfw.data.patterns import is_remote
from vitfw.data.remote import TRIES, RemoteCache, locked, read_if_there, version
from vitfw.data.shard import index_shard
from vitfw.data.table import Table


class StoredIndex(NamedTuple):
    """Rows of a shard or folder; classes (of a folder); problems, one line each."""

    table: Table
    classes: tuple[str, ...] | None
    problems: list[str]


def stored_index(name: str, classes: tuple[str, ...] | None, remote: RemoteCache) -> StoredIndex:
    """The index of a folder, a shard, or a remote shard, which is thereby made known to the cache."""
    if is_remote(name):
        return _remote(name, classes, remote)
    if Path(name).is_dir():
        table, found = index_folder(Path(name), classes)
        return StoredIndex(table, found, [])
    return _local(Path(name), classes, remote.folder)


def keep_index(path: Path, classes: tuple[str, ...] | None, checksum: str) -> None:
    """Builds the index of a shard just packed beside it, with its SHA-256, for uploading both."""
    table, problems = index_shard(path, classes)
    about = {**_about_local(path, classes), "sha256": checksum, "problems": problems}
    tables.save(_beside(path), table, about)


def _classes_digest(classes: tuple[str, ...] | None) -> str:
    return sha256("\n".join(classes or ()).encode()).hexdigest()[:16]


def _about_local(path: Path, classes: tuple[str, ...] | None) -> dict[str, object]:
    status = path.stat()
    return {"size": status.st_size, "modified_ns": status.st_mtime_ns, "classes": _classes_digest(classes)}


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".idx")


def _matching(place: Path, about: dict[str, object]) -> tuple[StoredIndex, str | None] | None:
    """What is kept at a place, with the SHA-256 of the shard if known, if it was built from this state of the shard."""
    found = tables.load(place)
    if found is None or any(found[1].get(key) != value for key, value in about.items()):
        return None
    table, kept = found
    problems, checksum = kept.get("problems"), kept.get("sha256")
    assert isinstance(problems, list), "every index keeps its problems"
    return StoredIndex(table, None, problems), checksum if isinstance(checksum, str) else None


def _local(path: Path, classes: tuple[str, ...] | None, cache: Path) -> StoredIndex:
    about = _about_local(path, classes)
    places = [_beside(path), cache / "index" / f"{sha256(str(path.resolve()).encode()).hexdigest()[:24]}.idx"]
    found = _first_matching(places, about)
    if found is not None:
        return found
    with _turn(places[-1].with_suffix(".lock")):  # the ranks of a node start together: one of them builds
        found = _first_matching(places, about)
        return _build(path, classes, places, about) if found is None else found


def _first_matching(places: list[Path], about: dict[str, object]) -> StoredIndex | None:
    return next((found[0] for place in places if (found := _matching(place, about)) is not None), None)


@contextmanager
def _turn(lock: Path) -> Iterator[None]:
    """Exclusive on this node, where the cache folder can be written; else everyone builds for itself."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError:
        yield
        return
    with locked(lock):
        yield


def _build(path: Path, classes: tuple[str, ...] | None, places: list[Path], about: dict[str, object]) -> StoredIndex:
    table, problems = index_shard(path, classes)
    for place in places:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            tables.save(place, table, {**about, "problems": problems})
            break
        except OSError:
            continue  # a read-only folder: the next place, or built again at the next start
    return StoredIndex(table, None, problems)


def _remote(url: str, classes: tuple[str, ...] | None, remote: RemoteCache) -> StoredIndex:
    current = version(url)
    remote.versions[url] = current
    about: dict[str, object] = {"size": current.size, "tag": current.tag, "classes": _classes_digest(classes)}
    place = remote.folder / "index" / f"{sha256(url.encode()).hexdigest()[:24]}.idx"
    found = _matching(place, about)
    if found is None:
        place.parent.mkdir(parents=True, exist_ok=True)
        found = _from_store(url, place, {key: about[key] for key in ("size", "classes")})
        if found is None:
            found = _index_copy(url, classes, remote), None
        checksum = found[1] or remote.checksums.get(url)
        tables.save(place, found[0].table, {**about, "problems": found[0].problems, "sha256": checksum})
        found = found[0], checksum
    if found[1] is not None:
        remote.checksums[url] = found[1]
    return found[0]


def _index_copy(url: str, classes: tuple[str, ...] | None, remote: RemoteCache) -> StoredIndex:
    """The index of a remote shard from its local copy, fetched again where another thread or process made room of it."""
    for attempt in range(TRIES):
        path = remote.fetch(url)
        try:
            table, problems = index_shard(path, classes, name=url)
            return StoredIndex(table, None, problems)
        except FileNotFoundError:
            if attempt == TRIES - 1:
                raise
    raise AssertionError("unreachable: the last try returns or raises")


def _from_store(url: str, place: Path, about: dict[str, object]) -> tuple[StoredIndex, str | None] | None:
    """The index uploaded beside a remote shard, if it is there and of this size and these classes."""
    content = read_if_there(f"{url}.idx")
    if content is None:
        return None
    fetched = place.with_name(f".{place.name}.{os.getpid()}.{threading.get_ident()}.fetched")
    try:
        fetched.write_bytes(content)
        return _matching(fetched, about)
    finally:
        fetched.unlink(missing_ok=True)
