"""Loaders from samples, transform and order: uint8 batches, exact resume, bad images reported once."""

import json
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.util import Finalize
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from vitfw.data.dataset import ImageDataset, Sample, Transform
from vitfw.data.decode import UndecodableError
from vitfw.data.index import Samples
from vitfw.data.ledger import BadDataError, Ledger
from vitfw.data.order import Draw, TrainOrder, eval_order
from vitfw.data.resources import fit_prefetch, resolve_workers
from vitfw.data.section import DataConfig, build_train_order, open_data

__all__ = ["DataConfig", "Loader", "build_eval_loader", "build_train_loader", "build_train_order", "open_data"]

Batch = dict[str, torch.Tensor]


class Guarded(Dataset[Sample | BadDataError]):
    """A data set whose faults are values: as exceptions, torch would wrap a worker's traceback into their text."""

    def __init__(self, dataset: ImageDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, draw: Draw) -> Sample | BadDataError:
        try:
            return self.dataset[draw]
        except (UndecodableError, OSError) as error:
            return BadDataError(str(error))


def collate(samples: list[Sample | BadDataError]) -> dict[str, object]:
    """Samples -> {"image" uint8 [B, C, H, W], "label" int64 [B] or float32 [B, K], "index" int64 [B], "bad" list}, or
    {"fault" text} where one cannot be had."""
    fault = next((sample for sample in samples if isinstance(sample, BadDataError)), None)
    if fault is not None:
        return {"fault": str(fault)}
    return _stack([sample for sample in samples if not isinstance(sample, BadDataError)])


def _stack(samples: list[Sample]) -> dict[str, object]:
    labels = np.stack([sample["label"] for sample in samples])
    return {
        "image": default_collate([sample["image"] for sample in samples]),  # in a worker: straight into shared memory
        "label": torch.from_numpy(labels.astype(np.float32 if labels.ndim == 2 else np.int64)),
        "index": torch.tensor([sample["index"] for sample in samples], dtype=torch.int64),
        "bad": [entry for sample in samples for entry in sample["bad"]],
    }


class Batches:
    """What a DataLoader draws from: the rest of the present epoch, or `count` micro-batches over as many epochs as they take,
    so that the workers have the next epoch's images ready when it begins."""

    def __init__(self, order: TrainOrder | list[list[Draw]]) -> None:
        self.order = order
        self.count: int | None = None

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[list[Draw]]:
        if self.count is None:
            yield from self.order
            return
        left = self.count
        while left > 0:
            for draws in self.order:  # each iteration of a TrainOrder is the epoch after the one before
                yield draws
                left -= 1
                if left == 0:
                    return


class Loader:
    """Batches of one rank, with a length that is always the real one. Not a DataLoader, so no trainer re-creates it.

    Iterating gives Batch dicts of one epoch, `run` those of several. For training both start where `seek` says, else at the
    next epoch.
    """

    def __init__(
        self,
        loader: DataLoader,
        samples: Samples,
        ledger: Ledger,
        *,
        order: TrainOrder | None = None,
        trace: Path | None = None,
    ) -> None:
        self.loader, self.samples, self.ledger, self.order, self.trace = loader, samples, ledger, order, trace

    def __len__(self) -> int:
        return len(self.loader)

    def seek(self, *, epoch: int, images: int) -> None:
        """See `TrainOrder.seek`. Raises ValueError for an evaluation loader, which has no position."""
        if self.order is None:
            raise ValueError("an evaluation loader always starts at its first image; there is nothing to seek")
        self.order.seek(epoch=epoch, images=images)

    def __iter__(self) -> Iterator[Batch]:
        return self.run(None)

    def run(self, micro_batches: int | None) -> Iterator[Batch]:
        """So many batches over as many epochs as they take, without a pause between them; None: the rest of this epoch."""
        assert isinstance(self.loader.batch_sampler, Batches)
        self.loader.batch_sampler.count = micro_batches
        (epoch, images), left = (0, 0), len(self)
        if self.order is not None:
            epoch, images = self.order.position
            left = (self.order.num_samples - images) // self.order.global_batch * self.order.accumulation
        self.ledger.start_epoch()
        with _without_worker_advice():
            batches = iter(self.loader)
        number, seen = 0, False
        for batch in batches:
            if number == left:
                epoch, images, number, left = epoch + 1, 0, 0, len(self)
                self.ledger.start_epoch()
            if "fault" in batch:
                raise BadDataError(batch["fault"])
            self.ledger.add(batch.pop("bad"))
            seen = seen or self.order is not None or bool((batch["index"] >= 0).any())
            if self.trace is not None:
                self._write_trace(epoch, images, number, batch["index"])
            number += 1
            yield batch
        if not seen and self.ledger.known:
            self.ledger.report("note: no image of this set can be read: its scores mean nothing")

    def _write_trace(self, epoch: int, images: int, number: int, index: torch.Tensor) -> None:
        assert self.trace is not None
        keys = [self.samples.key(row) for row in index.tolist() if row >= 0]
        record: dict[str, object] = {"epoch": epoch, "batch": number, "keys": keys}
        if self.order is not None:  # images consumed by all ranks before this step
            record["images"] = images + number // self.order.accumulation * self.order.global_batch
        with self.trace.open("a") as file:
            file.write(json.dumps(record) + "\n")


def build_train_loader(
    samples: Samples,
    transform: Transform,
    *,
    data: DataConfig,
    order: TrainOrder,
    workers: int | Literal["auto"] = "auto",
    local_world: int = 1,
    channels: int = 3,
    image_size: int = 224,
    prefetch: int = 2,
    pin_memory: bool = False,
    folder: Path | None = None,
    report: Callable[[str], None] = print,
) -> Loader:
    """Training batches of one rank. order.seed seeds the augmentation, too.

    local_world: ranks on this node (for workers=auto and shared memory). image_size: pixels, for the shared-memory
    check. prefetch: batches each worker keeps ready. folder: where ledger and trace are written (run folder).
    """
    dataset = ImageDataset(
        samples,
        transform,
        seed=order.seed,
        channels=channels,
        background=data.background,
        exif=data.exif,
        on_bad_sample=data.on_bad_sample,
    )
    processes = resolve_workers(workers, local_world=local_world)
    batch_bytes = order.images_per_device * channels * image_size**2
    ready = fit_prefetch(prefetch, workers=processes, batch_bytes=batch_bytes, local_world=local_world)
    loader = _torch_loader(dataset, order, processes, ready, pin_memory)
    file = folder / f"bad-images-rank{order.rank}.jsonl" if folder is not None else None
    ledger = Ledger(data.bad_limit, len(samples), order.world, file, report)
    trace = _trace_file(data, folder, "train", order.rank)
    return Loader(loader, samples, ledger, order=order, trace=trace)


def build_eval_loader(
    samples: Samples,
    transform: Transform,
    *,
    data: DataConfig,
    batch: int,
    rank: int = 0,
    world: int = 1,
    workers: int | Literal["auto"] = "auto",
    local_world: int = 1,
    channels: int = 3,
    image_size: int = 224,
    prefetch: int = 2,
    pin_memory: bool = False,
    folder: Path | None = None,
    report: Callable[[str], None] = print,
) -> Loader:
    """Evaluation batches of one rank: every sample once over all ranks, padding has label -1 and index -1.

    batch: images of one rank. A bad image becomes padding, so it is not counted; the ledger says so.
    """
    dataset = ImageDataset(
        samples,
        transform,
        seed=0,
        channels=channels,
        background=data.background,
        exif=data.exif,
        on_bad_sample=data.on_bad_sample,
        replace=False,
    )
    processes = resolve_workers(workers, local_world=local_world)
    batch_bytes = batch * channels * image_size**2
    ready = fit_prefetch(prefetch, workers=processes, batch_bytes=batch_bytes, local_world=local_world)
    batches = eval_order(len(samples), batch=batch, rank=rank, world=world)
    loader = _torch_loader(dataset, batches, processes, ready, pin_memory)
    file = folder / f"bad-images-val-rank{rank}.jsonl" if folder is not None else None
    ledger = Ledger(data.bad_limit, len(samples), world, file, report)
    return Loader(loader, samples, ledger, trace=_trace_file(data, folder, "val", rank))


def _trace_file(data: DataConfig, folder: Path | None, split: str, rank: int) -> Path | None:
    if not data.trace:
        return None
    if folder is None:
        raise ValueError("data.trace=true needs a run folder to write to")
    return folder / f"trace-{split}-rank{rank}.jsonl"


def _torch_loader(
    dataset: ImageDataset, batches: TrainOrder | list[list[Draw]], workers: int, prefetch: int, pin_memory: bool
) -> DataLoader:
    with _without_worker_advice():
        return DataLoader(
            Guarded(dataset),
            batch_sampler=Batches(batches),
            collate_fn=collate,
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            persistent_workers=workers > 0,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # else each epoch would draw a number from the training step's generator
            worker_init_fn=WorkerStart(),
        )


def _set(flag: Any) -> None:
    flag.value = 1


class WorkerStart:
    """What each loader process does first (a DataLoader's worker_init_fn).

    Signals are left to the main process: a scheduler that preempts a job signals all its processes, and the main one saves,
    and needs its workers until then. Yet Python ends the children of a process that leaves by SIGTERM, and waits for them: so
    that signal must work from that moment on, which the workers see in shared memory.
    A worker whose parent was killed while it started ends here: torch's own watch over the parent begins later, and would
    take whoever adopted the worker for its parent.
    """

    def __init__(self) -> None:
        self.leaving = multiprocessing.RawValue("b", 0)
        # runs before multiprocessing ends and awaits its children, in a process that multiprocessing started too
        Finalize(None, _set, args=(self.leaving,), exitpriority=100)

    def __call__(self, worker: int) -> None:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._handle)
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid != os.getppid():
            os._exit(1)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.leaving.value:
            os._exit(0)


@contextmanager
def _without_worker_advice() -> Iterator[None]:
    """`resolve_workers` has said that there are too many workers, with the cure; torch repeats it each time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*worker processes in total.*")
        yield
