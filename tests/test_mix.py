"""Batch-level augmentation against torchvision's normalisation and timm's Mixup and RandomErasing."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.data.mixup import Mixup, mixup_target, rand_bbox
from timm.data.random_erasing import RandomErasing
from torchvision.transforms import v2

from vitfw.data.augment import AugmentConfig
from vitfw.data.mix import BatchAugment, cutmix_box, draw_boxes, draw_weights, erase, mix_images, partner, soft_targets

CPU = torch.device("cpu")


def batch(count: int, size: int = 16, channels: int = 3, classes: int = 10) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    image = torch.randint(0, 256, (count, channels, size, size), dtype=torch.uint8, generator=generator)
    return {
        "image": image,
        "label": torch.randint(classes, (count,), generator=generator),
        "index": torch.arange(count),
    }


def test_normalise_equals_torchvision() -> None:
    given_batch = batch(3)
    out = BatchAugment(AugmentConfig(policy="deit"))(given_batch, training=False)
    reference = v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])(given_batch["image"].float() / 255)
    torch.testing.assert_close(out["image"], reference, rtol=1e-5, atol=1e-6)
    assert torch.equal(out["label"], given_batch["label"])
    assert torch.equal(out["index"], given_batch["index"])
    assert given_batch["image"].dtype == torch.uint8  # the loader's batch is left alone


def test_a_training_batch_says_how_it_is_normalised() -> None:
    out = BatchAugment(AugmentConfig(policy="deit"))(batch(3), training=True)
    torch.testing.assert_close(out["normalisation"], torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]))


def test_evaluation_is_never_augmented() -> None:
    augment = BatchAugment(AugmentConfig(mixup=0.8, cutmix=1.0, erasing=1.0), num_classes=10, smoothing=0.1)
    torch.manual_seed(0)
    first, second = (augment(batch(4), training=False) for _ in range(2))
    assert torch.equal(first["image"], second["image"])
    assert first["label"].dtype == torch.int64


@settings(deadline=None)
@given(count=st.sampled_from([1, 2, 3, 5, 8]), channels=st.sampled_from([1, 3, 6]), pairing=st.sampled_from(["reverse", "roll"]))  # fmt: skip  # noqa: E501
def test_any_batch_size_and_channels(count: int, channels: int, pairing) -> None:
    """Odd batches and a batch of one: finite images, target rows that sum to 1, nothing below the off value."""
    config = AugmentConfig(mixup=0.8, cutmix=1.0, erasing=0.5, pairing=pairing, statistics="inception")
    augment = BatchAugment(config, channels=channels, num_classes=10, smoothing=0.1)
    out = augment(batch(count, channels=channels), training=True)
    assert out["image"].shape == (count, channels, 16, 16)
    assert out["image"].isfinite().all()
    torch.testing.assert_close(out["label"].sum(1), torch.ones(count))
    assert out["label"].min() == pytest.approx(0.01)


def test_smoothing_once() -> None:
    """P80."""
    rows = soft_targets(torch.tensor([3, -1]), 1000, 0.1)
    assert rows[0, 3].item() == pytest.approx(0.9001)
    assert rows[0, 4].item() == pytest.approx(0.0001)
    assert rows[0].sum().item() == pytest.approx(1)
    assert rows[1].sum().item() == 0
    labels = torch.tensor([0, 1, 2, 3])
    ours = soft_targets(labels, 5, 0.1)
    torch.testing.assert_close(torch.lerp(partner(ours, "reverse"), ours, 0.7), mixup_target(labels, 5, 0.7, 0.1))


def test_multi_label_targets_stay_within_zero_and_one() -> None:
    """P80."""
    rows = torch.tensor([[1.0, 0, 1], [0, 0, 0]])
    torch.testing.assert_close(soft_targets(rows, 3, 0.2), torch.tensor([[0.9, 0.1, 0.9], [0.1, 0.1, 0.1]]))
    data = batch(2) | {"label": rows}
    out = BatchAugment(AugmentConfig(cutmix=1.0), num_classes=3)(data, training=True)["label"]
    assert out.min() >= 0 and out.max() <= 1


@pytest.mark.parametrize(("lam", "cutmix"), [(0.3, False), (0.85, False), (0.4, True), (0.99, True), (0.0, True)])
def test_mixing_equals_timms_for_the_same_draw(lam: float, cutmix: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """timm's Mixup and ours, given the same lambda and box centre: same images, same targets."""
    from vitfw.data import mix

    image, label = torch.randn(4, 3, 24, 20), torch.tensor([0, 1, 2, 3])
    theirs = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=5)
    monkeypatch.setattr(theirs, "_params_per_batch", lambda: (lam, cutmix))
    centre = iter([7, 13])
    monkeypatch.setattr(np.random, "randint", lambda *_, **__: next(centre))
    expected_image, expected_target = theirs(image.clone(), label)
    monkeypatch.setattr(mix, "_beta", lambda *_: torch.tensor(lam, dtype=torch.float64))
    draws = iter([7.5 / 24, 13.5 / 20, 0.0, 0.0] if cutmix else [0.0])
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(next(draws), dtype=torch.float64))
    config = AugmentConfig(cutmix=1.0) if cutmix else AugmentConfig(mixup=0.8)
    own, share = draw_weights(config, 24, 20, CPU)
    torch.testing.assert_close(torch.lerp(partner(image, "reverse"), image, own), expected_image)
    torch.testing.assert_close(mix_images(image.clone(), own, "reverse"), expected_image)
    target = soft_targets(label, 5, 0.1)
    torch.testing.assert_close(torch.lerp(partner(target, "reverse"), target, share), expected_target)


@settings(deadline=None)
@given(
    count=st.integers(1, 7),
    pairing=st.sampled_from(["reverse", "roll"]),
    seed=st.integers(0, 50),
    config=st.sampled_from([AugmentConfig(mixup=0.8), AugmentConfig(cutmix=1.0), AugmentConfig(mixup=0.2, cutmix=1.0)]),
)
def test_mixing_in_place_equals_the_plain_form(count: int, pairing, seed: int, config: AugmentConfig) -> None:
    """The CPU works pair by pair in place, a device on whole batches: the same images."""
    torch.manual_seed(seed)
    images = torch.randn(count, 2, 9, 7)
    own, _ = draw_weights(config, 9, 7, CPU)
    expected = torch.lerp(partner(images, pairing), images, own)
    torch.testing.assert_close(mix_images(images, own, pairing), expected)


@given(lam=st.floats(0, 1), row=st.integers(0, 31), column=st.integers(0, 23))
def test_cutmix_box_equals_timms(lam: float, row: int, column: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        centre = iter([row, column])
        patch.setattr(np.random, "randint", lambda *_, **__: next(centre))
        expected = rand_bbox((3, 32, 24), lam)
    box = cutmix_box(torch.tensor(lam, dtype=torch.float64), torch.tensor(row), torch.tensor(column), 32, 24)
    assert tuple(int(edge) for edge in box) == tuple(int(edge) for edge in expected)


def test_cutmix_share_is_the_uncovered_area() -> None:
    torch.manual_seed(0)
    for _ in range(50):
        own, share = draw_weights(AugmentConfig(cutmix=1.0), 20, 30, CPU)
        assert share.item() == pytest.approx(own.mean().item(), abs=1e-6)
        assert set(own.unique().tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize(("alpha", "kept"), [(0.2, 0.90), (0.8, 0.77), (1.0, 0.75)])
def test_expected_share_of_the_larger_partner(alpha: float, kept: float) -> None:
    torch.manual_seed(0)
    shares = torch.stack([draw_weights(AugmentConfig(mixup=alpha), 2, 2, CPU)[1] for _ in range(3000)])
    assert shares.maximum(1 - shares).mean().item() == pytest.approx(kept, abs=0.01)
    assert shares.mean().item() == pytest.approx(0.5, abs=0.02)
    folded = torch.stack([draw_weights(AugmentConfig(mixup=alpha, fold=True), 2, 2, CPU)[1] for _ in range(50)])
    assert folded.min() >= 0.5


def test_switch_and_probability() -> None:
    torch.manual_seed(0)
    config = AugmentConfig(mixup=0.8, cutmix=1.0, switch=0.25, mix_probability=0.6)
    kinds = {"none": 0, "cutmix": 0, "mixup": 0}
    for _ in range(2000):
        own, share = draw_weights(config, 8, 8, CPU)
        flat = own.numel() == 1 or bool((own == own.flatten()[0]).all())
        kinds["none" if share == 1 else "mixup" if flat else "cutmix"] += 1
    # a CutMix box can miss or fill the image: those few count as none or mixup
    assert kinds["mixup"] / 2000 == pytest.approx(0.6 * 0.75, abs=0.04)
    assert kinds["cutmix"] / 2000 == pytest.approx(0.6 * 0.25, abs=0.04)


def test_pairing_of_timm_and_of_torchvision() -> None:
    rows = torch.arange(4)
    assert partner(rows, "reverse").tolist() == [3, 2, 1, 0]
    assert partner(rows, "roll").tolist() == [3, 0, 1, 2]


def test_erasing_law_equals_timms() -> None:
    """Share of images, mean and spread of the erased area, and mean of the aspect, over 4,000 draws of each."""
    torch.manual_seed(0)
    random.seed(0)
    boxes = draw_boxes(4000, 32, 24, 0.25, CPU)
    heights, widths = boxes[:, 1] - boxes[:, 0], boxes[:, 3] - boxes[:, 2]
    hit = heights * widths > 0
    theirs = RandomErasing(probability=0.25, max_area=1 / 3, mode="const", device="cpu")
    sizes = []
    for _ in range(4000):
        cleared = theirs(torch.ones(1, 32, 24))[0] == 0
        if cleared.any():
            sizes.append((int(cleared.any(1).sum()), int(cleared.any(0).sum())))
    reference = torch.tensor(sizes)
    assert hit.float().mean().item() == pytest.approx(len(sizes) / 4000, abs=0.03)
    for ours, expected in (
        ((heights * widths)[hit].float(), reference.prod(1).float()),
        ((heights / widths)[hit].log(), (reference[:, 0] / reference[:, 1]).log()),
    ):
        assert ours.mean().item() == pytest.approx(
            expected.mean().item(), abs=4 * expected.std().item() / math.sqrt(900)
        )
        assert ours.std().item() == pytest.approx(expected.std().item(), rel=0.12)
    assert (boxes[hit][:, 1] <= 32).all() and (boxes[hit][:, 3] <= 24).all() and (boxes >= 0).all()


@pytest.mark.parametrize("mode", ["pixel", "const"])
def test_erasing_touches_the_rectangle_only(mode: str) -> None:
    torch.manual_seed(0)
    images = torch.full((64, 3, 16, 16), 5.0)
    out = erase(images.clone(), 1.0, mode)
    changed = out != 5.0
    per_image = changed.flatten(1).float().mean(1)
    assert ((per_image > 0) & (per_image < 0.5)).all()
    assert torch.equal(changed[:, 0], changed[:, 1])
    values = out[changed]
    if mode == "const":
        assert (values == 0).all()
    else:
        assert (values.mean().item(), values.std().item()) == pytest.approx((0, 1), abs=0.05)


def test_same_seed_same_batch_and_another_seed_another() -> None:
    augment = BatchAugment(AugmentConfig(mixup=0.8, cutmix=1.0, erasing=0.5), num_classes=10)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(augment(batch(6), training=True)["image"])
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def test_nothing_waits_for_the_device() -> None:
    """On the meta device every read of a value raises, so what runs there never synchronises."""
    augment = BatchAugment(AugmentConfig(mixup=0.8, cutmix=1.0, erasing=0.5), num_classes=10, smoothing=0.1).to("meta")
    data = {"image": torch.zeros(4, 3, 8, 8, dtype=torch.uint8, device="meta"), "label": torch.zeros(4, dtype=torch.long, device="meta")}  # fmt: skip  # noqa: E501
    out = augment(data, training=True)
    assert out["image"].shape == (4, 3, 8, 8)
    assert out["label"].shape == (4, 10)


def test_unlabelled_batches() -> None:
    augment = BatchAugment(AugmentConfig(policy="mae"))
    data = batch(2)
    del data["label"]
    assert "label" not in augment(data, training=True)
    kept = augment(batch(2) | {"label": torch.tensor([-1, 3])}, training=True)["label"]
    assert kept.tolist() == [-1, 3]
    with pytest.raises(ValueError, match=r"this task has no class labels to mix; set all three to 0"):
        BatchAugment(AugmentConfig(mixup=0.8))
    with pytest.raises(ValueError, match=r"batch has no label, but augment.mixup or augment.cutmix is on"):
        BatchAugment(AugmentConfig(mixup=0.8), num_classes=3)(data, training=True)


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"batch image: dtype torch.float32; the loader hands over uint8"):
        BatchAugment(AugmentConfig())({"image": torch.zeros(1, 3, 4, 4)}, training=False)
    with pytest.raises(ValueError, match=r"imagenet: 3 means and 3 deviations for 1 channels"):
        BatchAugment(AugmentConfig(), channels=1)
    with pytest.raises(ValueError, match=r"task.smoothing=1.0: must lie in"):
        BatchAugment(AugmentConfig(), num_classes=3, smoothing=1.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_path_on_cuda() -> None:
    """No synchronisation, and the same law as on the CPU: erased share and target rows."""
    augment = BatchAugment(AugmentConfig(mixup=0.8, cutmix=1.0, erasing=1.0), num_classes=10, smoothing=0.1).cuda()
    data = {key: value.cuda() for key, value in batch(7).items()}
    augment(data, training=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = augment(data, training=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(out["label"].sum(1).cpu(), torch.ones(7))
    erased = erase(torch.full((64, 3, 16, 16), 5.0, device="cuda"), 1.0, "pixel") != 5.0
    assert 0.05 < erased.float().mean().item() < 0.3
