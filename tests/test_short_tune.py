"""The short fine-tune beside masked autoencoding: what it reads, what it learns, and that it leaves no trace."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vitfw.data.augment import AugmentConfig
from vitfw.data.index import Samples, open_samples
from vitfw.data.loader import build_eval_loader, build_train_loader
from vitfw.data.mix import BatchAugment
from vitfw.data.section import DataConfig
from vitfw.evaluate.short_tune import copy_with_head, labelled_share, plan_short_tune, short_tune
from vitfw.models.variants import ModelConfig
from vitfw.seeding import seed_all
from vitfw.tasks.mae import MaeConfig, MaeTask, build_mae

DATA = Path(__file__).parent.parent / "data" / "digits"


def samples(split: str) -> Samples:
    return open_samples(f"{DATA}/{split}-*.tar")


def digits_task(**options) -> MaeTask:
    torch.manual_seed(0)
    model = ModelConfig(variant="mae_ti2", image_size=8, in_channels=1, width=48, depth=2, heads=3, registers=1)
    values: dict[str, Any] = {"decoder_width": 24, "decoder_depth": 1, "decoder_heads": 2, "tune_per_class": 10}
    return build_mae(MaeConfig(**(values | options)), model, num_classes=10)


def tuned(task: MaeTask, *, images_per_device: int = 256) -> dict[str, float]:
    plan = plan_short_tune(
        task.config, samples("train"), samples("val"), rank=0, world=1, images_per_device=images_per_device
    )
    assert plan is not None
    augment = BatchAugment(AugmentConfig(mean=(0.5,), std=(0.5,)), channels=1)
    shared: dict[str, Any] = {"data": DataConfig(), "workers": 0, "channels": 1, "image_size": 8}
    train = build_train_loader(plan.samples, _pixels, order=plan.order, **shared)
    return short_tune(
        plan,
        task.encoder,
        train=lambda: train,
        val=build_eval_loader(samples("val"), _pixels, batch=100, **shared),
        prepare=lambda batch, training: augment(batch, training=training),
        autocast=nullcontext,
        device=torch.device("cpu"),
    )


def _pixels(image: Any) -> Tensor:
    return torch.from_numpy(np.array(image))[None]


def test_it_learns_from_few_labels_and_leaves_no_trace() -> None:
    """Accuracy far above chance; encoder, its modes and gradients, and every generator as before; the same once more."""
    task = digits_task(tune_steps=60, tune_lr=3e-3)
    before = {name: value.clone() for name, value in task.state_dict().items()}
    task.eval()
    seed_all(7)
    first = tuned(task)
    drawn = torch.rand(1), random.random(), np.random.rand()
    seed_all(7)
    assert drawn == (torch.rand(1), random.random(), np.random.rand())
    assert first.keys() == {"tune_n10_s60_acc1"}
    assert first["tune_n10_s60_acc1"] > 40
    assert all(torch.equal(value, before[name]) for name, value in task.state_dict().items())
    assert not task.training
    assert all(parameter.grad is None and parameter.requires_grad for parameter in task.parameters())
    with torch.no_grad():
        assert tuned(task) == first


def test_micro_batches_change_nothing() -> None:
    """16 micro-batches of 4 images (a quarter of 16, since all patches are seen) instead of one of 64: the same updates."""
    task = digits_task(tune_steps=20)
    small = plan_short_tune(task.config, samples("train"), samples("val"), rank=0, world=1, images_per_device=16)
    assert small is not None
    assert (small.order.images_per_device, small.order.accumulation) == (4, 16)
    one, many = tuned(task)["tune_n10_s20_acc1"], tuned(task, images_per_device=16)["tune_n10_s20_acc1"]
    assert abs(one - many) < 1.0


def test_the_copy_reads_the_mean_of_the_patches() -> None:
    """As in fine-tuning: patches without class token and registers, a fresh norm, a head that starts near zero."""
    task = digits_task()
    images = torch.randn(3, 1, 8, 8)
    network = copy_with_head(task.encoder, 10)
    tokens = task.encoder(images, output="tokens", blocks=(-1,), block_norm=False).blocks[1]
    expected = F.layer_norm(tokens[:, 2:].mean(1), (48,), eps=1e-6)
    torch.testing.assert_close(network(images, output="pooled"), expected)
    assert network(images).abs().max() < 1e-2
    ours = {value.data_ptr() for value in task.encoder.state_dict().values()}
    assert not ours & {value.data_ptr() for value in network.state_dict().values()}


def test_the_share_has_as_many_images_of_each_class() -> None:
    share = labelled_share(samples("train"), 7)
    assert np.bincount(share.labels).tolist() == [7] * 10
    again = labelled_share(samples("train"), 7)
    assert [share.key(row) for row in range(70)] == [again.key(row) for row in range(70)]
    larger = labelled_share(samples("train"), 9)
    assert {share.key(row) for row in range(70)} < {larger.key(row) for row in range(90)}


def plan_of(world: int = 1, val: Samples | None = None, **options) -> Callable[[], Any]:
    values: dict[str, Any] = {"tune_per_class": 10}
    config = MaeConfig(**(values | options))
    return lambda: plan_short_tune(config, samples("train"), val, rank=0, world=world, images_per_device=64)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tune_per_class": 500}, r"task.tune_per_class=500: class 0 has only \d+ training images; lower it"),
        (
            {"tune_batch": 101},
            r"task.tune_batch=101: must be a multiple of the 1 processes, and at most the 100 images",
        ),
        ({"tune_batch": 63, "world": 2}, r"task.tune_batch=63: must be a multiple of the 2 processes"),
    ],
)
def test_wrong_plans_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        plan_of(val=samples("val"), **options)()


def test_labels_are_needed() -> None:
    with pytest.raises(ValueError, match=r"task.tune_per_class=10: data.val has no labels to score"):
        plan_of()()
    assert plan_of(tune_per_class=0)() is None
    with pytest.raises(ValueError, match=r"task.tune_per_class=-1: must be 0 \(none\) or more"):
        MaeConfig(tune_per_class=-1)
    with pytest.raises(ValueError, match=r"task.tune_steps=0: must be above 0"):
        MaeConfig(tune_steps=0)


def test_the_cost_is_stated() -> None:
    task = digits_task(tune_steps=50, tune_batch=20)
    pretraining = sum(task.macs())
    network = copy_with_head(task.encoder, 10)
    matrices = sum(p.numel() for p in network.blocks.parameters() if p.ndim == 2)
    full = 18 * matrices + 2 * 2 * 18 * 18 * 48 + 16 * network.patch_embed.proj.weight.numel()
    images = 1000 * full / pretraining
    assert f"50 updates of 20 whole images, costs as much as pretraining on {images:,.0f} images" in task.cost_text()
    assert "fine-tune" not in digits_task(tune_per_class=0).cost_text()
