"""The answers of a network on a whole set, one row an image in the order of the data; as CSV or parquet.

N images, K classes, W processes.
"""

import csv
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitfw.evaluate.calibration import softmax
from vitfw.evaluate.chunks import chunked
from vitfw.tasks.task import Batch


@dataclass(frozen=True)
class Predictions:
    """index int64 [N]: row of each image in its set, rising; labels int64 [N] (-1: none) or float32 [N, K]; logits
    float32 [N, K]."""

    index: np.ndarray
    labels: np.ndarray
    logits: np.ndarray

    @property
    def multi_label(self) -> bool:
        return self.labels.ndim == 2


@torch.no_grad()
def predict(
    network: nn.Module,
    loader: Iterable[Batch],
    *,
    prepare: Callable[[Batch], Batch],
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Predictions:
    """One pass over an evaluation loader, entered by all ranks together. The network is left in the mode it had.

    `prepare` brings a batch to the device and normalises it. Padding (index -1) is taken out: each image counts once.
    The network always sees batches of one size, so the logits do not depend on the loader's (see `chunks`).
    """
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    rows: dict[str, list[Tensor]] = {"index": [], "label": [], "logits": []}
    try:
        for batch in chunked(loader):
            prepared = prepare(batch)
            with autocast():
                logits = network(prepared["image"])
            rows["logits"].append(logits.float())
            for name in ("index", "label"):
                rows[name].append(prepared[name].to(device))
    finally:
        for module, mode in modes:
            module.training = mode
    index, labels, logits = (gather_rows(torch.cat(rows[name])) for name in ("index", "label", "logits"))
    order = np.argsort(index, kind="stable")
    order = order[index[order] >= 0]
    return Predictions(index[order], labels[order], logits[order])


def gather_rows(rows: Tensor) -> np.ndarray:
    """[n, ...] of each rank, n equal on all (the loader pads) -> [W n, ...] on every rank, rank after rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return rows.cpu().numpy()
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.contiguous())
    return torch.cat(parts).cpu().numpy()


def write_predictions(
    path: Path,
    predictions: Predictions,
    *,
    key: Callable[[int], str],
    classes: Sequence[str] | None = None,
    top: int = 5,
) -> Path:
    """A table of one row an image: key, label, then `top` times class and probability, then all K logits.

    The file's ending chooses the form: .csv, or .parquet (needs the extra `vitfw[parquet]`). `key` names a row of the
    set. Multi-label sets have, in place of label and top classes, one target and one probability a class.
    """
    columns = _columns(predictions, key, classes, top)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*(_texts(values) for values in columns.values()), strict=True))
        return path
    if path.suffix == ".parquet":
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise ValueError(f"{path}: parquet needs pyarrow; install vitfw[parquet], or name a .csv file") from error
        pyarrow.parquet.write_table(pyarrow.table({name: list(values) for name, values in columns.items()}), path)
        return path
    raise ValueError(f"{path}: predictions are written as .csv or .parquet")


def read_logits(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """A single-label .csv of `write_predictions` -> labels int64 [N], logits float32 [N, K], the same bits."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        header = next(rows)
        places = [place for place, name in enumerate(header) if name.startswith("logit_")]
        if "label" not in header or not places:
            raise ValueError(f"{path}: has no columns `label` and `logit_...`; it was not written by vitfw")
        values = [(int(row[header.index("label")]), [row[place] for place in places]) for row in rows]
    return np.array([label for label, _ in values], np.int64), np.array([logits for _, logits in values], np.float32)


def _columns(
    predictions: Predictions, key: Callable[[int], str], classes: Sequence[str] | None, top: int
) -> dict[str, Sequence[Any] | np.ndarray]:
    count = predictions.logits.shape[1]
    names = [str(number) for number in range(count)] if classes is None else list(classes)
    if len(names) != count:
        raise ValueError(f"{len(names)} class names for the {count} classes of the model")
    columns: dict[str, Sequence[Any] | np.ndarray] = {"key": [key(int(row)) for row in predictions.index]}
    if predictions.multi_label:
        with np.errstate(over="ignore"):
            shares = 1.0 / (1.0 + np.exp(-predictions.logits.astype(np.float64)))
        columns |= {f"target_{name}": predictions.labels[:, number].astype(int) for number, name in enumerate(names)}
        columns |= {f"probability_{name}": shares[:, number] for number, name in enumerate(names)}
    else:
        probabilities = softmax(predictions.logits)
        order = np.argsort(-predictions.logits, axis=1, kind="stable")
        columns["label"] = predictions.labels
        for place in range(min(top, count)):
            best = order[:, place]
            columns[f"class_{place + 1}"] = [names[number] for number in best]
            columns[f"probability_{place + 1}"] = np.take_along_axis(probabilities, best[:, None], axis=1)[:, 0]
    return columns | {f"logit_{name}": predictions.logits[:, number] for number, name in enumerate(names)}


def _texts(values: Sequence[Any] | np.ndarray) -> list[str]:
    """Shortest texts that read back to the same numbers."""
    return [str(value) for value in values]
