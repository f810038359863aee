"""Scores from saved logits, against scikit-learn and torchmetrics."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    balanced_accuracy_score,
    confusion_matrix,
    f1_score,
    log_loss,
    precision_score,
    recall_score,
    top_k_accuracy_score,
)
from torchmetrics.classification import MulticlassCalibrationError

from vitfw.evaluate import calibration, multilabel, scores


def sample(images: int, classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes, images)
    logits = generator.normal(size=(images, classes)).astype(np.float32)
    logits[np.arange(images), labels] += 1.5
    return logits, labels


@settings(max_examples=25, deadline=None)
@given(images=st.integers(20, 60), classes=st.integers(2, 12), seed=st.integers(0, 99))
def test_scores_equal_scikit_learn(images: int, classes: int, seed: int) -> None:
    logits, labels = sample(images, classes, seed)
    labels[:classes] = np.arange(classes)  # scikit-learn warns about absent classes; a test of its own has them
    values = scores.classification_scores(logits, labels)
    probabilities = calibration.softmax(logits)
    called = logits.argmax(1)
    assert values["acc1"] == pytest.approx(100 * accuracy_score(labels, called), abs=1e-12)
    assert values["mean_class_acc"] == pytest.approx(100 * balanced_accuracy_score(labels, called), abs=1e-10)
    assert values["nll"] == pytest.approx(log_loss(labels, probabilities, labels=range(classes)), rel=1e-9)
    if classes > 5:
        expected = top_k_accuracy_score(labels, logits, k=5, labels=range(classes))
        assert values["acc5"] == pytest.approx(100 * expected, abs=1e-12)
    one_hot = np.eye(classes)[labels]
    assert values["brier"] == pytest.approx(((probabilities - one_hot) ** 2).sum(1).mean(), rel=1e-9)
    assert values["samples"] == images


def test_ece__equals_torchmetrics() -> None:
    logits, labels = sample(500, 7)
    probabilities = calibration.softmax(logits)
    reference = MulticlassCalibrationError(7, n_bins=15)(torch.from_numpy(probabilities), torch.from_numpy(labels))
    assert calibration.expected_error(probabilities, labels) == pytest.approx(reference.item(), abs=1e-6)


def test_classwise_ece__by_hand() -> None:
    """Two classes, two bins: class 0 is given 0.9, 0.9, 0.2 and occurs in the first and the third image."""
    probabilities = np.array([[0.9, 0.1], [0.9, 0.1], [0.2, 0.8]])
    labels = np.array([0, 1, 0])
    first = (2 * abs(0.5 - 0.9) + 1 * abs(1.0 - 0.2)) / 3
    second = (2 * abs(0.5 - 0.1) + 1 * abs(0.0 - 0.8)) / 3
    assert calibration.classwise_error(probabilities, labels, bins=2) == pytest.approx((first + second) / 2)


def test_reliability__bins_hold_each_image_once() -> None:
    logits, labels = sample(200, 4)
    probabilities = calibration.softmax(logits)
    diagram = calibration.reliability(probabilities, labels, bins=10)
    assert diagram.images.sum() == 200 and len(diagram.edges) == 11
    full = diagram.images > 0
    overall = (diagram.accuracy[full] * diagram.images[full]).sum() / 200
    assert overall == pytest.approx(np.mean(probabilities.argmax(1) == labels))
    assert np.isnan(diagram.accuracy[~full]).all()


def test_temperature__found_where_the_logits_were_scaled() -> None:
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(20_000, 5)) * 2
    labels = np.array([generator.choice(5, p=row) for row in calibration.softmax(logits)])
    assert calibration.fit_temperature(logits, labels) == pytest.approx(1.0, abs=0.03)
    assert calibration.fit_temperature(logits * 3, labels) == pytest.approx(3.0, abs=0.09)
    before = calibration.expected_error(calibration.softmax(logits * 3), labels)
    after = calibration.expected_error(calibration.softmax(logits), labels)
    assert after < before / 5


def test_accuracy_is_hits_over_images__and_mean_class_ignores_absent_classes() -> None:
    """P55."""
    logits = np.zeros((10, 3))
    logits[:, 0] = 1
    labels = np.array([0] * 9 + [1])
    values = scores.classification_scores(logits, labels)
    assert values["acc1"] == pytest.approx(90) and values["mean_class_acc"] == pytest.approx(50)
    assert "acc5" not in values  # three classes


def test_order_and_split_into_parts_change_nothing() -> None:
    """P54."""
    logits, labels = sample(101, 9)
    order = np.random.default_rng(1).permutation(101)
    assert (
        scores.classification_scores(logits, labels)["acc1"]
        == scores.classification_scores(logits[order], labels[order])["acc1"]
    )
    assert np.array_equal(
        scores.confusion_matrix(logits, labels), scores.confusion_matrix(logits[order], labels[order])
    )


def test_ties_go_to_the_lower_class() -> None:
    logits = np.zeros((3, 4))
    assert scores.label_ranks(logits, np.array([0, 1, 3])).tolist() == [0, 1, 3]


def test_class_table__equals_scikit_learn() -> None:
    logits, labels = sample(300, 6)
    confusion = scores.confusion_matrix(logits, labels)
    assert np.array_equal(confusion, confusion_matrix(labels, logits.argmax(1)))
    rows = scores.class_table(confusion, tuple("abcdef"))
    for name, reference in (("recall", recall_score), ("precision", precision_score), ("f1", f1_score)):
        found = [getattr(row, name) for row in rows]
        assert found == pytest.approx(100 * reference(labels, logits.argmax(1), average=None))
    assert [row.name for row in rows] == list("abcdef")


@pytest.mark.parametrize(
    ("logits", "labels", "text"),
    [
        (np.zeros((2, 3)), np.array([0, -1]), r"labels run from -1 to 0.*classes 0 to 2"),
        (np.zeros((2, 3)), np.array([0, 3]), r"labels run from 0 to 3"),
        (np.full((2, 3), np.nan), np.array([0, 1]), r"2 of 2 images have logits that are not finite"),
        (np.zeros((0, 3)), np.zeros(0, int), r"N over 0"),
    ],
)
def test_what_cannot_be_scored_is_refused(logits: np.ndarray, labels: np.ndarray, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        scores.classification_scores(logits, labels)


def multi_sample(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    targets = (generator.random((200, 5)) < 0.3).astype(np.int64)
    values = np.round(generator.normal(size=(200, 5)) + targets, 1)  # rounded: with ties
    return values, targets


def test_average_precision__equals_scikit_learn_with_ties() -> None:
    values, targets = multi_sample()
    found = multilabel.average_precision(values, targets)
    assert found == pytest.approx([average_precision_score(targets[:, k], values[:, k]) for k in range(5)])


def test_average_precision__class_without_positive_images_has_none() -> None:
    values, targets = multi_sample()
    targets[:, 2] = 0
    assert np.isnan(multilabel.average_precision(values, targets)[2])
    thresholds = multilabel.fit_thresholds(values, targets)
    assert thresholds.values[2] == np.inf
    result = multilabel.multilabel_scores(values, targets, thresholds.values)
    assert result["classes_scored"] == 4 and np.isfinite(list(result.values())).all()


def test_f1__equals_scikit_learn_at_the_thresholds() -> None:
    values, targets = multi_sample()
    thresholds = multilabel.fit_thresholds(values, targets)
    called = values >= thresholds.values
    result = multilabel.multilabel_scores(values, targets, thresholds.values)
    assert result["f1_macro"] == pytest.approx(100 * f1_score(targets, called, average="macro"))
    assert result["f1_micro"] == pytest.approx(100 * f1_score(targets, called, average="micro"))
    assert thresholds.f1 == pytest.approx(100 * f1_score(targets, called, average=None))


def test_thresholds__no_other_threshold_is_better() -> None:
    values, targets = multi_sample(3)
    thresholds = multilabel.fit_thresholds(values, targets)
    for k in range(5):
        best = max(f1_score(targets[:, k], values[:, k] >= level) for level in np.unique(values[:, k]))
        assert thresholds.f1[k] == pytest.approx(100 * best)


def test_binomial_error__of_a_perfect_score_is_not_zero() -> None:
    assert scores.binomial_error(100.0, 360) == pytest.approx(100 * (1 / 361 * 360 / 361 / 360) ** 0.5)
    assert scores.binomial_error(75.0, 10_000) == pytest.approx(100 * (0.75 * 0.25 / 10_000) ** 0.5)
