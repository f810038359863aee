"""The path of one run, from words to an exported network.

    torchrun --standalone --nproc-per-node 8 train.py recipe=deit_b machine=gpu8 data.train=... optim.lr=1e-3

Exit status: 0 finished, 2 refused before any work, 75 stopped and saved (start the same command again), 1 failed.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import yaml

from vitfw.config import Config, load
from vitfw.launch import Launch, broadcast, check_launch, detect_launch, join_processes, leave_processes, set_threads

if TYPE_CHECKING:
    from vitfw.prepare import Prepared
    from vitfw.run import Run

FINISHED, FAILED, REFUSED, STOPPED = 0, 1, 2, 75


def main(words: Sequence[str]) -> int:
    """Runs one command and returns its exit status."""
    if not words or words[0] in ("help", "--help", "-h"):
        from vitfw.help import help_text

        print(help_text())
        return FINISHED if words else REFUSED
    from vitfw.ladder import is_ladder, run_ladder

    try:
        if is_ladder(words):
            return run_ladder(words, train)
        config, launch = load(words), detect_launch()
        check_launch(launch, config.machine)
        if config.dry_run:
            from vitfw.plan import plan_text

            print(plan_text(config, launch))
            return FINISHED
        set_threads(launch, config.machine)
        join_processes(launch, config.machine)
        return train(config, launch, list(words))
    except (ValueError, OSError) as error:
        if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":  # once, not once a process
            print(f"vitfw: {error}", file=sys.stderr)
        return REFUSED
    finally:
        leave_processes()


def train(config: Config, launch: Launch, words: list[str]) -> int:
    """Trains one configuration in this process, one of `launch.world`, and returns the exit status."""
    from vitfw.fit import build_fit  # Lightning loads only once the words are known to be right
    from vitfw.prepare import prepare
    from vitfw.run import log_to, mark_finished, run_config
    from vitfw.summary import closing_text, start_text

    prepared = prepare(config, launch)  # refuses; nothing has been written when it raises
    recipe = run_config(config.recipe_part(), prepared.seed)
    run = _on_main(launch, lambda: _open(config, prepared, recipe, words))
    with log_to(run.folder / "log.txt") if launch.is_main else contextlib.nullcontext():
        if run.finished:
            _say(launch, f"this run is finished; nothing to do\n{closing_text(run)}")
            return FINISHED
        try:
            fit = build_fit(config, launch, run, prepared, config_text=yaml.safe_dump(recipe, sort_keys=False))
            _say(launch, start_text(config, launch, run, prepared, fit.progress))
            if not fit.run():
                _say(launch, f"stopped and saved at step {fit.progress.step:,}: start the same command again to go on")
                return STOPPED
            if launch.is_main:
                fit.export()
                mark_finished(run, fit.progress.best)
                print(closing_text(run), flush=True)
            return FINISHED
        except Exception:
            traceback.print_exc()  # here, so that log.txt has it too
            return FAILED


def _open(config: Config, prepared: "Prepared", recipe: dict[str, Any], words: list[str]) -> "Run":
    """The run folder, after everything about it that can be refused was refused. Rank 0 only."""
    from vitfw import checkpoint
    from vitfw.run import open_run

    if config.resume == "changed" and (found := checkpoint.newest(config.folder / "checkpoints")) is not None:
        checkpoint.check_names(prepared.task.state_dict(), checkpoint.load(found[0])["model"], "model")
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
    )


def _on_main(launch: Launch, call):
    """The result of `call` on rank 0, for all ranks; its ValueError is raised on all of them."""
    result, error = None, None
    if launch.is_main:
        try:
            result = call()
        except ValueError as caught:
            error = caught
    result, error = broadcast((result, error))
    if error is not None:
        raise error
    return result


def _say(launch: Launch, text: str) -> None:
    if launch.is_main:
        print(text, flush=True)
