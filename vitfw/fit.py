"""Joins the prepared parts to loaders, module and trainer, at the place where the run stands."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from vitfw import checkpoint
from vitfw.after_step import AfterStep, newest_checkpoint
from vitfw.config import Config
from vitfw.data.augment import eval_transform
from vitfw.data.index import shuffled_rows
from vitfw.data.loader import Loader, build_eval_loader, build_train_loader
from vitfw.evaluate.short_tune import short_tune
from vitfw.launch import Launch, MachineConfig, broadcast, on_any, uses_gpu
from vitfw.models.export import export_checkpoint
from vitfw.models.variants import input_size
from vitfw.module import Module
from vitfw.parallel import place
from vitfw.preempt import MARKER, StopRequest, mark_stopped
from vitfw.prepare import Prepared
from vitfw.report.dashboard import Dashboard, start_wandb
from vitfw.report.progress import ProgressDisplay
from vitfw.report.reconstruct import save_training_panel
from vitfw.report.recorder import Recorder
from vitfw.run import Run
from vitfw.seeding import derive
from vitfw.tasks.mae import MaeTask
from vitfw.tasks.task import Batch, Monitor
from vitfw.trainer import Trainer, build_trainer

Watch = Callable[[Iterable[Batch]], Iterator[Batch]]


class RestOfRun:
    """The micro-batches from where the run stands to its end, over all epochs: what the Trainer takes for one epoch."""

    def __init__(self, loader: Loader, micro_batches: int) -> None:
        self.loader, self.micro_batches = loader, micro_batches

    def __len__(self) -> int:
        return self.micro_batches

    def __iter__(self) -> Iterator[Batch]:
        return self.loader.run(self.micro_batches)


@dataclass(frozen=True)
class Fit:
    """A run ready to go on from `after_step.progress`."""

    trainer: Trainer
    module: Module
    loader: RestOfRun
    eval_loader: Loader | None
    after_step: AfterStep

    @property
    def progress(self) -> checkpoint.Progress:
        return self.after_step.progress

    def run(self) -> bool:
        """Trains to the end (True), or until a stop was asked for (False). A stop that came from outside leaves a marker in
        the run folder for the launcher, until the next start."""
        after_step, stop, is_main = self.after_step, self.after_step.stop, self.trainer.is_global_zero
        if is_main:
            (after_step.run.folder / MARKER).unlink(missing_ok=True)
        limit = after_step.stop_after
        if limit is not None and limit <= self.progress.step and len(self.loader):
            after_step.stopped = True  # it stands there already
        if on_any(stop.signal is not None):
            after_step.stopped = stop.agreed_to_stop = True  # nothing was done that must be saved
        try:
            if (len(self.loader) or after_step.evaluation_pending) and not after_step.stopped:
                with warnings.catch_warnings():  # Lightning looks for srun although it was told how the run was started
                    warnings.filterwarnings("ignore", message=".*`srun` command is available")
                    # frozen parts are in evaluation mode on purpose
                    warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode")
                    # no step is left where the last evaluation is made up for
                    warnings.filterwarnings("ignore", message="Total length of .* across ranks is zero")
                    self.trainer.fit(self.module, self.loader)
        except BaseException:
            after_step.recorder.close(status=1)
            raise
        after_step.recorder.close(status=0)
        if after_step.stopped and is_main and stop.agreed_to_stop:
            mark_stopped(after_step.run.folder, self.progress.step)
        broadcast(None)  # a launcher may end the others as soon as one leaves: all leave when everything is written
        return not after_step.stopped

    def export(self) -> Path:
        return export_run(self.after_step.run, self.module.task.monitor, self.progress)


def export_run(run: Run, monitor: Monitor, progress: checkpoint.Progress) -> Path:
    """The network with its best weights (by the task's monitor; the last ones without evaluation) as a timm folder."""
    split = best_split(monitor, progress)
    file = checkpoint.LAST if split is None else checkpoint.best_name(split)
    which = "ema" if split == "val_ema" else "raw"
    if not (run.checkpoints / file).exists():
        print(f"note: {run.checkpoints / file} is gone; the last weights are exported instead", flush=True)
        file = checkpoint.LAST
    return export_checkpoint(run.checkpoints / file, run.export, which=which).folder


def best_split(monitor: Monitor, progress: checkpoint.Progress) -> str | None:
    """`val` or `val_ema`, whichever weights scored better in the run; None where nothing was evaluated."""
    best: str | None = None
    for split in ("val", "val_ema"):
        value = progress.best.get(f"{split}/{monitor.name}")
        if value is not None and monitor.better(value, progress.best.get(f"{best}/{monitor.name}") if best else None):
            best = split
    return best


def build_fit(
    config: Config, launch: Launch, run: Run, prepared: Prepared, *, stop: StopRequest, config_text: str
) -> Fit:
    """Finds where the run stands and builds everything from there. Called on all ranks."""
    found = newest_checkpoint(run.checkpoints, is_main=launch.is_main)
    state = checkpoint.load(found[0], pieces=True) if found else None
    progress = found[1] if found else checkpoint.Progress()
    if found is None and run.attempt > 0 and launch.is_main and (run.folder / "metrics.jsonl").exists():
        print(
            f"note: {run.checkpoints} holds no checkpoint, although this run has begun before: from the beginning again"
        )
    length, machine = prepared.length, config.machine
    size, channels = input_size(config.model), config.model.in_channels
    shared = {"data": config.data, "workers": "auto" if machine.workers < 0 else machine.workers}
    shared |= {"local_world": launch.local_world, "channels": channels, "image_size": max(size)}
    shared |= {"pin_memory": uses_gpu(machine), "folder": run.folder}
    loader = build_train_loader(prepared.train_set, prepared.transform, order=prepared.order, **shared)
    epoch, step = divmod(progress.step, length.steps_per_epoch)
    loader.seek(epoch=epoch, images=step * length.global_batch)
    scoring = {
        "transform": eval_transform(config.augment, size=size, channels=channels),
        "batch": machine.eval_images_per_device or 2 * machine.images_per_device,
        "rank": launch.rank,
        "world": launch.world,
        **shared,
    }
    eval_loader = None if prepared.val_set is None else build_eval_loader(prepared.val_set, **scoring)
    clean_loader = None
    if config.eval.train_images:
        rows = shuffled_rows(len(prepared.train_set), derive(prepared.seed, "clean"))[: config.eval.train_images]
        clean_loader = build_eval_loader(prepared.train_set.select(rows), **scoring)
    module = Module(
        prepared.task,
        prepared.augment,
        optim=config.optim,
        length=length,
        ema=config.ema,
        guard=config.guard,
        seed=prepared.seed,
        accumulation=prepared.accumulation,
        rank=launch.rank,
        world=launch.world,
        place=partial(place, machine=machine, launch=launch),
    )
    after_step = AfterStep(
        run,
        log=config.log,
        evaluation=config.eval,
        machine=machine,
        length=length,
        progress=progress,
        resume_from=state,
        eval_loader=eval_loader,
        recorder=_recorder(config, launch, run),
        display=ProgressDisplay(config.log, length, start_step=progress.step, show=launch.is_main),
        config_text=config_text,
        preprocessing=prepared.preprocessing.plain(),
        stop_after=config.stop_after,
        stop=stop,
        key_of=prepared.train_set.key,
        look=_panels(prepared, run, launch),
        tune=_short_tune(prepared, machine, {**scoring, "data": replace(config.data, trace=False), "folder": None}),
        clean_loader=clean_loader,
    )
    rest = RestOfRun(loader, (length.total_steps - progress.step) * prepared.accumulation)
    trainer = build_trainer(machine, launch, accumulation=prepared.accumulation, callbacks=[after_step])
    return Fit(trainer, module, rest, eval_loader, after_step)


def _panels(prepared: Prepared, run: Run, launch: Launch) -> Callable[[Batch, int], None] | None:
    """For a masked autoencoder, pictures of the same images through training, in `panels/`."""
    if not isinstance(prepared.task, MaeTask):
        return None
    folder = run.folder / "panels" if launch.is_main else None
    task, preprocessing = prepared.task, prepared.preprocessing

    def draw(batch: Batch, step: int) -> None:
        save_training_panel(task, batch, folder, step=step, mean=preprocessing.mean, std=preprocessing.std)

    return draw


def _short_tune(
    prepared: Prepared, machine: MachineConfig, scoring: dict[str, Any]
) -> Callable[[Module, Watch], dict[str, float]] | None:
    """For a masked autoencoder with `task.tune_per_class`: the short fine-tune of a copy, at each evaluation."""
    plan, task = prepared.tune, prepared.task
    if plan is None or not isinstance(task, MaeTask):
        return None
    shared = {key: value for key, value in scoring.items() if key not in ("transform", "batch", "rank", "world")}

    def tune(module: Module, watch: Watch) -> dict[str, float]:
        # loaders of the moment: their workers do not wait beside those of the training
        train = build_train_loader(plan.samples, prepared.transform, order=plan.order, **shared)
        train.seek(epoch=0, images=0)
        assert prepared.val_set is not None
        return short_tune(
            plan,
            task.encoder,
            train=lambda: watch(train),
            val=watch(build_eval_loader(prepared.val_set, **scoring)),
            prepare=lambda batch, training: module.augment(
                {key: value.to(module.device) for key, value in batch.items()}, training=training
            ),
            autocast=nullcontext if machine.precision == "fp16" else module.autocast,  # without a gradient scaler
            device=module.device,
        )

    return tune


def _recorder(config: Config, launch: Launch, run: Run) -> Recorder:
    """Rank 0 writes; the rank is known from the environment, so no other rank ever makes a file or a W&B run."""
    folder: Path | None = run.folder if launch.is_main else None
    dashboard: Dashboard | None = None
    if folder is not None and config.log.wandb:
        log = config.log
        dashboard = start_wandb(
            folder,
            run_id=run.run_id,
            project=log.project,
            entity=log.entity,
            name=log.name,
            config=config.recipe_part(),
        )
    return Recorder(folder, attempt=run.attempt, dashboard=dashboard)
