"""Feature pass alone against feature pass and a grid of 52 heads: the grid must cost less than a second pass.

    python benchmarks/probe_grid.py --variant vit_ti16 --images 256 --classes 100
    python benchmarks/probe_grid.py --variant vit_b16 --images 20000 --device cuda

Random pictures: only the time counts. The grid is DINOv2's (13 rates x class token with or without the mean of the
patches x last 1 or 4 blocks), trained for 10 epochs, at its default settings otherwise.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch

from vitfw.evaluate.features import extract_features
from vitfw.evaluate.holdout import split_training
from vitfw.evaluate.probe import ProbeConfig, probe
from vitfw.models.build import build_model
from vitfw.models.model_config import ModelConfig


def main() -> None:
    """Prints seconds of both parts and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="vit_ti16")
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    network = build_model(ModelConfig(variant=options.variant), num_classes=0).to(device).eval()
    pictures = torch.randn(options.batch, 3, 224, 224)
    batches = []
    for start in range(0, options.images, options.batch):
        index = torch.arange(start, start + options.batch)
        index = torch.where(index < options.images, index, -1)
        batches.append({"image": pictures, "label": index % min(options.classes, options.images // 4), "index": index})
    config = ProbeConfig(pools=("cls", "cls_mean"), blocks=(1, 4), least_steps=1)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        features = extract_features(
            network,
            [batches],
            folder=Path(folder),
            facts={},
            num_rows=options.images,
            prepare=lambda batch: {key: value.to(device) for key, value in batch.items()},
            device=device,
            place="random pictures",
        )
        middle = time.perf_counter()
        split = split_training(features.labels, least=1)
        result = probe(features, split, config, num_classes=options.classes, device=device)
        ended = time.perf_counter()
    passes, grid = middle - started, ended - middle
    print(
        f"{options.variant}, {options.images} images, {options.classes} classes, {len(result.table)} heads, "
        f"{options.device}: feature pass {passes:.1f} s, grid {grid:.1f} s, "
        f"together {(passes + grid) / passes:.2f} times the pass alone"
    )


if __name__ == "__main__":
    main()
