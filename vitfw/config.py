"""Words to one frozen `Config`: defaults <- `extends:` of the recipe <- recipe <- machine <- words.

    recipe=deit_b machine=gpu8 optim.lr=1e-3 out=runs/first

Every mistake is a ConfigError of one line that names the key, the value and what would be right.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vitfw.data.augment import AugmentConfig
from vitfw.data.section import DataConfig
from vitfw.ema import EmaConfig
from vitfw.evaluate.freezing import FreezeConfig
from vitfw.evaluate.metrics import EvalConfig
from vitfw.guard import GuardConfig
from vitfw.launch import MachineConfig
from vitfw.models.load_report import LoadConfig
from vitfw.models.variants import ModelConfig
from vitfw.optim import OptimConfig
from vitfw.report.recorder import LogConfig
from vitfw.schedules import TrainConfig
from vitfw.tasks import TASKS
from vitfw.tasks.task import TaskConfig

# all that may change the result
RECIPE_SECTIONS = ("model", "load", "freeze", "task", "data", "augment", "optim", "ema", "guard", "train", "eval")
MACHINE_SECTIONS = ("machine", "log")
MACHINE_DATA_KEYS = (
    "data.train",
    "data.val",
    "data.cache",
    "data.cache_gb",
)  # where the data lies is a fact about the machine
_PACKAGE = Path(__file__).parent


class ConfigError(ValueError):
    """A mistake in the words, a recipe or a machine file; the text is one line for the user."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run, complete. Sections are frozen; what follows from them is computed where it is used, never written back."""

    model: ModelConfig = field(default_factory=ModelConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    freeze: FreezeConfig = field(default_factory=FreezeConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    log: LogConfig = field(default_factory=LogConfig)
    recipe: str = field(default="", metadata={"help": "name of a recipe in recipes/, or a YAML file"})
    machine_name: str = field(
        default="", metadata={"help": "written as machine=NAME: a file in configs/, or a YAML file"}
    )
    out: str | None = field(default=None, metadata={"help": "run folder; default runs/RECIPE"})
    weights: str | None = field(default=None, metadata={"help": "start a new run from these weights (not a resume)"})
    resume: Literal["same", "changed"] = field(
        default="same", metadata={"help": "changed: go on with another configuration than the run folder holds"}
    )
    stop_after: int | None = field(
        default=None, metadata={"help": "save and stop (status 75) when this many steps of the run are done"}
    )
    dry_run: bool = field(default=False, metadata={"help": "print what would run, and stop"})

    def __post_init__(self) -> None:
        if self.stop_after is not None and self.stop_after < 1:
            raise ValueError(f"stop_after={self.stop_after}: must be at least 1 step")

    @property
    def folder(self) -> Path:
        return Path(self.out or f"runs/{Path(self.recipe).stem}")

    def recipe_part(self) -> dict[str, Any]:
        """All that may change the result, as plain containers: what `config.yaml` holds and a resume compares."""
        sections = {name: dataclasses.asdict(getattr(self, name)) for name in RECIPE_SECTIONS}
        return _plain(sections | {"weights": self.weights})


def load(words: Sequence[str], *, base: Path = Path()) -> Config:
    """The Config that the command-line words describe; paths to recipe and machine files are relative to `base`."""
    pairs = _split_words(words)
    if "machine_name" in pairs:
        raise ConfigError(f"machine_name={pairs['machine_name']}: write machine={pairs['machine_name']}")
    recipe, machine = pairs.pop("recipe", None), pairs.pop("machine", None)
    if recipe is None:
        raise ConfigError(f"recipe=NAME is missing; recipes: {', '.join(names_of('recipes'))}")
    sources = [
        *_recipe_sources(recipe, base),
        *([] if machine is None else [_machine_source(machine, base)]),
        ("the command line", {key: _Word(text) for key, text in pairs.items()}),
    ]
    leaves = [(source, key, value) for source, tree in sources for key, value in _leaves(tree)]
    schema = _schema(_task_name(leaves))
    for source, key, value in leaves:
        _set(schema, source, key, value)
    _set(schema, "the command line", "recipe", recipe)
    _set(schema, "the command line", "machine_name", machine or "")
    try:
        return typing.cast(Config, OmegaConf.to_object(schema))
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(_first_line(error)) from error


def names_of(folder: Literal["recipes", "configs"]) -> list[str]:
    """Names of the shipped recipes, or machines."""
    return sorted(path.stem for path in _shipped(folder).glob("*.yaml"))


def find_file(folder: Literal["recipes", "configs"], name: str, base: Path = Path()) -> Path:
    """A shipped file by its name, or any YAML file by its path. Raises ConfigError with the nearest names."""
    path = base / name if name.endswith((".yaml", ".yml")) else _shipped(folder) / f"{name}.yaml"
    if not path.is_file():
        key = "recipe" if folder == "recipes" else "machine"
        near = difflib.get_close_matches(name, names_of(folder), n=3, cutoff=0.5) or names_of(folder)
        raise ConfigError(f"{key}={name}: no such {key}; did you mean {', '.join(near)}?")
    return path


def keys() -> Iterator[tuple[str, str, Any, str]]:
    """(dotted key, type, default, help) of every key; each task's own keys stand under `task`."""
    for item in dataclasses.fields(Config):
        if item.name == "task":
            for name, (config, _) in TASKS.items():
                for key in dataclasses.fields(config):
                    yield (
                        f"task.{key.name}",
                        _type_text(key.type),
                        _default(key),
                        f"[{name}] {key.metadata.get('help', '')}",
                    )
        elif dataclasses.is_dataclass(_plain_type(item.type)):
            for key in dataclasses.fields(_plain_type(item.type)):
                yield f"{item.name}.{key.name}", _type_text(key.type), _default(key), key.metadata.get("help", "")
        elif item.name != "machine_name":
            yield item.name, _type_text(item.type), _default(item), item.metadata.get("help", "")


class _Word(str):
    """A value as it stood on the command line, not yet read as YAML."""


def _split_words(words: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if word.startswith("-"):
            raise ConfigError(f"{word}: options are words without dashes; write {word.lstrip('-') or 'key=value'}")
        if not equals or not key:
            near = _nearest(word, [name for name, *_ in keys()])
            raise ConfigError(
                f"{word}: not of the form key=value; did you mean {' or '.join(f'{n}=...' for n in near)}?"
            )
        if pairs.setdefault(key, value) != value:
            raise ConfigError(f"{key} is given twice with different values: {pairs[key]} and {value}")
    return pairs


def _shipped(folder: str) -> Path:
    inside = _PACKAGE / folder  # an installed wheel carries them; a clone has them beside the package
    return inside if inside.is_dir() else _PACKAGE.parent / folder


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path))  # refuses duplicate keys
    except (OmegaConfBaseException, yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a YAML file of sections: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict) or not tree:
        raise ConfigError(f"{path}: must hold sections such as `model:` and `optim:`")
    return typing.cast(dict[str, Any], tree)


def _recipe_sources(name: str, base: Path) -> list[tuple[str, dict[str, Any]]]:
    path = find_file("recipes", name, base)
    tree = _read_yaml(path)
    parent = tree.pop("extends", None)
    sources = []
    if parent is not None:
        above = _read_yaml(find_file("recipes", str(parent), path.parent))
        if "extends" in above:
            raise ConfigError(f"{path}: extends {parent}, which itself extends {above['extends']}: one level only")
        sources.append((f"recipe {parent}", above))
    sources.append((f"recipe {name}", tree))
    for source, content in sources:
        for key in content:
            if key in MACHINE_SECTIONS or (
                key in Config.__dataclass_fields__ and key not in (*RECIPE_SECTIONS, "weights")
            ):
                raise ConfigError(
                    f"{source}: {key} does not belong in a recipe; put it in a machine file or on the command line"
                )
    return sources


def _machine_source(name: str, base: Path) -> tuple[str, dict[str, Any]]:
    tree = _read_yaml(find_file("configs", name, base))
    for key, _ in _leaves(tree):
        if key.split(".")[0] not in MACHINE_SECTIONS and key not in MACHINE_DATA_KEYS:
            raise ConfigError(
                f"machine {name}: {key} may change the result and belongs in a recipe; a machine file sets "
                f"{', '.join(f'{section}.*' for section in MACHINE_SECTIONS)} and {', '.join(MACHINE_DATA_KEYS)}"
            )
    return f"machine {name}", tree


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _task_name(leaves: list[tuple[str, str, Any]]) -> str:
    name = next((str(value) for _, key, value in reversed(leaves) if key == "task.name"), "classify")
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1) or list(TASKS)
        raise ConfigError(f"task.name={name}: no such task; did you mean {', '.join(near)}?")
    return name


def _schema(task: str) -> Any:
    schema = OmegaConf.structured(Config)
    OmegaConf.set_readonly(
        schema, False
    )  # frozen dataclasses give read-only nodes; here the values are still coming in
    schema.task = OmegaConf.structured(TASKS[task][0])
    for name in schema:
        if OmegaConf.is_dict(schema[name]):
            OmegaConf.set_readonly(schema[name], False)
    return schema


def _set(schema: Any, source: str, key: str, value: Any) -> None:
    """Sets one leaf, or raises ConfigError naming the source, the key, the value and what would be right."""
    node, path = schema, key.split(".")
    for depth, part in enumerate(path):
        if not OmegaConf.is_dict(node) or part not in node:
            raise ConfigError(
                f"{key}={value}: no such key{_where(source)}; did you mean {_suggest(schema, path, depth)}?"
            )
        if depth < len(path) - 1:
            node = node[part]
    if OmegaConf.is_dict(node[path[-1]]):
        inside = ", ".join(f"{key}.{name}" for name in list(node[path[-1]])[:3])
        raise ConfigError(f"{key}={value}: {key} is a section{_where(source)}; set its keys, such as {inside}")
    declared = typing.get_type_hints(OmegaConf.get_type(node))[path[-1]]
    try:
        read = _read_word(value, declared) if isinstance(value, _Word) else value
        _check_finite(key, read, shown=str(value))
        OmegaConf.update(schema, key, read)
    except ConfigError:
        raise
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigError(f"{key}={value}: must be {_type_text(declared)}{_where(source)}") from error


def _check_finite(key: str, value: Any, *, shown: str) -> None:
    """No key means anything as NaN, infinity or 1e99: it would only fail later, or not even that."""
    for number in value if isinstance(value, list | tuple) else [value]:
        unread = isinstance(value, list) and str(number).lower().strip("+-.") in (
            "nan",
            "inf",
        )  # YAML reads these as text
        if unread or (isinstance(number, float) and not math.isfinite(number)):
            raise ConfigError(f"{key}={shown}: must be a finite number")
        if isinstance(number, int | float) and abs(number) > 2**53:
            raise ConfigError(f"{key}={shown}: is larger than any meaningful number here")


def _where(source: str) -> str:
    return "" if source == "the command line" else f" (in {source})"


def _read_word(word: str, declared: Any) -> Any:
    """A command-line value in its declared type: text stays text, 1e3 is an integer where one is wanted."""
    options = typing.get_args(declared) if isinstance(declared, types.UnionType) else (declared,)
    if type(None) in options and word in ("null", "none", "None"):
        return None
    if str in options or any(typing.get_origin(option) is Literal for option in options):
        return str(word)
    value = yaml.safe_load(word)
    if isinstance(value, str) and (int in options or float in options):
        value = float(value)  # YAML reads 1e-3 (no dot) as text
    if int in options and float not in options and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _suggest(schema: Any, path: list[str], depth: int) -> str:
    sections = [name for name in schema if OmegaConf.is_dict(schema[name])]
    names = [f"{section}.{key}" for section in sections for key in schema[section]]
    names += [name for name in schema if name not in sections and name != "machine_name"]
    if depth > 0 and path[0] in sections:  # the section is right: stay in it
        inside = [str(key) for key in schema[path[0]]]
        return " or ".join(f"{path[0]}.{name}" for name in _nearest(path[-1], inside))
    return " or ".join(_nearest(".".join(path), names))


def _nearest(name: str, valid: list[str]) -> list[str]:
    near = difflib.get_close_matches(name, valid, n=2, cutoff=0.6)
    leaf = [key for key in valid if key.rsplit(".", 1)[-1] == name]  # `lr` -> optim.lr
    return list(dict.fromkeys([*leaf, *near]))[:2] or difflib.get_close_matches(name, valid, n=1, cutoff=0.0)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _plain_type(declared: Any) -> Any:
    return declared if isinstance(declared, type) else object


def _type_text(declared: Any) -> str:
    if isinstance(declared, types.UnionType):
        return " or ".join(_type_text(option) for option in typing.get_args(declared))
    if typing.get_origin(declared) is Literal:
        return "|".join(map(str, typing.get_args(declared)))
    names = {int: "an integer", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    return names.get(declared) or str(declared).replace("typing.", "")


def _default(item: Any) -> Any:
    return item.default if item.default_factory is dataclasses.MISSING else item.default_factory()


def _first_line(error: BaseException) -> str:
    """The message in one line, without OmegaConf's list of places."""
    return str(error).split("\n    full_key")[0].replace("\n", " ") if str(error) else type(error).__name__
