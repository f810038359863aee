"""MAE's linear probe: what it reads, what trains, and that the saved network is the probe itself."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from vitfw.config import load
from vitfw.data.augment import train_transform
from vitfw.models.variants import ModelConfig
from vitfw.optim import build_optimizer, parameter_groups
from vitfw.tasks.mae_probe import MaeProbeConfig, MaeProbeTask, build_mae_probe

RECIPES = sorted(path.stem for path in (Path(__file__).parent.parent / "recipes").glob("mae_*_probe.yaml"))


def probe_task(**options) -> MaeProbeTask:
    torch.manual_seed(0)
    values = {"variant": "mae_ti4", "image_size": 16, "width": 32, "depth": 2, "heads": 2} | options
    return build_mae_probe(MaeProbeConfig(), ModelConfig(**values), num_classes=3)


def probe_batch(count: int = 96) -> dict[str, torch.Tensor]:
    """Three classes that a random encoder's features separate: each brightens another third of the image."""
    generator = torch.Generator().manual_seed(0)
    label = torch.arange(count) % 3
    image = 0.3 * torch.randn(count, 3, 16, 16, generator=generator)
    for row in range(3):
        image[label == row, :, 5 * row : 5 * row + 5] += 1.0
    return {"image": image, "label": label, "index": torch.arange(count)}


def accuracy(task: MaeProbeTask, batch: dict[str, torch.Tensor]) -> float:
    training = task.training
    task.eval()
    measures = task.measures()
    with torch.no_grad():
        task.measure(batch, measures)
    task.train(training)
    return task.results(measures)["acc1"]


@pytest.mark.parametrize("pool", ["cls", "gap"])
def test_separable_classes_are_learnt(pool: str) -> None:
    """P25, P14: over 95 % on separable classes, without weight decay, and the encoder the same bit for bit."""
    task, batch = probe_task(pool=pool, final_norm="tokens", drop_path=0.5, projection_dropout=0.5), probe_batch()
    frozen = {name: value.clone() for name, value in task.net.state_dict().items() if not name.startswith("head.")}
    config = load(["recipe=mae_b_probe"]).optim
    config = dataclasses.replace(config, warmup_epochs=None)
    groups = parameter_groups(task.named_parameters(), task.parameter_layers("last_block"), config, 16384)
    assert {group["peak_weight_decay"] for group in groups} == {0.0}
    assert sorted(name for group in groups for name in group["names"]) == ["probe.head.bias", "probe.head.weight"]
    optimizer = build_optimizer(groups, config)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([6.4] * len(groups))
    for _ in range(50):
        optimizer.zero_grad()
        task.losses(batch, 0.0)["loss"].backward()
        optimizer.step()
        task.after_step(0.0)
    assert accuracy(task, batch) > 95
    assert all(torch.equal(task.net.state_dict()[name], value) for name, value in frozen.items())


def test_the_network_is_the_probe_with_its_norm_folded_in() -> None:
    task, batch = probe_task(), probe_batch()
    task.losses(batch, 0.0)  # moves the running statistics
    task.after_step(0.0)
    task.eval()
    with torch.no_grad():
        apart = task.probe(task.net(batch["image"], output="pooled"))
        torch.testing.assert_close(task.net(batch["image"]), apart, rtol=1e-4, atol=1e-4)
    assert task.network is task.net


def test_the_head_is_the_published_one() -> None:
    """P25."""
    task = probe_task()
    assert [type(module) for module in task.probe.children()] == [nn.BatchNorm1d, type(task.probe.head)]
    assert (task.probe.norm.affine, task.probe.norm.eps) == (False, 1e-6)
    assert isinstance(task.probe.head, nn.Linear)
    assert task.probe.head.weight.std().item() == pytest.approx(0.01, rel=0.3)
    assert not task.probe.head.bias.any()


def test_the_feature_is_the_class_token_of_the_whole_image_in_evaluation_mode() -> None:
    """P25, P14: no masking, no drop-path, whatever mode the task is put in; the same features in each step."""
    task, batch = probe_task(drop_path=0.5), probe_batch(8)
    seen = []
    task.probe.norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    task.train()
    task.losses(batch, 0.0)
    task.net.eval()
    assert task.probe.training
    assert torch.equal(seen[0], task.net(batch["image"], output="tokens")[:, 0])
    task.train()
    task.losses(batch, 0.0)
    assert torch.equal(seen[1], seen[0])


def test_unlabelled_images_do_not_count() -> None:
    task, batch = probe_task(), probe_batch(12)
    label = batch["label"].clone()
    label[6:] = -1
    half = {key: value[:6] for key, value in batch.items()}
    assert accuracy(task, batch | {"label": label}) == accuracy(task, half)
    losses = task.losses(batch | {"label": torch.full((12,), -1)}, 0.0)
    assert losses["loss"].item() == 0


def test_wrong_options_are_refused() -> None:
    model = ModelConfig(variant="mae_ti4", image_size=16)
    with pytest.raises(ValueError, match=r"task.num_classes=1: must be 2 or more"):
        MaeProbeConfig(num_classes=1)
    with pytest.raises(ValueError, match=r"task.num_classes=3, and the training data has 5 classes"):
        build_mae_probe(MaeProbeConfig(num_classes=3), model, num_classes=5)
    with pytest.raises(ValueError, match=r"use `vitfw probe`"):
        build_mae_probe(MaeProbeConfig(), ModelConfig(variant="timm:resnet18"), num_classes=5)
    with pytest.raises(ValueError, match="needs 2 images or more a micro-batch"):
        probe_task().losses({key: value[:1] for key, value in probe_batch(3).items()}, 0.0)


@pytest.mark.parametrize("name", [name for name in RECIPES if "digits" not in name])
def test_recipes_pin_the_published_protocol(name: str) -> None:
    """P25."""
    config = load([f"recipe={name}"])
    assert (config.optim.name, config.optim.weight_decay, config.optim.momentum) == ("lars", 0.0, 0.9)
    assert config.optim.base_lr is not None
    assert config.optim.base_lr * config.train.global_batch / (config.optim.base_batch or 1) == pytest.approx(6.4)
    assert (config.augment.mixup, config.augment.cutmix, config.augment.erasing) == (0.0, 0.0, 0.0)
    transform = train_transform(config.augment, size=(224, 224), channels=3)
    assert "Rand" not in repr(transform).replace("RandomHorizontalFlip", "").replace("RandomResizedCrop", "")
    assert config.model.pool is None  # the variant's own: the class token
    assert isinstance(config.task, MaeProbeConfig)
