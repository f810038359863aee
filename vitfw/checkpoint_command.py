"""`vitfw checkpoint info|diff|average|consolidate`: what is in a checkpoint, what two differ in, and new files from them."""

import argparse
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vitfw import checkpoint
from vitfw.checkpoint import CheckpointError, Progress
from vitfw.checkpoint_files import write_file
from vitfw.run import package_versions
from vitfw.sharded import Scattered, is_folder, scattered

Which = Literal["raw", "ema"]


def info(path: Path) -> str:
    """Where the run stood, what the file holds and how large each part is; the checksums are read as well.

    Raises CheckpointError for a damaged or foreign file.
    """
    path = resolve(path)
    checkpoint.verify(path)
    state = checkpoint.load(path)
    progress = Progress(**state["progress"])
    best = ", ".join(f"{key} {value:.4g} (step {progress.best_step[key]:,})" for key, value in progress.best.items())
    rows = [
        ("file", f"{path}, {_bytes(path) / 1e6:.2f} MB, format {state['format']}, checksums right"),
        ("progress", f"step {progress.step:,}, {progress.images:,} images, attempt {progress.attempt}"),
        ("best", best or "nothing was evaluated"),
        ("weights", size_text(state["model"].values())),
        ("average", average_text(state["ema"])),
        ("optimiser", size_text(value for entry in state["optimizer"].values() for value in entry.values())),
        ("versions", ", ".join(f"{name} {version}" for name, version in state["versions"].items())),
    ]  # fmt: skip
    bad = [name for name, value in state["model"].items() if value.is_floating_point() and not value.isfinite().all()]
    if bad:
        rows.append(("not finite", f"{len(bad)} tensors: {', '.join(bad[:5])}"))
    return "\n".join(f"  {name:<12}{text}" for name, text in rows)


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]))


def average_text(ema: Mapping[str, Tensor] | None) -> str:
    return "none" if ema is None else f"{size_text(ema.values())}, {int(ema['updates']):,} updates"


def size_text(values: Iterable[Any]) -> str:
    """Of the tensors among the values; one is held at a time."""
    count = numbers = size = 0
    kinds: set[str] = set()
    for value in values:
        if isinstance(value, Tensor):
            count, numbers, size = count + 1, numbers + value.numel(), size + value.numel() * value.element_size()
            kinds.add(str(value.dtype).removeprefix("torch."))
    return f"{count} tensors, {numbers:,} values, {size / 1e6:.2f} MB, {', '.join(sorted(kinds))}"


@dataclass(frozen=True)
class Difference:
    """One tensor in which two checkpoints differ: largest absolute difference, or what is missing."""

    name: str
    text: str
    largest: float


def differences(one: Path, other: Path) -> list[Difference]:
    """Every tensor of weights, average and optimiser that is not equal bit for bit, the largest difference first.

    Raises CheckpointError for a damaged or foreign file.
    """
    first, second = (dict(flat(checkpoint.load(resolve(path), pieces=True))) for path in (one, other))
    found = []
    for name in dict.fromkeys([*first, *second]):
        if name not in first or name not in second:
            found.append(Difference(name, f"only in {one if name in first else other}", float("inf")))
            continue
        mine, theirs = first[name].whole(), second[name].whole()
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            kinds = " and ".join(f"{tuple(value.shape)} {value.dtype}" for value in (mine, theirs))
            found.append(Difference(name, kinds, float("inf")))
        elif not torch.equal(mine, theirs):
            gap = (mine.double() - theirs.double()).abs().max().item()
            scale = max(mine.double().abs().max().item(), 1e-30)
            found.append(Difference(name, f"differs by up to {gap:.3g} ({gap / scale:.2%} of its largest value)", gap))
    return sorted(found, key=lambda difference: -difference.largest)


def diff_text(one: Path, other: Path, *, limit: int = 20) -> str:
    """The differences for a person, configuration included."""
    lines = [f"  {entry.name}: {entry.text}" for entry in differences(one, other)]
    if len(lines) > limit:
        lines[limit:] = [f"  and {len(lines) - limit} more"]
    configs = [checkpoint.load(resolve(path)).get("config", "") for path in (one, other)]
    if configs[0] != configs[1]:
        before, after = (text.splitlines() for text in configs)
        lines += [f"  config - {line.strip()}" for line in before if line not in after]
        lines += [f"  config + {line.strip()}" for line in after if line not in before]
    return "\n".join(lines) if lines else "  equal bit for bit"


def flat(state: Mapping[str, Any]) -> Iterator[tuple[str, Scattered]]:
    """(path inside the file, tensor)."""
    for part in ("model", "ema"):
        for name, value in (state[part] or {}).items():
            yield f"{part}/{name}", scattered(value)
    for name, entry in state["optimizer"].items():
        for key, value in entry.items():
            if isinstance(value, Tensor | Scattered):
                yield f"optimizer/{name}/{key}", scattered(value)


def average(paths: Sequence[Path], out: Path, *, which: Which = "raw") -> Path:
    """Writes the mean of the weights of several checkpoints of one network, summed in float64; counters are the last
    file's. The result holds weights alone: it can be evaluated, exported and given as weights=, not continued.

    Raises CheckpointError for fewer than two files, and for files of other networks.
    """
    if len(paths) < 2:
        raise CheckpointError(f"an average needs at least 2 checkpoints, got {len(paths)}")
    states = [checkpoint.load(resolve(path)) for path in paths]
    weights = [weights_of(state, path, which) for state, path in zip(states, paths, strict=True)]
    for other, path in zip(weights[1:], paths[1:], strict=True):
        checkpoint.check_names(weights[0], other, f"weights ({path} against {paths[0]})")
    mean = {
        name: torch.stack([entry[name].double() for entry in weights]).mean(0).to(value.dtype)
        if value.is_floating_point()
        else value
        for name, value in weights[-1].items()
    }
    return write_weights(out, mean, states[-1])


def consolidate(path: Path, out: Path, *, which: Which | Literal["all"] = "raw") -> Path:
    """Writes a checkpoint as one file: `which` weights alone, a quarter of the size, for giving away; or with all
    that it holds, so that a run goes on from it.

    Raises CheckpointError for a damaged or foreign file, and for averaged weights where there are none.
    """
    checkpoint.verify(resolve(path))
    state = checkpoint.load(resolve(path))
    if which == "all":
        return write_new(out, _plain(state))
    return write_weights(out, weights_of(state, path, which), state)


def _plain(tree: Any) -> Any:
    """With tensors of their own: a part of a mapped file would take the whole of it along."""
    if isinstance(tree, Mapping):
        return {name: _plain(value) for name, value in tree.items()}
    return tree.clone() if isinstance(tree, Tensor) else tree


def weights_of(state: Mapping[str, Any], path: Path, which: Which) -> dict[str, Tensor]:
    """The raw weights, or the averaged ones over the raw buffers."""
    if which == "raw":
        return dict(state["model"])
    if state["ema"] is None:
        raise CheckpointError(f"{path}: has no averaged weights; use which=raw")
    return {name: state["ema"].get(name, value) for name, value in state["model"].items()}


def write_weights(out: Path, weights: Mapping[str, Tensor], source: Mapping[str, Any]) -> Path:
    """A file of the same format with weights alone. Refuses to replace a file."""
    content = {
        "format": checkpoint.FORMAT,
        "progress": asdict(Progress(**source["progress"])),
        "model": _plain(weights),
        "optimizer": {},
        "ema": None,
        "preprocessing": source.get("preprocessing"),
        "config": source["config"],
        "versions": package_versions(),
    }
    return write_new(out, content)


def write_new(out: Path, content: Mapping[str, Any]) -> Path:
    if os.path.lexists(out):
        raise CheckpointError(f"{out}: exists already; choose another name")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.tmp")
    write_file(temporary, dict(content))
    temporary.replace(out)
    return out


def resolve(path: Path) -> Path:
    """A checkpoint as it is; of a run folder its last one."""
    if path.is_dir() and not is_folder(path):
        for folder in (path / "checkpoints", path):
            if (folder / checkpoint.LAST).exists():
                return folder / checkpoint.LAST
        raise CheckpointError(f"{path}: holds no {checkpoint.LAST}; name a checkpoint or a run folder")
    if not path.exists():
        raise CheckpointError(f"{path}: no such file")
    return path


def main(words: list[str]) -> int:
    """info|diff|average|consolidate FILES: what is in a checkpoint, what two differ in, new files from them

    A file may also be a checkpoint in parts, or a run folder: its last one. Status of diff: 0 equal, 1 different. Raises
    CheckpointError.
    """
    parser = argparse.ArgumentParser(prog="vitfw checkpoint", description=(main.__doc__ or "").splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("info", help="position, sizes, versions; checksums").add_argument("file", type=Path)
    both = actions.add_parser("diff", help="tensors and settings in which two differ")
    both.add_argument("file", type=Path)
    both.add_argument("other", type=Path)
    mean = actions.add_parser("average", help="the mean of several, as weights")
    mean.add_argument("file", type=Path, nargs="+")
    alone = actions.add_parser("consolidate", help="the weights alone, or one file of a checkpoint in parts")
    alone.add_argument("file", type=Path)
    for action in (mean, alone):
        action.add_argument("--out", type=Path, required=True, help="file to write; must not exist")
    mean.add_argument("--which", choices=("raw", "ema"), default="raw", help="raw or averaged weights")
    alone.add_argument("--which", choices=("raw", "ema", "all"), default="raw", help="weights alone, or all there is")
    given = parser.parse_args(words)
    if given.action == "info":
        print(info(given.file))
    elif given.action == "diff":
        text = diff_text(given.file, given.other)
        print(text)
        return int("equal bit for bit" not in text)
    elif given.action == "average":
        print(average(given.file, given.out, which=given.which))
    else:
        print(consolidate(given.file, given.out, which=given.which))
    return 0
