"""What a ladder's recipe and its words mean: the stages, and what the run of each is started with.

A ladder's file has the sections `ladder` and `grid`, `shared` for all rungs, one section a rung, and `pretrain` where it
makes its own weights first. A stage is a rung or `pretrain`.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import yaml

from vitfw import checkpoint
from vitfw.config import MACHINE_DATA_KEYS, MACHINE_SECTIONS, Config, ConfigError, find_file
from vitfw.evaluate.probe import ProbeConfig
from vitfw.opened import parse
from vitfw.words import type_text

PRETRAIN = "pretrain"
OWN_SECTIONS = ("ladder", "grid", "shared", PRETRAIN)

# What a rung does not read whose head is chosen on stored features: it takes no steps and mixes nothing.
UNREAD_SECTIONS = ("optim", "train", "ema", "guard", "eval")
UNREAD_KEYS = (
    *("stop_after", "task.loss", "task.smoothing", "task.class_weights", "task.logit_adjustment"),
    *("data.balance", "data.weights", "data.window", "data.trace"),
)
READ_OF_AUGMENT = ("policy", "mean", "std", "eval_crop", "eval_interpolation", "eval_resize")


@dataclass(frozen=True, kw_only=True)
class LadderConfig:
    """Section `ladder` of a ladder's recipe."""

    rungs: tuple[str, ...] = field(
        default=("probe", "last_block", "full"), metadata={"help": "which of the recipe's rungs run, in this order"}
    )
    seeds: int = field(default=1, metadata={"help": "how often each rung runs; the seeds count up from train.seed"})
    carry_head: bool = field(
        default=False, metadata={"help": "the other rungs start from the first rung's trained head, not from weights="}
    )
    probe: Literal["grid", "train"] = field(
        default="grid",
        metadata={"help": "a rung with freeze.rung=probe: the best of a grid of heads, or trained as a run"},
    )

    def __post_init__(self) -> None:
        if not self.rungs or len(set(self.rungs)) < len(self.rungs):
            raise ValueError(f"ladder.rungs={list(self.rungs)}: one or more rungs, each once")
        if self.seeds < 1:
            raise ValueError(f"ladder.seeds={self.seeds}: must be 1 or more")


@dataclass(frozen=True, kw_only=True)
class GridConfig:
    """Section `grid`: how the head of a probe rung is chosen. Pools are those that the network's own head can read."""

    rates: tuple[float, ...] = field(
        default=ProbeConfig().rates, metadata={"help": "learning rates per 256 images of a step"}
    )
    epochs: float = field(default=10.0, metadata={"help": "passes over the training images"})
    least_steps: int = field(default=500, metadata={"help": "steps at least: small sets get more passes"})
    batch: int = field(default=1024, metadata={"help": "images a step; at most the training images"})
    weight_decay: float = field(default=0.0, metadata={"help": "L2 term of SGD"})
    refit: bool = field(default=True, metadata={"help": "train the winner again with the held-out images"})
    holdout: float = field(default=0.01, metadata={"help": "share of data.train on which the head is chosen"})
    holdout_least: int = field(default=256, metadata={"help": "images held out at least (at most a fifth)"})

    def __post_init__(self) -> None:
        try:
            self.probe(("mean",), seed=0)
        except ValueError as error:
            raise ValueError(str(error).replace("probe.", "grid.")) from error
        if not 0.0 < self.holdout < 1.0:
            raise ValueError(f"grid.holdout={self.holdout}: must lie between 0 and 1")

    def probe(self, pools: tuple[str, ...], *, seed: int) -> ProbeConfig:
        """The settings of `evaluate.probe`."""
        return ProbeConfig(
            rates=self.rates,
            pools=pools,
            blocks=(1,),
            epochs=self.epochs,
            least_steps=self.least_steps,
            batch=self.batch,
            weight_decay=self.weight_decay,
            refit=self.refit,
            seed=seed,
        )


@dataclass(frozen=True)
class Plan:
    """out: the one folder of all runs; words: what each stage's own run is started with; given: what the command line
    says to all rungs, own: to one of them."""

    ladder: LadderConfig
    grid: GridConfig
    out: Path
    words: dict[str, dict[str, str]]
    given: dict[str, str]
    own: dict[str, dict[str, str]]

    @property
    def pretrains(self) -> bool:
        return PRETRAIN in self.words

    @property
    def weights(self) -> Path:
        """What pretraining leaves: its last weights, which nothing chose."""
        return self.out / PRETRAIN / "checkpoints" / checkpoint.LAST

    def of(self, stage: str, seed: int | None = None, *, carried: Path | None = None) -> list[str]:
        """The words of one run (without a seed: those of it alone). `carried`: the checkpoint it starts from."""
        own = self.words[stage]
        if stage == PRETRAIN:
            own = own | {"out": str(self.out / PRETRAIN)}
        elif self.pretrains:
            own = own | {"weights": str(self.weights)}
        if carried is not None:  # what was said of loading was said of the other file
            own = {key: value for key, value in own.items() if not key.startswith("load.")}
            own |= {"weights": str(carried), "load.head": "keep"}
        if seed is not None:
            own = own | {"out": str(self.folder(stage, seed)), "train.seed": str(seed)}
        return [f"{key}={value}" for key, value in own.items()]

    def folder(self, rung: str, seed: int) -> Path:
        return self.out / f"{rung}-seed{seed}"

    def is_grid(self, config: Config) -> bool:
        """Whether a rung's head is chosen on stored features. `mae_probe` is a published protocol and always trains."""
        return self.ladder.probe == "grid" and config.freeze.rung == "probe" and config.task.name == "classify"


def read_plan(words: Sequence[str]) -> Plan:
    """Recipe and words -> the plan. Raises ConfigError naming the word and what would be right."""
    given = dict(_split(word) for word in words)
    name = given.pop("recipe")
    path = find_ladder(name)
    if path is None:
        raise ConfigError(f"recipe={name}: no such ladder; ladders: {', '.join(ladder_names())}")
    tree = _read(path)
    for stage, content in tree.items():
        if stage not in ("ladder", "grid", "shared") and (not isinstance(content, dict) or "recipe" not in content):
            raise ConfigError(f"recipe {name}: {stage} must be a rung that names its recipe, such as {{recipe: probe}}")
    rungs = [stage for stage in tree if stage not in OWN_SECTIONS]
    ladder = _section(LadderConfig, "ladder", tree, given)
    grid = _section(GridConfig, "grid", tree, given)
    unknown = [rung for rung in ladder.rungs if rung not in rungs]
    if unknown:
        raise ConfigError(f"ladder.rungs: the recipe has no {', '.join(unknown)}; it has {', '.join(rungs)}")
    out = Path(given.pop("out", f"runs/{Path(name).stem}"))
    stages = [stage for stage in tree if stage in rungs or stage == PRETRAIN]
    own = {stage: _words_of(stage, given) for stage in stages}  # those of a rung that does not run may be a slip
    for rung in rungs:
        if rung not in ladder.rungs and own[rung]:
            raise ConfigError(f"{rung}.{next(iter(own[rung]))}: {rung} is not among ladder.rungs={list(ladder.rungs)}")
    shared = _leaves(tree.get("shared", {}))
    words_of = {rung: shared | _leaves(tree[rung]) | given | own[rung] for rung in ladder.rungs}
    if PRETRAIN in tree:
        if "weights" in given:
            raise ConfigError(
                f"weights={given['weights']}: this ladder makes its own weights; to start its pretraining from these "
                "write pretrain.weights=, to skip pretraining use recipe=ladder"
            )
        place = {key: value for key, value in given.items() if _says_where(key)}
        words_of[PRETRAIN] = _leaves(tree[PRETRAIN]) | place | own[PRETRAIN]
    elif any(key.startswith(f"{PRETRAIN}.") for key in given):
        raise ConfigError(f"{next(k for k in given if k.startswith(PRETRAIN))}: recipe {name} has no pretraining")
    return Plan(ladder, grid, out, words_of, given, own)


def ladder_keys() -> Iterator[tuple[str, str, Any, str]]:
    """(dotted key, type, default, help) of the sections that only a ladder has, as `config.keys` of a run's."""
    for section, schema in (("ladder", LadderConfig), ("grid", GridConfig)):
        for key in fields(schema):
            yield f"{section}.{key.name}", type_text(key.type), key.default, key.metadata.get("help", "")


def unread(words: dict[str, str]) -> list[str]:
    """Which of these words a rung does not read whose head is chosen on stored features."""
    return [
        f"{key}={value}"
        for key, value in words.items()
        if (key.split(".")[0] in UNREAD_SECTIONS and key != "train.seed")
        or key in UNREAD_KEYS
        or (key.startswith("augment.") and key.removeprefix("augment.") not in READ_OF_AUGMENT)
    ]


def _says_where(key: str) -> bool:
    """Whether a word for all stages goes to pretraining as well: where the data lies, and on what machine it runs.

    What may change the result is said to each: the rungs' epochs or share of labels are none of pretraining's.
    """
    return key.split(".")[0] in (*MACHINE_SECTIONS, "dry_run") or key in MACHINE_DATA_KEYS


def _words_of(stage: str, given: dict[str, str]) -> dict[str, str]:
    """Takes the words STAGE.KEY=VALUE out of `given`."""
    prefix = f"{stage}."
    own = {key.removeprefix(prefix): given.pop(key) for key in list(given) if key.startswith(prefix)}
    refused = {"out", "recipe"} | (set() if stage == PRETRAIN else {"train.seed"})
    for key in refused & own.keys():
        raise ConfigError(f"{prefix}{key}: the ladder sets it for every {'stage' if stage == PRETRAIN else 'rung'}")
    if stage != PRETRAIN and "dry_run" in own:
        raise ConfigError(f"{prefix}dry_run: write dry_run={own['dry_run']}, it is one plan of all stages")
    return own


def _section(schema: type[Any], name: str, tree: dict[str, Any], given: dict[str, str]) -> Any:
    """A section of the ladder's own: the file's values, then the words NAME.KEY=VALUE, which are taken out of `given`."""
    values = _leaves(tree.get(name) or {})
    values |= {key.removeprefix(f"{name}."): given.pop(key) for key in list(given) if key.startswith(f"{name}.")}
    try:
        return parse(schema, [f"{key}={value}" for key, value in values.items()])
    except ValueError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(f"{name}.") else f"{name}.{text}") from error


def is_ladder(words: Sequence[str]) -> bool:
    """Whether `recipe=` names a ladder: a file of recipes/ladders/, or any YAML file with a section `ladder`."""
    name = next((word.removeprefix("recipe=") for word in words if word.startswith("recipe=")), None)
    return name is not None and find_ladder(name) is not None


def ladder_names() -> list[str]:
    """Names of the shipped ladders."""
    return sorted(path.stem for path in _shipped().glob("*.yaml"))


def ladder_file(name: str) -> Path:
    """The file of a shipped ladder."""
    return _shipped() / f"{name}.yaml"


def find_ladder(name: str) -> Path | None:
    """A shipped ladder by its name, or a YAML file with a section `ladder` by its path."""
    if not name.endswith((".yaml", ".yml")):
        path = ladder_file(name)
        return path if path.is_file() else None
    path = Path(name)
    return path if path.is_file() and "ladder" in _read(path) else None


def _shipped() -> Path:
    """They have a folder of their own, because their files are no recipe of one run."""
    return find_file("recipes", "probe").parent / "ladders"


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must hold sections")
    return tree


def _split(word: str) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    if not equals or not key or key.startswith("-"):
        raise ConfigError(f"{word}: not of the form key=value")
    return key, value


def _leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """A nested recipe as words: {"optim.lr": "0.001"}; lists in YAML's inline form."""
    found: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= _leaves(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value)
    return found
