"""Nearest neighbours, L2-swept logistic regression and few-shot least squares, against numpy and scikit-learn."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, Ridge

from vitfw.evaluate.features import Features
from vitfw.evaluate.few_shot import BIAS, FewShotConfig, draw_shots, few_shot, predict_ridge, ridge
from vitfw.evaluate.holdout import split_training
from vitfw.evaluate.knn import KnnConfig, knn_votes
from vitfw.evaluate.logistic import LogisticConfig, logistic_regression


def clusters(images: int, classes: int, width: int, spread: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    centres = np.random.default_rng(7).normal(size=(classes, width))
    labels = generator.integers(0, classes, images)
    return (centres[labels] + spread * generator.normal(size=(images, width))).astype(np.float16), labels


def table(values: np.ndarray, labels: np.ndarray) -> Features:
    return Features(values[None, :, None], labels, np.arange(len(labels)), ("cls-1",), "a test")


def naive_votes(
    train: np.ndarray, labels: np.ndarray, queries: np.ndarray, k: int, temperature: float, classes: int
) -> np.ndarray:
    train, queries = (
        x.astype(np.float64) / np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True) for x in (train, queries)
    )
    similarity = queries @ train.T
    votes = np.zeros((len(queries), classes))
    for row, values in enumerate(similarity):
        for neighbour in np.argsort(-values, kind="stable")[:k]:
            votes[row, labels[neighbour]] += np.exp(values[neighbour] / temperature)
    return votes / votes.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_knn__equals_the_plain_loop_whatever_the_chunk(chunk: int) -> None:
    train, labels = clusters(150, 4, 12, 1.5)
    queries, _ = clusters(40, 4, 12, 1.5, seed=1)
    found = knn_votes(train, labels, queries, KnnConfig(neighbours=(1, 5, 20), chunk=chunk), num_classes=4)
    for k in (1, 5, 20):
        assert found[k] == pytest.approx(naive_votes(train, labels, queries, k, 0.07, 4), abs=1e-5)


def test_knn__equal_images_the_earlier_votes() -> None:
    train = np.ones((6, 3), np.float16)
    votes = knn_votes(
        train, np.array([2, 0, 0, 0, 0, 0]), train[:1], KnnConfig(neighbours=(1,), chunk=2), num_classes=3
    )
    assert votes[1].tolist() == [[0, 0, 1]]


def test_knn__several_labels_share_the_votes() -> None:
    train = np.eye(3, dtype=np.float16)
    targets = np.array([[1, 1], [0, 1], [0, 0]], np.float32)
    votes = knn_votes(train, targets, train, KnnConfig(neighbours=(1,)), num_classes=2)
    assert votes[1] == pytest.approx(targets)


def test_knn__more_neighbours_than_images_is_refused() -> None:
    with pytest.raises(ValueError, match=r"knn.neighbours=\(10, 20, 100, 200\): the training set has only 3 images"):
        knn_votes(np.eye(3), np.arange(3), np.eye(3), KnnConfig(), num_classes=3)
    with pytest.raises(ValueError, match=r"knn.temperature=0.0: must be above 0"):
        KnnConfig(temperature=0.0)


def test_logistic__equals_scikit_learn() -> None:
    values, labels = clusters(200, 3, 6, 2.0)
    train = table(values, labels)
    split = split_training(labels, least=20)
    config = LogisticConfig(strengths=(0.1,), tolerance=1e-9, chunk=33)
    found = logistic_regression(train, split, config, columns=("cls-1",), num_classes=3)
    reference = LogisticRegression(C=0.1, tol=1e-10, max_iter=5000).fit(values.astype(np.float64), labels)
    np.testing.assert_allclose(found.weight.T, reference.coef_, atol=1e-5)
    shift = found.bias - found.bias.mean()  # the bias is fixed up to a constant
    assert shift == pytest.approx(reference.intercept_ - reference.intercept_.mean(), abs=1e-5)
    assert found.logits(train).argmax(1).tolist() == reference.predict(values.astype(np.float64)).tolist()
    assert "held out of data.train" in found.protocol and "converged" in found.protocol


def test_logistic__the_held_out_images_choose_the_strength() -> None:
    values, labels = clusters(120, 3, 40, 6.0)  # few images, many features: weak L2 overfits
    train = table(values, labels)
    split = split_training(labels, least=40, share=0.3)
    config = LogisticConfig(strengths=(1e-4, 1e-3, 1e-2, 1.0, 1e2), tolerance=1e-8)
    found = logistic_regression(train, split, config, columns=("cls-1",), num_classes=3)
    scores = []
    x, held = values[split.fit].astype(np.float64), values[split.held].astype(np.float64)
    for strength in config.strengths:
        model = LogisticRegression(C=strength, max_iter=3000, tol=1e-8).fit(x, labels[split.fit])
        scores.append(100 * model.score(held, labels[split.held]))
    assert [row["held_score"] for row in found.table] == pytest.approx(scores)
    assert found.chosen["C"] == config.strengths[int(np.argmax(scores))]


def test_logistic__several_labels_an_image() -> None:
    generator = np.random.default_rng(0)
    values = generator.normal(size=(200, 5)).astype(np.float16)
    targets = (values[:, :2].astype(np.float32) > 0).astype(np.float32)
    train = table(values, targets)
    found = logistic_regression(
        train,
        split_training(targets, least=40),
        LogisticConfig(strengths=(1.0, 100.0)),
        columns=("cls-1",),
        num_classes=2,
    )
    assert found.chosen["held_score"] > 97


def test_ridge__equals_scikit_learn_in_both_forms() -> None:
    for images, width in ((30, 8), (8, 30)):
        values, labels = clusters(images, 3, width, 1.0)
        x = values.astype(np.float64)
        solved = ridge(x, labels, (0.5, 64.0), num_classes=3)
        for one, strength in zip(solved, (0.5, 64.0), strict=True):
            white = np.concatenate([(x - x.mean(0)) / (x.std(0) + 1e-5), np.full((images, 1), BIAS)], axis=1)
            target = np.where(labels[:, None] == np.arange(3), 1.0, -1.0)
            reference = Ridge(alpha=strength, fit_intercept=False, solver="svd").fit(white, target)
            assert predict_ridge(one, x) == pytest.approx(reference.predict(white), abs=1e-6)


def test_few_shot__more_shots_are_better_and_reported_labels_choose_nothing() -> None:
    values, labels = clusters(400, 4, 16, 2.0)
    test_values, test_labels = clusters(300, 4, 16, 2.0, seed=1)
    train, split = table(values, labels), split_training(labels, least=80)
    config = FewShotConfig(shots=(1, 25), draws=3)
    found = few_shot(train, split, table(test_values, test_labels), config, columns=("cls-1",), num_classes=4)
    assert found[1].mean > found[0].mean + 5 and found[0].spread > 0
    wrong = few_shot(train, split, table(test_values, (test_labels + 1) % 4), config, columns=("cls-1",), num_classes=4)
    assert [one.strengths for one in wrong] == [one.strengths for one in found]


def test_few_shot__a_class_with_too_few_images_is_named() -> None:
    labels = np.array([0] * 50 + [1] * 3)
    with pytest.raises(ValueError, match=r"few_shot.shots=5: class 1 has only 3 images"):
        draw_shots(labels, np.arange(53), 5, seed=0)
    small, large = draw_shots(labels, np.arange(53), 1, seed=0), draw_shots(labels, np.arange(53), 3, seed=0)
    assert set(small) < set(large)
