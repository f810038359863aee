"""Images with several labels: losses, scores against plain numpy, and a run through the real command."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import tiny
from make_shards import write_tar
from PIL import Image
from torch import nn

from vitfw.evaluate.multilabel import multilabel_scores
from vitfw.evaluate_command import evaluate_place
from vitfw.models.model_config import ModelConfig
from vitfw.report.recorder import read_metrics
from vitfw.tasks.multi_label import MultiLabelConfig, MultiLabelTask, build_multi_label
from vitfw.train import main


class Fixed(nn.Module):
    """Answers with the logits it was given, batch after batch."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.logits[images[:, 0, 0, 0].long()]


@pytest.mark.parametrize("batch", [1, 5, 12])
def test_scores_equal_the_evaluations_own(batch: int) -> None:
    """For any batch size, with rows of padding, an image without labels, and a class that never occurs."""
    generator = np.random.default_rng(0)
    logits = torch.from_numpy(generator.normal(size=(12, 4))).float()
    labels = torch.from_numpy(generator.integers(0, 2, (12, 4))).float()
    labels[:, 3], labels[5] = 0, 0
    task = MultiLabelTask(Fixed(torch.cat([logits, logits[:1]])), num_classes=4, loss="sigmoid", smoothing=0.0).eval()
    measures = task.measures()
    padded = torch.cat([labels, torch.full((1, 4), -1.0)])
    for rows in torch.arange(13).split(batch):
        task.measure({"image": rows[:, None, None, None].float(), "label": padded[rows]}, measures)
    found = task.results(measures)
    expected = multilabel_scores(logits.numpy(), labels.numpy(), np.zeros(4))
    for name in ("map", "f1_macro", "f1_micro", "classes_scored"):
        assert found[name] == pytest.approx(expected[name]), name
    assert found["samples"] == 12
    assert found["loss"] == pytest.approx(
        F.binary_cross_entropy_with_logits(logits, labels, reduction="sum").item() / 12, rel=1e-5
    )


def test_a_single_class_is_scored() -> None:
    """A yes or no about one thing: torchmetrics drops the axis of the classes there."""
    logits, labels = torch.tensor([[2.0], [-1.0], [0.5], [-3.0]]), torch.tensor([[1.0], [1.0], [0.0], [0.0]])
    task = MultiLabelTask(Fixed(logits), num_classes=1, loss="sigmoid", smoothing=0.0).eval()
    measures = task.measures()
    task.measure({"image": torch.arange(4)[:, None, None, None].float(), "label": labels}, measures)
    found, expected = task.results(measures), multilabel_scores(logits.numpy(), labels.numpy(), np.zeros(1))
    for name in ("map", "f1_macro", "f1_micro", "classes_scored", "samples"):
        assert found[name] == pytest.approx(expected[name]), name


def multi_label_shard(path: Path, labels: list[list[int]]) -> str:
    buffer, members = io.BytesIO(), []
    Image.new("L", (8, 8)).save(buffer, "PNG")
    for number, label in enumerate(labels):
        text = json.dumps({"label": label}).encode()
        members += [(f"{number:02d}.png", buffer.getvalue()), (f"{number:02d}.json", text)]
    return str(write_tar(path, members))


@pytest.mark.parametrize(
    ("train", "val", "classes"),
    [
        ([[0, 2], [1]], [[1]], 5),  # a head wider than both sets
        ([[], []], [[], []], 5),  # nobody has a label
        ([[0], [1]], [[7]], 8),  # only the evaluated images show the last class
        ([[0, 4], [1]], [[1]], 0),  # the evaluated images show fewer than the trained ones
        ([[0], []], [[0]], 1),
    ],
)
def test_the_rows_are_as_wide_as_the_head(tmp_path: Path, train: list, val: list, classes: int) -> None:
    shards = multi_label_shard(tmp_path / "t.tar", train * 4), multi_label_shard(tmp_path / "v.tar", val * 3)
    words = tiny(
        "task.name=multi_label", f"task.num_classes={classes}", f"data.train={shards[0]}", f"data.val={shards[1]}",
        "task.smoothing=0.1", "data.fraction=1.0", "train.global_batch=4", "train.epochs=1", "optim.warmup_epochs=null",
    )  # fmt: skip
    assert main([*words, f"out={tmp_path / 'run'}"]) == 0
    assert read_metrics(tmp_path / "run", "val")[-1]["samples"] == len(val) * 3
    place, scored = str(tmp_path / "run"), any(val)
    if scored:
        results = evaluate_place(place, [f"data.val={shards[1]}", "machine.device=cpu", "machine.threads=1"])
        assert results["scores"]["samples"] == len(val) * 3


def test_a_second_head_needs_a_teacher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether a key asks for it or the variant's name."""
    shard = multi_label_shard(tmp_path / "s.tar", [[0], [1]] * 20)
    words = ["task.name=multi_label", "model.variant=deit_ti2_distilled", "model.pool=cls", "model.class_token=true"]
    words = tiny(*words, f"data.train={shard}", "data.val=null", "data.fraction=1.0", f"out={tmp_path / 'run'}")
    assert main(words) == 2
    assert "nothing would teach the distillation head; set model.distillation_token=false" in capsys.readouterr().err


def test_one_setting_picks_loss_target_and_metrics(tmp_path: Path) -> None:
    """P80: label [0, 2] gives two ones, an empty list is allowed; CutMix and smoothing keep targets within 0 and 1."""
    members = []
    for number in range(24):
        colour, buffer = ((200, 60, 60), (60, 200, 60), (60, 60, 200))[number % 3], io.BytesIO()
        Image.new("RGB", (8, 8), colour).save(buffer, "PNG")
        members += [
            (f"{number:02d}.png", buffer.getvalue()),
            (f"{number:02d}.json", json.dumps({"label": [[0, 2], [1], []][number % 3]}).encode()),
        ]
    tar = write_tar(tmp_path / "s.tar", members)
    words = tiny(
        "task.name=multi_label", "task.num_classes=0", "task.smoothing=0.1", f"data.train={tar}", f"data.val={tar}",
        "data.fraction=1.0", "data.window=0", "model.in_channels=3", "train.global_batch=8", "train.epochs=20",
        "eval.every_epochs=0", "model.width=48", "model.drop_path=0", "augment.mixup=0", "augment.policy=none", "optim.lr=3e-3",
    )  # fmt: skip
    words = [word for word in words if not word.startswith("augment.cutmix")]
    assert main([*words, f"out={tmp_path / 'run'}", "augment.cutmix=0"]) == 0
    record = read_metrics(tmp_path / "run", "val")[-1]
    assert record["map"] > 90 and record["f1_micro"] > 80
    assert record["classes_scored"] == 3 and record["samples"] == 24
    assert "acc1" not in record
    assert main([*words, f"out={tmp_path / 'mixed'}", "augment.cutmix=1.0", "stop_after=2"]) == 75


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_classes": -1}, r"task.num_classes=-1: must be 1 or more, or 0"),
        ({"smoothing": 1.0}, r"task.smoothing=1.0: must lie in \[0, 1\)"),
        ({"loss": "bce", "smoothing": 0.1}, r"task.smoothing=0.1 with task.loss=bce: .*every class positive"),
    ],
)
def test_contradictions_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiLabelConfig(**keys)


def test_what_does_not_fit_is_refused() -> None:
    small: dict[str, Any] = {"variant": "vit_ti4", "image_size": 8, "width": 24, "depth": 1, "heads": 2}
    with pytest.raises(ValueError, match=r"task.num_classes=2, and the training data has 3 classes"):
        build_multi_label(MultiLabelConfig(num_classes=2), ModelConfig(**small), num_classes=3)
    task = build_multi_label(MultiLabelConfig(), ModelConfig(**small), num_classes=3)
    with pytest.raises(ValueError, match=r"the data has one label an image; use task.name=classify"):
        task.losses({"image": torch.zeros(2, 3, 8, 8), "label": torch.zeros(2, dtype=torch.int64)}, 0.0)
    assert task.parameter_layers("head").keys() == {name for name, _ in task.named_parameters()}
