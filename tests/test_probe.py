"""Stored features, the grid of probes and freezing: what they promise, each against a reference."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vitfw.evaluate.features import Features, extract_features, feature_columns, feature_vectors, head_column
from vitfw.evaluate.freezing import FreezeConfig, freeze, trainable_share, training_bytes
from vitfw.evaluate.holdout import split_training
from vitfw.evaluate.probe import ProbeConfig, feature_sets, predict_heads, probe, train_heads
from vitfw.models.build import build_model
from vitfw.models.model_config import ModelConfig
from vitfw.models.vit import ViT
from vitfw.tasks.classify import ClassifyTask

TINY = {"variant": "vit_ti4", "image_size": 16, "width": 32, "depth": 5, "heads": 2}
SMALL = ProbeConfig(rates=(1e-3, 1e-2, 0.1), least_steps=200, batch=64, epochs=1)


def tiny(**options: object) -> ViT:
    torch.manual_seed(0)
    network = build_model(ModelConfig(**(TINY | options)), num_classes=3)  # type: ignore[arg-type]
    assert isinstance(network, ViT)
    return network


def batches(images: torch.Tensor, labels: torch.Tensor, size: int = 8) -> list[dict[str, torch.Tensor]]:
    index = torch.arange(len(images))
    filled = -(-len(images) // size) * size - len(images)
    images = torch.cat([images, images.new_zeros(filled, *images.shape[1:])])
    labels = torch.cat([labels, labels.new_full((filled, *labels.shape[1:]), -1)])
    index = torch.cat([index, index.new_full((filled,), -1)])
    return [
        {
            "image": images[start : start + size],
            "label": labels[start : start + size],
            "index": index[start : start + size],
        }
        for start in range(0, len(images), size)
    ]


def stored(folder: Path, network: nn.Module, views: list[list[dict[str, torch.Tensor]]], **facts: object) -> Features:
    rows = int(max(batch["index"].max() for batch in views[0])) + 1
    return extract_features(
        network, list(views), folder=folder, facts=facts, num_rows=rows, prepare=lambda batch: batch,
        device=torch.device("cpu"), place="a test",
    )  # fmt: skip


def random_features(
    images: int = 300, width: int = 8, columns: tuple[str, ...] = ("cls-1",), seed: int = 0
) -> Features:
    generator = np.random.default_rng(seed)
    values = generator.normal(size=(1, images, len(columns), width)).astype(np.float16)
    return Features(values, generator.integers(0, 3, images), np.arange(images), columns, "random numbers")


# Features


def test_features__equal_the_networks_own_forward(tmp_path: Path) -> None:
    network = tiny(drop_path=0.5, dropout=0.5, projection_dropout=0.5).train()
    images, labels = torch.randn(21, 3, 16, 16), torch.arange(21) % 3
    found = stored(tmp_path, network, [batches(images, labels)])
    assert network.training and network.blocks[0].training  # left as it was
    assert (
        found.values.shape == (1, 21, 8, 32)
        and found.values.dtype == np.float16
        and isinstance(found.values, np.memmap)
    )
    network.eval()
    with torch.no_grad():
        taken = network(images, output="tokens", blocks=(1, 4))
        pooled = network(images, output="pooled")
    column = {name: found.values[0, :, place] for place, name in enumerate(found.columns)}
    half = lambda value: value.half().numpy()  # noqa: E731
    np.testing.assert_allclose(column["cls-1"], half(pooled), atol=2e-3)
    np.testing.assert_allclose(column["cls-4"], half(taken.blocks[1][:, 0]), atol=2e-3)
    np.testing.assert_allclose(column["mean-1"], half(taken.output[:, 1:].mean(1)), atol=2e-3)
    assert found.labels.tolist() == labels.tolist() and found.index.tolist() == list(range(21))


def test_features__are_read_again_only_for_the_same_weights_and_facts(tmp_path: Path) -> None:
    network = tiny()
    data = [batches(torch.randn(10, 3, 16, 16), torch.zeros(10, dtype=torch.int64))]
    first = stored(tmp_path, network, data, size=16)

    class Unread(list):
        def __iter__(self):
            raise AssertionError("the images were read again")

    again = extract_features(
        network, [Unread()], folder=tmp_path, facts={"size": 16}, num_rows=10, prepare=lambda b: b,
        device=torch.device("cpu"), place="again",
    )  # fmt: skip
    assert np.array_equal(first.values, again.values)
    stored(tmp_path, network, data, size=24)
    with torch.no_grad():
        network.norm.bias[0] += 1e-3
    changed = stored(tmp_path, network, data, size=16)
    assert len(list(tmp_path.iterdir())) == 3 and not np.array_equal(first.values, changed.values)
    keys = [json.loads((folder / "key.json").read_text()) for folder in tmp_path.iterdir()]
    assert len({key["weights"] for key in keys}) == 2


def test_features__a_killed_pass_is_done_again(tmp_path: Path) -> None:
    network = tiny()
    data = batches(torch.randn(10, 3, 16, 16), torch.zeros(10, dtype=torch.int64), size=4)

    def cut():
        yield data[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stored_views = [cut()]
        extract_features(
            network, stored_views, folder=tmp_path, facts={}, num_rows=10, prepare=lambda b: b,
            device=torch.device("cpu"), place="cut",
        )  # fmt: skip
    assert all(folder.name.endswith(".partial") for folder in tmp_path.iterdir())
    whole = stored(tmp_path, network, [data])
    assert whole.values.shape[1] == 10 and not list(tmp_path.glob("*.partial"))


def test_features__bad_images_are_left_out_and_views_kept_apart(tmp_path: Path) -> None:
    network, images = tiny(), torch.randn(9, 3, 16, 16)
    labels = torch.arange(9) % 3
    views = [batches(images, labels), batches(images + 0.1, labels)]
    for view in views:
        view[0]["index"][4] = -1  # an image that could not be decoded became padding
        view[0]["label"][4] = -1
    found = stored(tmp_path, network, views)
    assert found.index.tolist() == [0, 1, 2, 3, 5, 6, 7, 8] and found.views == 2
    assert found.labels.tolist() == [int(row) % 3 for row in found.index]
    assert not np.array_equal(found.values[0], found.values[1])
    views[1][0]["index"][5] = -1
    with pytest.raises(ValueError, match="read in one view and not in another"):
        stored(tmp_path / "second", network, views)


def test_features__too_large_for_fp16_are_refused(tmp_path: Path) -> None:
    network = tiny()
    with torch.no_grad():
        network.norm.weight.fill_(1e6)
    with pytest.raises(ValueError, match=r"do not fit fp16 \(65,504\)"):
        stored(tmp_path, network, [batches(torch.randn(4, 3, 16, 16), torch.zeros(4, dtype=torch.int64))])


@pytest.mark.parametrize(
    ("options", "column"),
    [
        ({}, "cls-1"),
        ({"pool": "gap", "class_token": False}, "mean-1"),
        ({"pool": "gap", "class_token": False, "final_norm": "pooled"}, "mean-1"),
        ({"pool": "map", "class_token": False}, "pooled"),
        ({"pre_head": "tanh"}, "pooled"),
        ({"registers": 2}, "cls-1"),
    ],
)
def test_head_column__is_what_the_head_reads(options: dict[str, object], column: str) -> None:
    network = tiny(**options).eval()
    assert head_column(network) == column
    images = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        vectors = feature_vectors(network, images, feature_columns(network))
        expected = network(images, output="pooled")
    torch.testing.assert_close(vectors[:, feature_columns(network).index(column)], expected)


# The split


def test_split__held_out_images_are_spread_over_classes_and_named() -> None:
    labels = np.repeat([0, 1, 2], [700, 200, 100])
    split = split_training(labels, share=0.1, least=1)
    assert np.bincount(labels[split.held]).tolist() == [70, 20, 10]
    assert np.array_equal(np.sort(np.concatenate([split.fit, split.held])), np.arange(1000))
    assert split.name == "100 of 1,000 images held out of data.train (seed 0)"
    assert np.array_equal(split.held, split_training(labels, share=0.1, least=1).held)
    assert not np.array_equal(split.held, split_training(labels, share=0.1, least=1, seed=1).held)


def test_split__never_takes_a_class_whole_and_at_most_a_fifth() -> None:
    labels = np.array([0] * 99 + [1])
    split = split_training(labels, least=256)
    assert 1 in labels[split.fit] and len(split.held) <= 20
    with pytest.raises(ValueError, match="4 training images are too few"):
        split_training(np.zeros(4, int))
    with pytest.raises(ValueError, match="one image of every class: none can be held out"):
        split_training(np.arange(40))
    with pytest.raises(ValueError, match="holdout=0"):
        split_training(np.zeros(40, int), share=0)


# The grid


def test_grid__equals_one_head_after_the_other_with_autograd() -> None:
    columns = ("cls-2", "cls-1", "mean-1")
    train = random_features(200, 6, columns)
    rows = np.arange(200)
    config = ProbeConfig(rates=(1e-2, 0.1), batch=50, epochs=3, least_steps=1, weight_decay=0.01)
    sets = {"cls/2": ("cls-2", "cls-1"), "mean/1": ("mean-1",)}
    for name, heads in zip(sets, train_heads(train, rows, sets, config.rates, config, num_classes=3), strict=True):
        x = torch.from_numpy(train.take(sets[name], rows))
        x = (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-6).sqrt()
        for place, rate in enumerate(config.rates):
            reference = reference_head(x, torch.from_numpy(train.labels), rate, sets[name], config)
            torch.testing.assert_close(heads.weight[place].T, reference.weight.detach(), atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(heads.bias[place], reference.bias.detach(), atol=1e-5, rtol=1e-4)


def reference_head(
    x: torch.Tensor, y: torch.Tensor, rate: float, columns: tuple[str, ...], config: ProbeConfig
) -> nn.Linear:
    from vitfw.data.index import shuffled_rows
    from vitfw.seeding import derive

    linear = nn.Linear(x.shape[1], 3)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(derive(config.seed, "probe", *columns))
        linear.weight.copy_(0.01 * torch.randn(x.shape[1], 3, generator=generator).T)
        linear.bias.zero_()
    peak = rate * config.batch / 256
    optimizer = torch.optim.SGD(linear.parameters(), lr=peak, momentum=0.9, weight_decay=config.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    for epoch in range(3):
        for chosen in np.split(shuffled_rows(200, derive(config.seed, "probe order", epoch)), 4):
            optimizer.zero_grad()
            F.cross_entropy(linear(x[chosen]), y[chosen]).backward()
            optimizer.step()
            schedule.step()
    return linear


def test_grid__heads_are_dinov2s_52_and_one_more_pool() -> None:
    columns = tuple(f"{pool}-{depth}" for pool in ("cls", "mean") for depth in (4, 3, 2, 1))
    dinov2 = feature_sets(columns, ProbeConfig(pools=("cls", "cls_mean")))
    assert {name: len(parts) for name, parts in dinov2.items()} == {
        "cls/1": 1,
        "cls/4": 4,
        "cls_mean/1": 2,
        "cls_mean/4": 5,
    }
    assert len(dinov2) * len(ProbeConfig().rates) == 52
    assert list(feature_sets(columns, ProbeConfig())) == [
        "cls/1",
        "cls/4",
        "mean/1",
        "mean/4",
        "cls_mean/1",
        "cls_mean/4",
    ]
    with pytest.raises(ValueError, match=r"probe.pools=\('cls',\): this network gives no cls"):
        feature_sets(("mean-1",), ProbeConfig(pools=("cls",)))
    with pytest.raises(ValueError, match=r"probe.blocks=\(9,\): features of 9 blocks were not stored"):
        feature_sets(columns, ProbeConfig(blocks=(9,)))


def test_probe__separable_features_of_a_random_encoder_over_95_percent(tmp_path: Path) -> None:
    """Three kinds of images that any encoder tells apart: dark, mid, bright."""
    network = tiny()
    labels = torch.arange(300) % 3
    images = 0.3 * torch.randn(300, 3, 16, 16) + (labels[:, None, None, None] - 1) * 1.0
    train = stored(tmp_path, network, [batches(images[:200], labels[:200])], part="train")
    test = stored(tmp_path, network, [batches(images[200:], labels[200:])], part="test")
    result = probe(train, split_training(train.labels, least=40), SMALL, num_classes=3)
    assert np.mean(result.logits(test).argmax(1) == test.labels) > 0.95
    assert "40 of 200 images held out of data.train" in result.protocol


def test_probe__random_labels_stay_at_chance() -> None:
    train, test = random_features(600, 8), random_features(600, 8, seed=5)
    result = probe(train, split_training(train.labels, least=100), SMALL, num_classes=3)
    assert abs(np.mean(result.logits(test).argmax(1) == test.labels) - 1 / 3) < 0.08
    assert abs(float(result.chosen["held_score"]) - 100 / 3) < 15


def test_probe__the_reported_set_never_comes_in() -> None:
    """The choice and the weights are the same whatever the reported labels are: they are not an argument at all."""
    train, test = random_features(seed=1), random_features(seed=2)
    split = split_training(train.labels, least=60)
    first = probe(train, split, SMALL, num_classes=3)
    test.labels[:] = (test.labels + 1) % 3
    second = probe(train, split, SMALL, num_classes=3)
    assert first.chosen == second.chosen and np.array_equal(first.logits(test), second.logits(test))


def test_probe__held_out_labels_decide_and_take_no_part_in_fitting() -> None:
    train = random_features(seed=1)
    split = split_training(train.labels, least=60)
    sets = {"cls/1": ("cls-1",)}
    before = train_heads(train, split.fit, sets, (0.1,), SMALL, num_classes=3)[0]
    train.labels[split.held] = (train.labels[split.held] + 1) % 3
    after = train_heads(train, split.fit, sets, (0.1,), SMALL, num_classes=3)[0]
    assert torch.equal(before.weight, after.weight)


def test_probe__winner_is_batch_norm_without_affine_and_linear() -> None:
    train = random_features()
    result = probe(train, split_training(train.labels, least=60), SMALL, num_classes=3)
    norm, linear = result.heads.module(0)
    assert isinstance(norm, nn.BatchNorm1d) and not norm.affine and isinstance(linear, nn.Linear)
    x = torch.from_numpy(train.take(result.heads.columns, np.arange(len(train.labels))))
    with torch.no_grad():
        np.testing.assert_allclose(nn.Sequential(norm, linear)(x).numpy(), result.logits(train), atol=1e-4)
        assert nn.Sequential(norm, linear)(x[:1]).shape == (1, 3)  # one image is enough


def test_probe__a_diverging_rate_stays_in_the_table_and_loses() -> None:
    train = random_features()
    config = ProbeConfig(rates=(1e-2, 1e6), weight_decay=0.1, least_steps=40, batch=64, epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = probe(train, split_training(train.labels, least=60), config, num_classes=3)
    assert result.chosen["rate"] == 1e-2 and result.table[1]["held_score"] == -1.0


def test_probe__several_labels_an_image() -> None:
    generator = np.random.default_rng(0)
    values = generator.normal(size=(1, 300, 1, 6)).astype(np.float16)
    targets = (values[0, :, 0, :2] > 0).astype(np.float32)
    train = Features(values, targets, np.arange(300), ("cls-1",), "a test")
    result = probe(train, split_training(targets, least=60), SMALL, num_classes=2)
    assert float(result.chosen["held_score"]) > 95
    assert np.mean((result.logits(train) > 0) == targets) > 0.93


def test_probe__nine_images_and_batches_of_four() -> None:
    """The last batch would hold one image: statistics are those of the whole set, so no batch is too small."""
    values = np.random.default_rng(0).normal(size=(1, 9, 1, 4)).astype(np.float16)
    train = Features(values, np.arange(9) % 3, np.arange(9), ("cls-1",), "a test")
    heads = train_heads(
        train, np.arange(9), {"cls/1": ("cls-1",)}, (0.1,), ProbeConfig(batch=4, least_steps=5), num_classes=3
    )[0]
    assert np.isfinite(predict_heads(heads, train, np.arange(1))).all()


# Freezing


def task_of(network: nn.Module) -> ClassifyTask:
    return ClassifyTask(network, num_classes=3)


def train_steps(task: ClassifyTask, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([p for p in task.parameters() if p.requires_grad], lr=0.01)
    for step in range(steps):
        task.train()
        torch.manual_seed(step)
        batch = {"image": torch.randn(4, 3, 16, 16), "label": torch.arange(4) % 3}
        optimizer.zero_grad()
        task.losses(batch, 0.0)["loss"].backward()
        optimizer.step()
        task.eval()  # a validation pass between
        task.network(batch["image"])
    return optimizer


@pytest.mark.parametrize(
    ("config", "free"),
    [
        (FreezeConfig(rung="probe"), ("head.",)),
        (FreezeConfig(rung="last_block"), ("blocks.4.", "norm.", "head.")),
        (FreezeConfig(rung="last_block", blocks=2), ("blocks.3.", "blocks.4.", "norm.", "head.")),
    ],
)
def test_frozen_part_is_bit_equal_after_training(config: FreezeConfig, free: tuple[str, ...]) -> None:
    """P14."""
    rates = {"drop_path": 0.5, "projection_dropout": 0.5, "position_dropout": 0.5, "attention_dropout": 0.5}
    network = tiny(**rates, layer_scale=0.5)
    network.norm_pre = nn.BatchNorm1d(17)  # a running statistic in the frozen part: [B, 17 tokens, D]
    task = task_of(network)
    freeze(task, config)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    train_steps(task)
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name]) == (not name.startswith(free)), name
    assert all(parameter.grad is None for name, parameter in network.named_parameters() if not name.startswith(free))


def test_frozen_part_gives_equal_features_in_training_steps() -> None:
    network = tiny(drop_path=0.5, projection_dropout=0.5, position_dropout=0.5)
    task = task_of(network)
    freeze(task, FreezeConfig(rung="probe"))
    images = torch.randn(4, 3, 16, 16)
    task.train()
    assert network.head.training and not network.training and not network.blocks[0].training
    first, second = (network(images, output="pooled") for _ in range(2))
    assert torch.equal(first, second) and not first.requires_grad
    network.train()  # whoever calls it
    assert not network.blocks[0].training and network.head.training


def test_last_block__its_drop_path_is_on_and_the_others_off() -> None:
    task = task_of(tiny(drop_path=0.5))
    freeze(task, FreezeConfig(rung="last_block"))
    task.train()
    assert [block.training for block in task.network.blocks] == [False] * 4 + [True]  # type: ignore[union-attr]
    task.eval()
    assert not any(module.training for module in task.network.modules())


def test_freezing__of_a_timm_network() -> None:
    network = build_model(ModelConfig(variant="timm:resnet10t", image_size=32), num_classes=3)
    task = task_of(network)
    freeze(task, FreezeConfig(rung="probe"))
    assert {name for name, p in network.named_parameters() if p.requires_grad} == {"net.fc.weight", "net.fc.bias"}
    before = {name: value.clone() for name, value in network.state_dict().items()}
    train_steps(task)
    changed = {name for name, value in network.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"net.fc.weight", "net.fc.bias"}  # the BatchNorm statistics as well stand still
    with pytest.raises(ValueError, match=r"freeze.rung=last_block: TimmModel has no numbered blocks"):
        freeze(task, FreezeConfig(rung="last_block"))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: FreezeConfig(rung="last_block", blocks=0), r"freeze.blocks=0: must be 1 or more"),
        (lambda: FreezeConfig(rung="probe", blocks=2), r"freeze.blocks=2: only freeze.rung=last_block reads it"),
        (
            lambda: freeze(task_of(tiny()), FreezeConfig(rung="last_block", blocks=5)),
            r"freeze.blocks=5.*use freeze.rung=full",
        ),
    ],
)
def test_freezing__mistakes_are_named(make, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize(
    ("rung", "trainable", "memory"),
    [("probe", 7_690, "120 KiB"), ("last_block", 7_097_098, "108 MiB"), ("full", 85_806_346, "1.28 GiB")],
)
def test_ladder_table__vit_b16_with_ten_classes_from_the_live_optimiser(rung: str, trainable: int, memory: str) -> None:
    """Weight, gradient and two moments of what the optimiser holds; on the meta device, where both are the same."""
    with torch.device("meta"):
        network = build_model(ModelConfig(variant="vit_b16"), num_classes=10)
    task = ClassifyTask(network, num_classes=10)
    freeze(task, FreezeConfig(rung=rung))  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW([p for p in task.parameters() if p.requires_grad], lr=1e-3, foreach=False)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert trainable_share(task) == (trainable, 85_806_346)
    found = training_bytes(optimizer)
    assert found == 16 * trainable
    unit = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[memory.split()[1]]
    digits = 2 if "." in memory else 0
    assert f"{found / unit:.{digits}f}" == memory.split()[0]
