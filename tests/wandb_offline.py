"""Reads the history of an offline W&B run with no server: the file is a LevelDB log of protobuf records."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

_BLOCK, _HEADER = 32768, struct.Struct("<IHB")  # checksum, length, kind


def _bodies(data: bytes) -> Iterator[bytes]:
    place, body = 7, b""  # 7 bytes of W&B's own header
    while place + _HEADER.size <= len(data):
        if (left := _BLOCK - place % _BLOCK) < _HEADER.size:
            place += left
            continue
        _, length, kind = _HEADER.unpack_from(data, place)
        if kind == 0:
            return
        piece = data[place + _HEADER.size : place + _HEADER.size + length]
        place += _HEADER.size + length
        body = piece if kind in (1, 2) else body + piece  # whole, first | middle, last
        if kind in (1, 4):
            yield body


def read_history(path: Path) -> list[dict[str, Any]]:
    """One dict a logged row."""
    rows = []
    for body in _bodies(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(body)
        if record.WhichOneof("record_type") == "history":
            rows.append(
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            )
    return rows
