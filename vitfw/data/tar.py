"""Where the members of a tar lie, read from its headers alone: offset and size of each file, and any damage.

`tarfile` is not used because it stops silently at a destroyed header in the middle of an archive, as if the archive
ended there; here everything between two headers and the two empty blocks at the end is accounted for.
Format: POSIX ustar with GNU long names, GNU base-256 sizes and pax paths and sizes.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

BLOCK = 512  # bytes
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstandard"}


class Member(NamedTuple):
    """One file of a tar: its bytes are archive[offset : offset + size]."""

    name: str
    offset: int
    size: int


class DamagedTarError(ValueError):
    """The archive cannot be trusted: truncated, compressed, or with a destroyed header."""


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # GNU: base 256, for files of 8 GiB and more
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    digits = field.strip(b"\0 ")
    return int(digits, 8) if digits else 0


def _pax_records(body: bytes) -> dict[str, str]:
    records = {}
    while body:
        length = int(body.split(b" ", 1)[0])
        key, _, value = body[:length].split(b" ", 1)[1].rstrip(b"\n").partition(b"=")
        records[key.decode()] = value.decode("utf-8", "surrogateescape")
        body = body[length:]
    return records


def _header_is_sound(header: bytes) -> bool:
    try:
        return _number(header[148:156]) == sum(header) - sum(header[148:156]) + 8 * 32
    except ValueError:
        return False


def _name(header: bytes) -> str:
    name = header[:100].split(b"\0", 1)[0].decode("utf-8", "surrogateescape")
    prefix = header[345:500].split(b"\0", 1)[0] if header[257:263] == b"ustar\0" else b""
    return f"{prefix.decode('utf-8', 'surrogateescape')}/{name}" if prefix else name


def read_members(path: str | Path) -> Iterator[Member]:
    """The regular files of a tar, in order; folders are passed over, links are refused.

    Raises DamagedTarError, which names the archive and the place, for anything that is not a whole uncompressed tar.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield from _walk(descriptor, str(path))
    finally:
        os.close(descriptor)


def _unsound(path: str, header: bytes, offset: int, total: int) -> DamagedTarError:
    kind = _COMPRESSED.get(header[:2]) if offset == 0 else None
    if kind is not None:
        return DamagedTarError(f"{path}: compressed with {kind}; shards are read in place, so unpack it to a plain tar")
    return DamagedTarError(f"{path}: not a tar header at byte {offset} of {total}: the archive is damaged")


def _check_tail(descriptor: int, path: str, offset: int, total: int) -> None:
    """Only padding may follow the end mark: anything else is a wiped header, or a second archive glued on."""
    while chunk := os.pread(descriptor, 1 << 20, offset):
        if chunk.strip(b"\0"):
            raise DamagedTarError(
                f"{path}: empty header at byte {offset} of {total} with data behind it; pack it again"
            )
        offset += len(chunk)


def _walk(descriptor: int, path: str) -> Iterator[Member]:
    total = os.fstat(descriptor).st_size
    offset, long_name, pax = 0, None, {}
    while True:
        header = os.pread(descriptor, BLOCK, offset)
        if len(header) < BLOCK:
            raise DamagedTarError(f"{path}: truncated: no end mark at byte {offset} of {total}; copy or pack it again")
        if not header.strip(b"\0"):
            _check_tail(descriptor, path, offset, total)
            return
        if not _header_is_sound(header):
            raise _unsound(path, header, offset, total)
        size = int(pax["size"]) if "size" in pax else _number(header[124:136])
        kind, body = header[156:157], offset + BLOCK
        offset = body + (size + BLOCK - 1) // BLOCK * BLOCK
        if body + size > total:
            raise DamagedTarError(f"{path}: truncated: {_name(header)!r} ends at byte {body + size} of {total}")
        if kind == b"L":
            long_name = os.pread(descriptor, size, body).rstrip(b"\0").decode("utf-8", "surrogateescape")
        elif kind == b"x":
            pax = _pax_records(os.pread(descriptor, size, body))
        elif kind in (b"0", b"\0", b"7"):
            yield Member(pax.get("path") or long_name or _name(header), body, size)
            long_name, pax = None, {}
        elif kind in (b"1", b"2"):
            raise DamagedTarError(f"{path}: {_name(header)!r} is a link; pack the file itself")
        elif kind in (b"3", b"4", b"5", b"6"):  # devices, folders, pipes
            long_name, pax = None, {}
        elif kind not in (b"g", b"K"):  # a global pax header or a long link name says nothing about where files lie
            raise DamagedTarError(
                f"{path}: {_name(header)!r} has the unknown type {kind!r} (sparse file?); pack it again"
            )
