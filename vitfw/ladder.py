"""The fine-tune ladder in one command: probe, last block, everything; each a run of its own, one table at the end.

    torchrun --nproc-per-node 8 train.py recipe=ladder weights=CKPT_OR_TIMM_NAME data.train=... data.val=...

`ladder.seeds=3` repeats every rung; `probe.optim.lr=3e-3` sets a key of one rung; all other words go to every rung. The
same command again goes on where a stopped ladder stands, in whichever rung that is.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from vitfw import checkpoint
from vitfw.config import Config, ConfigError, find_file, load
from vitfw.evaluate.ladder import RungResult, recommend, table
from vitfw.launch import Launch, broadcast, check_launch, detect_launch, join_processes, set_threads
from vitfw.opened import evaluation_set, open_network, parse
from vitfw.run import write_text

FINISHED = 0


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

    def __post_init__(self) -> None:
        if not self.rungs or len(set(self.rungs)) < len(self.rungs):
            raise ValueError(f"ladder.rungs={list(self.rungs)}: one or more rungs, each once")
        if self.seeds < 1:
            raise ValueError(f"ladder.seeds={self.seeds}: must be 1 or more")


@dataclass(frozen=True)
class Plan:
    """ladder; out: the one folder of all runs; words: what each rung's own run is started with."""

    ladder: LadderConfig
    out: Path
    words: dict[str, dict[str, str]]

    def of(self, rung: str, seed: int | None = None, *, carried: Path | None = None) -> list[str]:
        """The words of one run (without a seed: those of it alone). `carried`: the checkpoint it starts from."""
        own = self.words[rung]
        if carried is not None:  # what was said of loading was said of the other file
            own = {key: value for key, value in own.items() if not key.startswith("load.")}
            own |= {"weights": str(carried), "load.head": "keep"}
        if seed is not None:
            own = own | {"out": str(self.folder(rung, seed)), "train.seed": str(seed)}
        return [f"{key}={value}" for key, value in own.items()]

    def folder(self, rung: str, seed: int) -> Path:
        return self.out / f"{rung}-seed{seed}"


def is_ladder(words: Sequence[str]) -> bool:
    """Whether `recipe=` names a ladder: a file of recipes/ladders/, or any YAML file with a section `ladder`."""
    name = next((word.removeprefix("recipe=") for word in words if word.startswith("recipe=")), None)
    return name is not None and _find(name) is not None


def read_plan(words: Sequence[str]) -> Plan:
    """Recipe and words -> the plan. Raises ConfigError naming the word and what would be right."""
    given = dict(_split(word) for word in words)
    name = given.pop("recipe")
    path = _find(name)
    if path is None:
        raise ConfigError(f"recipe={name}: no such ladder; ladders: {', '.join(ladder_names())}")
    tree = _read(path)
    settings = tree.pop("ladder")
    shared = _leaves(tree.pop("shared", {}))
    for rung, content in tree.items():
        if not isinstance(content, dict) or "recipe" not in content:
            raise ConfigError(f"recipe {name}: {rung} must be a rung that names its recipe, such as {{recipe: probe}}")
    own = {key: given.pop(key) for key in list(given) if key.startswith("ladder.")}
    ladder = _ladder(settings, own, list(tree))
    out = Path(given.pop("out", f"runs/{Path(name).stem}"))
    by_rung: dict[str, dict[str, str]] = {}
    for rung in tree:  # words of a rung that does not run are checked as well: they may be a slip
        prefix = f"{rung}."
        by_rung[rung] = {key.removeprefix(prefix): given.pop(key) for key in list(given) if key.startswith(prefix)}
        refused = {"out", "train.seed", "recipe"} & by_rung[rung].keys()
        if refused:
            raise ConfigError(f"{rung}.{min(refused)}: the ladder sets it for every rung")
    for rung in by_rung.keys() - set(ladder.rungs):
        if by_rung[rung]:
            raise ConfigError(
                f"{rung}.{next(iter(by_rung[rung]))}: {rung} is not among ladder.rungs={list(ladder.rungs)}"
            )
    words_of = {rung: shared | _leaves(tree[rung]) | given | by_rung[rung] for rung in ladder.rungs}
    return Plan(ladder, out, words_of)


def run_ladder(words: Sequence[str], train: Callable[[Config, Launch, list[str]], int]) -> int:
    """Runs every rung with every seed, evaluates each, writes table, picture and recommendation. Returns the status.

    train: `vitfw.train.train`, one run. Everything that can be refused is refused before the first rung starts.
    """
    from vitfw.plan import plan_text
    from vitfw.prepare import prepare

    plan, launch = read_plan(words), detect_launch()
    rungs = plan.ladder.rungs
    configs = {rung: load(plan.of(rung)) for rung in rungs}
    start = configs[rungs[0]].train.seed or 0
    for config in configs.values():
        check_launch(launch, config.machine)
        if config.data.val is None:
            raise ConfigError("data.val is not given: a ladder compares its rungs on it")
        if config.task.name != "classify":
            raise ConfigError(
                f"task.name={config.task.name}: a ladder compares top-1 accuracies; use task.name=classify"
            )
        if config.dry_run:
            print(plan_text(config, launch))
    if configs[rungs[0]].dry_run:
        return FINISHED
    set_threads(launch, configs[rungs[0]].machine)
    join_processes(launch, configs[rungs[0]].machine)
    for config in configs.values():
        prepare(replace(config, train=replace(config.train, seed=start)), launch)
    if all(config.weights is None for config in configs.values()):
        _say(launch, "warning: no weights= is given: the lower rungs read an untrained encoder")
    results = []
    for seed in range(start, start + plan.ladder.seeds):
        for rung in rungs:
            carried = plan.ladder.carry_head and rung != rungs[0]
            head = plan.folder(rungs[0], seed) / "checkpoints" / checkpoint.LAST if carried else None
            own = plan.of(rung, seed, carried=head)
            config = load(own)
            _say(launch, f"\nladder: rung {rung}, seed {seed}, in {config.folder}")
            status = train(config, launch, own)
            if status != FINISHED:
                return status
            results.append(_result(config, launch, rung, seed))
    if launch.is_main:
        print(write_summary(plan, results, weights=configs[rungs[0]].weights), flush=True)
    return FINISHED


def write_summary(plan: Plan, results: Sequence[RungResult], *, weights: str | None) -> str:
    """Writes ladder.json, ladder.md and ladder.png into the ladder's folder; returns the text to show."""
    text = table(results)
    advice = recommend(results) if len(plan.ladder.rungs) > 1 else None
    notes = f"Weights: {weights or 'none, a random network'}. Every rung is scored with its last weights on data.val, "
    notes += "which no rung used to choose anything."
    parts = [text, notes, *([advice.text] if advice else [])]
    write_text(plan.out / "ladder.md", "\n\n".join(parts) + "\n")
    record: dict[str, Any] = {
        "weights": weights,
        "results": [result.plain() for result in results],
        "recommendation": None if advice is None else {"rung": advice.rung, "text": advice.text},
    }
    write_text(plan.out / "ladder.json", json.dumps(record, indent=2) + "\n")
    if advice is not None:
        from vitfw.report.ladder_plot import plot_ladder

        plot_ladder(
            results, plan.out / "ladder.png", title=f"fine-tune ladder: {plan.out.name}", recommended=advice.rung
        )
    return "\n\n".join(["", *parts, f"ladder folder: {plan.out}"])


def read_results(out: Path) -> list[RungResult]:
    """The results in a finished ladder's folder."""
    return [RungResult(**entry) for entry in json.loads((out / "ladder.json").read_text(encoding="utf-8"))["results"]]


def _result(config: Config, launch: Launch, rung: str, seed: int) -> RungResult:
    """Scores a finished rung, or reads what a former start of the ladder found. Entered by all ranks."""
    file, run_id = config.folder / "rung.json", _run_id(config.folder)
    stored = None
    if launch.is_main and file.exists():
        content = json.loads(file.read_text(encoding="utf-8"))
        stored = content["result"] if content["run_id"] == run_id else None
    if (stored := broadcast(stored)) is not None:
        return RungResult(**stored)
    result = _measure(config, launch, rung, seed)
    if launch.is_main:
        write_text(file, json.dumps({"run_id": run_id, "result": result.plain()}, indent=2) + "\n")
    return result


def _measure(config: Config, launch: Launch, rung: str, seed: int) -> RungResult:
    from vitfw.evaluate.scores import classification_scores
    from vitfw.report.recorder import read_metrics

    place = config.folder / "checkpoints" / checkpoint.LAST
    opened = open_network(str(place), launch, config.machine)
    predictions = evaluation_set(opened, config.data, config.machine, launch, split="val").predict()
    state = checkpoint.load(place)
    trained = list(state["optimizer"])
    training_bytes = sum(_bytes_of(state["model"][name], state["optimizer"][name]) for name in trained)
    speed = read_metrics(config.folder, "train")[-1]["images_per_second"]
    return RungResult(
        rung=rung,
        seed=seed,
        scores=classification_scores(predictions.logits, predictions.labels),
        trainable=sum(state["model"][name].numel() for name in trained),
        parameters=sum(parameter.numel() for parameter in opened.network.parameters()),
        training_bytes=training_bytes,
        images_per_second=speed,
        seconds=state["progress"]["images"] / speed,
    )


def _bytes_of(parameter: Any, state: dict[str, Any]) -> int:
    """Weight, gradient and the optimiser's own tensors of one parameter (see `freezing.training_bytes`)."""
    own = 2 * parameter.numel() * parameter.element_size()
    tensors = [value for value in state.values() if hasattr(value, "ndim") and value.ndim > 0]
    return own + sum(value.numel() * value.element_size() for value in tensors)


def _run_id(folder: Path) -> str:
    return json.loads((folder / "provenance.json").read_text(encoding="utf-8"))["run_id"]


def _ladder(settings: Any, own: dict[str, str], rungs: list[str]) -> LadderConfig:
    given = _leaves(settings or {}) | {key.removeprefix("ladder."): value for key, value in own.items()}
    try:
        ladder = parse(LadderConfig, [f"{key}={value}" for key, value in given.items()])
    except ValueError as error:
        text = str(error)
        raise ConfigError(text if text.startswith("ladder.") else f"ladder.{text}") from error
    unknown = [rung for rung in ladder.rungs if rung not in rungs]
    if unknown:
        raise ConfigError(f"ladder.rungs: the recipe has no {', '.join(unknown)}; it has {', '.join(rungs)}")
    return ladder


def ladder_names() -> list[str]:
    """Names of the shipped ladders."""
    return sorted(path.stem for path in _shipped().glob("*.yaml"))


def ladder_file(name: str) -> Path:
    """The file of a shipped ladder."""
    return _shipped() / f"{name}.yaml"


def _shipped() -> Path:
    """They have a folder of their own, because their files are no recipe of one run."""
    return find_file("recipes", "probe").parent / "ladders"


def _find(name: str) -> Path | None:
    if not name.endswith((".yaml", ".yml")):
        path = ladder_file(name)
        return path if path.is_file() else None
    path = Path(name)
    return path if path.is_file() and "ladder" in _read(path) else None


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


def _say(launch: Launch, text: str) -> None:
    if launch.is_main:
        print(text, flush=True)
