"""`vitfw eval`, `vitfw predict` and `vitfw probe` on the digits, with a small untrained network."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from make_shards import picture, write_tar
from PIL import Image
from sklearn.metrics import accuracy_score, balanced_accuracy_score, log_loss

from vitfw.data.index import open_samples
from vitfw.evaluate.predictions import read_logits
from vitfw.evaluate.robustness import ALEXNET
from vitfw.evaluate_command import evaluate_place, predict_images
from vitfw.models.build import build_model
from vitfw.models.export import export
from vitfw.models.model_config import ModelConfig
from vitfw.models.preprocess import Preprocessing
from vitfw.probe_command import probe_place

DATA = "data/digits"
QUICK = ["machine.workers=0", "machine.threads=1"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    config = ModelConfig(variant="vit_ti2", image_size=8, in_channels=1, width=24, depth=2, heads=2)
    folder = tmp_path_factory.mktemp("weights") / "export"
    names = tuple(str(number) for number in range(10))
    prepared = Preprocessing(size=(8, 8), mean=(0.5,), std=(0.5,), crop=1.0, class_names=names)
    export(build_model(config, num_classes=10), folder, preprocessing=prepared)
    return str(folder)


def test_eval__equals_scikit_learn_on_the_saved_predictions(place: str, tmp_path: Path) -> None:
    file = tmp_path / "predictions.csv"
    words = [*QUICK, f"data.val={DATA}/val-*.tar", f"predictions={file}", f"out={tmp_path / 'out'}"]
    results = evaluate_place(place, words)
    labels, logits = read_logits(file)
    samples = open_samples(f"{DATA}/val-*.tar")
    assert labels.tolist() == [samples.label(row) for row in range(len(samples))]
    found, probabilities = results["scores"], torch.from_numpy(logits).double().softmax(1).numpy()
    assert found["acc1"] == pytest.approx(100 * accuracy_score(labels, logits.argmax(1)), abs=1e-12)
    assert found["mean_class_acc"] == pytest.approx(100 * balanced_accuracy_score(labels, logits.argmax(1)), abs=1e-10)
    assert found["nll"] == pytest.approx(log_loss(labels, probabilities), rel=1e-9)
    assert found["samples"] == results["images_in_set"] == len(samples)
    assert np.array(results["confusion"]).sum() == len(samples) and len(results["classes"]) == 10
    assert json.loads((tmp_path / "out" / "results.json").read_text())["scores"] == found


def test_eval__the_same_bits_for_any_batch_and_workers(place: str, tmp_path: Path) -> None:
    found = []
    for number, words in enumerate(
        (
            ["machine.eval_images_per_device=7"],
            ["machine.eval_images_per_device=1"],
            ["machine.eval_images_per_device=100", "machine.workers=1"],
        )
    ):
        file = tmp_path / f"{number}.csv"
        results = evaluate_place(place, [*QUICK[1:], f"data.val={DATA}/val-00000.tar", f"predictions={file}", *words])
        found.append((json.dumps(results), read_logits(file)[1]))  # as text: empty bins are NaN
    for results, logits in found[1:]:
        assert results == found[0][0] and np.array_equal(logits, found[0][1])


def test_eval__other_sizes_and_calibration(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*QUICK, f"data.val={DATA}/val-00000.tar", f"calibrate={DATA}/val-00001.tar", "sizes=[8,12]"]
    results = evaluate_place(place, words)
    assert results["sizes"]["8"] == results["scores"] and results["sizes"]["12"] != results["scores"]
    assert results["calibrated_on"].endswith("val-00001.tar") and results["calibrated"]["temperature"] > 0
    assert results["calibrated"]["nll_calibrated"] < results["scores"]["nll"] + 0.05
    assert (
        f"ece_classwise_calibrated  {results['calibrated']['ece_classwise_calibrated']:.6g}" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], r"data.val is not given"),
        (["data.vall=x"], r"vall"),
        (
            [f"data.val={DATA}/val-*.tar", f"calibrate={DATA}/val-*.tar"],
            r"images are in data.val itself: fitting there would flatter",
        ),
        ([f"data.val={DATA}/val-*.tar", "sizes=[9]"], r"size 9: not divisible by the patch"),
        ([f"data.val={DATA}/val-*.tar", "crop=2"], r"crop=2.0: must lie in \(0, 1\]"),
        (
            [f"data.val={DATA}/val-*.tar", "robustness.frost=x"],
            r"robustness.frost=x: only robustness.cifar_c=true reads it",
        ),
        ([f"data.val={DATA}/val-*.tar", "robustness.c=x"], r"robustness.c=x: x/gaussian_noise/1 is missing"),
        (
            [f"data.val={DATA}/val-*.tar", f"calibrate={DATA}/../digits/val-00000.tar"],
            r"calibrate=.*: \d+ of its \d+ images are in data.val itself",
        ),
        ([f"data.val={DATA}/val-*.tar", "calibrate=/nope"], r"calibrate=/nope: "),
        ([f"data.val={DATA}/val-*.tar", "robustness.v2=/nope"], r"robustness.v2=/nope: "),
        ([f"data.val={DATA}/val-*.tar", "robustness.real=README.md"], r"robustness.real=README.md: Expecting value"),
        (
            [f"data.val={DATA}/val-*.tar", "robustness.cifar_c=true"],
            r"robustness.cifar_c=true: .* is 8 x 8 pixels; the strengths are those of 32 x 32 pictures",
        ),
        (["--out=x"], r"--out=x: not of the form key=value"),
        (["which=raw", "which=ema"], r"which is given twice with different values: raw and ema"),
    ],
)
def test_eval__mistakes_are_named(place: str, words: list[str], text: str) -> None:
    with pytest.raises((ValueError, OSError), match=text):
        evaluate_place(place, [*QUICK, *words])


def test_predict__image_files_in_labels_out_as_eval_says(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = open_samples(f"{DATA}/val-00000.tar")
    files = []
    for row in range(3):
        files.append(str(tmp_path / f"{row}.png"))
        Image.open(io.BytesIO(samples.read(row))).save(files[-1])
    evaluate_place(place, [*QUICK, f"data.val={DATA}/val-00000.tar", f"predictions={tmp_path / 'p.csv'}"])
    _, logits = read_logits(tmp_path / "p.csv")
    answers = predict_images(place, files, ["top=2"])
    assert [answer[0][0] for answer in answers] == [str(number) for number in logits[:3].argmax(1)]
    assert len(answers[0]) == 2 and f"{files[0]}\t{answers[0][0][0]} " in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"nowhere.png: no such image file \(and 1 more\)"):
        predict_images(place, ["nowhere.png", "neither.png"])


def test_probe__chooses_alike_whatever_is_reported(place: str, tmp_path: Path) -> None:
    """data.val is another set the second time: what is chosen, and on which images, stays the same."""
    words = [
        *QUICK,
        "data.train=data/digits/train-*.tar",
        f"features.folder={tmp_path}",
        "methods=[probe,knn,logistic,few_shot]",
        "probe.rates=[0.01,0.1]",
        "probe.least_steps=100",
        "logistic.strengths=[0.1,10]",
        "knn.neighbours=[5]",
        "few_shot.shots=[1,5]",
        "few_shot.draws=2",
    ]
    first = probe_place(place, [*words, f"data.val={DATA}/val-00000.tar", f"out={tmp_path / 'out'}"])
    second = probe_place(place, [*words, f"data.val={DATA}/val-00001.tar"])
    assert set(first) == {"probe", "knn_5", "logistic", "few_shot"}
    for name in ("probe", "logistic"):
        assert first[name]["chosen"] == second[name]["chosen"] and first[name]["table"] == second[name]["table"]
        assert "256 of 1,438 images held out of data.train" in first[name]["protocol"]
        assert first[name]["scores"] != second[name]["scores"]
    assert first["probe"]["scores"]["acc1"] > 30  # of an untrained network's features; chance is 10
    assert first["few_shot"]["scores"]["5_shot"]["acc1"] > first["few_shot"]["scores"]["1_shot"]["acc1"]
    assert json.loads((tmp_path / "out" / "results.json").read_text())["knn_5"] == first["knn_5"]
    assert len([one for one in tmp_path.iterdir() if (one / "values.npy").exists()]) == 3  # train once, two test sets


def test_probe__augmented_views(place: str, tmp_path: Path) -> None:
    words = [
        *QUICK,
        "data.train=data/digits/train-00000.tar",
        f"data.val={DATA}/val-*.tar",
        f"features.folder={tmp_path}",
    ]
    words += [
        "features.views=2",
        "features.policy=digits",
        "methods=[probe]",
        "probe.rates=[0.1]",
        "probe.least_steps=50",
    ]
    found = probe_place(place, words)
    assert "2 augmented views" in found["probe"]["protocol"]
    with pytest.raises(ValueError, match=r"methods=\['kn'\]: one or more of probe, knn, logistic, few_shot"):
        probe_place(place, ["methods=[kn]"])
    with pytest.raises(ValueError, match=r"features.policy=foo: one of .*digits"):
        probe_place(place, ["features.policy=foo"])


def folder_set(root: Path, names: dict[str, int], size: int = 32) -> str:
    """A folder of images: root/CLASS/NUMBER.png."""
    generator = np.random.default_rng(0)
    for name, count in names.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            pixels = np.uint8(generator.integers(0, 256, (size, size, 3)))
            Image.fromarray(pixels).save(root / name / f"ILSVRC2012_val_{number + 1:08d}.png")
    return str(root)


@pytest.fixture(scope="module")
def colour_place(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    config = ModelConfig(variant="vit_ti16", image_size=32, width=24, depth=1, heads=2)
    folder = tmp_path_factory.mktemp("colour") / "export"
    names = ("n00", "n01", "n02", "n03")
    prepared = Preprocessing(size=(32, 32), mean=(0.5,) * 3, std=(0.5,) * 3, crop=1.0, class_names=names)
    export(build_model(config, num_classes=4), folder, preprocessing=prepared)
    return str(folder)


def test_robustness_sets__each_by_its_own_rule(colour_place: str, tmp_path: Path) -> None:
    clean = folder_set(tmp_path / "val", {"n00": 2, "n01": 2, "n02": 2, "n03": 2})
    part = folder_set(tmp_path / "a", {"n01": 3, "n03": 3})
    for name in ALEXNET:
        for severity in range(1, 6):
            folder_set(tmp_path / "c" / name / str(severity), {"n00": 1, "n01": 1, "n02": 1, "n03": 1})
    (tmp_path / "real.json").write_text("[[0, 1, 2, 3], []]")
    words = [f"data.val={clean}", f"robustness.v2={clean}", f"robustness.a={part}", f"robustness.c={tmp_path / 'c'}"]
    words += [f"robustness.real={tmp_path / 'real.json'}", "robustness.cifar_c=true"]
    results = evaluate_place(colour_place, [*QUICK, *words])
    assert results["v2"] == results["scores"] and results["a"]["samples"] == 6
    assert results["real"] == {"acc1": 100.0, "samples": 4.0, "without_answer": 4.0}
    assert set(ALEXNET) < set(results["c"]) and results["c"]["mce"] > 0
    generated = results["cifar_c_generated"]
    assert generated["left_out"] == "frost" and "mce" not in generated and len(generated) == 14 + 2


def test_several_labels_an_image__scores_thresholds_and_probe(place: str, tmp_path: Path) -> None:
    """Ten classes; an image has its class and, for even ones, the next as well."""
    members = []
    for number in range(60):
        labels = [number % 10, (number + 1) % 10] if number % 2 == 0 else [number % 10]
        members += [
            (f"{number:03d}.png", picture(number)),
            (f"{number:03d}.json", json.dumps({"labels": labels}).encode()),
        ]
    for name, part in (("train", members[:60]), ("val", members[60:])):
        write_tar(tmp_path / f"{name}.tar", part)
        (tmp_path / "classes.txt").write_text("\n".join(str(number) for number in range(10)) + "\n")
    words = [*QUICK, f"data.val={tmp_path / 'val.tar'}"]
    plain = evaluate_place(place, words)
    assert plain["thresholds_from"] == "probability 0.5" and plain["scores"]["samples"] == 30
    fitted = evaluate_place(place, [*words, f"calibrate={tmp_path / 'train.tar'}", f"predictions={tmp_path / 'p.csv'}"])
    assert fitted["scores"]["map"] == plain["scores"]["map"] and len(fitted["thresholds"]) == 10
    assert (tmp_path / "p.csv").read_text().startswith("key,target_0,")
    quick = ["probe.rates=[0.1]", "probe.least_steps=20", "knn.neighbours=[3]", "logistic.strengths=[1]"]
    more = [f"data.train={tmp_path / 'train.tar'}", f"features.folder={tmp_path / 'f'}", "methods=[probe,knn,logistic]"]
    found = probe_place(place, [*words, *more, *quick])
    assert all("map" in found[name]["scores"] for name in ("probe", "knn_3", "logistic"))
