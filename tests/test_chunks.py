"""Batches of one size: the same rows, whatever came in, and the same bits of the network."""

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitfw.evaluate.chunks import AT_ONCE, chunked
from vitfw.evaluate.predictions import predict
from vitfw.models.build import build_model
from vitfw.models.model_config import ModelConfig
from vitfw.tasks.task import Batch


def batches(images: torch.Tensor, sizes: list[int], *, multi_label: bool = False) -> list[Batch]:
    """Rows cut into batches of these sizes, over and over."""
    found, start = [], 0
    while start < len(images):
        rows = torch.arange(start, min(start + sizes[len(found) % len(sizes)], len(images)))
        label = torch.stack([rows % 2, rows % 3], 1).float() if multi_label else rows % 3
        found.append({"image": images[rows], "label": label, "index": rows})
        start += len(rows)
    return found


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 70), st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 20), st.booleans())
def test_chunks__hold_the_same_rows_in_one_size(count: int, sizes: list[int], size: int, multi_label: bool) -> None:
    images = torch.arange(count, dtype=torch.uint8)[:, None].expand(-1, 4)
    found = list(chunked(batches(images, sizes, multi_label=multi_label), size))
    assert len(found) == -(-count // size) and all(len(value) == size for part in found for value in part.values())
    index, image = (torch.cat([part[name] for part in found]) for name in ("index", "image"))
    label = torch.cat([part["label"] for part in found])
    assert index[:count].tolist() == list(range(count)) and torch.equal(image[:count], images)
    assert bool((index[count:] == -1).all()) and bool((label[count:] == -1).all())
    assert label.dtype == (torch.float32 if multi_label else torch.int64)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width, heads", [(24, 2), (64, 4), (50, 2)])
def test_logits__are_the_same_bits_for_any_batches_and_order(width: int, heads: int, precision: torch.dtype) -> None:
    """An image's row is the same wherever it stands and whatever stands beside it."""
    torch.manual_seed(0)
    network = build_model(
        ModelConfig(variant="vit_ti4", image_size=12, width=width, depth=2, heads=heads), num_classes=5
    )
    images = torch.randn(150, 3, 12, 12)

    def autocast() -> AbstractContextManager[Any]:
        return torch.autocast("cpu", dtype=precision, enabled=precision != torch.float32)

    def logits(rows: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        found = predict(
            network,
            batches(images[rows], sizes),
            prepare=lambda batch: {name: value.clone() for name, value in batch.items()},
            device=torch.device("cpu"),
            autocast=autocast,
        )
        return torch.from_numpy(found.logits)

    whole = logits(torch.arange(150), [AT_ONCE])
    for sizes in ([1], [7], [100], [3, 90, 1]):
        assert torch.equal(logits(torch.arange(150), sizes), whole), sizes
    shuffled = torch.randperm(150)
    assert torch.equal(logits(shuffled, [32]), whole[shuffled])
    assert torch.equal(logits(torch.arange(1, 150, 3), [11]), whole[1::3])
