"""The path of one run, from words to an exported network.

    torchrun --standalone --nproc-per-node 8 train.py recipe=deit_b machine=gpu8 data.train=... optim.lr=1e-3

Exit status: 0 finished, 2 refused before any work, 75 stopped, with what was done saved (start the same command again), 1 failed.
"""

import contextlib
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from vitfw.config import Config, load
from vitfw.launch import (
    Launch,
    check_launch,
    detect_launch,
    join_processes,
    leave_processes,
    on_any,
    on_main,
    set_threads,
)
from vitfw.startup import STOPPED, LeaveNow, Signals, leave_on_signal, leaving_text, say

if TYPE_CHECKING:
    from vitfw.preempt import StopRequest
    from vitfw.prepare import Prepared
    from vitfw.run import Run

FINISHED, FAILED, REFUSED = 0, 1, 2


def main(words: Sequence[str]) -> int:
    """Runs one command and returns its exit status."""
    if not words or words[0] in ("help", "--help", "-h"):
        from vitfw.help import help_text

        print(help_text())
        return FINISHED if words else REFUSED
    with leave_on_signal() as signals:
        try:
            return _run(words, signals)
        except LeaveNow as stop:
            say(f"vitfw: {stop}")
            return STOPPED
        except (ValueError, OSError) as error:
            if isinstance(error, ConnectionError) and signals.number is not None:  # the others left for the same reason
                say(f"vitfw: {leaving_text(signals.number)}")
                return STOPPED
            say(f"vitfw: {error}")
            return REFUSED
        finally:
            leave_processes()


def _run(words: Sequence[str], signals: Signals) -> int:
    from vitfw.ladder import is_ladder, run_ladder

    launch = detect_launch()
    signals.alone = launch.world == 1
    train_one = partial(train, signals=signals)
    if is_ladder(words):
        return run_ladder(words, train_one)
    config = load(words)
    check_launch(launch, config.machine)
    if config.dry_run:
        from vitfw.plan import plan_text

        print(plan_text(config, launch))
        return FINISHED
    set_threads(launch, config.machine)
    join_processes(launch, config.machine)
    return train_one(config, launch, list(words))


def train(config: Config, launch: Launch, words: list[str], *, signals: Signals | None = None) -> int:
    """Trains one configuration in this process, one of `launch.world`, and returns the exit status. `signals`: what came
    before this run has something to save."""
    from vitfw.folder_lock import FolderLock
    from vitfw.preempt import StopRequest, mark_stopped
    from vitfw.prepare import prepare
    from vitfw.run import log_to, run_config

    signals = signals or Signals()
    stop, lock = None, FolderLock(config.folder)
    try:
        prepared = prepare(config, launch)  # refuses; nothing has been written when it raises
        if on_any(signals.number is not None):
            raise LeaveNow(leaving_text(signals.number))
        recipe = run_config(config.recipe_part(), prepared.seed)
        on_main(launch, lock.acquire)
        run = on_main(launch, lambda: _open(config, prepared, recipe, words))
        stop = StopRequest(config.machine.stop_signal, wall_minutes=config.machine.wall_minutes)
        stop.install()  # from here on a signal is heeded before the first step, and after each
        if signals.number is not None:
            stop.signal = signals.number
        with log_to(run.folder / "log.txt") if launch.is_main else contextlib.nullcontext():
            return _train(config, launch, run, prepared, recipe, stop)
    except LeaveNow:
        if launch.is_main and (config.folder / "config.yaml").exists():
            mark_stopped(config.folder, _newest_step(config.folder))
        raise
    finally:
        lock.release()
        if stop is not None:
            stop.uninstall()


def _train(
    config: Config, launch: Launch, run: "Run", prepared: "Prepared", recipe: dict[str, Any], stop: "StopRequest"
) -> int:
    from vitfw.checkpoint import CheckpointError
    from vitfw.data.ledger import BadDataError
    from vitfw.fit import build_fit  # Lightning loads only once the words are known to be right
    from vitfw.guard import DivergedError
    from vitfw.run import mark_finished
    from vitfw.summary import closing_text, start_text

    if run.finished:
        if launch.is_main:
            _export_again(run, prepared)
        _say(launch, f"this run is finished; nothing to do\n{closing_text(run)}")
        return FINISHED
    try:
        config_text = yaml.safe_dump(recipe, sort_keys=False)
        fit = build_fit(config, launch, run, prepared, stop=stop, config_text=config_text)
        _say(launch, start_text(config, launch, run, prepared, fit.progress))
        if not fit.run():
            step = fit.progress.step
            where = f"and saved at step {step:,}" if step else "before the first step"
            _say(launch, f"stopped {where}: start the same command again to go on")
            return STOPPED
        if launch.is_main:
            fit.export()
            mark_finished(run, fit.progress.best)
            print(closing_text(run), flush=True)
        return FINISHED
    except CheckpointError:
        raise  # what there is cannot be gone on from: a sentence for the user
    except (BadDataError, DivergedError) as error:  # nothing in the code is wrong: a sentence, in log.txt too
        print(f"vitfw: {error}", file=sys.stderr, flush=True)
        return FAILED
    except Exception:
        traceback.print_exc()  # here, so that log.txt has it too
        return FAILED


def _export_again(run: "Run", prepared: "Prepared") -> None:
    """Makes the export of a finished run again where it is gone. Raises ValueError where the checkpoints are gone too."""
    from vitfw import checkpoint
    from vitfw.fit import export_run
    from vitfw.preempt import MARKER

    (run.folder / MARKER).unlink(missing_ok=True)
    if all((run.export / name).exists() for name in ("model.safetensors", "config.json")):
        return
    found = checkpoint.newest(run.checkpoints)
    if found is None:
        raise ValueError(
            f"{run.folder} holds a finished run whose export/ and checkpoints/ are gone: choose another out= to train it "
            "again, or delete the folder"
        )
    print(f"note: {run.export} was not complete; it is made again from the checkpoints", flush=True)
    export_run(run, prepared.task.monitor, found[1])


def _newest_step(folder: Path) -> int:
    from vitfw import checkpoint

    files = checkpoint.step_files(folder / "checkpoints") if (folder / "checkpoints").is_dir() else []
    return files[0][0] if files else 0


def _open(config: Config, prepared: "Prepared", recipe: dict[str, Any], words: list[str]) -> "Run":
    """The run folder, after everything about it that can be refused was refused. Rank 0 only."""
    from vitfw import checkpoint
    from vitfw.run import open_run

    position = None
    if config.resume == "changed" and (found := checkpoint.newest(config.folder / "checkpoints")) is not None:
        stored = checkpoint.load(found[0], pieces=True)
        checkpoint.check_names(prepared.task.state_dict(), stored["model"], "model")
        position = found[1].step, prepared.length.total_steps
    sets = {"train": prepared.train_set, "val": prepared.val_set}
    return open_run(
        config.folder,
        recipe,
        words=words,
        machine=asdict(config.machine),
        seed=prepared.seed,
        data={split: None if samples is None else samples.fingerprint() for split, samples in sets.items()},
        defaults=config.default_part(),
        resume=config.resume,
        position=position,
    )


def _say(launch: Launch, text: str) -> None:
    if launch.is_main:
        print(text, flush=True)
