"""Checkpoints of cut weights: a folder into which each process writes the pieces of the tensors that it holds.

    step-000001234.ckpt/
      part-00000.ckpt   of rank 0: its pieces, and everything that is no tensor
      part-00001.ckpt   of rank 1: its pieces; of several copies of the weights (hsdp) the first one is written
      index.json        the parts with their sizes in bytes; written last

A part is a file like a checkpoint in one file, with the same names, but each tensor in it is a tuple: shape of the whole,
where the piece begins, the piece. Torch's own format for this (torch.distributed.checkpoint) keeps its index as a pickle,
which may run code when it is read, and in its safetensors form neither checksums nor a list of what belongs together.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from vitfw.checkpoint_files import CheckpointError, read_file, sync_folder, verify_file, write_file

INDEX = "index.json"
TREES = ("model", "optimizer", "ema")  # the entries of a checkpoint that hold tensors
Piece = tuple[tuple[int, ...], tuple[int, ...], Tensor]  # shape of the whole, begin, values


@dataclass(frozen=True)
class Scattered:
    """A tensor in pieces, each mapped from disk: (where it begins in the whole, its values)."""

    shape: torch.Size
    pieces: list[tuple[tuple[int, ...], Tensor]]

    def box(self, start: Sequence[int], size: Sequence[int]) -> Tensor:
        """The values from `start` on, `size` in each dimension. Only their bytes are read.

        Raises CheckpointError where no piece holds some of them.
        """
        found = torch.empty(tuple(size), dtype=self.pieces[0][1].dtype)
        count = 0
        for begin, piece in self.pieces:
            low = [max(a, b) for a, b in zip(start, begin, strict=True)]
            ends = zip(start, size, begin, piece.shape, strict=True)
            high = [min(a + length, b + rows) for a, length, b, rows in ends]
            if all(a < b for a, b in zip(low, high, strict=True)):
                part = piece[_slices(low, high, begin)]
                if part.shape == found.shape:
                    return part
                found[_slices(low, high, start)] = part
                count += part.numel()
        if count != found.numel():
            raise CheckpointError(f"of {found.numel()} values of a tensor {tuple(self.shape)} only {count} are there")
        return found

    def whole(self) -> Tensor:
        return self.box([0] * len(self.shape), self.shape)


class Whole(Mapping[str, Any]):
    """Named tensors in pieces; each is put together when it is asked for, so that memory holds one at a time."""

    def __init__(self, leaves: Mapping[str, Any]) -> None:
        self._leaves = leaves

    def __getitem__(self, name: str) -> Any:
        value = self._leaves[name]
        if isinstance(value, Mapping):
            return Whole(value)
        return value.whole() if isinstance(value, Scattered) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)


def scattered(value: Tensor | Scattered) -> Scattered:
    """A whole tensor as a single piece."""
    return value if isinstance(value, Scattered) else Scattered(value.shape, [((0,) * value.ndim, value)])


def _slices(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - zero, b - zero) for a, b, zero in zip(low, high, origin, strict=True))


def box_of(value: DTensor) -> tuple[list[int], list[int]]:
    """(start, size) of this rank's values in the whole: each cut gives equal numbers of rows, the last ones fewer or none."""
    start, size = [0] * value.ndim, list(value.shape)
    for place, count, placement in _cuts(value):
        if isinstance(placement, Shard):
            dim = placement.dim
            rows = -(-size[dim] // count)
            before = min(place * rows, size[dim])
            start[dim] += before
            size[dim] = min(rows, size[dim] - before)
    return start, size


def _cuts(value: DTensor) -> Iterable[tuple[int, int, Any]]:
    """(this rank's coordinate, processes, placement) of each dimension of the mesh."""
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None, "the mesh has all processes"
    return zip(coordinate, value.device_mesh.shape, value.placements, strict=True)


def is_cut(tensors: Iterable[Tensor]) -> bool:
    """Whether some of them are spread over several processes."""
    cuts = (cut for value in tensors if isinstance(value, DTensor) for cut in _cuts(value))
    return any(count > 1 and isinstance(placement, Shard) for _, count, placement in cuts)


def piece_of(value: Any, *, keep: bool) -> Any:
    """What this rank writes of a value, copied to the CPU: its piece if it has the first copy of it; what every rank holds
    is written by the one told to `keep` it. None for nothing. No process waits for another."""
    if isinstance(value, DTensor):
        if any(place and not isinstance(placement, Shard) for place, _, placement in _cuts(value)):
            return None
        start, _ = box_of(value)
        return tuple(value.shape), tuple(start), _copy(value.to_local())
    if not keep:
        return None
    return (tuple(value.shape), (0,) * value.ndim, _copy(value)) if isinstance(value, Tensor) else value


def _copy(value: Tensor) -> Tensor:
    value = value.detach()
    return value.cpu() if value.device.type != "cpu" else value.clone()  # not the storage of which it is a part


def _is_piece(value: Any) -> TypeGuard[Piece]:
    return isinstance(value, tuple) and len(value) == 3 and isinstance(value[2], Tensor)


@dataclass(frozen=True)
class Team:
    """The processes that write together; their words go over a group of their own, since they come from a thread."""

    rank: int = 0
    world: int = 1
    group: Any = None

    def gather(self, word: Any) -> list[Any]:
        """The words of all ranks, on rank 0; elsewhere an empty list. Raises OSError when a process is gone."""
        if self.world == 1:
            return [word]
        words = [None] * self.world if self.rank == 0 else None
        try:
            dist.gather_object(word, words, dst=0, group=self.group)
        except RuntimeError as error:
            raise OSError(f"another process ended while a checkpoint was written: {error}") from error
        return words or []


def write(folder: Path, content: Mapping[str, Any], team: Team) -> None:
    """Called on all ranks with their own pieces; rank 0 returns when all parts and the index lie in `folder`.

    Raises OSError: on rank 0 whichever part could not be written, elsewhere the own one.
    """
    part, fault = None, None
    try:
        part = write_part(folder, content, team.rank)
    except Exception as error:  # whatever it was, the others are waiting for a word
        fault = f"rank {team.rank}: {error}"
    words = team.gather((part, fault))
    if faults := [text for _, text in words or [(part, fault)] if text is not None]:
        raise OSError("; ".join(faults))
    if team.rank == 0:
        write_index(folder, dict(part for part, _ in words if part is not None), content["progress"])


def write_part(folder: Path, content: Mapping[str, Any], rank: int) -> tuple[str, int] | None:
    """(name, bytes) of this rank's file; None, and no file, where it has nothing to write."""
    folder.mkdir(exist_ok=True)
    pieces = [content[tree] for tree in TREES]
    if rank and not any(_is_piece(leaf) for tree in pieces for leaf in _leaves(tree)):
        return None
    path = folder / f"part-{rank:05d}.ckpt"
    told = content if rank == 0 else {tree: content[tree] for tree in TREES}
    write_file(path, {"format": content["format"], **_save_of(content["progress"]), "part": dict(told)})
    return path.name, path.stat().st_size


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from _leaves(value)
    else:
        yield tree


def _save_of(progress: Mapping[str, Any]) -> dict[str, Any]:
    """What all parts of one save have in common, and parts of no other have."""
    return {"run": progress.get("run", ""), "step": progress["step"], "attempt": progress["attempt"]}


def write_index(folder: Path, parts: Mapping[str, int], progress: Mapping[str, Any]) -> None:
    with (folder / INDEX).open("w", encoding="utf-8") as file:
        json.dump({**_save_of(progress), "parts": dict(parts)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def is_folder(path: Path) -> bool:
    """Whether a folder is a checkpoint in parts, whole or not."""
    return path.is_dir() and ((path / INDEX).exists() or any(path.glob("part-*.ckpt")))


def verify(folder: Path) -> None:
    """Reads every byte of every part and compares checksums; no piece may be missing. Raises CheckpointError."""
    for path in _part_files(folder, _read_index(folder)):
        verify_file(path)
    state = load(folder)
    for tree in TREES:
        for leaf in _leaves(state[tree]):
            if isinstance(leaf, Scattered) and sum(piece.numel() for _, piece in leaf.pieces) != leaf.shape.numel():
                raise CheckpointError(f"{folder}: pieces of a tensor {tuple(leaf.shape)} of {tree} are missing")


def load(folder: Path) -> dict[str, Any]:
    """The content as of a checkpoint in one file, with `Scattered` for tensors. Raises CheckpointError where parts are
    missing, of another size, or of another save."""
    index = _read_index(folder)
    state: dict[str, Any] = {}
    for path in _part_files(folder, index):
        part = read_file(path)
        if not isinstance(part, dict) or "part" not in part or _save_of(part) != _save_of(index):
            raise CheckpointError(f"{path}: is not a part of the checkpoint that {INDEX} describes")
        _add(state, part["part"])
    return state


def open_whole(folder: Path) -> dict[str, Any]:
    """As `load`, with whole tensors, each put together when it is asked for."""
    state = load(folder)
    return state | {name: None if state[name] is None else Whole(state[name]) for name in TREES}


def _read_index(folder: Path) -> dict[str, Any]:
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if not index["parts"] or not all(isinstance(size, int) for size in index["parts"].values()):
            raise ValueError("no parts")
        return {**_save_of(index), "parts": index["parts"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}: {INDEX} cannot be read: {error!r}") from error


def _part_files(folder: Path, index: Mapping[str, Any]) -> list[Path]:
    paths = [folder / Path(name).name for name in index["parts"]]
    for path, size in zip(paths, index["parts"].values(), strict=True):
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            raise CheckpointError(f"{path}: is missing" if found is None else f"{path}: has {found} bytes, not {size}")
    return paths


def _add(state: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Pieces are collected; of all else the word of the first part counts, which is rank 0's."""
    for name, value in part.items():
        if isinstance(value, Mapping):
            _add(state.setdefault(name, {}), value)
        elif _is_piece(value):
            shape, begin, piece = value
            state.setdefault(name, Scattered(torch.Size(shape), []))
            state[name].pieces.append((begin, piece))
        else:
            state.setdefault(name, value)
