"""Robustness sets, corruptions on the fly, predictions on disk, test-time resolution."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

from vitfw.evaluate import corruptions
from vitfw.evaluate.predictions import Predictions, predict, read_logits, write_predictions
from vitfw.evaluate.resolution import at_size
from vitfw.evaluate.robustness import ALEXNET, among, class_columns, corruption_errors, real_answers, real_scores
from vitfw.evaluate.scores import classification_scores
from vitfw.models.build import build_model
from vitfw.models.model_config import ModelConfig
from vitfw.models.vit import ViT


def picture(seed: int = 0) -> Image.Image:
    smooth = ndimage.gaussian_filter(np.random.default_rng(seed).random((32, 32, 3)), (2, 2, 0))
    smooth = (smooth - smooth.min()) / (smooth.max() - smooth.min())
    return Image.fromarray(np.uint8(smooth * 255))


WITHOUT_PHOTOGRAPHS = [name for name in corruptions.STRENGTHS if name != "frost"]


@pytest.mark.parametrize("name", WITHOUT_PHOTOGRAPHS)
def test_corruption__changes_the_picture_the_same_way_each_time_and_more_with_severity(name: str) -> None:
    clean = np.asarray(picture(), np.float64)
    changes = []
    for severity in (1, 5):
        first, second = (corruptions.corrupt(picture(), name, severity, np.random.default_rng(3)) for _ in range(2))
        assert first.size == (32, 32) and first.mode == "RGB" and first.tobytes() == second.tobytes()
        changes.append(np.abs(np.asarray(first, np.float64) - clean).mean())
    assert min(changes) > 0.1
    if name != "elastic_transform":  # its published strengths trade a large turn for sharp local shifts
        assert changes[0] < changes[1] * 1.05, changes


def test_corruption__the_elastic_map_without_strength_is_the_identity() -> None:
    x = np.random.default_rng(0).random((32, 32, 3))
    found = corruptions.OPERATIONS["elastic_transform"](x, (0, 0, 0), np.random.default_rng(0))
    np.testing.assert_allclose(found, x, atol=1e-9)


def test_corruption__frost_needs_its_photographs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"frost needs a folder of photographs of ice \(frost=None\)"):
        corruptions.Corrupted("frost", 1, lambda image: image)
    Image.new("RGB", (400, 300), (200, 220, 255)).save(tmp_path / "ice.png")
    found = corruptions.corrupt(picture(), "frost", 3, np.random.default_rng(0), frost=str(tmp_path))
    expected = 0.9 * np.asarray(picture(), np.float64) + 0.4 * np.array([200, 220, 255])
    np.testing.assert_allclose(np.asarray(found, np.float64), np.clip(expected, 0, 255), atol=1.01)


@pytest.mark.parametrize(
    ("name", "severity", "size", "text"),
    [
        ("fogg", 1, 32, "corruption 'fogg' is unknown; there are gaussian_noise"),
        ("fog", 6, 32, "severity 6 of fog: must be 1 to 5"),
        ("fog", 1, 64, "64 x 64 pixels; the strengths are for 32 x 32"),
    ],
)
def test_corruption__mistakes_are_named(name: str, severity: int, size: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        corruptions.corrupt(Image.new("RGB", (size, size)), name, severity, np.random.default_rng(0))


def test_corruption__of_an_image_depends_on_numpys_seed_alone() -> None:
    transform = corruptions.Corrupted("gaussian_noise", 3, np.asarray)
    results = []
    for seed in (1, 1, 2):
        np.random.seed(seed)
        results.append(transform(picture()))
    assert np.array_equal(results[0], results[1]) and not np.array_equal(results[0], results[2])


def test_blur_and_zoom__equal_scipys() -> None:
    x = np.random.default_rng(0).random((32, 32, 3))
    for sigma in (0.4, 1.0, 2.5):
        expected = ndimage.gaussian_filter(x, (sigma, sigma, 0), mode="nearest", truncate=4.0)
        np.testing.assert_allclose(corruptions.gaussian_blur(x, sigma), expected, atol=1e-12)
    expected = ndimage.gaussian_filter(x, (1.3, 1.3, 0), mode="reflect", truncate=3.0)
    np.testing.assert_allclose(corruptions.gaussian_blur(x, 1.3, reach=3.0), expected, atol=1e-12)
    kept = int(np.ceil(32 / 1.15))
    first = (32 - kept) // 2
    grown = ndimage.zoom(x[first : first + kept, first : first + kept], (1.15, 1.15, 1), order=1)
    trim = (len(grown) - 32) // 2
    np.testing.assert_allclose(corruptions.zoom(x, 1.15), grown[trim : trim + 32, trim : trim + 32], atol=1e-9)


def test_plasma__fills_0_to_1_and_is_smoother_with_more_decay() -> None:
    rough, smooth = (corruptions.plasma(decay, np.random.default_rng(0)) for decay in (1.75, 3.0))
    for field in (rough, smooth):
        assert field.shape == (32, 32) and field.min() == 0 and field.max() == 1
    assert np.abs(np.diff(smooth)).mean() < np.abs(np.diff(rough)).mean()


def test_mce__of_alexnet_itself_is_100_and_a_part_is_refused() -> None:
    errors = {name: [value] * 5 for name, value in ALEXNET.items()}
    assert len(errors) == 15 and corruption_errors(errors, relative_to_alexnet=True)["mce"] == pytest.approx(100)
    half = {name: [value / 2] * 5 for name, value in ALEXNET.items()}
    found = corruption_errors(half, relative_to_alexnet=True)
    assert found["mce"] == pytest.approx(50) and found["mean_error"] == pytest.approx(
        np.mean(list(ALEXNET.values())) / 2
    )
    with pytest.raises(ValueError, match=r"mCE needs 15 corruptions at 5 severities; missing: fog, snow"):
        corruption_errors({**{k: v for k, v in errors.items() if k != "fog"}, "snow": [1.0]}, relative_to_alexnet=True)
    assert "mce" not in corruption_errors({"fog": [1.0, 3.0]}, relative_to_alexnet=False)


def test_subset_of_classes__only_they_compete() -> None:
    """As in ImageNet-A and -R: class 3 would win, but the set does not have it."""
    logits = np.array([[0.0, 1.0, 2.0, 9.0], [3.0, 1.0, 2.0, 9.0]], np.float32)
    columns = class_columns(("n0", "n1", "n2", "n3"), ("n0", "n2"))
    predictions = among(Predictions(np.arange(2), np.array([1, 0]), logits), columns)
    assert classification_scores(predictions.logits, predictions.labels)["acc1"] == 100
    with pytest.raises(ValueError, match=r"1 of the set's 2 classes are unknown to the model: cat"):
        class_columns(("n0", "n1"), ("n0", "cat"))


def test_real__any_of_the_answers_counts_and_images_without_drop_out(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text(json.dumps([[0, 2], [], [1]]))
    keys = ["n01/ILSVRC2012_val_00000003.JPEG", "ILSVRC2012_val_00000001", "ILSVRC2012_val_00000002"]
    answers = real_answers(tmp_path / "real.json", keys)
    assert answers == [[1], [0, 2], []]
    found = real_scores(np.array([[1.0, 0, 0], [0, 0, 1.0], [0, 1.0, 0]]), answers)
    assert found == {"acc1": 50.0, "samples": 2.0, "without_answer": 1.0}
    with pytest.raises(ValueError, match=r"'ILSVRC2012_val_00000004' names no image"):
        real_answers(tmp_path / "real.json", ["ILSVRC2012_val_00000004"])


def tiny(**options: object) -> ViT:
    torch.manual_seed(0)
    values = {"variant": "vit_ti4", "image_size": 16, "width": 32, "depth": 2, "heads": 2} | options
    network = build_model(ModelConfig(**values), num_classes=7)  # type: ignore[arg-type]
    assert isinstance(network, ViT)
    return network


def predictions_of(images: int = 9) -> Predictions:
    logits = np.random.default_rng(0).normal(size=(images, 7)).astype(np.float32)
    return Predictions(np.arange(images), np.arange(images) % 7, logits)


def test_predictions__csv_gives_the_same_bits_and_scores_back(tmp_path: Path) -> None:
    predictions = predictions_of()
    path = write_predictions(tmp_path / "p.csv", predictions, key=lambda row: f"image, {row}", classes=tuple("abcdefg"))
    labels, logits = read_logits(path)
    assert np.array_equal(labels, predictions.labels) and np.array_equal(logits, predictions.logits)
    assert classification_scores(logits, labels) == classification_scores(predictions.logits, predictions.labels)
    header, first = path.read_text().splitlines()[:2]
    assert header.startswith("key,label,class_1,probability_1,") and header.endswith("logit_g")
    assert first.startswith('"image, 0",0,' + "abcdefg"[int(predictions.logits[0].argmax())])


def test_predictions__parquet_holds_the_same(tmp_path: Path) -> None:
    import pyarrow.parquet

    predictions = predictions_of()
    path = write_predictions(tmp_path / "p.parquet", predictions, key=str)
    table = pyarrow.parquet.read_table(path).to_pydict()
    assert table["label"] == predictions.labels.tolist() and table["key"] == [str(row) for row in range(9)]
    assert np.array_equal(np.array(table["logit_3"], np.float32), predictions.logits[:, 3])
    with pytest.raises(ValueError, match=r"p.txt: predictions are written as .csv or .parquet"):
        write_predictions(tmp_path / "p.txt", predictions, key=str)
    with pytest.raises(ValueError, match=r"2 class names for the 7 classes"):
        write_predictions(tmp_path / "p.csv", predictions, key=str, classes=("a", "b"))


def test_predictions__several_labels_an_image(tmp_path: Path) -> None:
    targets = np.array([[1, 0], [1, 1]], np.float32)
    predictions = Predictions(np.arange(2), targets, np.array([[0.0, 5.0], [-900.0, 900.0]], np.float32))
    path = write_predictions(tmp_path / "p.csv", predictions, key=str)
    assert path.read_text().splitlines()[0] == "key,target_0,target_1,probability_0,probability_1,logit_0,logit_1"
    assert path.read_text().splitlines()[1].startswith("0,1,0,0.5,")


def test_predict__in_the_order_of_the_data_without_padding_whatever_the_batch() -> None:
    network, images, labels = tiny(dropout=0.5, drop_path=0.5).train(), torch.randn(11, 3, 16, 16), torch.arange(11) % 7
    order = torch.randperm(11, generator=torch.Generator().manual_seed(0))
    found = []
    for size in (1, 4, 5, 11):
        batches = []
        for rows in order.split(size):
            fill = size - len(rows)
            rows = torch.cat([rows, rows.new_full((fill,), -1)])
            label = torch.where(rows >= 0, labels[rows], -1)
            batches.append({"image": images[rows.clamp(min=0)], "label": label, "index": rows})
        found.append(predict(network, batches, prepare=lambda batch: batch, device=torch.device("cpu")))
    assert network.training and network.blocks[0].training
    with torch.no_grad():
        expected = network.eval()(images).numpy()
    for one in found:
        assert one.index.tolist() == list(range(11)) and one.labels.tolist() == labels.tolist()
        np.testing.assert_allclose(one.logits, expected, atol=1e-5)
        assert (
            classification_scores(one.logits, one.labels)["acc1"] == classification_scores(expected, one.labels)["acc1"]
        )


@pytest.mark.parametrize("position", ["learned", "sincos"])
def test_resolution__shares_the_weights_and_resizes_positions(position: str) -> None:
    network = tiny(position=position).eval()
    larger = at_size(network, 24)
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert larger(torch.randn(2, 3, 24, 24)).shape == (2, 7)
        torch.testing.assert_close(larger(images), network(images), atol=0, rtol=0)
    assert larger.blocks[0].attn.qkv.weight is network.blocks[0].attn.qkv.weight
    with pytest.raises(ValueError, match=r"size 18: not divisible by the patch \(4, 4\); the nearest that is: 16"):
        at_size(network, 18)
    with pytest.raises(ValueError, match="Linear cannot change its image size"):
        at_size(torch.nn.Linear(2, 2), 16)
