"""From the machine section to a Lightning Trainer, and what happens after each step: log, evaluate, save, stop."""

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from vitfw import checkpoint
from vitfw.evaluate.metrics import EvalConfig, evaluate
from vitfw.launch import Launch, MachineConfig, broadcast, device_of, uses_gpu
from vitfw.module import Module
from vitfw.optim import current_learning_rate
from vitfw.preempt import StopRequest
from vitfw.report.progress import ProgressDisplay, result_text
from vitfw.report.recorder import LogConfig, Recorder
from vitfw.run import Run, package_versions
from vitfw.schedules import Length
from vitfw.tasks.task import Batch

PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def build_trainer(machine: MachineConfig, launch: Launch, *, accumulation: int, callbacks: list[pl.Callback]) -> pl.Trainer:
    """One pass over a loader that yields the whole rest of the run: epochs, evaluation, logging, saving and resuming are
    ours, so that the position of a run is one number and not the state of nested loops."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # Lightning 2.6 asks torch 2.14 in a way that torch calls deprecated; no user can act on it
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)", category=FutureWarning)
    on_gpu = uses_gpu(machine)
    device = device_of(launch, machine)
    if launch.world > 1:
        strategy: Any = DDPStrategy(
            cluster_environment=_environment(launch),
            find_unused_parameters=False,  # a parameter without gradient is an error, not a search in every step
            gradient_as_bucket_view=True,
            process_group_backend="nccl" if on_gpu else "gloo",
        )
    else:
        strategy = SingleDeviceStrategy(device=device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*`srun` command is available on your system but is not used.*")
        return pl.Trainer(
            accelerator="gpu" if on_gpu else "cpu",
            devices=launch.local_world if launch.world > 1 else "auto" if not on_gpu else [launch.local_rank],
            num_nodes=launch.nodes,
            strategy=strategy,
            precision=PRECISIONS[machine.precision],  # pyright: ignore[reportArgumentType]
            accumulate_grad_batches=accumulation,
            max_epochs=1,
            limit_val_batches=0,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=callbacks,
        )


def _environment(launch: Launch) -> ClusterEnvironment:
    if launch.kind == "torchrun":
        return TorchElasticEnvironment()
    return SLURMEnvironment(auto_requeue=False) if launch.kind == "srun" else LightningEnvironment()


class AfterStep(pl.Callback):
    """After each optimiser step, in this order on every rank: count, log, evaluate, save, stop."""

    def __init__(
        self,
        run: Run,
        *,
        log: LogConfig,
        evaluation: EvalConfig,
        machine: MachineConfig,
        length: Length,
        progress: checkpoint.Progress,
        resume_from: Mapping[str, Any] | None,
        eval_loader: Iterable[Batch] | None,
        recorder: Recorder,
        display: ProgressDisplay,
        config_text: str,
        preprocessing: Mapping[str, Any],
        stop_after: int | None,
    ) -> None:
        self.run, self.machine, self.length = run, machine, length
        self.log_every = log.every  # `self.log` would be overwritten: Lightning puts its own logging there
        self.progress, self.resume_from = progress, resume_from
        self.eval_loader, self.recorder, self.display = eval_loader, recorder, display
        self.config_text, self.preprocessing, self.stop_after = config_text, preprocessing, stop_after
        self.eval_every = round(evaluation.every_epochs * length.steps_per_epoch) if evaluation.every_epochs else 0
        self.save_every = machine.save_every_steps or length.steps_per_epoch
        self.stopped = False  # asked to stop before the end
        self.results: dict[str, dict[str, float]] = {}
        self.stop = StopRequest()
        self._saved_step = progress.step if resume_from is not None else -1

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        # Lightning's own SIGTERM handling broadcasts and waits in every step; ours agrees without waiting (see preempt)
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        module.start_average()
        if self.resume_from is not None:
            checkpoint.restore(self.resume_from, module.task, _optimizer(trainer), module.ema)
            self.resume_from = None
        module.step = self.progress.step
        self.stop.install()
        if self.progress.evaluated < self.progress.step and self._evaluation_due(self.progress.step):
            self._evaluate(module, self.progress.step)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % module.accumulation:
            return
        step = module.step
        self.display.advance()
        last = step >= self.length.total_steps
        if step % self.log_every == 0 or last:
            self._record(trainer, module, step)
        stop = self.stop.agreed() or step == self.stop_after
        if self._evaluation_due(step) and (not stop or step == self.stop_after):
            self._evaluate(module, step)  # a signal leaves no time for it: the next attempt makes up for it
        if stop or last or step % self.save_every == 0 or step in self.progress.best_step.values():
            self.save(trainer, module)
        if stop and not last:
            self.stopped = trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.stop.uninstall()
        self.display.close()

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        self.on_train_end(trainer, module)

    def _evaluation_due(self, step: int) -> bool:
        return self.eval_loader is not None and (
            step >= self.length.total_steps or (self.eval_every > 0 and step % self.eval_every == 0)
        )

    def _record(self, trainer: pl.Trainer, module: Module, step: int) -> None:
        values = module.read_sums()
        values["learning_rate"] = current_learning_rate(_optimizer(trainer))
        values["images_per_second"] = self.display.speed(step)
        self.recorder.write("train", values, **self._axes(step))
        self.display.note(step, values)

    def _evaluate(self, module: Module, step: int) -> None:
        """Scores the raw and, where there is one, the averaged weights; every rank gets the same numbers."""
        assert self.eval_loader is not None
        device = module.device
        weights: dict[str, Callable[[], Any]] = {"val": nullcontext}
        if module.ema is not None and module.ema.holds_average:
            weights["val_ema"] = module.ema.swapped
        self.results = evaluate(
            module.task,
            self.display.evaluating(self.eval_loader),
            prepare=lambda batch: module.augment({key: value.to(device) for key, value in batch.items()}, training=False),
            autocast=module.autocast,
            weights=weights,
            device=device,
        )
        for split, values in self.results.items():
            self.recorder.write(split, values, **self._axes(step))
        self.display.line(step, result_text(self.results))
        self._keep_score(module.task.monitor, step)

    def _keep_score(self, monitor: Any, step: int) -> None:
        best, best_step = dict(self.progress.best), dict(self.progress.best_step)
        for split, values in self.results.items():
            key = f"{split}/{monitor.name}"
            if monitor.better(values[monitor.name], best.get(key)):
                best[key], best_step[key] = values[monitor.name], step
        self.progress = replace(self.progress, evaluated=step, best=best, best_step=best_step)

    def save(self, trainer: pl.Trainer, module: Module) -> None:
        """Entered by all ranks; rank 0 writes. An error of the writer ends the run on all of them."""
        if module.step == self._saved_step:
            return
        self.progress = replace(self.progress, step=module.step, images=module.images_seen, attempt=self.run.attempt)
        state = checkpoint.collect(module.task, _optimizer(trainer), module.ema)
        state["preprocessing"] = dict(self.preprocessing)
        error = None
        if trainer.is_global_zero:
            bests = [split for split in self.results if self._is_best(split, module.step)]
            try:
                checkpoint.save(
                    self.run.checkpoints,
                    state,
                    self.progress,
                    config=self.config_text,
                    versions=package_versions(),
                    best_of=bests,
                )
            except OSError as caught:
                error = str(caught)
        if (error := broadcast(error)) is not None:
            raise OSError(error)
        self._saved_step = module.step

    def _is_best(self, split: str, step: int) -> bool:
        return any(key.startswith(f"{split}/") and at == step for key, at in self.progress.best_step.items())

    def _axes(self, step: int) -> dict[str, Any]:
        return {"step": step, "images": step * self.length.global_batch, "epoch": step / self.length.steps_per_epoch}


def _optimizer(trainer: pl.Trainer) -> torch.optim.Optimizer:
    return trainer.optimizers[0]
