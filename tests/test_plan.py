"""A plan refuses what the run refuses, with the same sentence, and needs neither weights nor data for it."""

import io
import json
from pathlib import Path

import pytest
import torch
from conftest import tiny
from make_shards import write_tar
from PIL import Image

from vitfw.config import load
from vitfw.launch import Launch
from vitfw.models.build import build_model
from vitfw.models.export import export
from vitfw.models.preprocess import Preprocessing
from vitfw.plan import plan_text
from vitfw.train import main

ABSENT = ["data.train=nowhere/train-{00..09}.tar", "data.val=nowhere/val.tar", "data.fraction=1.0"]
WITHOUT_DATA = [  # what no image is needed for
    (["optim.momentum=0"], "optim.momentum=0.0: adamw does not read it"),
    (["augment.policy=cifar10"], "augment statistics cifar10: 3 means"),
    (["augment.operations=foo"], "augment.operations=foo: timm does not know"),
    (["data.balance=class", "augment.repeats=3"], "augment.repeats=3 with data.balance=class"),
    (["optim.warmup_epochs=9"], "the warm-up"),
    (["optim.end_lr=1"], "optim.end_lr=1 lies above the peak"),
    (["weights=timm:vit_enormous"], "weights=timm:vit_enormous: timm cannot provide them (RuntimeError: Unknown model"),
    (["guard.raise_precision=decoder"], "guard.raise_precision=decoder: this task has no decoder"),
    (["model.distillation_token=true", "model.pool=cls", "model.class_token=true"], "teach the distillation head"),
]
WITH_DATA = [
    (["data.weights=[1,2]"], "data.weights=(1.0, 2.0) has 2 numbers, data.train 1 patterns"),
    (["weights=/nonexistent"], "weights=/nonexistent: no such file"),
    (["data.classes=/nope"], "data.classes=/nope: no such file"),
    (["task.name=multi_label"], "have one label each; use task.name=classify"),
    (["task.num_classes=12", "task.class_weights=balanced"], "class"),
    (["data.val=nowhere/val.tar"], "data.val=nowhere/val.tar: no such file"),
    (["data.train=data/digits/train-00000.tar, nowhere.tar"], "no such file or folder: 'nowhere.tar'"),
    (["data.train=README.md"], "README.md: not a tar header"),
    (["train.global_batch=100000"], "the training set has only"),
]


@pytest.mark.parametrize(("words", "text"), WITH_DATA + WITHOUT_DATA, ids=lambda value: str(value)[:40])
def test_a_plan_refuses_as_the_run_does(
    words: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for dry_run in ("true", "false"):
        assert main(tiny(*words, f"dry_run={dry_run}", f"out={tmp_path / 'run'}")) == 2
        said.append(capsys.readouterr().err)
        assert text in said[-1] and not (tmp_path / "run").exists()
    assert said[0] == said[1]


@pytest.mark.parametrize(("words", "text"), WITHOUT_DATA, ids=lambda value: str(value)[:40])
def test_without_data_the_rest_is_checked(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "optim.warmup_epochs=9" not in words:  # which is too long for TINY's run of 3 epochs in any case
        words = ["optim.warmup_epochs=1", *words]
    assert main(tiny(*ABSENT, *words, "dry_run=true")) == 2
    assert text in capsys.readouterr().err


def test_without_data_a_plan_counts_with_imagenet(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither its list of classes nor weights that another machine holds are asked for."""
    assert main(tiny(*ABSENT, "data.classes=nowhere/classes.txt", "weights=nowhere", "dry_run=true")) == 0
    text = capsys.readouterr().out
    assert (
        "not at hand (data.train=nowhere/train-{00..09}.tar: no such file): counted with ImageNet-1k's 1,281,167"
        in text
    )
    assert "weights        nowhere, not read for this plan" in text


def test_weights_are_taken_as_the_run_takes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load(tiny())
    network = build_model(config.model, num_classes=10)
    prepared = Preprocessing(size=(8, 8), mean=(0.5,), std=(0.5,))
    place = str(export(network, tmp_path / "w", preprocessing=prepared, format="vitfw"))
    assert main(tiny(f"weights={place}", "dry_run=true")) == 0
    assert f"{place}, read and found to fit" in capsys.readouterr().out
    for dry_run in ("true", "false"):
        assert main(tiny(f"weights={place}", "model.depth=3", f"dry_run={dry_run}", f"out={tmp_path / 'run'}")) == 2
        assert f"weights={place}: " in capsys.readouterr().err


def test_a_network_of_any_size_takes_no_memory() -> None:
    """22 billion parameters, with the data at hand."""
    words = tiny("model.width=6144", "model.depth=48", "model.heads=48", "model.mlp_ratio=4")
    text = plan_text(load(words), Launch("python"))
    assert "train 116 images" in text and "6144" in text


def test_several_labels_are_counted(tmp_path: Path) -> None:
    Image.new("L", (8, 8)).save(image := io.BytesIO(), "PNG")
    label = json.dumps({"label": [0, 3]}).encode()
    members = [
        (f"{n:02d}.{kind}", data) for n in range(40) for kind, data in (("png", image.getvalue()), ("json", label))
    ]
    data = [f"data.train={write_tar(tmp_path / 's.tar', members)}", "data.val=null", "data.fraction=1.0"]
    text = plan_text(load(tiny(*data, "task.name=multi_label", "task.num_classes=6")), Launch("python"))
    assert "6 classes (multi-label)" in text and torch.get_default_device().type == "cpu"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["ema.every=10"], "ema.every=10: the run has 9 updates, so the average is never made and never scored"),
        (["ema.copy_epochs=3"], "ema.copy_epochs=3: the run has 3 epochs, so the average stays a copy of the weights"),
        (
            ["optim.per=epoch", "optim.epoch_lag=100"],
            "the run has 3 epochs, so the learning rate stays 0; nothing is learned",
        ),
        (["optim.per=epoch", "optim.epoch_lag=2", "optim.warmup_epochs=null"], "so the learning rate stays 0.002"),
    ],
)
def test_what_never_comes_to_pass_is_said(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(tiny(*words, "dry_run=true")) == 0
    assert text in capsys.readouterr().out
    assert main(tiny("ema.every=9", "ema.copy_epochs=2", "dry_run=true")) == 0
    assert "note:" not in capsys.readouterr().out
