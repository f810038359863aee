"""Weight files and folders -> one flat state dict, with what the file says about its own network.

Only data is read: pickles go through torch's safe loader, and a file that needs code is refused unless trusted.
"""

import argparse
import dataclasses
import json
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from vitfw import sharded
from vitfw.checkpoint_files import LAST, CheckpointError, best_name
from vitfw.models.architecture import Architecture
from vitfw.models.described import architecture_from_plain, described, known, told_preprocessing
from vitfw.models.preprocess import Preprocessing
from vitfw.models.variants import ModelConfig, resolve

State = dict[str, Tensor]
Which = Literal["auto", "raw", "ema"]

AVERAGED = ("model_ema", "state_dict_ema", "ema_state_dict", "ema_model", "teacher")
RAW = (
    "state_dict",
    "model_state_dict",
    "model",
    "network",
    "target_encoder",
    "encoder",
    "backbone",
    "module",
    "student",
)
# Under which of its names a task of vitfw holds the network it trains; a teacher beside it is another one.
NETWORKS = ("net.", "encoder.", "network.", "student.")


@dataclass(frozen=True)
class Source:
    """What a place holds. entry: where in the file the tensors lay; architecture and preprocessing where the file
    tells.
    """

    place: str
    state: State
    entry: str
    architecture: Architecture | None = None
    preprocessing: Preprocessing | None = None
    own: bool = False  # a checkpoint of vitfw
    task: Mapping[str, Any] = field(default_factory=dict)  # its section `task`


class UntrustedError(ValueError):
    """A pickle that is more than data; `need` says what it would run."""

    def __init__(self, place: str, need: str, fix: str) -> None:
        super().__init__(f"weights={place}: the file needs code to be read{need}, which could do anything. {fix}")
        self.place, self.need = place, need


def read(place: str | Path, *, which: Which = "auto", trust: bool = False) -> Source:
    """Reads `timm:NAME`, `local-dir:FOLDER`, a timm, Hugging Face or run folder, or a .safetensors, .npz or torch file.

    which: raw or averaged (EMA, teacher) weights where a file has both; auto prefers the averaged ones. Of a run folder
    auto is its export, raw and ema are the checkpoints from which an export of these weights would be made. trust: run
    code that a pickle holds. Raises ValueError naming the place and what to do, UntrustedError where that is trust.
    """
    try:
        return _read(str(place), which=which, trust=trust)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:  # ValueErrors too, but not for users
        raise ValueError(f"weights={place}: damaged, or no weights ({type(error).__name__}: {error})") from error
    except (ValueError, OSError, ImportError):
        raise
    except Exception as error:  # each format has its own errors for what is no file of its kind
        first = str(error).strip().split("\n")[0]
        raise ValueError(f"weights={place}: damaged, or no weights ({type(error).__name__}: {first})") from error


def _read(text: str, *, which: Which, trust: bool) -> Source:
    if text.startswith("timm:"):
        return _read_timm(text.removeprefix("timm:"))
    path = Path(text.removeprefix("local-dir:"))
    if sharded.is_folder(path):
        try:
            return _read_own(path, sharded.open_whole(path), which)
        except CheckpointError as error:
            raise ValueError(f"weights={error}") from error
    if path.is_dir():
        return _read_folder(path, which=which, trust=trust)
    if not path.is_file():
        raise ValueError(f"weights={text}: no such file or folder; or write timm:NAME for published weights")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix == ".npz":
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return Source(text, {name: torch.from_numpy(arrays[name]) for name in arrays.files}, "npz")
        except ValueError as error:  # its own words would have pickles allowed
            raise ValueError(f"weights={text}: damaged, or no weights (not a NumPy archive of plain arrays)") from error
    return _read_torch(path, which=which, trust=trust)


def _read_timm(name: str) -> Source:
    import timm

    from vitfw.models.timm_bridge import read_architecture

    try:
        net: Any = timm.create_model(name, pretrained=True)
    except Exception as error:  # unknown name, no published weights, no network
        first = str(error).strip().split("\n")[0]
        raise ValueError(f"weights=timm:{name}: timm cannot provide them ({type(error).__name__}: {first})") from error
    try:
        arch = read_architecture(net)
    except ValueError:
        arch = None  # a model without counterpart: usable for the same timm model only
    return Source(f"timm:{name}", net.state_dict(), "timm", arch, Preprocessing.from_timm_config(net.pretrained_cfg))


def _read_folder(path: Path, *, which: Which, trust: bool) -> Source:
    if not (path / "config.json").is_file() and (path / "export" / "config.json").is_file():
        if which != "auto":  # the export has one set of weights and does not say which
            return read(_checkpoint_of(path, which), which=which, trust=trust)
        path = path / "export"
    if not (path / "config.json").is_file():
        raise ValueError(f"weights={path}: the folder has no config.json; name the weight file itself")
    config = json.loads((path / "config.json").read_text())
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (path / name).is_file():
            source = read(path / name, which=which, trust=trust)
            break
    else:
        raise ValueError(f"weights={path}: neither model.safetensors nor pytorch_model.bin beside config.json")
    arch, preprocessing = described(config)
    return dataclasses.replace(source, place=str(path), architecture=arch, preprocessing=preprocessing)


def _checkpoint_of(run: Path, which: Which) -> Path:
    """Where a run keeps these weights at their best; its last checkpoint where nothing was evaluated."""
    names = (best_name("val_ema" if which == "ema" else "val"), LAST)
    for name in names:
        if (run / "checkpoints" / name).exists():
            return run / "checkpoints" / name
    raise ValueError(
        f"weights={run}: {which} weights are read from the run's checkpoints, and there is neither "
        f"{names[0]} nor {names[1]} in {run / 'checkpoints'}; leave out which= to take its export as it is"
    )


def _read_safetensors(path: Path) -> Source:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        metadata = file.metadata() or {}
    if "vitfw" not in metadata:
        return Source(str(path), state, "safetensors")
    told = json.loads(metadata["vitfw"])
    arch = architecture_from_plain(told["architecture"]) if told.get("architecture") else None
    return Source(str(path), state, "safetensors", arch, told_preprocessing(told))


def _read_torch(path: Path, *, which: Which, trust: bool) -> Source:
    tree = _load_pickle(path, trust)
    if isinstance(tree, Mapping) and "progress" in tree and "versions" in tree:
        return _read_own(path, tree, which)
    state, entry = _find_state(tree, which, str(path))
    return Source(str(path), state, entry)


def _load_pickle(path: Path, trust: bool) -> Any:
    if trust:
        return torch.load(path, map_location="cpu", weights_only=False)
    try:
        # An argparse.Namespace is a bag of plain values; MAE and DeiT files hold their options in one.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        need = f" ({found[1]})" if found else ""
        if not found and not _is_pickle(path):
            raise ValueError(f"weights={path}: not a readable torch file ({str(error).splitlines()[0]})") from error
        fix = "If you trust its origin, set load.trust=true; better, convert it to .safetensors once"
        raise UntrustedError(str(path), need, fix) from error
    except Exception as error:  # of trash the unpickler makes KeyError, IndexError, EOFError and others
        raise ValueError(f"weights={path}: not a readable torch file ({error})") from error


def _is_pickle(path: Path) -> bool:
    """Whether the bytes begin as a pickle, or as torch's archive around one."""
    with path.open("rb") as file:
        return file.read(4).startswith((b"\x80", b"PK"))


def _read_own(path: Path, tree: Mapping[str, Any], which: Which) -> Source:
    """A checkpoint of vitfw: raw weights, an average over them, and the recipe as YAML."""
    averaged: State = {name: value for name, value in (tree.get("ema") or {}).items() if name != "updates"}
    if which == "ema" and not averaged:
        raise ValueError(f"weights={path}: the checkpoint has no averaged weights; set which=raw")
    use_average = bool(averaged) and which != "raw"
    state: State = {**tree["model"], **averaged} if use_average else dict(tree["model"])
    section = _section(tree)
    arch = None if section is None or section.variant.startswith("timm:") else resolve(section)
    entry, task = "ema" if use_average else "model", _recipe(tree).get("task") or {}
    return Source(str(path), state, entry, arch, told_preprocessing(tree), own=True, task=task)


def model_section(path: str | Path) -> ModelConfig | None:
    """The `model` section of a checkpoint of vitfw."""
    folder = Path(path)
    return _section(sharded.load(folder) if sharded.is_folder(folder) else _load_pickle(folder, trust=False))


def _recipe(tree: Mapping[str, Any]) -> dict[str, Any]:
    import yaml

    return yaml.safe_load(tree["config"]) or {}


def _section(tree: Mapping[str, Any]) -> ModelConfig | None:
    section = _recipe(tree).get("model")
    return None if section is None else ModelConfig(**known(section, ModelConfig))


def _find_state(tree: Any, which: Which, place: str, entry: str = "") -> tuple[State, str]:
    """The state dict in nested containers, and the names on the way to it."""
    if not isinstance(tree, Mapping):
        raise ValueError(f"weights={place}: holds a {type(tree).__name__}, not a dict of tensors")
    tensors = {str(name): value for name, value in tree.items() if isinstance(value, Tensor)}
    inner = {str(name): value for name, value in tree.items() if isinstance(value, Mapping)}
    averaged = [name for name in AVERAGED if name in inner]
    raw = [name for name in RAW if name in inner]
    if which == "ema" and not averaged and not entry and not tensors:
        raise ValueError(
            f"weights={place}: no averaged weights among the entries {', '.join(map(str, tree))}; set which=raw"
        )
    order = raw + averaged if which == "raw" else averaged + raw
    if len(tensors) > 3 or (tensors and not order):
        return tensors, entry or "top level"
    for name in order:
        try:
            return _find_state(inner[name], which, place, f"{entry}.{name}".lstrip("."))
        except ValueError:
            continue
    raise ValueError(f"weights={place}: no dict of tensors among the entries {', '.join(map(str, tree)) or '(none)'}")
