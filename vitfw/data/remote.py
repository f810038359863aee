"""Remote shards (`s3://`, `gs://`, `http(s)://`, ... through fsspec) as local files in a cache of bounded size.

A shard is downloaded whole and once a node: processes that want it at the same time wait for the one that holds its
lock. It gets its name only when its size and, where known, its SHA-256 are right. The shards used least recently make
room for new ones; a process that still reads a removed shard keeps its open file.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

Result = TypeVar("Result")

TRIES = 5
FIRST_WAIT = 0.5  # seconds before the second try; doubled for each further one


class Version(NamedTuple):
    """Size in bytes, and whatever the store says about the version of a file (ETag, time), empty if nothing."""

    size: int
    tag: str


def default_folder() -> Path:
    """$VITFW_CACHE, else ~/.cache/vitfw."""
    return Path(os.environ.get("VITFW_CACHE") or Path.home() / ".cache" / "vitfw")


def with_retries(action: Callable[[], Result], url: str) -> Result:
    """Runs an action on a remote file up to TRIES times. Raises FileNotFoundError and PermissionError at once, and
    OSError that names the file and the last reason when the tries are used up."""
    for attempt in range(1, TRIES + 1):
        try:
            return action()
        except (FileNotFoundError, PermissionError) as error:
            raise type(error)(f"{url}: {error}") from error
        except Exception as error:  # each store has its own exception classes, most of them no OSErrors
            if attempt == TRIES:
                raise OSError(
                    f"{url}: gave up after {TRIES} tries; the last: {type(error).__name__}: {error}"
                ) from error
            time.sleep(FIRST_WAIT * 2 ** (attempt - 1))
    raise AssertionError("the loop returns or raises")


def _file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, made in this process: its event loop does not survive a fork."""
    try:
        import fsspec

        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise ImportError(f"{url}: {error}; install the remote extra: pip install 'vitfw[remote]'") from error
    except ValueError as error:
        raise ValueError(f"{url}: {error}") from error


def version(url: str) -> Version:
    """What the store says about a file now. Raises FileNotFoundError, or ValueError where it states no size."""
    file_system, path = _file_system(url)

    def ask() -> dict[str, Any]:
        file_system.invalidate_cache()
        return file_system.info(path)

    about = with_retries(ask, url)
    if about.get("size") is None:
        raise ValueError(f"{url}: the server states no size (Content-Length), so a download cannot be checked")
    tag = next((about[key] for key in ("ETag", "etag", "LastModified", "mtime", "updated") if about.get(key)), "")
    return Version(int(about["size"]), str(tag))


def read_if_there(url: str) -> bytes | None:
    """The bytes of a small remote file, None if there is none (or, on stores that do not tell, no access to it)."""
    file_system, path = _file_system(url)

    def get() -> bytes | None:
        try:
            return file_system.cat_file(path)
        except (FileNotFoundError, PermissionError):
            return None

    return with_retries(get, url)


@dataclass(frozen=True, kw_only=True)
class RemoteCache:
    """Local copies of remote shards below `folder`, of `limit` bytes in all.

    versions: size of each URL; checksums: its SHA-256 where one is known (from the first download or the packing).
    """

    folder: Path
    limit: int
    versions: dict[str, Version] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)

    def path(self, url: str) -> Path:
        """Where the copy of a URL lies, or will lie; another version of the file has another name."""
        name = url.rstrip("/").rpartition("/")[2]
        return self.folder / "shards" / f"{sha256(f'{url} {self.versions[url]}'.encode()).hexdigest()[:24]}-{name}"

    def open(self, url: str) -> int:
        """A descriptor of the local copy, downloaded if need be."""
        for _ in range(TRIES):
            path = self.fetch(url)
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except FileNotFoundError:  # another process made room between the two lines
                continue
            os.utime(descriptor)  # the time of the last use, by which room is made
            return descriptor
        raise OSError(
            f"{url}: its copy was removed {TRIES} times before it could be opened: data.cache_gb="
            f"{self.limit / 1e9:g} is too small for the shards in use; raise it or lower data.window"
        )

    def fetch(self, url: str) -> Path:
        """The whole, checked local copy of a URL."""
        path = self.path(url)
        if path.exists():
            return path
        size = self.versions[url].size
        if size > self.limit:
            raise ValueError(f"{url} has {size:,} bytes, more than data.cache_gb={self.limit / 1e9:g} holds; raise it")
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(_lock_of(path)):
            if not path.exists():
                self._download(url, path)
        return path

    def _download(self, url: str, path: Path) -> None:
        wanted = self.versions[url].size
        part = path.with_name(f".{path.name}.{wanted}.part")  # its name reserves the room that it will take
        file_system, remote_path = _file_system(url)

        def get() -> str:
            file_system.get_file(remote_path, str(part))
            if part.stat().st_size != wanted:
                raise OSError(f"{part.stat().st_size:,} of {wanted:,} bytes came")
            with part.open("rb") as file:
                digest = sha256()
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
            return digest.hexdigest()

        while not self._reserve(part, wanted):
            time.sleep(0.05)  # all the room is taken by downloads of other processes, which will end
        try:
            digest = with_retries(get, url)
            known = self.checksums.setdefault(url, digest)
            if known != digest:
                raise ValueError(f"{url}: its SHA-256 is {digest[:16]}..., not {known[:16]}...: replaced or damaged")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def _reserve(self, part: Path, size: int) -> bool:
        """Makes room by removing what was used least recently, and what killed downloads left; then creates `part`."""
        with locked(part.with_name(".room.lock")):
            files = []
            for file in part.parent.iterdir():
                if file.suffix == ".part" and not _is_locked(_lock_of(file)):
                    file.unlink(missing_ok=True)
                elif file.suffix == ".part":
                    size += int(file.suffixes[-2][1:])
                elif file.suffix != ".lock":
                    files.append((file.stat().st_mtime, file.stat().st_size, file))
            used = sum(entry[1] for entry in files)
            for _, file_size, file in sorted(files):
                if used + size <= self.limit:
                    break
                file.unlink()
                used -= file_size
            fits = used + size <= self.limit
            if fits:
                part.touch()
            return fits


def _lock_of(file: Path) -> Path:
    """The lock file of a copy, or of its unfinished `.part`."""
    return file.with_name(f".{file.name.lstrip('.')[:24]}.lock")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Exclusive among the processes of this node; the kernel frees it when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_locked(path: Path) -> bool:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
