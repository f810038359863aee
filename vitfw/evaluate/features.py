"""Features of a whole set, computed once by all ranks and kept on disk as fp16 memory maps for every probe.

V views (1: the evaluation view; more: differently augmented), N images, C columns, D width. A column is one pooled
vector of one block: `cls-4` .. `cls-1` the class token after the last four blocks, `mean-4` .. `mean-1` the mean of
the patch tokens, both behind the final norm; `pooled` is what the network's own head reads.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitfw.evaluate.chunks import chunked
from vitfw.models.vit import ViT
from vitfw.tasks.task import Batch

FORMAT = 2  # raised when what is stored changes its meaning, so that older caches are computed again
CHUNK = 4096  # images moved at once when the ranks' parts are joined


@dataclass(frozen=True)
class Features:
    """values float16 [V, N, C, D], mapped from disk; labels int64 [N] or float32 [N, K]; index int64 [N]: rows of the
    set; columns: the C names; place: what was measured, for the result's line; seconds: of the pass that made them."""

    values: np.ndarray
    labels: np.ndarray
    index: np.ndarray
    columns: tuple[str, ...]
    place: str
    seconds: float = 0.0

    @property
    def views(self) -> int:
        return self.values.shape[0]

    @property
    def multi_label(self) -> bool:
        return self.labels.ndim == 2

    def take(self, columns: tuple[str, ...], rows: np.ndarray, view: int = 0) -> np.ndarray:
        """Columns one behind the other, for rows [n] of this table -> float32 [n, len(columns) D]."""
        places = [self.columns.index(name) for name in columns]
        return self.values[view, rows][:, places].astype(np.float32).reshape(len(rows), -1)


def feature_columns(network: nn.Module, blocks: int = 4) -> tuple[str, ...]:
    """What this network can give, of its last `blocks` blocks; `pooled` where its head reads something else."""
    if not isinstance(network, ViT):
        return ("pooled",)
    depths = [depth for depth in range(blocks, 0, -1) if depth <= network.depth]
    names = [f"cls-{depth}" for depth in depths] if network.arch.class_token else []
    names += [f"mean-{depth}" for depth in depths]
    own_pool = network.arch.pool == "map" or network.arch.pre_head != "none" or network.arch.distillation_token
    return (*names, *(("pooled",) if own_pool else ()))


def head_column(network: nn.Module) -> str:
    """The column that the network's own head reads: the natural one for nearest neighbours."""
    columns = feature_columns(network, blocks=1)
    if "pooled" in columns:
        return "pooled"
    assert isinstance(network, ViT)
    return "cls-1" if network.arch.pool == "cls" else "mean-1"


def feature_vectors(network: nn.Module, images: Tensor, columns: tuple[str, ...]) -> Tensor:
    """Normalised images [B, 3, H, W] -> float32 [B, C, D], all patches visible, in the mode the network is in."""
    if not isinstance(network, ViT):
        return network(images, output="pooled").float()[:, None]
    depths = sorted({int(name.rsplit("-", 1)[1]) for name in columns if name != "pooled"})
    taken = network(images, output="pooled", blocks=[-depth for depth in depths])
    vectors = {"pooled": taken.output}
    for depth in depths:
        tokens = taken.blocks[network.depth - depth]
        vectors[f"cls-{depth}"] = tokens[:, 0]
        vectors[f"mean-{depth}"] = tokens[:, network.num_prefix_tokens :].mean(dim=1)
    # a network that normalises only the pooled vector has no norm on its tokens: its own norm goes here
    late = network.fc_norm if network.arch.final_norm == "pooled" else nn.Identity()
    return torch.stack([vectors[name] if name == "pooled" else late(vectors[name]) for name in columns], dim=1).float()


def weights_digest(network: nn.Module) -> str:
    """Hash of names, types, shapes and bytes of all parameters and buffers, without the head of a ViT: a new head
    changes no feature."""
    digest, heads = hashlib.sha256(), ("head.", "head_dist.") if isinstance(network, ViT) else ()
    for name, value in sorted(network.state_dict().items()):
        if name.startswith(heads):
            continue
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def extract_features(
    network: nn.Module,
    views: list[Iterable[Batch]],
    *,
    folder: Path,
    facts: Mapping[str, Any],
    num_rows: int,
    prepare: Callable[[Batch], Batch],
    device: torch.device,
    place: str,
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
    blocks: int = 4,
) -> Features:
    """The features of a set: from `folder` when exactly these were stored there before, else computed and stored.

    Entered by all ranks together; `folder` must be one folder for all of them. views: one pass over the set each, of
    this rank's share (evaluation loaders, which deal row i to rank i % W and pad). num_rows: images of the set. facts:
    all that decides the pixels (the set's fingerprint, transform, size, seed); with the hash of the weights they are
    the cache's name, so a stale cache cannot be used. The network is left in the mode it had.

    Raises:
        ValueError: features that do not fit fp16, and views in which different images could be read.
    """
    columns = feature_columns(network, blocks)
    key = {
        "format": FORMAT,
        "weights": weights_digest(network),
        "columns": columns,
        "views": len(views),
        "rows": num_rows,
        "facts": facts,
    }
    text = json.dumps(key, sort_keys=True, default=str)
    target = folder / hashlib.sha256(text.encode()).hexdigest()[:24]
    if not _agreed(target.is_dir()):
        _compute(network, views, target, text, num_rows, columns, prepare, device, autocast)
    return _open(target, columns, place)


def _compute(
    network: nn.Module,
    views: list[Iterable[Batch]],
    target: Path,
    key: str,
    num_rows: int,
    columns: tuple[str, ...],
    prepare: Callable[[Batch], Batch],
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[None]],
) -> None:
    started, (rank, world) = time.perf_counter(), _place_of_rank()
    partial = target.with_name(f"{target.name}.partial")
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)  # what a killed pass left
        partial.mkdir(parents=True)
    _barrier()
    if not partial.is_dir():
        raise ValueError(f"{partial} is not seen by rank {rank}: the folder for features must be shared by all nodes")
    share = len(range(rank, num_rows, world))
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        for view, loader in enumerate(views):
            batches = _vectors(network, loader, columns, prepare, device, autocast)
            _write_part(partial, view, batches, share, rank, world)
    finally:
        for module, mode in modes:
            module.training = mode
    _barrier()
    if rank == 0:
        _join_parts(partial, len(views), num_rows, world)
        (partial / "seconds").write_text(f"{time.perf_counter() - started:.3f}")
        (partial / "key.json").write_text(key)
        partial.replace(target)  # a folder with its final name is whole
    _barrier()


@torch.no_grad()
def _vectors(
    network: nn.Module,
    loader: Iterable[Batch],
    columns: tuple[str, ...],
    prepare: Callable[[Batch], Batch],
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[None]],
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(index [n], labels [n] or [n, K], vectors float16 [n, C, D]) of each batch, padding taken out."""
    for batch in chunked(loader):
        prepared = prepare(batch)
        with autocast():
            vectors = feature_vectors(network, prepared["image"].to(device), columns)
        half = vectors.half()
        kept = (batch["index"] >= 0).cpu()
        if not torch.isfinite(half).all():
            raise ValueError(
                f"features reach {vectors.abs().max().item():.3g} and do not fit fp16 (65,504): "
                "the weights are broken, or the network has no final norm"
            )
        yield batch["index"].cpu()[kept].numpy(), batch["label"].cpu()[kept].numpy(), half.cpu()[kept].numpy()


def _write_part(
    partial: Path,
    view: int,
    batches: Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]],
    share: int,
    rank: int,
    world: int,
) -> None:
    """Writes one view of this rank's rows, row `index` at place (index - rank) / world."""
    stem = f"view{view}-rank{rank}"
    values, seen, labels = None, np.zeros(share, bool), None
    for index, batch_labels, vectors in batches:
        if values is None or labels is None:
            shape = (share, *vectors.shape[1:])
            values = np.lib.format.open_memmap(partial / f"{stem}.npy", mode="w+", dtype=np.float16, shape=shape)
            labels = np.zeros((share, *batch_labels.shape[1:]), batch_labels.dtype)
        places = (index - rank) // world
        values[places], labels[places], seen[places] = vectors, batch_labels, True
    if values is not None and labels is not None:
        values.flush()
        np.savez(partial / f"{stem}.npz", labels=labels, seen=seen)


def _join_parts(partial: Path, views: int, num_rows: int, world: int) -> None:
    """The ranks' parts -> values.npy [V, N, C, D] and rows.npz, N the images that could be read in every view."""
    found = [
        [rank for rank in range(world) if (partial / f"view{view}-rank{rank}.npz").exists()] for view in range(views)
    ]
    seen = np.zeros((views, num_rows), bool)
    labels: np.ndarray | None = None
    for view in range(views):
        for rank in found[view]:
            part = np.load(partial / f"view{view}-rank{rank}.npz")
            labels = np.zeros((num_rows, *part["labels"].shape[1:]), part["labels"].dtype) if labels is None else labels
            labels[rank::world], seen[view, rank::world] = part["labels"], part["seen"]
    if not (seen == seen[:1]).all():
        raise ValueError("some images could be read in one view and not in another: does the data change meanwhile?")
    index = np.flatnonzero(seen[0])
    if labels is None or len(index) == 0:
        raise ValueError("no image could be read: there are no features")
    first = np.load(partial / f"view0-rank{found[0][0]}.npy", mmap_mode="r")
    shape = (views, len(index), *first.shape[1:])
    values = np.lib.format.open_memmap(partial / "values.npy", mode="w+", dtype=np.float16, shape=shape)
    for view in range(views):
        for rank in found[view]:
            part = np.load(partial / f"view{view}-rank{rank}.npy", mmap_mode="r")
            for start in range(0, len(part), CHUNK):
                rows = np.arange(start, min(start + CHUNK, len(part)))
                rows = rows[seen[view, rank + rows * world]]
                values[view, np.searchsorted(index, rank + rows * world)] = part[rows]
            for ending in ("npy", "npz"):
                (partial / f"view{view}-rank{rank}.{ending}").unlink()
    values.flush()
    np.savez(partial / "rows.npz", index=index, labels=labels[index])


def _open(folder: Path, columns: tuple[str, ...], place: str) -> Features:
    rows = np.load(folder / "rows.npz")
    labels = rows["labels"] if rows["labels"].ndim == 2 else rows["labels"].astype(np.int64)
    seconds = float((folder / "seconds").read_text())
    return Features(np.load(folder / "values.npy", mmap_mode="r"), labels, rows["index"], columns, place, seconds)


def _place_of_rank() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _agreed(mine: bool) -> bool:
    """Rank 0's answer, on all ranks: on a shared file system they may see a new folder at different moments."""
    if not dist.is_initialized():
        return mine
    box = [mine]
    dist.broadcast_object_list(box, src=0)
    return box[0]
