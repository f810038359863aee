"""Checkpoints: one logical format for every strategy and number of processes.

A file is torch's zip format with plain containers only, so that torch's safe loader reads it:

    format      integer, raised when an older reader would misread the file
    progress    where the run stands (see Progress)
    model       {parameter or buffer name: tensor}, whole tensors, names of the bare task
    optimizer   {parameter name: {state name: tensor}}; `group_step` where the optimiser counts for a whole group
    guard       counters of skipped steps (see guard.py), plain numbers
    ema         {parameter name: fp32 tensor} and `updates`, their counter; None when averaging is off
    preprocessing  what images went through before the network (plain numbers), for export and evaluation
    config      the recipe part as YAML text
    versions    {package: version}

In the folder: `step-000001234.ckpt`, one file a save; `last.ckpt`, `best.ckpt`, `best_ema.ckpt`, further names of some of them.
"""

import contextlib
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from vitfw.ema import Ema
from vitfw.parallel import whole

FORMAT = 1
LAST = "last.ckpt"
_STEP_FILE = re.compile(r"step-(\d{9})\.ckpt")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the text names the file and the reason."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands: `step` optimiser steps and `images` images are done, `attempt` made the file."""

    step: int = 0
    images: int = 0
    attempt: int = 0
    evaluated: int = 0  # step of the last evaluation: a run stopped before one that was due makes up for it
    best: dict[str, float] = field(default_factory=dict)  # {metric: best value so far}
    best_step: dict[str, int] = field(default_factory=dict)
    ranking: dict[str, list[list[float]]] = field(default_factory=dict)  # {metric: [[value, step], ...]}, best first


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Which checkpoints stay: the newest `last`, multiples of `every` steps (0: none), and the `steps` named."""

    last: int = 2
    every: int = 0
    steps: Collection[int] = ()


def collect(task: nn.Module, optimizer: torch.optim.Optimizer, ema: Ema | None, *, keep: bool = True) -> dict[str, Any]:
    """The tensors of a run as whole CPU tensors of their own, keyed by name: training may go on while they are written.

    Called on all ranks, since shards are gathered here; ranks that do not `keep` them get an empty dict.
    """
    state = {
        "model": {name: whole(value, keep=keep) for name, value in task.state_dict().items()},
        "optimizer": {
            name: {key: whole(value, keep=keep) for key, value in entry.items()}
            for name, entry in _optimizer_entries(optimizer)
        },
        "ema": None if ema is None else {name: whole(value, keep=keep) for name, value in ema.state_dict().items()},
    }
    return state if keep else {}


def _optimizer_entries(optimizer: torch.optim.Optimizer) -> list[tuple[str, dict[str, Any]]]:
    """(parameter name, its state) in the groups' order. LAMB counts steps once a group: each parameter carries them."""
    counts = {name: group["step"] for group in optimizer.param_groups if "step" in group for name in group["names"]}
    return [
        (name, optimizer.state.get(parameter, {}) | ({"group_step": counts[name]} if name in counts else {}))
        for name, parameter in named_of(optimizer)
    ]


def restore(state: Mapping[str, Any], task: nn.Module, optimizer: torch.optim.Optimizer, ema: Ema | None) -> None:
    """Puts a checkpoint's tensors into a built task and optimiser, whatever their sharding. Names and shapes must agree.

    Raises CheckpointError that lists what is missing, unexpected or of another shape.
    """
    if (ema is None) != (state["ema"] is None):
        raise CheckpointError(
            "averaged weights are in the checkpoint or in this run, but not in both: ema.decay was changed"
        )
    own, named = task.state_dict(), dict(named_of(optimizer))
    check_names(own, state["model"], "model")
    for name in state["optimizer"].keys() - named.keys():
        raise CheckpointError(f"the checkpoint has optimiser state for {name}, which this run does not train")
    for name in named.keys() - state["optimizer"].keys():
        raise CheckpointError(f"the checkpoint has no optimiser state for {name}, which this run trains")
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(_like(state["model"][name], value))
    fused = bool(optimizer.defaults.get("fused"))
    for name, parameter in named.items():
        entry = {key: value for key, value in state["optimizer"][name].items() if key != "group_step"}
        optimizer.state[parameter] = {key: _placed(key, value, parameter, fused) for key, value in entry.items()}
    for group in optimizer.param_groups:
        count = state["optimizer"][group["names"][0]].get("group_step")
        if count is not None:
            group["step"] = count.clone() if isinstance(count, Tensor) else count
    if ema is not None:
        ema.load_state_dict(state["ema"])


def check_names(own: Mapping[str, Tensor], stored: Mapping[str, Tensor], what: str) -> None:
    """Raises CheckpointError unless both hold the same names with the same shapes."""
    faults = [f"missing {name}" for name in own if name not in stored]
    faults += [f"unexpected {name}" for name in stored if name not in own]
    faults += [
        f"{name} is {tuple(stored[name].shape)} in the file and {tuple(value.shape)} here"
        for name, value in own.items()
        if name in stored and stored[name].shape != value.shape
    ]
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise CheckpointError(f"the checkpoint's {what} does not fit: {'; '.join(faults[:5])}{more}")


def named_of(optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of everything the optimiser trains; each group carries its parameters' names."""
    return [pair for group in optimizer.param_groups for pair in zip(group["names"], group["params"], strict=True)]


def best_name(split: str) -> str:
    """`best.ckpt` for the raw weights' best evaluation (split val), `best_ema.ckpt` for the averaged weights' (val_ema)."""
    return f"best{split.removeprefix('val')}.ckpt"


def save(
    folder: Path,
    state: Mapping[str, Any],
    progress: Progress,
    *,
    config: str,
    versions: Mapping[str, str],
    best_of: Sequence[str] = (),
    keep: Keep | None = None,
) -> Path:
    """Writes the checkpoint of this step in one go, gives it the name `last.ckpt` and that of each split in `best_of`,
    and removes what `keep` does not name. Rank 0 only.

    A kill at any moment leaves the files of earlier steps as they are. Raises OSError when the disk does not take it.
    """
    for stale in folder.glob(".*.tmp"):  # of an attempt that was killed while it wrote
        stale.unlink(missing_ok=True)
    path = folder / f"step-{progress.step:09d}.ckpt"
    temporary = folder / f".{path.name}.tmp"
    content = {"format": FORMAT, "progress": asdict(progress), **state, "config": config, "versions": dict(versions)}
    try:
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        verify(temporary)  # reads back what the disk holds, checksums included
    except (OSError, RuntimeError, CheckpointError) as error:  # torch reports a full disk as RuntimeError
        temporary.unlink(missing_ok=True)
        raise OSError(f"checkpoint {path} could not be written, the ones before it still stand: {error}") from error
    temporary.replace(path)
    for name in (LAST, *map(best_name, best_of)):
        _link(path, folder / name)
    _sync_folder(folder)
    _prune(folder, keep or Keep())
    return path


def _prune(folder: Path, keep: Keep) -> None:
    files = step_files(folder)
    for step, path in files[keep.last :]:
        if step not in keep.steps and not (keep.every and step % keep.every == 0):
            path.unlink()


def step_files(folder: Path) -> list[tuple[int, Path]]:
    """(step, file) of the saved steps in a run's checkpoint folder, the newest first."""
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _STEP_FILE.fullmatch(path.name))]
    return sorted(found, reverse=True)


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


def verify(path: Path) -> None:
    """Reads every byte of a checkpoint and compares checksums. Raises CheckpointError."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if damaged is not None:
        raise CheckpointError(f"{path}: entry {damaged} is damaged")


def load(path: Path) -> dict[str, Any]:
    """A checkpoint's content, tensors mapped from disk. Raises CheckpointError when it is damaged, foreign or newer."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged file raises anything from KeyError to UnpicklingError
        raise CheckpointError(
            f"{path}: cannot be read: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from error
    if not isinstance(state, dict) or "progress" not in state or "model" not in state:
        raise CheckpointError(f"{path}: is not a vitfw checkpoint; to start from foreign weights use weights={path}")
    if state["format"] > FORMAT:
        raise CheckpointError(f"{path}: has format {state['format']}, this vitfw reads up to {FORMAT}; update vitfw")
    return state


def newest(folder: Path) -> tuple[Path, Progress, list[str]] | None:
    """The newest readable checkpoint, its progress, and a word about each file that had to be passed over; None if none.

    Raises CheckpointError when there are files and none can be read: starting anew would overwrite a run without a word.
    """
    damaged: list[str] = []
    for path in _candidates(folder):
        try:
            verify(path)
            return path, Progress(**load(path)["progress"]), damaged
        except CheckpointError as error:
            damaged.append(str(error))
    if damaged:
        raise CheckpointError(
            f"no checkpoint in {folder} can be read ({'; '.join(damaged)}); choose another out= to start anew"
        )
    return None


def _candidates(folder: Path) -> list[Path]:
    """Files to continue from, the best first: saved steps, and a `last.ckpt` that somebody put there by itself."""
    files = [path for _, path in step_files(folder)] if folder.is_dir() else []
    last = folder / LAST
    return [*files, last] if last.exists() and not any(last.samefile(path) for path in files) else files


def _like(value: Tensor, target: Tensor) -> Tensor:
    """`value` on the target's device, cut as the target is cut."""
    if isinstance(target, DTensor):
        # every rank holds the whole value and takes its part: nothing is sent
        whole_value = value.to(target.device)
        return distribute_tensor(whole_value, target.device_mesh, target.placements, src_data_rank=None)
    return value.to(target.device, copy=True)


def _placed(key: str, value: Any, parameter: Tensor, fused: bool) -> Any:
    """One entry of an optimiser's state, where the optimiser wants it: what has the parameter's shape lies where the
    parameter lies; a counter on the CPU, but on the parameter's device for fused optimisers.
    """
    if not isinstance(value, Tensor):
        return value
    if key != "step" and value.shape == parameter.shape:
        return _like(value, parameter)
    if value.numel() == 1:
        return value.to(parameter.device, copy=True) if fused else value.clone()
    raise CheckpointError(f"optimiser state {key} is {tuple(value.shape)}, its parameter {tuple(parameter.shape)}")


def _link(source: Path, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)  # the same bytes under a second name; `last` is replaced, never written into
    except OSError:
        shutil.copyfile(source, temporary)
    temporary.replace(target)


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some network file systems do not take it; the rename is still in order
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
