"""The files of a run's checkpoint folder: each there as a whole or not at all, under its names, as long as it should stay.

    step-000001234.ckpt   a save: one file, or a folder of parts (see sharded.py)
    last.ckpt, best.ckpt, best_ema.ckpt
                          further names of some of them: hard links of files, symbolic links to folders

Names that begin with a dot are under way, or were when a process was killed.
"""

import contextlib
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

LAST = "last.ckpt"
_STEP = re.compile(r"step-(\d{9})(?:\.before)?\.ckpt")  # `before`: see put_in_place


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the text names the file and the reason."""


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Which checkpoints stay: the newest `last`, multiples of `every` steps (0: none), and the `steps` named."""

    last: int = 2
    every: int = 0
    steps: Collection[int] = ()


def best_name(split: str) -> str:
    """`best.ckpt` for the raw weights' best evaluation (split val), `best_ema.ckpt` for the averaged weights' (val_ema)."""
    return f"best{split.removeprefix('val')}.ckpt"


def step_files(folder: Path) -> list[tuple[int, Path]]:
    """(step, file or folder) of the saved steps in a run's checkpoint folder, the newest first."""
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))]
    return sorted(found, reverse=True)


def step_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:09d}.ckpt"


def write_file(path: Path, content: Any) -> None:
    """Torch's zip format, flushed to the disk and read back with its checksums. Raises OSError, RuntimeError, CheckpointError."""
    with path.open("wb") as file:
        try:
            torch.save(content, file)
        except (
            RuntimeError
        ) as error:  # what torch says of a full disk is a position; what the system said lies behind it
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        file.flush()
        os.fsync(file.fileno())
    verify_file(path)


def verify_file(path: Path) -> None:
    """Reads every byte of a file of torch's zip format and compares checksums. Raises CheckpointError."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:  # a damaged archive raises anything from BadZipFile to UnicodeDecodeError
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if damaged is not None:
        raise CheckpointError(f"{path}: entry {damaged} is damaged")


def read_file(path: Path) -> Any:
    """The content by torch's safe loader, tensors mapped from disk. Raises CheckpointError."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged file raises anything from KeyError to UnpicklingError
        raise CheckpointError(
            f"{path}: cannot be read: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from error


def clear_stale(folder: Path, *, but: Path) -> None:
    """Removes what an attempt left that was killed while it wrote, `but` not what is being written now."""
    for stale in folder.glob(".*.tmp"):
        if stale != but:
            remove(stale)


def remove(path: Path) -> None:
    """A file, a link or a folder, as far as it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def publish(temporary: Path, path: Path, *, names: Sequence[str], keep: Keep) -> None:
    """Gives a written checkpoint its name and `names`, and removes the steps that `keep` does not name."""
    put_in_place(temporary, path)
    for name in names:
        link(path, path.with_name(name))
    sync_folder(path.parent)
    _prune(path.parent, keep)


def put_in_place(temporary: Path, target: Path) -> None:
    """Renames. A folder cannot be replaced in one go: the old one keeps a name that still counts as a save of its step,
    so a kill in between loses nothing."""
    folders = [path.is_dir() and not path.is_symlink() for path in (temporary, target)]
    if not any(folders) or not os.path.lexists(target):
        temporary.replace(target)
        return
    before = target.with_name(f"{target.stem}.before.ckpt")
    remove(before)
    target.rename(before)
    temporary.replace(target)
    remove(before)


def link(source: Path, target: Path) -> None:
    """Gives a checkpoint a further name in its folder, in one step."""
    temporary = target.with_name(f".{target.name}.tmp")
    remove(temporary)
    try:
        if source.is_dir():
            temporary.symlink_to(source.name)  # relative: the run folder may be moved
        else:
            os.link(source, temporary)  # the same bytes under a second name; `last` is replaced, never written into
    except OSError:  # a file system without links
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, temporary)
    put_in_place(temporary, target)


def _prune(folder: Path, keep: Keep) -> None:
    """A folder that a link points to stays; of a file the bytes stay under the other name."""
    linked = {link.resolve().name for link in folder.iterdir() if link.is_symlink()}
    for step, path in step_files(folder)[keep.last :]:
        if step not in keep.steps and not (keep.every and step % keep.every == 0) and path.name not in linked:
            if path.is_dir():
                path = path.replace(path.with_name(f".{path.name}.tmp"))  # half of a folder must not look like a save
            remove(path)


def sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some network file systems do not take it; the rename is still in order
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Writer:
    """Runs one write at a time beside the training; the next one waits until the last is done."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Any] | None = None

    def start(self, write: Callable[[], Any]) -> None:
        """Raises what the write before this one raised."""
        self.wait()
        self._pending = self._thread.submit(write)

    @property
    def failed(self) -> bool:
        """Whether the last write has ended with an error; `wait` raises it."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def wait(self) -> None:
        """Until nothing is pending. Raises the error of the write, once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
