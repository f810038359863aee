"""The fine-tune ladder in one command: probe, last block, everything; each a run of its own, one table at the end.

    torchrun --nproc-per-node 8 train.py recipe=ladder weights=CKPT_OR_TIMM_NAME data.train=... data.val=...

`ladder.seeds=3` repeats every rung; `last_block.optim.lr=3e-4` sets a key of one rung; all other words go to every rung.
A ladder with a section `pretrain` makes its weights first. The same command again goes on where a stopped ladder stands,
in whichever stage that is.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitfw import checkpoint
from vitfw.config import Config, ConfigError, load
from vitfw.evaluate.ladder import RungResult, recommend, table
from vitfw.ladder_grid import check_kind, on_main, read_record, run_grid, without_steps
from vitfw.ladder_grid import plan_text as grid_plan_text
from vitfw.ladder_plan import (
    PRETRAIN,
    GridConfig,
    LadderConfig,
    Plan,
    is_ladder,
    ladder_file,
    ladder_names,
    read_plan,
    unread,
)
from vitfw.ladder_record import check_start, has_begun, read_score, scored, write_score
from vitfw.launch import Launch, check_launch, detect_launch, join_processes, set_threads
from vitfw.models.variants import ModelConfig, resolve
from vitfw.opened import evaluation_set, open_network
from vitfw.run import write_text

__all__ = [
    "GridConfig",
    "LadderConfig",
    "is_ladder",
    "ladder_file",
    "ladder_names",
    "read_plan",
    "read_results",
    "run_ladder",
    "write_summary",
]

FINISHED = 0
COMPARED = ("classify", "mae_probe")  # tasks whose network answers with the logits of one label an image

Train = Callable[[Config, Launch, list[str]], int]


def run_ladder(words: Sequence[str], train: Train) -> int:
    """Runs every stage, evaluates each rung, writes table, picture and recommendation. Returns the status.

    train: `vitfw.train.train`, one run. Everything that can be refused is refused before the first stage starts.
    """
    plan, launch = read_plan(words), detect_launch()
    configs = {stage: _load(plan, stage, plan.of(stage)) for stage in plan.words}
    first = configs[plan.ladder.rungs[0]]
    _check(plan, configs, launch)
    if first.dry_run:
        _say(launch, _dry_run(plan, configs, launch))
        return FINISHED
    set_threads(launch, first.machine)
    join_processes(launch, first.machine)
    on_main(launch, lambda: _rehearse(plan, configs, launch))
    if all(config.weights is None for config in configs.values()) and not plan.pretrains:
        _say(launch, "warning: no weights= is given: the lower rungs read an untrained encoder")
    if plan.pretrains:
        own = plan.of(PRETRAIN)
        _say(launch, f"\nladder: pretraining, recipe {configs[PRETRAIN].recipe}, in {configs[PRETRAIN].folder}")
        if (status := train(load(own), launch, own)) != FINISHED:
            return status
    results, start = [], first.train.seed or 0
    for seed in range(start, start + plan.ladder.seeds):
        for rung in plan.ladder.rungs:
            status, config = _run_rung(plan, launch, train, rung, seed)
            if status != FINISHED:
                return status
            results.append(_result(plan, config, launch, rung, seed))
    if launch.is_main:
        weights = str(plan.weights) if plan.pretrains else first.weights
        print(write_summary(plan, results, weights=weights), flush=True)
    return FINISHED


def _run_rung(plan: Plan, launch: Launch, train: Train, rung: str, seed: int) -> tuple[int, Config]:
    """(status, what it ran with) of one rung with one seed."""
    first = plan.ladder.rungs[0]
    carried = plan.ladder.carry_head and rung != first
    words = plan.of(rung, seed, carried=plan.folder(first, seed) / "checkpoints" / checkpoint.LAST if carried else None)
    config = _load(plan, rung, words)
    on_main(launch, lambda: check_start(plan.out, config))
    _say(launch, f"\nladder: rung {rung}, seed {seed}, in {config.folder}")
    if not plan.is_grid(config):
        return train(config, launch, words), config
    if left := unread(plan.given):
        _say(
            launch,
            f"note: rung {rung} chooses its head on stored features; the other rungs alone read {' '.join(left)}",
        )
    # the other rungs take a carried head as their own, so it must read what theirs read
    either = config.model.pool is None and not plan.ladder.carry_head
    return run_grid(config, launch, words, plan.grid, out=plan.out, either=either), config


def _load(plan: Plan, stage: str, words: list[str]) -> Config:
    """The configuration of a stage; a mistake in a word that was said to it alone is named as it was written."""
    try:
        return load(words)
    except ConfigError as error:
        if any(str(error).startswith((f"{key}:", f"{key}=")) for key in plan.own[stage]):
            raise ConfigError(f"{stage}.{error}") from error
        raise


def _check(plan: Plan, configs: dict[str, Config], launch: Launch) -> None:
    """Refuses what can be refused without opening data. Raises ValueError."""
    for stage, config in configs.items():
        check_launch(launch, config.machine)
        if stage == PRETRAIN:
            continue
        if config.data.val is None and not config.dry_run:  # a plan needs no data
            raise ConfigError("data.val is not given: a ladder compares its rungs on it")
        if config.task.name not in COMPARED:
            raise ConfigError(
                f"task.name={config.task.name}: a ladder compares top-1 accuracies; use task.name=classify"
            )
        if plan.is_grid(config) and (left := unread(plan.own[stage])):
            raise ConfigError(
                f"{stage}.{left[0]}: the rung {stage} chooses its head on stored features and does not read it; set "
                "grid.KEY (rates, epochs, batch, ...), or train it as a run with ladder.probe=train"
            )
    if plan.ladder.carry_head:
        first, *others = plan.ladder.rungs
        for rung in others:
            _check_carried(first, configs[first].model, rung, configs[rung].model)


def _check_carried(first: str, below: ModelConfig, rung: str, above: ModelConfig) -> None:
    """Refuses to carry a head to a rung where it would read another vector than it was trained on."""
    if below.variant.startswith("timm:") or above.variant.startswith("timm:"):
        return
    mine, theirs = resolve(below), resolve(above)
    for key in ("pool", "final_norm", "pre_head"):
        if getattr(mine, key) != getattr(theirs, key):
            raise ConfigError(
                f"ladder.carry_head=true: the head of {first} is trained with model.{key}={getattr(mine, key)}, and {rung} "
                f"has model.{key}={getattr(theirs, key)}; make them equal, or let each rung begin with a head of its own"
            )


def _rehearse(plan: Plan, configs: dict[str, Config], launch: Launch) -> None:
    """Prepares every stage, so that a mistake in a late one is known before the first starts. Rank 0 only.

    Where pretraining has not been done, the rungs load its network as it will begin: names and shapes are the same.
    """
    from vitfw.models.export import export
    from vitfw.prepare import prepare

    start = configs[plan.ladder.rungs[0]].train.seed or 0
    folders = [
        plan.folder(rung, seed) for seed in range(start, start + plan.ladder.seeds) for rung in plan.ladder.rungs
    ]
    if plan.pretrains and not plan.weights.exists() and (begun := [str(one) for one in folders if has_begun(one)]):
        raise ConfigError(
            f"{plan.weights} is gone, and there are rungs that started from it: remove {', '.join(begun)} as well, or "
            "choose another out="
        )
    with tempfile.TemporaryDirectory() as folder:
        if plan.pretrains:
            config = configs[PRETRAIN]
            prepared = prepare(
                replace(_alone(config), train=replace(config.train, seed=config.train.seed or 0)), launch
            )
            export(prepared.task.network, folder, preprocessing=prepared.preprocessing, format="vitfw")
        for rung in plan.ladder.rungs:
            config = configs[rung]
            if plan.is_grid(config):
                config = without_steps(config, launch)
            weights = folder if plan.pretrains else config.weights
            prepare(replace(_alone(config), train=replace(config.train, seed=start), weights=weights), launch)
            for seed in range(start, start + plan.ladder.seeds):
                if config.freeze.rung == "probe":
                    check_kind(plan.folder(rung, seed), grid=plan.is_grid(config))


def _alone(config: Config) -> Config:
    """For a rehearsal on rank 0: a sharded start would send weights to ranks that are not there to take them."""
    return replace(config, machine=replace(config.machine, strategy="ddp"))


def _dry_run(plan: Plan, configs: dict[str, Config], launch: Launch) -> str:
    from vitfw.plan import plan_text

    parts = []
    for stage in [PRETRAIN] * plan.pretrains + list(plan.ladder.rungs):
        config, later = configs[stage], plan.pretrains and stage != PRETRAIN
        text = (
            grid_plan_text(config, plan.grid)
            if plan.is_grid(config)
            else plan_text(config, launch, weights_later=later)
        )
        parts.append(f"#### {stage} (recipe {config.recipe})\n\n{text}")
    return "\n\n".join(parts)


def write_summary(plan: Plan, results: Sequence[RungResult], *, weights: str | None) -> str:
    """Writes ladder.json, ladder.md and ladder.png into the ladder's folder; returns the text to show."""
    text = table(results)
    advice = recommend(results) if len(plan.ladder.rungs) > 1 else None
    notes = f"Weights: {weights or 'none, a random network'}. Every rung is scored with its last weights on data.val, "
    notes += "which no rung used to choose anything."
    first = {result.rung: result for result in reversed(results)}
    protocols = "\n".join(f"- {rung}: {first[rung].protocol}" for rung in plan.ladder.rungs)
    parts = [text, notes, protocols, *([advice.text] if advice else [])]
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


def _result(plan: Plan, config: Config, launch: Launch, rung: str, seed: int) -> RungResult:
    """Scores a finished rung, or reads what a former start of the ladder found. Entered by all ranks."""
    now = on_main(launch, lambda: scored(config))
    stored = on_main(launch, lambda: read_score(config.folder, now))
    if stored is not None:
        return stored
    result = _measure(config, launch, rung, seed, grid=plan.is_grid(config))
    if launch.is_main:
        write_score(config.folder, now, result)
    return result


def _measure(config: Config, launch: Launch, rung: str, seed: int, *, grid: bool) -> RungResult:
    from vitfw.evaluate.scores import classification_scores

    place = config.folder / "checkpoints" / checkpoint.LAST
    opened = open_network(str(place), launch, config.machine)
    predictions = evaluation_set(opened, config.data, config.machine, launch, split="val").predict()
    return RungResult(
        rung=rung,
        seed=seed,
        scores=classification_scores(predictions.logits, predictions.labels),
        parameters=sum(parameter.numel() for parameter in opened.network.parameters()),
        **(_grid_cost(config.folder) if grid else _training_cost(config, place)),
    )


def _grid_cost(folder: Path) -> dict[str, Any]:
    record = read_record(folder)
    return {
        "trainable": record["trainable"],
        "training_bytes": record["training_bytes"],
        "images_per_second": record["images"] / max(record["feature_seconds"], 1e-9),
        "seconds": record["feature_seconds"] + record["grid_seconds"],
        "protocol": record["protocol"],
    }


def _training_cost(config: Config, place: Path) -> dict[str, Any]:
    from vitfw.report.recorder import read_metrics

    state = checkpoint.load(place)
    trained = list(state["optimizer"])
    speed = read_metrics(config.folder, "train")[-1]["images_per_second"]
    return {
        "trainable": sum(state["model"][name].numel() for name in trained),
        "training_bytes": sum(_bytes_of(state["model"][name], state["optimizer"][name]) for name in trained),
        "images_per_second": speed,
        "seconds": state["progress"]["images"] / speed,
        "protocol": f"recipe {config.recipe}, trained for {state['progress']['step']:,} steps; nothing is chosen",
    }


def _bytes_of(parameter: Any, state: dict[str, Any]) -> int:
    """Weight, gradient and the optimiser's own tensors of one parameter (see `freezing.training_bytes`)."""
    own = 2 * parameter.numel() * parameter.element_size()
    tensors = [value for value in state.values() if hasattr(value, "ndim") and value.ndim > 0]
    return own + sum(value.numel() * value.element_size() for value in tensors)


def _say(launch: Launch, text: str) -> None:
    if launch.is_main:
        print(text, flush=True)
