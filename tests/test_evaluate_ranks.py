"""One, two and three processes, each with another batch size, give the same bits: predictions, features, neighbours.

Processes are started once, as three, and regroup as two. This file imports little, since each of them imports it.
"""

import multiprocessing
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from vitfw.data.order import eval_order
from vitfw.evaluate.features import extract_features
from vitfw.evaluate.knn import KnnConfig, knn_votes
from vitfw.evaluate.predictions import predict
from vitfw.models.build import build_model
from vitfw.models.model_config import ModelConfig

IMAGES, CLASSES = 41, 3


def loader(rank: int, world: int, batch: int) -> list[dict[str, torch.Tensor]]:
    """What an evaluation loader gives this rank: row i to rank i % world, padded."""
    images = torch.randn(IMAGES, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    batches = []
    for draws in eval_order(IMAGES, batch=batch, rank=rank, world=world):
        index = torch.tensor([draw.index for draw in draws])
        label = torch.where(index >= 0, index % CLASSES, -1)
        batches.append({"image": images[index.clamp(min=0)], "label": label, "index": index})
    return batches


def work(rank: int, world: int, folder: str) -> None:
    """Everything that is shared out over processes; results of rank r go to RESULT-WORLD-r.npz."""
    torch.manual_seed(0)
    batch = {1: 64, 2: 7, 3: 1}[world]
    config = ModelConfig(variant="vit_ti4", image_size=8, width=32, depth=2, heads=2)
    network = build_model(config, num_classes=CLASSES)
    device = torch.device("cpu")
    found = predict(network, loader(rank, world, batch), prepare=lambda batch: batch, device=device)
    features = extract_features(
        network,
        [loader(rank, world, batch)],
        folder=Path(folder) / f"features-{world}",
        facts={},
        num_rows=IMAGES,
        prepare=lambda batch: batch,
        device=device,
        place="a test",
    )
    generator = np.random.default_rng(0)
    train, labels = generator.normal(size=(300, 12)).astype(np.float16), generator.integers(0, CLASSES, 300)
    queries = generator.normal(size=(600, 12)).astype(np.float16)
    votes = knn_votes(train, labels, queries, KnnConfig(neighbours=(5, 20)), num_classes=CLASSES)
    np.savez(
        Path(folder) / f"result-{world}-{rank}.npz",
        index=found.index,
        labels=found.labels,
        logits=found.logits,
        features=np.array(features.values),
        feature_labels=features.labels,
        knn_5=votes[5],
        knn_20=votes[20],
    )


def process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    for world in (3, 2):
        if rank < world:
            store = dist.FileStore(f"{folder}/store-{world}", world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
            work(rank, world, folder)
            dist.destroy_process_group()


def test_one_two_and_three_processes_give_the_same_bits(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=process, args=(rank, str(tmp_path))) for rank in range(3)]
    for one in processes:
        one.start()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    work(0, 1, str(tmp_path))
    torch.set_num_threads(threads)
    for one in processes:
        one.join(300)
        assert one.exitcode == 0
    alone = np.load(tmp_path / "result-1-0.npz")
    assert alone["index"].tolist() == list(range(IMAGES)) and alone["features"].shape == (1, IMAGES, 4, 32)
    for world in (2, 3):
        for rank in range(world):
            found = np.load(tmp_path / f"result-{world}-{rank}.npz")
            for name in alone:
                assert np.array_equal(found[name], alone[name]), (world, rank, name)
