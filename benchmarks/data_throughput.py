"""Images a second of vitfw's loader, of webdataset + timm, and of ImageFolder + torchvision, with one augmentation.

    python benchmarks/data_throughput.py --images 512 --workers 1 --rounds 3

The images are random cuts of two photographs, 500 x 375, quality 90 (about 60 to 100 kB, as in ImageNet), written as a
folder and packed into shards. Every contender cuts a random part, resizes it (bicubic) to 224 and flips it; with
--policy deit RandAugment (rand-m9-mstd0.5-inc1) comes on top. "uint8" and "float" say what a contender hands over:
vitfw gives bytes and normalises the batch on the device; torchvision's and timm's usual stacks give normalised floats.
With --workers 0 the CPU time of the process is measured instead of the clock, which other jobs hardly disturb.
The contenders take turns, so that a busy machine slows all of them; shown are medians over the rounds and their ratios.
"""

import argparse
import io
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torchvision
import webdataset
from PIL import Image
from timm.data.auto_augment import RandAugment
from timm.data.transforms_factory import create_transform
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, v2
from webdataset.compat import WebDataset

from vitfw.data.augment import AugmentConfig, train_transform
from vitfw.data.index import Samples, open_samples
from vitfw.data.loader import build_train_loader
from vitfw.data.pack import PackOptions, pack
from vitfw.data.section import DataConfig, build_train_order
from vitfw.data.timm_guard import guard_posterize

BATCH = 64


def make_images(folder: Path, count: int) -> None:
    """JPEG files in ten class folders."""
    from sklearn.datasets import load_sample_images

    photographs = [Image.fromarray(np.asarray(image)) for image in load_sample_images().images]
    random = np.random.default_rng(0)
    for number in range(count):
        photograph = photographs[number % 2]
        scale = random.uniform(0.8, 1.0)
        width, height = int(photograph.width * scale), int(photograph.height * scale)
        left, top = (
            int(random.integers(0, rest + 1)) for rest in (photograph.width - width, photograph.height - height)
        )
        image = photograph.resize((500, 375), Image.Resampling.BICUBIC, box=(left, top, left + width, top + height))
        path = folder / f"class{number % 10}" / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path, quality=90)


def augmentation(policy: str, kind: str) -> Any:
    """timm's stack, or torchvision's for the plain policy."""
    if kind == "torchvision":
        parts: list = [v2.RandomResizedCrop(224, interpolation=v2.InterpolationMode.BICUBIC), v2.RandomHorizontalFlip()]
        parts += [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)]
        return v2.Compose(parts)
    operations = "rand-m9-mstd0.5-inc1" if policy == "deit" else None
    found = create_transform(  # as DeiT's repository calls it; the prefetcher's form gives uint8
        224,
        is_training=True,
        auto_augment=operations,
        color_jitter=None,  # type: ignore[arg-type]
        interpolation="bicubic",
        use_prefetcher=kind == "timm uint8",
    )
    assert isinstance(found, Compose)
    for part in found.transforms:
        if isinstance(part, RandAugment):
            guard_posterize(part)  # timm 1.0.31 raises under Pillow 13 without it
    return found


def count_images(batches: Iterable) -> int:
    """Runs through an epoch."""
    total = 0
    for batch in batches:
        total += len(batch["image"] if isinstance(batch, dict) else batch[0])
    return total


def contenders(root: Path, workers: int, policy: str) -> dict[str, Callable[[], int]]:
    """Name -> a function that runs one epoch and returns its images. Worker processes live on between epochs."""
    samples = open_samples(f"{root}/shards/train-*.tar")
    section = DataConfig()
    order = build_train_order(samples, data=section, seed=0, global_batch=BATCH, images_per_device=BATCH)
    augment = AugmentConfig(policy="deit" if policy == "deit" else "mae", scale=(0.08, 1.0))
    transform = train_transform(augment, size=(224, 224))
    ours = build_train_loader(samples, transform, data=section, order=order, workers=workers)
    common = {"batch_size": BATCH, "num_workers": workers, "persistent_workers": workers > 0}
    found: dict[str, Callable[[], int]] = {"vitfw uint8": lambda: count_images(ours)}
    shards = sorted(str(path) for path in (root / "shards").glob("train-*.tar"))
    for kind in ("timm uint8", "timm float"):
        transformed = augmentation(policy, kind)

        def decode_sample(sample: dict, transformed: Callable = transformed) -> tuple:
            image = Image.open(io.BytesIO(sample["jpg"])).convert("RGB")
            return torch.as_tensor(transformed(image)), int(sample["cls"])

        stream = WebDataset(shards, shardshuffle=len(shards), nodesplitter=None, seed=0).shuffle(500).map(decode_sample)
        streamed = DataLoader(stream, **common)  # type: ignore[arg-type]
        found[f"webdataset + {kind}"] = lambda streamed=streamed: count_images(streamed)
    pictures = ImageFolder(f"{root}/photos", augmentation(policy, "torchvision" if policy == "plain" else "timm float"))
    folder = DataLoader(pictures, shuffle=True, drop_last=True, **common)
    found[f"ImageFolder + {'torchvision' if policy == 'plain' else 'timm'} float"] = lambda: count_images(folder)
    return found


def read_all(samples: Samples, rows: np.ndarray) -> int:
    """Bytes of the given rows."""
    return sum(len(samples.read(int(row))) for row in rows)


def reading(root: Path) -> dict[str, Callable[[], int]]:
    """Undecoded bytes from the page cache: through the index in two orders, and webdataset's sequential reading."""
    samples = open_samples(f"{root}/shards/train-*.tar")
    shards = sorted(str(path) for path in (root / "shards").glob("train-*.tar"))
    sequential, shuffled = np.arange(len(samples)), np.random.default_rng(0).permutation(len(samples))
    return {
        "webdataset sequential": lambda: sum(len(s["jpg"]) for s in WebDataset(shards, shardshuffle=False)),
        "index sequential": lambda: read_all(samples, sequential),
        "index shuffled": lambda: read_all(samples, shuffled),
    }


def interleaved(
    functions: dict[str, Callable[[], int]],
    rounds: int,
    unit: str,
    per: Callable[[int], float],
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Each function once to warm up, then all in turn, `rounds` times; prints medians, spread and ratios."""
    speeds: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 1):
        for name, function in functions.items():
            begin = clock()
            total = function()
            if number:
                speeds[name].append(per(total) / (clock() - begin))
    reference = statistics.median(next(iter(speeds.values())))
    for name, values in speeds.items():
        middle = statistics.median(values)
        spread = f"{min(values):.0f} to {max(values):.0f}"
        print(f"  {name:<34}{middle:8.0f} {unit} ({spread}), {middle / reference:.2f} x the first")


def main() -> None:
    """Makes the data, runs both comparisons, prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--workers", type=int, default=1, help="loader processes of each contender")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policy", choices=("plain", "deit"), default="plain")
    words = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        make_images(root / "photos", words.images)
        pack(str(root / "photos"), root / "shards", options=PackOptions(shard_size=max(1, words.images // 4)))
        size = sum(path.stat().st_size for path in (root / "photos").rglob("*.jpg")) / words.images
        print(f"{words.images} JPEGs of {size / 1000:.0f} kB, {words.workers} workers, {words.rounds} rounds")
        versions = [(module.__name__, module.__version__) for module in (torch, torchvision, timm, webdataset)]
        print(platform.platform(), *(f"{name} {version}" for name, version in versions))
        print("reading from the page cache:")
        interleaved(reading(root), words.rounds * 3, "MB/s", lambda total: total / 1e6)
        print(f"decoded and augmented ({words.policy}):")
        clock = time.perf_counter if words.workers else time.process_time
        interleaved(contenders(root, words.workers, words.policy), words.rounds, "images/s", float, clock)


if __name__ == "__main__":
    main()
