"""Words to one frozen `Config`: defaults <- `extends:` of the recipe <- recipe <- machine <- words.

    recipe=deit_b machine=gpu8 optim.lr=1e-3 out=runs/first

Every mistake is a ConfigError of one line that names the key, the value and what would be right.
"""

import dataclasses
import difflib
import typing
from collections.abc import Iterator, Sequence
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
from vitfw.words import ConfigError, Word, first_line, leaves, nearest, set_leaf, type_text

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

    def default_part(self) -> dict[str, Any]:
        """What `recipe_part` would hold if only the task had been named."""
        return Config(task=type(self.task)(name=self.task.name)).recipe_part()


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
        ("the command line", {key: Word(text) for key, text in pairs.items()}),
    ]
    given = [(source, key, value) for source, tree in sources for key, value in leaves(tree)]
    schema = _schema(_task_name(given))
    for source, key, value in given:
        set_leaf(schema, source, key, value)
    set_leaf(schema, "the command line", "recipe", recipe)
    set_leaf(schema, "the command line", "machine_name", machine or "")
    try:
        return typing.cast(Config, OmegaConf.to_object(schema))
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(first_line(error)) from error


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
                        type_text(key.type),
                        _default(key),
                        f"[{name}] {key.metadata.get('help', '')}",
                    )
        elif dataclasses.is_dataclass(_plain_type(item.type)):
            for key in dataclasses.fields(_plain_type(item.type)):
                yield f"{item.name}.{key.name}", type_text(key.type), _default(key), key.metadata.get("help", "")
        elif item.name != "machine_name":
            yield item.name, type_text(item.type), _default(item), item.metadata.get("help", "")


def _split_words(words: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if word.startswith("-"):
            raise ConfigError(f"{word}: options are words without dashes; write {word.lstrip('-') or 'key=value'}")
        if not equals or not key:
            near = nearest(word, [name for name, *_ in keys()])
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
        try:
            above = _read_yaml(find_file("recipes", str(parent), path.parent))
        except ConfigError as error:
            raise ConfigError(f"{path}: extends: {parent}: {str(error).partition(': ')[2]}") from error
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
    for key, _ in leaves(tree):
        if key.split(".")[0] not in MACHINE_SECTIONS and key not in MACHINE_DATA_KEYS:
            raise ConfigError(
                f"machine {name}: {key} may change the result and belongs in a recipe; a machine file sets "
                f"{', '.join(f'{section}.*' for section in MACHINE_SECTIONS)} and {', '.join(MACHINE_DATA_KEYS)}"
            )
    return f"machine {name}", tree


def _task_name(given: list[tuple[str, str, Any]]) -> str:
    name = next((str(value) for _, key, value in reversed(given) if key == "task.name"), "classify")
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


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _plain_type(declared: Any) -> Any:
    return declared if isinstance(declared, type) else object


def _default(item: Any) -> Any:
    return item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
