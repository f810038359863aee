"""What the ends of epochs cost: one pass over several epochs, as training reads, against epoch by epoch.

    python benchmarks/epoch_ends.py --epochs 10 --workers 2 --step-ms 30

The embedded digits (1,437 images, batches of 128), with a pause for each batch in place of the training step. Between two
epochs that are read one by one the workers stand still until the next begins. Both ways take turns; shown are medians.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch

from vitfw.data.augment import AugmentConfig, train_transform
from vitfw.data.index import open_samples
from vitfw.data.loader import Loader, build_train_loader
from vitfw.data.section import DataConfig, build_train_order

BATCH = 128


def step_through(batches: Iterable, pause: float) -> int:
    """Takes each batch and waits; returns their number."""
    count = 0
    for _ in batches:
        time.sleep(pause)
        count += 1
    return count


def one_by_one(loader: Loader, epochs: int, pause: float) -> int:
    return sum(step_through(loader, pause) for _ in range(epochs))


def in_one_run(loader: Loader, epochs: int, pause: float) -> int:
    return step_through(loader.run(epochs * len(loader)), pause)


def main() -> None:
    """Builds both loaders, lets them take turns, prints seconds an epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=30.0, help="pause for each batch")
    parser.add_argument("--rounds", type=int, default=5)
    words = parser.parse_args()
    torch.set_num_threads(1)
    samples, data = open_samples("data/digits/train-{00000..00003}.tar"), DataConfig()
    transform = train_transform(AugmentConfig(policy="cifar10"), size=(32, 32))
    ways: dict[str, Callable[[], int]] = {}
    for name, way in (("epoch by epoch", one_by_one), ("in one run", in_one_run)):
        order = build_train_order(samples, data=data, seed=0, global_batch=BATCH, images_per_device=BATCH)
        loader = build_train_loader(samples, transform, data=data, order=order, workers=words.workers, image_size=32)
        ways[name] = partial(way, loader, words.epochs, words.step_ms / 1000)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(words.rounds + 1):
        for name, way in ways.items():
            begin = time.perf_counter()
            steps = way()
            if number:  # the first starts the workers
                seconds[name].append((time.perf_counter() - begin) / words.epochs)
    print(f"{platform.platform()} torch {torch.__version__}; {steps // words.epochs} steps an epoch, {words}")
    reference = statistics.median(seconds["epoch by epoch"])
    for name, values in seconds.items():
        middle = statistics.median(values)
        print(
            f"  {name:<16}{middle:.3f} s an epoch ({min(values):.3f} to {max(values):.3f}), {middle / reference:.2f} x"
        )


if __name__ == "__main__":
    main()
