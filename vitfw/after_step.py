"""What happens after each optimiser step, in this order on every rank: count, log, heed the guard, evaluate, save, stop."""

import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from vitfw import checkpoint
from vitfw.evaluate.metrics import EvalConfig, evaluate
from vitfw.guard import DivergedError, raise_precision
from vitfw.launch import MachineConfig, broadcast
from vitfw.module import Module
from vitfw.optim import current_learning_rate
from vitfw.parallel import share_buffers
from vitfw.preempt import Answer, StoppedError, StopRequest
from vitfw.report.progress import ProgressDisplay, result_text
from vitfw.report.recorder import LogConfig, Recorder
from vitfw.run import Run
from vitfw.saver import Saver
from vitfw.schedules import Length
from vitfw.tasks.task import Batch, Monitor

ROWS = 512  # micro-batches whose rows are remembered for the record of skipped steps


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
        stop: StopRequest,
        key_of: Callable[[int], str] = str,
        look: Callable[..., None] | None = None,
        clean_loader: Iterable[Batch] | None = None,
        tune: Callable[..., dict[str, float]] | None = None,
    ) -> None:
        self.run, self.machine, self.length = run, machine, length
        self.log_every = log.every  # `self.log` would be overwritten: Lightning puts its own logging there
        self.progress, self.resume_from = progress, resume_from
        self.eval_loader, self.recorder, self.display = eval_loader, recorder, display
        self.stop_after = stop_after
        self.eval_every = round(evaluation.every_epochs * length.steps_per_epoch) if evaluation.every_epochs else 0
        self.save_every = machine.save_every_steps or length.steps_per_epoch
        self.stopped = False  # asked to stop before the end
        self.results: dict[str, dict[str, float]] = {}
        self.stop = stop
        self.key_of = key_of  # row of the index -> key of the sample
        self.clean_loader = clean_loader  # a fixed part of the training set, as evaluation sees it
        self.look = look  # draws the first evaluation batch at a step
        self.tune = tune  # fine-tunes a copy for a moment and scores it
        self.saver = Saver(run.checkpoints, machine, config_text=config_text, preprocessing=preprocessing)
        self._saved = (progress.step, progress.evaluated) if resume_from is not None else None
        self._rows: deque[tuple[int, Any]] = deque(maxlen=ROWS)
        self._begun = False

    @property
    def evaluation_pending(self) -> bool:
        """Whether the run stands where an evaluation was due that it has not done."""
        return self.progress.evaluated < self.progress.step and self._evaluation_due(self.progress.step)

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._begin(trainer, pl_module)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if not self._begun:  # no step was left, but an evaluation
            self._begin(trainer, pl_module)
            self.on_train_end(trainer, pl_module)

    def _begin(self, trainer: pl.Trainer, module: Any) -> None:
        """Takes up the run where it stands: everything lies where it stays by now, sharded and on its device."""
        self._begun = True
        module.start_average()
        if self.resume_from is not None:
            checkpoint.restore(self.resume_from, module.task, _optimizer(trainer), module.ema)
            if self.resume_from.get("guard") is not None:
                module.guard.load_state_dict(self.resume_from["guard"])
            if module.guard.raised:
                raise_precision(module.task, module.guard.config.raise_precision)
            self.resume_from = None
        module.step = self.progress.step
        if self.evaluation_pending:
            self.stopped = trainer.should_stop = not self._evaluate(module, self.progress.step)
            self.save(trainer, module)  # a best that is only remembered would have no file

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module: Module = pl_module
        inside = (batch_idx + 1) % module.accumulation != 0
        self._rows.append((module.step + inside, batch.get("index")))
        if inside:
            return
        step = module.step
        self.display.advance()
        last = step >= self.length.total_steps
        if step % self.log_every == 0 or last:
            self._record(trainer, module, step)
        self._heed_guard(trainer, module)
        answer = self.stop.agreed(failed=self.saver.failed)
        if answer is Answer.FAILED:
            self.saver.finish()
        stop = answer is Answer.STOP or (self.stop_after is not None and step >= self.stop_after)
        if self._evaluation_due(step) and (answer is Answer.GO_ON or last):
            # a signal leaves no time for it: the next attempt makes up for it
            stop = not self._evaluate(module, step) or stop
        if stop or last or step % self.save_every == 0 or self._ranks(step):
            self.save(trainer, module)
        if stop and not (last and not self.evaluation_pending):
            self.stopped = trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.saver.finish()
        self.display.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        try:
            self.saver.wait()
        except OSError as error:  # the exception that ended the run must be the one that is shown last
            print(error, file=sys.stderr)
        self.display.close()

    def _heed_guard(self, trainer: pl.Trainer, module: Module) -> None:
        """Writes down the samples of skipped steps; after too many in a row goes back to the last checkpoint's weights.

        The position stays: the data since then is not shown again, and the schedule goes on.
        """
        bad = module.guard.take_bad_steps()
        for step, norm in bad:
            rows = [row for at, index in self._rows if at == step and index is not None for row in index.tolist()]
            record = {"step": step, "gradient_norm": str(norm), "keys": [self.key_of(row) for row in rows if row >= 0]}
            with (self.run.folder / f"skipped-rank{module.rank}.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        verdict = module.guard.verdict() if bad else "go on"
        if verdict == "go on":
            return
        what = f"{module.guard.config.patience} steps in a row had a loss or gradient that is not finite, or a spike"
        self.saver.finish()
        try:
            found = newest_checkpoint(self.run.checkpoints, is_main=trainer.is_global_zero)
        except checkpoint.CheckpointError as error:
            raise DivergedError(f"{what}, at step {module.step:,}, and {error}") from error
        if verdict == "give up" or found is None:
            raise DivergedError(
                f"{what}, at step {module.step:,}, after {module.guard.rollbacks - 1} returns to a checkpoint; the last "
                "checkpoint is untouched. Lower optim.lr, set optim.clip_norm, or look at the samples in skipped-rank*.jsonl"
            )
        checkpoint.restore(checkpoint.load(found[0], pieces=True), module.task, _optimizer(trainer), module.ema)
        text = f"{what}: back to the weights of step {found[1].step:,}, on with new data"
        parts = module.guard.config.raise_precision
        if parts != "none" and self.machine.precision != "fp32" and not module.guard.raised:
            module.guard.raised = True
            raise_precision(module.task, parts)
            text += f"; from here on {'attention and decoder' if parts == 'all' else parts} in float32"
        self.display.line(module.step, text)

    def _evaluation_due(self, step: int) -> bool:
        return self.eval_loader is not None and (
            step >= self.length.total_steps or (self.eval_every > 0 and step % self.eval_every == 0)
        )

    def _record(self, trainer: pl.Trainer, module: Module, step: int) -> None:
        values = module.read_sums()
        values["learning_rate"] = current_learning_rate(_optimizer(trainer))
        values["images_per_second"] = self.display.speed(step)
        values["skipped_steps"] = module.guard.skipped
        self.recorder.write("train", values, **self._axes(step))
        self.display.note(step, values)

    def _evaluate(self, module: Module, step: int) -> bool:
        """Scores the raw and, where there is one, the averaged weights; every rank gets the same numbers. False where a
        stop was asked for in the middle: nothing is recorded then."""
        assert self.eval_loader is not None
        weights: dict[str, Callable[[], Any]] = {"val": nullcontext}
        if module.ema is not None and module.ema.holds_average:
            weights["val_ema"] = module.ema.swapped
        share_buffers(module.task)
        look = None if self.look is None else partial(self.look, step=step)
        try:
            self.results = self._score(module, self.eval_loader, weights, look)
            if self.tune is not None:
                self.results["val"] |= self.tune(module, lambda b: self.display.evaluating(self.stop.watch(b)))
            if self.clean_loader is not None:
                (clean,) = self._score(module, self.clean_loader, {"train_clean": nullcontext}, None).values()
                self.recorder.write("train_clean", clean, **self._axes(step))
        except StoppedError:
            self.results = {}
            return False
        for split, values in self.results.items():
            self.recorder.write(split, values, **self._axes(step))
        self.display.line(step, result_text(self.results))
        self._keep_score(module.task.monitor, step)
        return True

    def _score(
        self, module: Module, loader: Iterable[Batch], weights: Any, look: Callable[[Batch], None] | None
    ) -> dict[str, dict[str, float]]:
        device = module.device
        return evaluate(
            module.task,
            self.display.evaluating(self.stop.watch(loader)),
            prepare=lambda batch: module.augment({key: item.to(device) for key, item in batch.items()}, training=False),
            autocast=module.autocast,
            weights=weights,
            device=device,
            look=look,
        )

    def _keep_score(self, monitor: Monitor, step: int) -> None:
        """Ranks this evaluation among the earlier ones of each set of weights; ties keep the earlier, NaN never ranks."""
        best, best_step = dict(self.progress.best), dict(self.progress.best_step)
        ranking = {key: list(entries) for key, entries in self.progress.ranking.items()}
        for split, values in self.results.items():
            key, value = f"{split}/{monitor.name}", values[monitor.name]
            if monitor.better(value, best.get(key)):
                best[key], best_step[key] = value, step
            entries = ranking.setdefault(key, [])
            place = next((at for at, (other, _) in enumerate(entries) if monitor.better(value, other)), len(entries))
            if value == value:
                entries.insert(place, [value, step])
            del entries[self.machine.keep_best :]
        self.progress = replace(self.progress, evaluated=step, best=best, best_step=best_step, ranking=ranking)

    def _ranks(self, step: int) -> bool:
        """Whether an evaluation at this step is among the best that are kept."""
        return any(at == step for entries in self.progress.ranking.values() for _, at in entries)

    def save(self, trainer: pl.Trainer, module: Module) -> None:
        """Once for each state of the run. Entered by all ranks."""
        if self._saved == (module.step, self.progress.evaluated):
            return
        where = {"step": module.step, "images": module.images_seen}
        self.progress = replace(self.progress, **where, attempt=self.run.attempt, run=self.run.run_id)
        best_of = [split for split in self.results if self._is_best(split, module.step)]
        self.saver.save(module, _optimizer(trainer), self.progress, best_of=best_of)
        self._saved = (module.step, self.progress.evaluated)

    def _is_best(self, split: str, step: int) -> bool:
        return any(key.startswith(f"{split}/") and at == step for key, at in self.progress.best_step.items())

    def _axes(self, step: int) -> dict[str, Any]:
        return {"step": step, "images": step * self.length.global_batch, "epoch": step / self.length.steps_per_epoch}


def _optimizer(trainer: pl.Trainer) -> torch.optim.Optimizer:
    return trainer.optimizers[0]


def newest_checkpoint(folder: Path, *, is_main: bool) -> tuple[Path, checkpoint.Progress] | None:
    """What rank 0 finds to continue from, for all ranks; damaged files that were passed over are named.

    Raises CheckpointError on all ranks: where nothing can be read, and where another rank does not see the same file.
    """
    found, error = None, None
    if is_main:
        try:
            found = checkpoint.newest(folder)
        except checkpoint.CheckpointError as caught:
            error = caught
    found, error = broadcast((found, error))
    if error is not None:
        raise error
    if found is None:
        return None
    path, progress, damaged = found
    if is_main:
        for word in damaged:
            print(f"passed over a damaged checkpoint: {word}", flush=True)
        for word in checkpoint.mend_names(path, progress):
            print(f"note: {word}", flush=True)
    if not path.exists():
        raise checkpoint.CheckpointError(
            f"{path} is on the first node alone: out= must lie on a file system of all nodes"
        )
    return path, progress
