"""A ladder from weights of timm: a ViT in timm's own form, and a network of another kind with published weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from efficientnet_lite0 import teacher_folder
from ladder_words import run
from timm.models import save_for_hf

from vitfw.evaluate_command import evaluate_place
from vitfw.ladder import read_results

DATA = ["data.train=data/digits/train-*.tar", "data.val=data/digits/val-*.tar", "task.num_classes=10"]
QUICK = ["machine.workers=0", "machine.threads=1", "log.progress=off", "augment.policy=digits"]
SHORT = ["train.epochs=1", "train.global_batch=20", "augment.mixup=0", "augment.cutmix=0"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_vit_of_timm__climbs_all_rungs(tmp_path: Path) -> None:
    """timm's folder (config.json, model.safetensors) names the network; its own head has 1000 classes and goes."""
    torch.manual_seed(0)
    arguments: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2}
    net = timm.create_model("vit_tiny_patch16_224", **arguments)
    data = {"input_size": (3, 16, 16), "mean": (0.5,) * 3, "std": (0.5,) * 3}
    save_for_hf(net, str(tmp_path / "timm"), data_config=data, model_args=arguments, safe_serialization=True)
    size = "model.variant=vit_ti4 model.image_size=16 model.width=24 model.depth=2 model.heads=2".split()
    once = ["data.per_class=4", "last_block.optim.warmup_epochs=0", "full.optim.warmup_epochs=0", *SHORT]
    words = ["recipe=ladder", f"weights={tmp_path / 'timm'}", *size, *DATA, *QUICK, *once]
    assert run([*words, f"out={tmp_path / 'ladder'}"]) == 0
    probe, last_block, full = read_results(tmp_path / "ladder")
    assert probe.trainable == 250 < last_block.trainable < full.trainable == full.parameters
    table = json.loads((tmp_path / "ladder" / "probe-seed0" / "grid.json").read_text())["table"]
    assert {row["feature"] for row in table} == {"cls/1", "mean/1"}
    # what the ladder leaves is timm's again
    exported = timm.create_model(f"local-dir:{tmp_path / 'ladder' / 'probe-seed0' / 'export'}", pretrained=True)
    assert torch.equal(
        exported.get_parameter("blocks.0.attn.qkv.weight"), net.get_parameter("blocks.0.attn.qkv.weight")
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_published_weights_of_another_network__as_a_probe(tmp_path: Path) -> None:
    """EfficientNet-Lite0 with its ImageNet weights: 60 labelled digits are enough for a head on its features. It has no
    numbered blocks, so it has no last_block; its folder is scored like any other."""
    words = [
        "recipe=ladder",
        f"weights={teacher_folder(tmp_path / 'lite0')}",
        "model.variant=timm:tf_efficientnet_lite0",
    ]
    words += ["model.image_size=64", *DATA, *QUICK, "data.per_class=6", f"out={tmp_path / 'ladder'}"]
    with pytest.raises(ValueError, match=r"freeze.rung=last_block: .* use .* freeze.rung=probe"):
        run([*words, "train.global_batch=20"])
    assert run([*words, "ladder.rungs=[probe]"]) == 0
    (probe,) = read_results(tmp_path / "ladder")
    assert probe.trainable == 1281 * 10 and probe.scores["acc1"] > 50 and "chosen pooled" in probe.protocol
    place = str(tmp_path / "ladder" / "probe-seed0" / "checkpoints" / "last.ckpt")
    assert evaluate_place(place, [DATA[1], *QUICK[:2]])["scores"] == probe.scores
