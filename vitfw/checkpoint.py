"""Checkpoints: one logical format for every strategy and number of processes.

A file is torch's zip format with plain containers only, so that torch's safe loader reads it:

    format      integer, raised when an older reader would misread the file
    progress    where the run stands (see Progress)
    model       {parameter or buffer name: tensor}, whole tensors, names of the bare task
    optimizer   {parameter name: {state name: tensor}}
    ema         {parameter name: fp32 tensor} and `updates`, their counter; None when averaging is off
    preprocessing  what images went through before the network (plain numbers), for export and evaluation
    config      the recipe part as YAML text
    versions    {package: version}
"""

import contextlib
import os
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from vitfw.ema import Ema

FORMAT = 1
LAST, PREVIOUS = "last.ckpt", "previous.ckpt"


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


def collect(task: nn.Module, optimizer: torch.optim.Optimizer, ema: Ema | None) -> dict[str, Any]:
    """The tensors of a run as whole CPU tensors keyed by name. Called on all ranks: shards are gathered here."""
    return {
        "model": {name: _whole(value) for name, value in task.state_dict().items()},
        "optimizer": {
            name: {key: _whole(value) for key, value in optimizer.state.get(parameter, {}).items()}
            for name, parameter in named_of(optimizer)
        },
        "ema": None if ema is None else {name: _whole(value) for name, value in ema.state_dict().items()},
    }


def restore(state: Mapping[str, Any], task: nn.Module, optimizer: torch.optim.Optimizer, ema: Ema | None) -> None:
    """Puts a checkpoint's tensors into a built task and optimiser, whatever their sharding. Names and shapes must agree.

    Raises CheckpointError that lists what is missing, unexpected or of another shape.
    """
    if (ema is None) != (state["ema"] is None):
        raise CheckpointError("averaged weights are in the checkpoint or in this run, but not in both: ema.decay was changed")
    own = task.state_dict()
    check_names(own, state["model"], "model")
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(_like(state["model"][name], value))
    named = dict(named_of(optimizer))
    for name in state["optimizer"]:
        if name not in named:
            raise CheckpointError(f"the checkpoint has optimiser state for {name}, which this run does not train")
    for name, parameter in named.items():
        entry = state["optimizer"].get(name)
        if entry is None:
            raise CheckpointError(f"the checkpoint has no optimiser state for {name}, which this run trains")
        optimizer.state[parameter] = {
            # a step counter is a scalar; everything else has the parameter's shape and lies where the parameter lies
            key: _like(value, parameter) if isinstance(value, Tensor) and value.shape == parameter.shape else _scalar(value, parameter, key)
            for key, value in entry.items()
        }
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
) -> Path:
    """Writes `last.ckpt` in one step and keeps the one before it; it also becomes the best of each split in `best_of`.

    Rank 0 only. A kill at any moment leaves a whole `last.ckpt` or a whole `previous.ckpt`. Raises OSError when the disk does not take
    it; the older file then still stands.
    """
    temporary, last = folder / f".{LAST}.tmp", folder / LAST
    whole = {"format": FORMAT, "progress": asdict(progress), **state, "config": config, "versions": dict(versions)}
    try:
        with temporary.open("wb") as file:
            torch.save(whole, file)
            file.flush()
            os.fsync(file.fileno())
        with zipfile.ZipFile(temporary) as archive:  # read back what the disk holds, checksums included
            if (damaged := archive.testzip()) is not None:
                raise OSError(f"{temporary}: entry {damaged} does not read back as written")
    except (OSError, RuntimeError, zipfile.BadZipFile) as error:  # torch reports a full disk as RuntimeError
        temporary.unlink(missing_ok=True)
        raise OSError(f"checkpoint {last} could not be written, the one before it still stands: {error}") from error
    if last.exists():
        last.replace(folder / PREVIOUS)
    temporary.replace(last)
    for split in best_of:
        _link(last, folder / best_name(split))
    _sync_folder(folder)
    return last


def load(path: Path) -> dict[str, Any]:
    """A checkpoint's content, tensors mapped from disk. Raises CheckpointError when it is damaged, foreign or newer."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged file raises anything from KeyError to UnpicklingError
        raise CheckpointError(f"{path}: cannot be read: {str(error).splitlines()[0] if str(error) else error!r}") from error
    if not isinstance(state, dict) or "progress" not in state or "model" not in state:
        raise CheckpointError(f"{path}: is not a vitfw checkpoint; to start from foreign weights use weights={path}")
    if state["format"] > FORMAT:
        raise CheckpointError(f"{path}: has format {state['format']}, this vitfw reads up to {FORMAT}; update vitfw")
    return state


def newest(folder: Path) -> tuple[Path, Progress, list[str]] | None:
    """The newest readable checkpoint, its progress, and a word about each file that had to be passed over; None if none.

    Raises CheckpointError when there are files and none can be read: starting anew would overwrite a run without a word.
    """
    found: list[tuple[Path, Progress]] = []
    damaged = []
    for path in (folder / LAST, folder / PREVIOUS):
        if path.exists():
            try:
                with zipfile.ZipFile(path) as archive:
                    if (entry := archive.testzip()) is not None:
                        raise CheckpointError(f"{path}: entry {entry} is damaged")
                found.append((path, Progress(**load(path)["progress"])))
            except (CheckpointError, zipfile.BadZipFile, OSError) as error:
                damaged.append(str(error) if str(path) in str(error) else f"{path}: {error}")
    if found:
        path, progress = max(found, key=lambda pair: pair[1].step)
        return path, progress, damaged
    if damaged:
        raise CheckpointError(f"no checkpoint in {folder} can be read ({'; '.join(damaged)}); choose another out= to start anew")
    return None


def _whole(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()


def _like(value: Tensor, target: Tensor) -> Tensor:
    """`value` on the target's device, cut as the target is cut."""
    if isinstance(target, DTensor):
        return distribute_tensor(value.to(target.device), target.device_mesh, target.placements)
    return value.to(target.device)


def _scalar(value: Any, parameter: Tensor, key: str) -> Any:
    """A counter stays where torch's optimisers keep it: fused ones on the parameter's device, the others on the CPU."""
    if not isinstance(value, Tensor):
        return value
    if value.numel() == 1:
        return value.to(parameter.device) if parameter.device.type != "cpu" else value.clone()
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
