"""What guard, stop agreement, logging and checkpoints cost a training step of CIFAR's size.

    python benchmarks/step_overhead.py [--write docs/results.md]
    torchrun --standalone --nproc-per-node 2 benchmarks/step_overhead.py [--write docs/results.md]

Trains a small ViT on images of 32 pixels. Blocks of steps run in turn with all hooks and with none (on, off, off, on, ...), and
each block is compared with its neighbour by the CPU time of the whole process, writer thread included: what else the machine
does changes that little. The mean over all pairs has a bootstrap interval. Beside it stands the time spent inside the hooks
themselves, by the wall clock, as a share of the steps that had them: that number has no noise of the training in it, and knows
nothing of what the writer does beside the training.
"""

import argparse
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from vitfw import module as module_file  # noqa: E402
from vitfw.after_step import AfterStep  # noqa: E402
from vitfw.guard import Guard  # noqa: E402
from vitfw.launch import detect_launch  # noqa: E402
from vitfw.module import Module  # noqa: E402
from vitfw.optim import clip_gradients  # noqa: E402
from vitfw.run import source_commit  # noqa: E402
from vitfw.train import main  # noqa: E402

TITLE = "## Overhead of a step"
BLOCK = 10  # steps of a block; the pattern of four blocks repeats after 40
IMAGES = 32  # of a step, over all processes
SAVE = 200  # steps between checkpoints, a multiple of 40, so that they fall into the end of a block with hooks, before another
WARM = 4  # blocks that are not counted
WORDS = f"""
recipe=digits machine=cpu model.variant=vit_ti4 model.image_size=32 model.width=192 model.depth=4 model.heads=3 machine.threads=1
data.train={ROOT}/data/digits/train-*.tar data.val=null train.global_batch={IMAGES} train.epochs=100 optim.warmup_epochs=1
optim.clip_norm=1.0 guard.spike=10 eval.every_epochs=0 ema.decay=null log.every=10 log.progress=off
machine.save_every_steps={SAVE} machine.images_per_device={IMAGES}
""".split()


class Clock:
    """Times of blocks with and without hooks, and inside the hooks."""

    def __init__(self) -> None:
        self.blocks: list[tuple[bool, float, float]] = []  # (hooks, CPU seconds, seconds)
        self.inside: list[float] = []
        self.hook_seconds = 0.0
        self.started: tuple[float, float] | None = None

    def after(self, step: int) -> None:
        """Called at the very end of each step, the first being 1."""
        if step % BLOCK:
            return
        now = time.process_time(), time.perf_counter()
        if self.started is not None:
            self.blocks.append((hooks_on(step - 1), now[0] - self.started[0], now[1] - self.started[1]))
            self.inside.append(self.hook_seconds)
        self.started, self.hook_seconds = now, 0.0

    def timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = hook(*arguments, **options)
            self.hook_seconds += time.perf_counter() - started
            return result

        return run


def hooks_on(step: int) -> bool:
    """Whether step number `step`, from 0, runs with hooks: blocks on, off, off, on."""
    return step // BLOCK % 4 in (0, 3)


def install(clock: Clock) -> None:
    """Puts switches and clocks around everything of ours that a step passes beside the training itself."""
    after_step, clipping, poison = AfterStep.on_train_batch_end, Module.configure_gradient_clipping, module_file.poison
    timed_after_step, timed_poison = clock.timed(after_step), clock.timed(poison)
    current = [0]

    def switched_after_step(self: AfterStep, trainer: Any, pl_module: Any, *rest: Any) -> None:
        if hooks_on(pl_module.step - 1):
            timed_after_step(self, trainer, pl_module, *rest)
        current[0] = pl_module.step
        clock.after(pl_module.step)

    def switched_clipping(self: Module, optimizer: Any, **options: Any) -> None:
        if hooks_on(self.step):
            clipping(self, optimizer, **options)
        else:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self.gradient_norm = clip_gradients(parameters, self.optim.clip_norm)

    AfterStep.on_train_batch_end = switched_after_step  # type: ignore[method-assign]
    Module.configure_gradient_clipping = switched_clipping  # type: ignore[method-assign]
    Guard.judge = clock.timed(Guard.judge)  # type: ignore[method-assign]
    module_file.skip_step = clock.timed(module_file.skip_step)
    module_file.poison = lambda loss: timed_poison(loss) if hooks_on(current[0]) else loss


def ratios(blocks: list[tuple[bool, float, float]]) -> tuple[float, float, float]:
    """CPU time with hooks : without, over all pairs of neighbours, and its 95 % bootstrap interval."""
    pairs = [
        (first[1], second[1]) if first[0] else (second[1], first[1])
        for first, second in zip(blocks[::2], blocks[1::2], strict=False)
        if first[0] != second[0]
    ]

    def ratio(chosen: list[tuple[float, float]]) -> float:
        return sum(on for on, _ in chosen) / sum(off for _, off in chosen)

    draw = random.Random(0)
    samples = sorted(ratio(draw.choices(pairs, k=len(pairs))) for _ in range(4000))
    return ratio(pairs), samples[100], samples[-101]


def report(clock: Clock, world: int, loads: tuple[float, float]) -> str:
    blocks, inside = clock.blocks[WARM - 1 :], clock.inside[WARM - 1 :]  # the very first block has no start
    middle, low, high = ratios(blocks)
    with_hooks = [(hooks, block[2], block[1]) for hooks, block in zip(inside, blocks, strict=True) if block[0]]
    share = sum(hooks for hooks, _, _ in with_hooks) / sum(seconds for _, seconds, _ in with_hooks)
    by_block = statistics.quantiles([hooks / seconds for hooks, seconds, _ in with_hooks], n=10)
    step = statistics.median(block[1] for block in blocks if not block[0]) / BLOCK
    return (
        f"| {world} | {1000 * step:.0f} ms | {share:.2%} ({by_block[0]:.2%} to {by_block[-1]:.2%}) | "
        f"{middle - 1:+.2%} ({low - 1:+.2%} to {high - 1:+.2%}) | {len(blocks) // 2} | {loads[0]:.1f}, {loads[1]:.1f} |"
    )


def write(path: Path, row: str, world: int) -> None:
    """Puts the row of this number of processes into the section, which it makes where there is none."""
    head = [
        TITLE,
        "",
        "`python benchmarks/step_overhead.py`, and the same under torchrun with 2 processes: guard (with `guard.spike`), stop",
        f"agreement, records every 10 steps and a checkpoint every {SAVE // 2} steps with them; ViT of 4 blocks of width 192,",
        f"{IMAGES} images of 32 pixels a step, one thread a process, no average. Steps with and without hooks in turns, in",
        f"blocks of {BLOCK}; 95 % bootstrap interval over pairs of neighbouring blocks; 10 % to 90 % of the blocks for the share",
        "inside.",
        f"torch {torch.__version__}, {machine()}, commit {(source_commit() or 'unknown')[:7]}.",
        "",
        "| processes | CPU time of a step | inside the hooks, of a step | CPU time with : without | pairs | load of the host |",
        "|---|---|---|---|---|---|",
    ]
    old = path.read_text(encoding="utf-8")
    before, found, after = old.partition(TITLE + "\n")
    section, following, rest = after.partition("\n## ") if found else ("", "", "")
    rows = {line.split("|")[1].strip(): line for line in section.splitlines() if line.startswith("| ")}
    rows = {name: line for name, line in rows.items() if name.isdigit()} | {str(world): row}
    text = "\n".join([*head, *(rows[name] for name in sorted(rows)), ""])
    path.write_text(f"{before.rstrip()}\n\n{text}{f'{following}{rest}' if found else ''}", encoding="utf-8")


def machine() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{names[0].split(':')[1].strip() if names else platform.machine()}, {len(names)} CPUs"


def load() -> float:
    return float(Path("/proc/loadavg").read_text().split()[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Overhead of a training step.")
    parser.add_argument("--write", type=Path, help="the file whose section is replaced")
    parser.add_argument("--steps", type=int, default=480, help="training steps; a multiple of 40")
    given = parser.parse_args()
    clock, before = Clock(), load()
    install(clock)
    with tempfile.TemporaryDirectory() as folder:
        status = main([*WORDS, f"out={folder}/run", f"stop_after={given.steps}"])
    if status not in (0, 75):
        sys.exit(status)
    launch = detect_launch()
    if launch.is_main:
        row = report(clock, launch.world, (before, load()))
        print(row)
        if given.write is not None:
            write(given.write, row, launch.world)
