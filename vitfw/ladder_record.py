"""What a ladder remembers of its rungs: the weights each started from, and its score with what was scored.

A rung's folder says which file its weights came from, not what the file held. So the ladder keeps a hash of the tensors.
"""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from vitfw import checkpoint
from vitfw.config import Config, ConfigError
from vitfw.data.section import open_split
from vitfw.evaluate.ladder import RungResult
from vitfw.models.load_report import LoadConfig
from vitfw.models.reading import read
from vitfw.run import write_text

STARTED = "started_from.json"  # in the ladder's folder: {name of a rung's folder: fingerprint of its weights}
SCORED = "rung.json"  # in a rung's folder


def fingerprint(place: str | Path | None, load: LoadConfig | None = None) -> str:
    """A hash of the tensors at a place of weights, the same in whatever file they lie; of timm: the name itself."""
    load = load or LoadConfig()
    if place is None or str(place).startswith("timm:"):
        return str(place)
    digest = sha256()
    for name, value in sorted(read(place, which=load.which, trust=load.trust).state.items()):
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def check_start(out: Path, config: Config) -> None:
    """Writes down the weights that a rung starts from. Raises ConfigError where its folder began with others."""
    file, name = out / STARTED, config.folder.name
    known = _read(file) or {}
    own = fingerprint(config.weights, config.load)
    if has_begun(config.folder) and known.get(name, own) != own:
        raise ConfigError(
            f"weights={config.weights} holds other weights than those that {config.folder} started from; remove that "
            "folder to run the rung anew, or choose another out="
        )
    if known.get(name) != own:
        out.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(known | {name: own}, indent=2) + "\n")


def has_begun(folder: Path) -> bool:
    """Whether the folder holds a run."""
    return (folder / "config.yaml").exists()


def scored(config: Config) -> dict[str, Any]:
    """What a rung's score depends on: its last weights, and the images they are scored on."""
    return {
        "weights": fingerprint(config.folder / "checkpoints" / checkpoint.LAST),
        "images": open_split(config.data, "val").fingerprint(),
        "exif": config.data.exif,
        "background": list(config.data.background),
    }


def read_score(folder: Path, now: dict[str, Any]) -> RungResult | None:
    """The score in a rung's folder; None where there is none, or one of other weights or images."""
    content = _read(folder / SCORED)
    if content is None or content.get("scored") != now:
        return None
    try:
        return RungResult(**content["result"])
    except (KeyError, TypeError):  # of another version
        return None


def write_score(folder: Path, now: dict[str, Any], result: RungResult) -> None:
    write_text(folder / SCORED, json.dumps({"scored": now, "result": result.plain()}, indent=2) + "\n")


def _read(file: Path) -> dict[str, Any] | None:
    """A record, None where there is none; a damaged one is named, and made again."""
    if not file.exists():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        print(f"note: {file} is damaged ({error}); it is made again", flush=True)
        return None
    return content if isinstance(content, dict) else None
