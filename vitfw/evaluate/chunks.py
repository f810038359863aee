"""Images go through the network in evaluation always so many at once, whatever batches the loader gives.

The last bits of a matrix product depend on the shape of the product: a library takes another kernel for 7 rows than for
700. With one shape an image's answer is the same bits for any batch size, worker count and number of processes, on the
same machine, precision and number of threads. Where it stands in the chunk makes no difference for networks of even
width (with an odd one, rows of a matrix start at odd places in memory, and the CPU's kernels round some differently).
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from vitfw.tasks.task import Batch

AT_ONCE = 64  # fills a GPU from ViT-S on; memory for 64 images without gradients is less than a training step takes


def chunked(batches: Iterable[Batch], size: int = AT_ONCE) -> Iterator[Batch]:
    """Evaluation batches of any sizes -> the same rows in the same order, `size` a batch; the last one is padded.

    Padding has index and label -1 and black images. Ranks with equally many rows get equally many chunks.
    """
    rest: Batch = {}
    for batch in batches:
        rows = {name: torch.cat([rest[name], value]) for name, value in batch.items()} if rest else batch
        count = len(rows["index"])
        whole = count - count % size
        for start in range(0, whole, size):
            yield {name: value[start : start + size] for name, value in rows.items()}
        rest = {name: value[whole:] for name, value in rows.items()} if whole < count else {}
    if rest:
        yield {name: _padded(value, size, 0 if name == "image" else -1) for name, value in rest.items()}


def _padded(rows: Tensor, size: int, value: int) -> Tensor:
    return torch.cat([rows, rows.new_full((size - len(rows), *rows.shape[1:]), value)])
