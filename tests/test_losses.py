"""Losses against torch, timm and closed formulas."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from timm.loss.binary_cross_entropy import BinaryCrossEntropy
from timm.loss.cross_entropy import SoftTargetCrossEntropy

from vitfw.data.augment import AugmentConfig
from vitfw.data.mix import BatchAugment, soft_targets
from vitfw.models.build import build_model
from vitfw.models.losses import (
    adjust_logits,
    as_rows,
    balanced_weights,
    binary_cross_entropy,
    check_loss,
    classification_loss,
    distillation_loss,
    feature_loss,
    mixed_accuracy,
    soft_cross_entropy,
)
from vitfw.models.variants import ModelConfig


def case(batch: int, classes: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, classes, generator=generator), torch.randint(classes, (batch,), generator=generator)


@given(batch=st.integers(1, 8), classes=st.integers(2, 12), smoothing=st.sampled_from([0.0, 0.1, 0.5]))
def test_cross_entropy_against_torch(batch: int, classes: int, smoothing: float) -> None:
    """Hard and smoothed targets as torch's own; smoothing is in the target alone."""
    logits, label = case(batch, classes)
    torch.testing.assert_close(soft_cross_entropy(logits, label), F.cross_entropy(logits, label))
    soft = soft_targets(label, classes, smoothing)
    reference = F.cross_entropy(logits, label, label_smoothing=smoothing)
    torch.testing.assert_close(soft_cross_entropy(logits, soft), reference)
    torch.testing.assert_close(SoftTargetCrossEntropy()(logits, soft), reference)


def test_class_weights_as_torch() -> None:
    logits, label = case(6, 4)
    weights = torch.tensor([0.5, 1.0, 2.0, 4.0])
    reference = F.cross_entropy(logits, label, weight=weights)
    torch.testing.assert_close(soft_cross_entropy(logits, label, class_weights=weights), reference)
    reference = F.binary_cross_entropy_with_logits(logits, as_rows(label, 4), weight=weights)
    ours = binary_cross_entropy(logits, label, binarise=False, over_classes="mean", class_weights=weights)
    torch.testing.assert_close(ours, reference)


def test_unlabelled_rows_count_nowhere() -> None:
    logits, label = case(5, 3)
    part = soft_cross_entropy(logits[:3], label[:3])
    label[3:] = -1
    torch.testing.assert_close(soft_cross_entropy(logits, label), part)
    torch.testing.assert_close(soft_cross_entropy(logits, soft_targets(label, 3, 0.0)), part)
    assert soft_cross_entropy(logits, torch.full((5,), -1)).item() == 0


@pytest.mark.parametrize(("classes", "loss"), [(1000, 6.9078), (100, 4.6052), (10, 2.3026)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_zero_head_starts_at_ln_k(classes: int, loss: float, smoothing: float) -> None:
    """P77."""
    _, label = case(8, classes)
    target = 0.7 * soft_targets(label, classes, smoothing) + 0.3 * soft_targets(label.flip(0), classes, smoothing)
    value = soft_cross_entropy(torch.zeros(8, classes), target).item()
    assert value == pytest.approx(math.log(classes), rel=1e-6) == pytest.approx(loss, abs=5e-5)


def test_sigmoid_loss_of_augreg() -> None:
    """Bias -6.9 and 1000 classes: 7.907 summed over classes; bias 0: 693.15. Mean reduction: ln 2."""
    _, label = case(4, 1000)
    assert classification_loss("sigmoid", torch.full((4, 1000), -6.9), label).item() == pytest.approx(7.907, abs=1e-3)
    assert classification_loss("sigmoid", torch.zeros(4, 1000), label).item() == pytest.approx(693.15, abs=0.01)
    assert classification_loss("bce", torch.zeros(4, 1000), label).item() == pytest.approx(math.log(2))


def test_bce_of_deit3_equals_timms() -> None:
    """P80: both partners of a mixed image count in full; mean over batch and classes."""
    logits, label = case(6, 5)
    mixed = 0.8 * soft_targets(label, 5, 0.0) + 0.2 * soft_targets(label.flip(0), 5, 0.0)
    reference = BinaryCrossEntropy(smoothing=0.0, target_threshold=0.0)(logits, mixed)
    torch.testing.assert_close(classification_loss("bce", logits, mixed), reference)


def test_multi_label() -> None:
    """P80."""
    logits, _ = case(3, 4)
    rows = torch.tensor([[1.0, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    reference = F.binary_cross_entropy_with_logits(logits, rows, reduction="sum") / 3
    torch.testing.assert_close(classification_loss("sigmoid", logits, rows), reference)


def test_impossible_combinations_are_refused() -> None:
    """P80."""
    with pytest.raises(ValueError, match=r"task.smoothing=0.1 with task.loss=bce: .* every class positive"):
        check_loss("bce", smoothing=0.1, multi_label=False)
    with pytest.raises(ValueError, match=r"task.loss=softmax on multi-label targets"):
        check_loss("softmax", smoothing=0.0, multi_label=True)
    check_loss("softmax", smoothing=0.1, multi_label=False)


def test_half_precision_logits_are_summed_in_float32() -> None:
    logits, label = case(4, 1000)
    logits = logits.bfloat16()
    torch.testing.assert_close(soft_cross_entropy(logits, label), F.cross_entropy(logits.float(), label))
    assert classification_loss("sigmoid", logits, label).dtype == torch.float32


def test_logit_adjustment() -> None:
    """With logits of the true posterior of a balanced world, adjusting gives the long-tailed posterior."""
    counts = torch.tensor([90, 9, 1])
    logits, _ = case(2, 3)
    expected = torch.softmax(logits, 1) * counts
    torch.testing.assert_close(
        torch.softmax(adjust_logits(logits, counts), 1), expected / expected.sum(1, keepdim=True)
    )
    with pytest.raises(ValueError, match=r"logit adjustment: classes \[1\] have no training image"):
        adjust_logits(logits, torch.tensor([1, 0, 1]))


def test_balanced_weights_have_mean_one_over_images() -> None:
    counts = torch.tensor([90, 9, 1])
    for power in (0.0, 0.5, 1.0):
        weights = balanced_weights(counts, power)
        assert (weights * counts).sum().item() / 100 == pytest.approx(1)
    assert balanced_weights(counts).tolist() == pytest.approx([100 / 270, 100 / 27, 100 / 3], rel=1e-6)
    with pytest.raises(ValueError, match=r"class weights: classes \[0\] have no training image"):
        balanced_weights(torch.tensor([0, 5]))


def test_accuracy_under_mixing() -> None:
    """70 % of class 0 and 30 % of class 1: predicting 0 counts 0.7, smoothing taken out; hard labels: plain top-1."""
    first, second = torch.tensor([0, 0, -1]), torch.tensor([1, 1, -1])
    target = 0.7 * soft_targets(first, 10, 0.1) + 0.3 * soft_targets(second, 10, 0.1)
    logits = F.one_hot(torch.tensor([0, 1, 0]), 10).float()
    assert mixed_accuracy(logits, target, smoothing=0.1).item() == pytest.approx((0.7 + 0.3) / 2)
    assert mixed_accuracy(logits, torch.tensor([0, 2, -1])).item() == 0.5


@pytest.mark.parametrize("classes", [10, 100, 1000])
def test_a_head_of_zeros_leaves_the_backbone_alone_for_one_step(classes: int) -> None:
    """P77: first loss ln K under mixing and smoothing, backbone gradients exactly 0, the head's not; then all move."""
    torch.manual_seed(0)
    net = build_model(ModelConfig(variant="vit_ti4", image_size=8, depth=2, zero_head=True), num_classes=classes)
    augment = BatchAugment(AugmentConfig(mixup=0.8, cutmix=1.0), num_classes=classes, smoothing=0.1)
    batch = {"image": torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8), "label": torch.randint(classes, (4,))}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2):
        mixed = augment(batch, training=True)
        loss = soft_cross_entropy(net(mixed["image"]), mixed["label"])
        optimizer.zero_grad()
        loss.backward()
        backbone = [p.grad for name, p in net.named_parameters() if not name.startswith("head") and p.grad is not None]
        assert net.head.weight.grad.abs().max() > 0
        if step == 0:
            assert loss.item() == pytest.approx(math.log(classes), rel=1e-6)
            assert all(gradient.abs().max() == 0 for gradient in backbone)
        else:
            assert all(gradient.abs().max() > 0 for gradient in backbone)
        optimizer.step()


def test_distillation_as_deits_code() -> None:
    """Hard: the teacher's best class. Soft: KL at temperature 3, x 9, per element; per image it is K times as strong."""
    logits, _ = case(4, 1000)
    teacher, _ = case(4, 1000, seed=1)
    teacher.requires_grad_()
    logits.requires_grad_()
    hard = distillation_loss(logits, teacher, form="hard")
    torch.testing.assert_close(hard, F.cross_entropy(logits, teacher.argmax(1)))
    student, target = (torch.softmax(values.detach() / 3, 1) for values in (logits, teacher))
    expected = 9 * (target * (target.log() - student.log())).sum() / 4000
    soft = distillation_loss(logits, teacher, form="soft", temperature=3.0)
    torch.testing.assert_close(soft.detach(), expected)
    image = distillation_loss(logits, teacher, form="soft", temperature=3.0, per="image")
    torch.testing.assert_close(image, 1000 * soft)
    (hard + soft).backward()
    assert teacher.grad is None
    assert logits.grad is not None
    assert distillation_loss(teacher, teacher, form="soft").item() == pytest.approx(0, abs=1e-7)
    with pytest.raises(ValueError, match=r"the student gives \(4, 10\), the teacher \(4, 1000\); they need the same"):
        distillation_loss(logits[:, :10], teacher, form="hard")
    with pytest.raises(ValueError, match=r"per=batch: must be element or image"):
        distillation_loss(logits, teacher, form="soft", per="batch")


def test_feature_loss() -> None:
    features = torch.randn(2, 5, 8, requires_grad=True)
    assert feature_loss(features, 3 * features).item() == pytest.approx(0, abs=1e-6)
    assert feature_loss(features, -features).item() == pytest.approx(2, abs=1e-6)
    teacher = torch.randn(2, 5, 8, requires_grad=True)
    feature_loss(features, teacher).backward()
    assert teacher.grad is None
    assert features.grad is not None
