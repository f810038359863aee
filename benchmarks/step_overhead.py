"""What guard, stop agreement, logging and checkpoint hooks cost a training step, as a ratio of interleaved steps.

    python benchmarks/step_overhead.py
    torchrun --standalone --nproc-per-node 2 benchmarks/step_overhead.py

Trains a small ViT on images of CIFAR's size. Stretches of steps run in turn with all hooks and with none, so that whatever
else the machine does falls on both; the ratio of the two medians has the noise of the machine. The last line is the time
spent inside the hooks themselves, saves included, as a share of all steps: it should stay under 2 %.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from vitfw import module as module_file  # noqa: E402
from vitfw.after_step import AfterStep  # noqa: E402
from vitfw.guard import Guard  # noqa: E402
from vitfw.launch import detect_launch  # noqa: E402
from vitfw.module import Module  # noqa: E402
from vitfw.optim import clip_gradients  # noqa: E402
from vitfw.train import main  # noqa: E402

STRETCH = 4  # steps with the hooks, then as many without
STEPS = 160
WORDS = f"""
recipe=digits machine=cpu model.variant=vit_ti4 model.image_size=32 model.width=96 model.depth=4 model.heads=3 machine.threads=1
data.train={ROOT}/data/digits/train-*.tar data.val=null train.global_batch=32 train.epochs=8 optim.warmup_epochs=1
optim.clip_norm=1.0 eval.every_epochs=0 log.every=10 log.progress=off machine.save_every_steps=50 stop_after={STEPS}
""".split()

seconds: dict[bool, list[float]] = {True: [], False: []}
inside: list[float] = []  # seconds in a hook
after_step, clipping = AfterStep.on_train_batch_end, Module.configure_gradient_clipping
last = 0.0


def hooks_on(module: Module, ahead: int = 0) -> bool:
    step = module.step + ahead
    return step // STRETCH % 2 == 0 or step >= STEPS - 1


def timed(hook: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        result = hook(*arguments, **options)
        inside.append(time.perf_counter() - started)
        return result

    return run


def timed_after_step(self: AfterStep, trainer: Any, pl_module: Any, *rest: Any) -> None:
    global last
    on = hooks_on(pl_module, -1)
    if on:
        timed(after_step)(self, trainer, pl_module, *rest)
    now = time.perf_counter()
    if last and (pl_module.step - 1) % STRETCH:  # the first step of a stretch still pays for what the one before began
        seconds[on].append(now - last)
    last = now


def plain_or_guarded(self: Module, optimizer: Any, **options: Any) -> None:
    if hooks_on(self):
        clipping(self, optimizer, **options)
    else:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.gradient_norm = clip_gradients(parameters, self.optim.clip_norm)


if __name__ == "__main__":
    AfterStep.on_train_batch_end = timed_after_step  # type: ignore[method-assign]
    Guard.judge = timed(Guard.judge)  # type: ignore[method-assign]
    module_file.skip_step, module_file.poison = timed(module_file.skip_step), timed(module_file.poison)
    Module.configure_gradient_clipping = plain_or_guarded  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        status = main([*WORDS, f"out={folder}/run", *sys.argv[1:]])
    if detect_launch().is_main:
        medians = {on: statistics.median(values) for on, values in seconds.items()}
        print(f"exit status {status}, {len(seconds[True])} steps with hooks, {len(seconds[False])} without")
        print(f"median step: {1000 * medians[True]:.2f} ms with, {1000 * medians[False]:.2f} ms without")
        print(f"ratio of the medians: {medians[True] / medians[False]:.4f}")
        print(f"inside the hooks: {sum(inside) / (STEPS / 2 * statistics.mean(seconds[True])):.2%} of a step")
