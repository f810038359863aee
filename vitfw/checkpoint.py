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

Where weights are cut over several processes it is a folder of such files, one from each process (see sharded.py). The names of
checkpoints are in checkpoint_files.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vitfw import checkpoint_files as files
from vitfw import sharded
from vitfw.checkpoint_files import LAST, CheckpointError, Keep, best_name, step_files
from vitfw.ema import Ema
from vitfw.parallel import whole
from vitfw.sharded import Scattered, Team

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands: `step` optimiser steps and `images` images are done, `attempt` made the file."""

    step: int = 0
    images: int = 0
    attempt: int = 0
    run: str = ""  # identity of the run that made it
    evaluated: int = 0  # step of the last evaluation: a run stopped before one that was due makes up for it
    best: dict[str, float] = field(default_factory=dict)  # {metric: best value so far}
    best_step: dict[str, int] = field(default_factory=dict)
    ranking: dict[str, list[list[float]]] = field(default_factory=dict)  # {metric: [[value, step], ...]}, best first


def collect(
    task: nn.Module, optimizer: torch.optim.Optimizer, ema: Ema | None, *, keep: bool = True, cut: bool = False
) -> dict[str, Any]:
    """The tensors of a run as CPU tensors of their own, keyed by name: training may go on while they are written.

    Called on all ranks. Tensors are whole, shards are gathered, and ranks that do not `keep` them get an empty dict; or
    every rank gets its pieces of the `cut` ones, and the one that is to `keep` them also all else.
    """
    take = sharded.piece_of if cut else whole
    state = {
        "model": {name: take(value, keep=keep) for name, value in task.state_dict().items()},
        "optimizer": {
            name: {key: take(value, keep=keep) for key, value in entry.items()}
            for name, entry in _optimizer_entries(optimizer)
        },
        "ema": None if ema is None else {name: take(value, keep=keep) for name, value in ema.state_dict().items()},
    }
    return state if keep or cut else {}


def _optimizer_entries(optimizer: torch.optim.Optimizer) -> list[tuple[str, dict[str, Any]]]:
    """(parameter name, its state) in the groups' order. LAMB counts steps once a group: each parameter carries them."""
    counts = {name: group["step"] for group in optimizer.param_groups if "step" in group for name in group["names"]}
    return [
        (name, optimizer.state.get(parameter, {}) | ({"group_step": counts[name]} if name in counts else {}))
        for name, parameter in named_of(optimizer)
    ]


def restore(state: Mapping[str, Any], task: nn.Module, optimizer: torch.optim.Optimizer, ema: Ema | None) -> None:
    """Puts a checkpoint's tensors into a built task and optimiser, whatever their sharding: each rank reads its own values.
    Names and shapes must agree.

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
    if ema is not None:
        check_names(ema.state_dict(), state["ema"], "averaged weights")
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
            group["step"] = _like(count, torch.empty(())) if isinstance(count, Tensor | Scattered) else count
    if ema is not None:
        ema.load_state_dict({name: _like(state["ema"][name], value) for name, value in ema.state_dict().items()})


def check_names(own: Mapping[str, Tensor], stored: Mapping[str, Tensor | Scattered], what: str) -> None:
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


def save(
    folder: Path,
    state: Mapping[str, Any],
    progress: Progress,
    *,
    config: str,
    versions: Mapping[str, str],
    best_of: Sequence[str] = (),
    keep: Keep | None = None,
    team: Team | None = None,
) -> Path:
    """Writes the checkpoint of this step in one go, gives it the name `last.ckpt` and that of each split in `best_of`,
    and removes what `keep` does not name. Called on rank 0; with a `team`, on all its ranks, each with its own pieces.

    A kill at any moment leaves what was saved at earlier steps as it is. Raises OSError when the disk does not take it.
    """
    path = files.step_path(folder, progress.step)
    temporary = folder / f".{path.name}.{progress.attempt}.tmp"
    content = {"format": FORMAT, "progress": asdict(progress), **state, "config": config, "versions": dict(versions)}
    is_main = team is None or team.rank == 0
    if is_main:
        files.clear_stale(folder, but=temporary)
    try:
        if team is None:
            files.write_file(temporary, content)
        else:
            sharded.write(temporary, content, team)
    except (OSError, RuntimeError, CheckpointError) as error:  # torch reports a full disk as RuntimeError
        if is_main:
            files.remove(temporary)
        raise OSError(f"checkpoint {path} could not be written, the ones before it still stand: {error}") from error
    if is_main:
        files.publish(temporary, path, names=[LAST, *map(best_name, best_of)], keep=keep or Keep())
    return path


def verify(path: Path) -> None:
    """Reads every byte of a checkpoint and compares checksums. Raises CheckpointError."""
    sharded.verify(path) if path.is_dir() else files.verify_file(path)


def load(path: Path, *, pieces: bool = False) -> dict[str, Any]:
    """A checkpoint's content, tensors mapped from disk. Those of a folder are put together when they are asked for, or left
    in `pieces`, for `restore`. Raises CheckpointError when it is damaged, foreign or newer."""
    if path.is_dir():
        state = sharded.load(path) if pieces else sharded.open_whole(path)
    else:
        state = files.read_file(path)
        if isinstance(state, dict) and "part" in state:
            raise CheckpointError(f"{path}: is one part of a checkpoint; name its folder {path.parent}")
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


def mend_names(path: Path, progress: Progress) -> list[str]:
    """Gives a checkpoint to go on from, and the best ones that it knows of, their names where a kill left them without, or
    where the name is that of a later step that was passed over. Returns a word about each best one that is gone. Rank 0 only."""
    if path.name == LAST:  # somebody put it there by itself
        return []
    wanted = {LAST: progress.step}
    wanted |= {best_name(key.partition("/")[0]): at for key, at in progress.best_step.items()}
    words = []
    for name, step in wanted.items():
        target, source = path.with_name(name), files.step_path(path.parent, step)
        if _step_of(target) == step:
            continue
        if source.exists():
            files.link(source, target)
        else:
            words.append(f"{name} of step {step:,} is gone")
    return words


def _step_of(path: Path) -> int | None:
    try:
        return Progress(**load(path)["progress"]).step
    except CheckpointError:
        return None


def _candidates(folder: Path) -> list[Path]:
    """Files to continue from, the best first: saved steps, and a `last.ckpt` that somebody put there by itself."""
    saved = [path for _, path in step_files(folder)] if folder.is_dir() else []
    last = folder / LAST
    return [*saved, last] if last.exists() and not any(last.samefile(path) for path in saved) else saved


def _like(value: Tensor | Scattered, target: Tensor) -> Tensor:
    """`value` on the target's device, cut as the target is cut. Every rank reads its own part and nothing is sent."""
    stored = sharded.scattered(value)
    if not isinstance(target, DTensor):
        return stored.whole().to(target.device, copy=True)
    local = stored.box(*sharded.box_of(target)).to(target.device, copy=True)
    layout = {"shape": target.shape, "stride": target.stride()}
    return DTensor.from_local(local.contiguous(), target.device_mesh, target.placements, run_check=False, **layout)


def _placed(key: str, value: Any, parameter: Tensor, fused: bool) -> Any:
    """One entry of an optimiser's state, where the optimiser wants it: what has the parameter's shape lies where the
    parameter lies; a counter on the CPU, but on the parameter's device for fused optimisers.
    """
    if not isinstance(value, Tensor | Scattered):
        return value
    if key != "step" and value.shape == parameter.shape:
        return _like(value, parameter)
    if value.shape.numel() == 1:
        return _like(value, torch.empty((), device=parameter.device if fused else "cpu"))
    raise CheckpointError(f"optimiser state {key} is {tuple(value.shape)}, its parameter {tuple(parameter.shape)}")
