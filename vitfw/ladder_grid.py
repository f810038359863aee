"""The probe rung as the best of a grid: features are computed once, heads for every rate are trained on them at once.

The head is chosen on images held out of data.train, folded with its standardisation into one linear layer, and saved as a
run's checkpoint: what comes after (scoring, a carried head, export) treats it like that of any rung. All ranks share the
feature pass, each with the whole network; the grid is small and runs on rank 0.
"""

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from vitfw import checkpoint
from vitfw.config import Config, ConfigError
from vitfw.evaluate.features import Features
from vitfw.evaluate.head import folded, head_layers, own_pools, put_head
from vitfw.evaluate.holdout import split_training
from vitfw.evaluate.probe import ProbeResult, probe
from vitfw.ladder_plan import GridConfig
from vitfw.launch import Launch, broadcast, device_of
from vitfw.models.export import export_checkpoint
from vitfw.opened import Opened, evaluation_set
from vitfw.optim import OptimConfig
from vitfw.preempt import MARKER, Answer, StoppedError, StopRequest, mark_stopped
from vitfw.prepare import Prepared, prepare
from vitfw.probe_command import features_of
from vitfw.run import Run, log_to, mark_finished, open_run, package_versions, run_config, write_text
from vitfw.schedules import TrainConfig

READ = ("model", "load", "freeze", "task", "data", "augment")  # sections that may change the result
RECORD = "grid.json"
FINISHED, STOPPED = 0, 75

T = TypeVar("T")


@dataclass(frozen=True)
class GridRun:
    """A grid rung being run."""

    config: Config
    launch: Launch
    grid: GridConfig
    prepared: Prepared
    run: Run
    either: bool  # both pools, cls and mean, may win


def run_grid(config: Config, launch: Launch, words: list[str], grid: GridConfig, *, out: Path, either: bool) -> int:
    """Runs the rung in `config.folder`, with stored features in `out`, and returns the exit status. Entered by all ranks.

    A stopped pass over the images begins again; stored features are read again, whoever made them.
    """
    prepared = prepare(without_steps(config, launch), launch)
    part = run_config(config.recipe_part(), prepared.seed)
    recipe = {name: part[name] for name in READ} | {"weights": config.weights, "train": {"seed": prepared.seed}}
    recipe["grid"] = _plain(grid)
    run = on_main(launch, lambda: _open(config, prepared, recipe, words))
    if run.finished:
        on_main(launch, lambda: _export(run))
        return FINISHED
    this = GridRun(config, launch, grid, prepared, run, either)
    stop = StopRequest(config.machine.stop_signal, wall_minutes=config.machine.wall_minutes)
    stop.install()
    try:
        with log_to(run.folder / "log.txt") if launch.is_main else contextlib.nullcontext():
            on_main(launch, lambda: (run.folder / MARKER).unlink(missing_ok=True))
            features = _features(this, stop, out / "features")
            on_main(launch, lambda: _choose(this, features, recipe))
            answers = [stop.agreed() for _ in range(2)]  # a signal since then: the answer comes one call later
            if Answer.STOP not in answers:
                return FINISHED
    except StoppedError:
        if launch.is_main:
            print("stopped in the feature pass: start the same command again to do it anew", flush=True)
    finally:
        stop.uninstall()
    on_main(launch, lambda: mark_stopped(run.folder, 0))
    return STOPPED


def without_steps(config: Config, launch: Launch) -> Config:
    """The configuration with the shortest training there is: nothing is refused for a batch or schedule that is not used.
    Every rank has the whole network, for it reads images of its own."""
    train = TrainConfig(epochs=1, global_batch=launch.world, seed=config.train.seed)
    machine = replace(config.machine, strategy="auto", shard_size=0)
    return replace(config, train=train, optim=OptimConfig(lr=1.0, schedule="constant"), machine=machine)


def read_record(folder: Path) -> dict[str, Any]:
    """What a finished grid rung's folder says: protocol, chosen, table, trainable, training_bytes, images, and seconds of
    the feature pass and of the grid."""
    return json.loads((folder / RECORD).read_text(encoding="utf-8"))


def check_kind(folder: Path, *, grid: bool) -> None:
    """Raises ConfigError where the folder holds a probe of the other kind than is asked for now."""
    file = folder / "config.yaml"
    if not file.exists():
        return
    stored = yaml.safe_load(file.read_text(encoding="utf-8"))
    was = isinstance(stored, dict) and "grid" in stored
    if was != grid:
        kinds = {True: "a probe chosen from a grid (ladder.probe=grid)", False: "a trained probe (ladder.probe=train)"}
        raise ConfigError(f"{folder} holds {kinds[was]}, now {kinds[grid]} is asked for; choose another out=")


def plan_text(config: Config, grid: GridConfig) -> str:
    """The rung in a dry run."""
    return (
        f"features of data.train={config.data.train or 'not given'} in the evaluation view, once; then a head for each of "
        f"{len(grid.rates)} rates from {min(grid.rates):g} to {max(grid.rates):g} per 256 images on each pool that the "
        f"network's own head can read, {grid.epochs:g} passes, {grid.least_steps:,} steps or more; chosen on "
        f"{100 * grid.holdout:g} % of data.train (at least {grid.holdout_least}), which are held out. "
        "Its steps, batches and augmentation are those of section grid; ladder.probe=train trains it as a run."
    )


def on_main(launch: Launch, call: Callable[[], T]) -> T:
    """The result of `call` on rank 0, for all ranks; its ValueError or OSError is raised on all of them."""
    result: Any = None
    error: ValueError | OSError | None = None
    if launch.is_main:
        try:
            result = call()
        except (ValueError, OSError) as caught:
            error = caught
    result, error = broadcast((result, error))
    if error is not None:
        raise error
    return result


def _open(config: Config, prepared: Prepared, recipe: dict[str, Any], words: list[str]) -> Run:
    sets = {"train": prepared.train_set, "val": prepared.val_set}
    known = config.default_part()
    return open_run(
        config.folder,
        recipe,
        defaults={name: known[name] for name in READ} | {"grid": _plain(GridConfig())},
        words=words,
        machine=asdict(config.machine),
        seed=prepared.seed,
        data={split: None if samples is None else samples.fingerprint() for split, samples in sets.items()},
        resume=config.resume,
    )


def _plain(grid: GridConfig) -> dict[str, Any]:
    """With lists for tuples, as a YAML file gives them back."""
    return json.loads(json.dumps(asdict(grid)))


def _features(this: GridRun, stop: StopRequest, folder: Path) -> Features:
    config, prepared, report = this.config, this.prepared, this.prepared.load_report
    device = device_of(this.launch, config.machine)
    place, entry = ("a random network", f"seed {prepared.seed}") if report is None else (report.place, report.entry)
    network = prepared.task.network.to(device).eval()
    opened = Opened(network, prepared.task.num_classes or 0, prepared.preprocessing, place, entry, device)
    found = evaluation_set(opened, config.data, config.machine, this.launch, samples=prepared.train_set)
    views, name = [stop.watch(found.loader)], "data.train"
    return features_of(
        opened, found, config.data, config.machine, folder=folder, views=views, view="evaluation", name=name, blocks=1
    )


def _choose(this: GridRun, features: Features, recipe: dict[str, Any]) -> None:
    """Trains the grid, chooses, and writes the rung's checkpoint, export and record. Rank 0 only."""
    started, grid, run, task = time.perf_counter(), this.grid, this.run, this.prepared.task
    network, seed = task.network, this.prepared.seed
    split = split_training(features.labels, share=grid.holdout, least=grid.holdout_least, seed=seed)
    pools = own_pools(network, either=this.either)
    classes = task.num_classes or 0
    device = device_of(this.launch, this.config.machine)
    found = probe(features, split, grid.probe(pools, seed=seed), num_classes=classes, device=device)
    put_head(network, *folded(found.heads))
    _save(this, recipe, found)
    heads, parameters = len(found.table), [p for layer in head_layers(network) for p in layer.parameters()]
    record = {
        "run_id": run.run_id,
        "protocol": found.protocol,
        "chosen": dict(found.chosen),
        "table": [dict(row) for row in found.table],
        "trainable": sum(parameter.numel() for parameter in parameters),
        # weight, gradient and SGD's velocity of all heads at once
        "training_bytes": heads * 3 * sum(p.numel() * p.element_size() for p in head_layers(network)[0].parameters()),
        "images": len(features.labels),
        "feature_seconds": features.seconds,
        "grid_seconds": time.perf_counter() - started,
    }
    write_text(run.folder / RECORD, json.dumps(record, indent=2) + "\n")
    mark_finished(run, {"held_out/acc1": float(found.chosen["held_score"])})
    print(f"{found.protocol}\nrun folder: {run.folder}", flush=True)


def _save(this: GridRun, recipe: dict[str, Any], found: ProbeResult) -> None:
    """The checkpoint at step 0 of a run, whose `model` section reads the pool that won, and its export."""
    run, pool = this.run, str(found.chosen["feature"]).split("/")[0]
    section = recipe["model"]
    if pool != "pooled":  # the network's own pool, by the names of `model.pool`
        section = section | {"pool": {"cls": "cls", "mean": "gap"}[pool]}
    state = {
        "model": {name: value.detach().cpu() for name, value in this.prepared.task.state_dict().items()},
        "optimizer": {},
        "ema": None,
        "guard": None,
        "preprocessing": dict(this.prepared.preprocessing.plain()),
    }
    text = yaml.safe_dump(recipe | {"model": section}, sort_keys=False)
    progress = checkpoint.Progress(attempt=run.attempt)
    checkpoint.save(run.checkpoints, state, progress, config=text, versions=package_versions())
    _export(run)


def _export(run: Run) -> None:
    """The folder of weights, where it is not whole."""
    if not all((run.export / name).exists() for name in ("model.safetensors", "config.json")):
        export_checkpoint(run.checkpoints / checkpoint.LAST, run.export, which="raw")
