"""The run folder: opened once by rank 0, refused when it holds another run, continued when it holds this one."""

import contextlib
import dataclasses
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import yaml

PACKAGES = (
    "vitfw",
    "torch",
    "torchvision",
    "lightning",
    "timm",
    "webdataset",
    "omegaconf",
    "torchmetrics",
    "numpy",
    "pillow",
)


class RunError(ValueError):
    """The run folder cannot be used as asked; the text is for the user."""


LOCK = ".lock"


@dataclass(frozen=True)
class Run:
    """One opened run folder. `attempt` counts the starts of this run from 0; `run_id` stays the same over all of them."""

    folder: Path
    run_id: str
    attempt: int
    finished: bool
    notes: tuple[str, ...] = ()  # what differs from the attempt before and is no reason to refuse: versions, new keys

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def export(self) -> Path:
        return self.folder / "export"


def open_run(
    folder: Path,
    recipe: Mapping[str, Any],
    *,
    words: list[str],
    machine: Mapping[str, Any],
    seed: int,
    data: Mapping[str, str | None],
    defaults: Mapping[str, Any] | None = None,
    resume: Literal["same", "changed"] = "same",
    position: tuple[int, int] | None = None,
) -> Run:
    """Makes the folder, or goes on in it. `recipe` is all that may change the result, as plain containers;
    `data` the fingerprint of each set (keys, labels and sizes of all images). Keys that an older version did not know, so
    that the folder has no value for them, count as their `defaults`. `position`: steps that are done, and in all.

    Raises RunError, before anything is written, when the folder holds a run with another configuration (unless `resume` is
    "changed", which records the change, and the change leaves something to train) or is no run folder at all.
    """
    config_file, provenance_file = folder / "config.yaml", folder / "provenance.json"
    if not config_file.exists():
        if folder.exists() and not left_by_a_start(folder):
            raise RunError(
                f"out={folder}: the folder is not empty and holds no run (no config.yaml); choose another out="
            )
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        provenance: dict[str, Any] = {
            "run_id": f"{folder.name}-{os.urandom(4).hex()}",
            "seed": seed,
            "data": dict(data),
            "attempts": [],
        }
        changes: list[str] = []
        notes: tuple[str, ...] = ()
    else:
        try:
            stored = yaml.safe_load(config_file.read_text(encoding="utf-8"))
            provenance = json.loads(provenance_file.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise RunError(
                f"out={folder}: the run's own files cannot be read ({error}); choose another out="
            ) from error
        if not isinstance(stored, dict) or not _is_provenance(provenance):
            raise RunError(
                f"out={folder}: config.yaml or provenance.json is not what a run writes; choose another out="
            )
        complete = with_defaults(stored, defaults or {})
        changes = differences(complete, recipe)
        notes = _notes(provenance["attempts"], differences(stored, complete))
        changes += [
            f"images of {line}" for line in differences(provenance.get("data", dict(data)), dict(data), "data.")
        ]
        if changes and resume != "changed":
            raise RunError(
                f"out={folder} holds a run with another configuration: {'; '.join(changes)}. "
                "Choose another out=, or go on with the new one by resume=changed"
            )
        if changes and position is not None:
            _check_change(folder, changes, *position)
    finished = bool(provenance.get("finished")) and not changes
    attempt = len(provenance["attempts"])
    if not finished:
        provenance.pop("finished", None)
        provenance["data"] = dict(data)
        provenance["attempts"].append(
            {
                "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "words": words,
                "machine": dict(machine),
                "changes": changes,
                "host": platform.node(),
                "python": platform.python_version(),
                "notes": list(notes),
                "versions": package_versions(),
                "commit": source_commit(),
            }
        )
        # provenance first: a folder with a config.yaml is complete, whenever the process is killed
        write_text(provenance_file, json.dumps(provenance, indent=2) + "\n")
        write_text(config_file, yaml.safe_dump(dict(recipe), sort_keys=False))
    return Run(folder, provenance["run_id"], attempt, finished, notes)


def _is_provenance(found: Any) -> bool:
    if not isinstance(found, dict):
        return False
    attempts = found.get("attempts")
    return isinstance(found.get("run_id"), str) and isinstance(attempts, list) and all(map(_is_mapping, attempts))


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _check_change(folder: Path, changes: list[str], done: int, total: int) -> None:
    """Raises RunError for changes that a run which stands at step `done` cannot take up."""
    fresh = f"start a new run from its weights: weights={folder}/checkpoints/last.ckpt and another out="
    batch = next((line for line in changes if line.startswith("train.global_batch: ")), None)
    if batch is not None:
        raise RunError(
            f"{batch}: this run has done {done:,} steps of its own batch, by which its position is counted; {fresh}"
        )
    if done >= total:
        raise RunError(
            f"out={folder}: the run has done {done:,} steps, and with {'; '.join(changes)} it ends after {total:,}: nothing is "
            f"left to train. Lengthen it (train.epochs), or {fresh}"
        )


def with_defaults(stored: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`stored`, and the default of each key of a section that it lacks."""
    complete = dict(stored)
    for key, value in defaults.items():
        if isinstance(value, Mapping) and isinstance(stored.get(key, {}), Mapping):
            complete[key] = with_defaults(stored.get(key, {}), value)
        else:
            complete.setdefault(key, value)
    return complete


def _notes(attempts: list[dict[str, Any]], added: list[str]) -> tuple[str, ...]:
    """What to say about going on with other versions than the attempt before ran with."""
    before = attempts[-1].get("versions", {}) if attempts else {}
    now = package_versions()
    moved = [f"{name} {before[name]} -> {now[name]}" for name in now if before.get(name, now[name]) != now[name]]
    notes = [f"other versions than in the attempt before: {', '.join(moved)}"] if moved else []
    if added:
        keys = ", ".join(line.partition(":")[0] for line in added)
        notes.append(f"keys that this version added count as their defaults: {keys}")
    return tuple(notes)


def left_by_a_start(folder: Path) -> bool:
    """Whether the folder holds nothing but what a start that was killed before its first record leaves behind."""
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    own = {"checkpoints", LOCK, "provenance.json", ".provenance.json.tmp", ".config.yaml.tmp"}
    return names <= own and not any((folder / "checkpoints").glob("*"))


def stored_seed(folder: Path) -> int | None:
    """The seed of the run in this folder, drawn or given; None where there is no run."""
    file = folder / "provenance.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads(file.read_text(encoding="utf-8"))["seed"])
    return None


def mark_finished(run: Run, results: Mapping[str, float]) -> None:
    file = run.folder / "provenance.json"
    provenance = json.loads(file.read_text(encoding="utf-8"))
    write_text(file, json.dumps(provenance | {"finished": dict(results)}, indent=2) + "\n")


def differences(stored: Any, asked: Any, prefix: str = "") -> list[str]:
    """`key: stored -> asked` for each leaf that differs between two trees of plain containers."""
    if isinstance(stored, Mapping) and isinstance(asked, Mapping):
        return [
            line
            for key in dict.fromkeys([*stored, *asked])
            for line in differences(stored.get(key), asked.get(key), f"{prefix}{key}.")
        ]
    return [] if stored == asked else [f"{prefix.rstrip('.')}: {stored} -> {asked}"]


def write_text(path: Path, text: str) -> None:
    """Replaces a small file in one step: a reader sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def package_versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def source_commit() -> str | None:
    """Commit of the source tree, with `+changes` where it was edited; None outside a git clone."""
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return commit + ("+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()


class Tee:
    """Copies a text stream into `log.txt`, so that what was shown can be read afterwards; progress bars stay out of it."""

    def __init__(self, stream: Any, file: Any) -> None:
        self._stream, self._file = stream, file

    def write(self, text: str) -> int:
        if "\r" not in text:
            self._file.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()
        self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def log_to(path: Path):
    """Everything printed inside is also appended to `path`."""
    with path.open("a", encoding="utf-8") as file:
        out, err = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = Tee(out, file), Tee(err, file)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = out, err


def run_config(recipe: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The recipe part with the seed that is used, drawn or given, so that config.yaml reproduces the run."""
    return {**recipe, "train": {**recipe["train"], "seed": seed}}


def as_plain(section: Any) -> dict[str, Any]:
    return dataclasses.asdict(section)
