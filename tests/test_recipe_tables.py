"""Each supervised recipe resolves to its source's table (recipe_tables.yaml): optimiser, schedule, augmentation."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from vitfw.config import Config, load
from vitfw.data.augment import eval_transform, resolve_policy, train_transform
from vitfw.ema import full_decay
from vitfw.models.variants import input_size, resolve
from vitfw.optim import build_optimizer, parameter_groups, resolve_learning_rate, set_schedule
from vitfw.schedules import Length, learning_rate, resolve_length
from vitfw.tasks import build_task

TABLES: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "recipe_tables.yaml").read_text())
RECIPES = Path(__file__).parent.parent / "recipes"
IMAGENET = 1_281_167


def row(name: str) -> dict[str, Any]:
    """The recipe's own row laid over the row that it is like, which may be like another."""
    own = TABLES[name]
    if "like" not in own:
        return own
    below = row(own["like"])
    merged = below | own
    return merged | {part: below.get(part, {}) | own.get(part, {}) for part in ("keys", "policy")}


@functools.cache
def config_of(name: str) -> Config:
    return load([f"recipe={name}"])


def length_of(name: str) -> Length:
    return resolve_length(config_of(name).train, row(name).get("images", IMAGENET))


def value_at(config: Config, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return list(config) if isinstance(config, tuple) else config


@pytest.mark.parametrize("name", TABLES)
def test_keys(name: str) -> None:
    config, expected = config_of(name), row(name)
    assert {key: value_at(config, key) for key in expected["keys"]} == expected["keys"], expected["source"]


@pytest.mark.parametrize("name", TABLES)
def test_policy(name: str) -> None:
    policy = resolve_policy(config_of(name).augment)
    expected = {
        key: tuple(value) if isinstance(value, list) else value for key, value in row(name).get("policy", {}).items()
    }
    assert {key: getattr(policy, key) for key in expected} == expected


@pytest.mark.parametrize("name", TABLES)
def test_length_and_rates(name: str) -> None:
    config, run, expected = config_of(name), length_of(name), row(name)
    assert run.global_batch == expected["global_batch"]
    assert run.steps_per_epoch == expected["steps_per_epoch"]
    assert run.epochs == pytest.approx(expected["epochs"], rel=1e-6)
    assert run.total_steps == expected.get("total_steps", run.total_steps)
    peak = resolve_learning_rate(config.optim, run.global_batch).value
    assert peak == pytest.approx(expected["peak"], rel=1e-9)
    for epoch, rate in expected["rates"].items():
        found = learning_rate(config.optim, peak, round(epoch * run.images_per_epoch), run)
        assert found == pytest.approx(rate, rel=2e-3, abs=1e-12), (epoch, expected["source"])
    if "ema_decay" in expected:
        assert full_decay(config.ema, run) == pytest.approx(expected["ema_decay"], abs=1e-7)


@pytest.mark.parametrize("name", TABLES)
def test_recipe_builds(name: str) -> None:
    """Task, groups, optimiser, schedule and both transforms, without data and without memory for the weights."""
    config, run = config_of(name), length_of(name)
    with torch.device("meta"):
        task = build_task(
            config.task, config.model, num_classes=getattr(config.task, "num_classes", 0) or row(name)["classes"]
        )
    layers = task.parameter_layers(config.optim.norm_layer)
    groups = parameter_groups(task.named_parameters(), layers, config.optim, run.global_batch)
    optimizer = build_optimizer(groups, config.optim)
    for images in (0, run.total_images // 2, run.total_images - run.global_batch):
        set_schedule(optimizer, config.optim, run, images)
    decayed = {name for group in groups if group["peak_weight_decay"] for name in group["names"]}
    assert bool(decayed) == (config.optim.weight_decay > 0)
    size = input_size(config.model)
    train_transform(config.augment, size=size)
    eval_transform(config.augment, size=size)
    if "parameters" in TABLES[name]:
        assert sum(parameter.numel() for parameter in task.parameters()) == TABLES[name]["parameters"]


@pytest.mark.parametrize("name", TABLES)
def test_header(name: str) -> None:
    """Each recipe states its source, its command and what to expect, and whether it was run."""
    text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    header = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    assert f"recipe={name} " in header
    assert "# Expected: " in header
    assert "Not yet run." in header or "Measured: " in header


def test_every_recipe_with_published_figures_has_a_row() -> None:
    """A recipe for a supervised paper that is added without its table is a gap."""
    families = ("deit", "augreg", "vit_", "cifar")
    names = {path.stem for path in RECIPES.glob("*.yaml") if path.stem.startswith(families)}
    assert names == set(TABLES)


def test_deit_resolves_as_the_model_of_the_paper() -> None:
    """Drop-path rises to 0.1 as k / 11 of it in block k; constant in DeiT III."""
    rates = [resolve(config_of(name).model).path_rates() for name in ("deit_ti", "deit3_s")]
    assert rates[0] == pytest.approx([0.1 * block / 11 for block in range(12)])
    assert rates[1] == [0.05] * 12
