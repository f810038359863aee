"""Memory of the loader over ten epochs of 20,000 samples with two workers: it must not grow.

    python benchmarks/data_memory.py --samples 20000 --epochs 10 --workers 2

Prints, after each epoch, the data held by the main process and its workers together (pages that they share are counted
in each; files mapped into memory, such as libraries, are left out).
"""

import argparse
import io
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from webdataset.writer import TarWriter

from vitfw.data.index import open_samples
from vitfw.data.loader import build_train_loader
from vitfw.data.section import DataConfig, build_train_order


def megabytes(pids: list[int]) -> float:
    """Anonymous memory."""
    kilobytes = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        kilobytes += sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
    return kilobytes / 1000


def unchanged(image: Image.Image) -> torch.Tensor:
    """The samples have the right size already."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def main() -> None:
    """Writes one shard of tiny arrays, reads it for some epochs, prints the memory after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    words = parser.parse_args()
    array = io.BytesIO()
    np.save(array, np.zeros((2, 2, 3), np.uint8))
    with tempfile.TemporaryDirectory() as folder:
        with TarWriter(f"{folder}/s.tar", encoder=False) as writer:
            for number in range(words.samples):
                writer.write({"__key__": f"{number:08d}", "npy": array.getvalue()})
        samples = open_samples(f"{folder}/s.tar")
        data = DataConfig()
        order = build_train_order(samples, data=data, seed=0, global_batch=500, images_per_device=500)
        loader = build_train_loader(samples, unchanged, data=data, order=order, workers=words.workers, image_size=2)  # type: ignore[arg-type]
        for epoch in range(words.epochs):
            images = sum(len(batch["index"]) for batch in loader)
            iterator = loader.loader._iterator
            workers = [] if iterator is None else [worker.pid for worker in iterator._workers]  # type: ignore[attr-defined]
            print(f"epoch {epoch}: {images} images, {megabytes([os.getpid(), *workers]):.1f} MB", flush=True)


if __name__ == "__main__":
    main()
