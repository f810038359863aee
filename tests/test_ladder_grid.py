"""The probe rung: the best of a grid on stored features, as an ordinary head of its network."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from ladder_words import ALONE, run, weights

from vitfw import checkpoint
from vitfw.data.section import DataConfig
from vitfw.evaluate.head import folded, head_layers, own_pools, put_head
from vitfw.evaluate.probe import Heads
from vitfw.evaluate_command import evaluate_place
from vitfw.ladder import read_results
from vitfw.launch import Launch, MachineConfig
from vitfw.models.build import build_model
from vitfw.models.model_config import ModelConfig
from vitfw.models.vit import ViT
from vitfw.opened import evaluation_set, open_network
from vitfw.probe_command import probe_place

DATA = ["data.train=data/digits/train-*.tar", "data.val=data/digits/val-*.tar", "data.per_class=6"]
QUIET = ["machine.workers=0", "machine.threads=1"]


def head_of(folder: Path) -> torch.Tensor:
    return checkpoint.load(folder / "checkpoints" / "last.ckpt")["model"]["net.head.weight"]


def random_heads(width: int, classes: int, seed: int) -> Heads:
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(size, generator=generator) for size in ((2, width, classes), (2, classes), (width,), (width,))]
    return Heads(("mean-1",), (0.1, 1.0), draw[0], draw[1], 3 * draw[2], draw[3].abs() + 0.1)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 20), st.integers(2, 6), st.integers(0, 1), st.integers(0, 1000))
def test_folded_head__answers_on_raw_features_as_the_probe_on_standardised_ones(
    width: int, classes: int, number: int, seed: int
) -> None:
    heads = random_heads(width, classes, seed)
    weight, bias = folded(heads, number)
    raw = 5 * torch.randn(7, width, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(raw @ weight.T + bias, heads.logits(raw)[number], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "own", "either"),
    [
        ({}, ("cls",), ("cls", "mean")),
        ({"pool": "gap"}, ("mean",), ("cls", "mean")),
        ({"pool": "gap", "final_norm": "pooled"}, ("mean",), ("cls", "mean")),
        ({"pool": "gap", "class_token": False}, ("mean",), ("mean",)),
        ({"pool": "map"}, ("pooled",), ("pooled",)),
        ({"pre_head": "tanh"}, ("pooled",), ("pooled",)),
        ({"distillation_token": True}, ("pooled",), ("pooled",)),
    ],
)
def test_pools__are_those_that_a_linear_head_of_the_network_reads(
    options: dict[str, object], own: tuple[str, ...], either: tuple[str, ...]
) -> None:
    """And with any of them the network's logits are the head on that feature."""
    torch.manual_seed(0)
    base = {"variant": "vit_ti4", "image_size": 8, "width": 24, "depth": 2, "heads": 2}
    network = build_model(ModelConfig(**(base | options)), num_classes=3).eval()  # type: ignore[arg-type]
    assert isinstance(network, ViT)
    assert own_pools(network, either=False) == own and own_pools(network, either=True) == either
    weight, bias = torch.randn(3, 24), torch.randn(3)
    put_head(network, weight, bias)
    images = torch.randn(5, 3, 8, 8)
    with torch.no_grad():
        expected = network(images, output="pooled") @ weight.T + bias
        torch.testing.assert_close(network(images), expected, rtol=1e-5, atol=1e-5)
    assert len(head_layers(network)) == 1 + bool(options.get("distillation_token"))


def test_head__of_another_size_is_refused() -> None:
    network = build_model(ModelConfig(variant="vit_ti4", image_size=8, width=24, depth=1, heads=2), num_classes=3)
    with pytest.raises(ValueError, match=r"ladder.probe=grid: the head of this network is no linear layer \[4, 24\]"):
        put_head(network, torch.zeros(4, 24), torch.zeros(4))


def test_rung__is_the_winner_that_vitfw_probe_finds(tmp_path: Path) -> None:
    """The same choice, the same accuracy; the loss differs by the fp16 of stored features alone."""
    place = weights(tmp_path / "weights")
    assert run([*ALONE, f"weights={place}", f"out={tmp_path / 'ladder'}"]) == 0
    (rung,) = read_results(tmp_path / "ladder")
    record = json.loads((tmp_path / "ladder" / "probe-seed0" / "grid.json").read_text())
    words = [
        *DATA,
        *QUIET,
        "methods=[probe]",
        "probe.pools=[mean]",
        "probe.blocks=[1]",
        f"features.folder={tmp_path}/f",
    ]
    found = probe_place(place, words)["probe"]
    assert record["chosen"] == found["chosen"] and record["table"] == found["table"] and len(record["table"]) == 13
    assert rung.scores["acc1"] == pytest.approx(found["scores"]["acc1"], abs=100 / 359 + 1e-9)
    assert rung.scores["nll"] == pytest.approx(found["scores"]["nll"], rel=2e-3)
    assert "on 12 of 60 images held out of data.train (seed 0)" in rung.protocol
    assert rung.trainable == 250 and rung.training_bytes == 13 * 3 * 4 * 250  # weight, gradient, velocity of each head
    # its folder is read like that of any run
    scores = evaluate_place(str(tmp_path / "ladder" / "probe-seed0"), [*QUIET, DATA[1]])["scores"]
    assert scores == rung.scores


def test_rung__the_reported_set_changes_nothing_but_the_report(tmp_path: Path) -> None:
    place = weights(tmp_path / "weights")
    for number in (0, 1):
        val = f"data.val=data/digits/val-0000{number}.tar"
        assert run([*ALONE, f"weights={place}", val, f"out={tmp_path / str(number)}"]) == 0
    assert torch.equal(*(head_of(tmp_path / str(number) / "probe-seed0") for number in (0, 1)))
    one, two = (read_results(tmp_path / str(number))[0] for number in (0, 1))
    assert one.protocol == two.protocol and one.scores != two.scores


def own_ladder(folder: Path, *, pool: str | None) -> Path:
    """ladder_digits with a class token and, with `pool` None, no word about the pool."""
    shipped = Path("recipes/ladders/ladder_digits.yaml")
    tree = yaml.safe_load(shipped.read_text())
    tree["shared"]["model"] = {"variant": "vit_ti2", "image_size": 8, "in_channels": 1, "mlp_ratio": 2.0}
    if pool is not None:
        tree["shared"]["model"]["pool"] = pool
    file = folder / f"own-{pool}.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


@pytest.mark.parametrize(("words", "pools"), [([], {"cls", "mean"}), (["ladder.carry_head=true"], {"cls"})])
def test_rung__may_change_the_pool_where_nothing_is_said_of_it(
    words: list[str], pools: set[str], tmp_path: Path
) -> None:
    """A random network's class token says little, the mean of its patches more: the probe's network reads the winner.
    A head that is carried upward must read what the other rungs read."""
    given = [word for word in ALONE if not word.startswith("recipe=")]
    recipe = own_ladder(tmp_path, pool=None)
    assert run([f"recipe={recipe}", *given, *words, f"out={tmp_path / 'ladder'}"]) == 0
    folder = tmp_path / "ladder" / "probe-seed0"
    record = json.loads((folder / "grid.json").read_text())
    assert {row["feature"].split("/")[0] for row in record["table"]} == pools
    saved = yaml.safe_load(checkpoint.load(folder / "checkpoints" / "last.ckpt")["config"])
    assert saved["model"]["pool"] == {"cls/1": "cls", "mean/1": "gap"}[record["chosen"]["feature"]]
    # the network that is scored answers on its images as the head does on the stored features of that pool
    place, machine = str(folder / "checkpoints" / "last.ckpt"), MachineConfig(workers=0, threads=1)
    opened = open_network(place, Launch("python"), machine)
    data = DataConfig(train="data/digits/train-*.tar", per_class=6)
    found = evaluation_set(opened, data, machine, Launch("python"), split="train").predict()
    (stored,) = (tmp_path / "ladder" / "features").glob("*/values.npy")
    column = ["cls/1", "mean/1"].index(record["chosen"]["feature"])
    with torch.no_grad():
        expected = head_layers(opened.network)[0](torch.from_numpy(np.load(stored)[0, :, column]).float())
    torch.testing.assert_close(torch.from_numpy(found.logits), expected, rtol=2e-2, atol=2e-2)


def test_rung__a_change_of_words_is_refused_in_its_folder(tmp_path: Path) -> None:
    words = [*ALONE, f"weights={weights(tmp_path / 'weights')}", f"out={tmp_path / 'ladder'}"]
    assert run(words) == 0
    with pytest.raises(ValueError, match=r"holds a run with another configuration: grid.epochs: 10.0 -> 3.0"):
        run([*words, "grid.epochs=3"])
    before = (tmp_path / "ladder" / "probe-seed0" / "grid.json").stat().st_mtime_ns
    assert run(words) == 0 and (tmp_path / "ladder" / "probe-seed0" / "grid.json").stat().st_mtime_ns == before


def test_rung__seeds_hold_out_other_images_and_share_the_features(tmp_path: Path) -> None:
    words = [*ALONE, f"weights={weights(tmp_path / 'weights')}", "ladder.seeds=2", f"out={tmp_path / 'ladder'}"]
    assert run(words) == 0
    heads = [head_of(tmp_path / "ladder" / f"probe-seed{seed}") for seed in (0, 1)]
    assert not torch.equal(*heads) and len(list((tmp_path / "ladder" / "features").iterdir())) == 1
    protocols = [one.protocol for one in read_results(tmp_path / "ladder")]
    assert "(seed 0)" in protocols[0] and "(seed 1)" in protocols[1]


def test_rung__a_killed_pass_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    """A stop inside the pass over the images: status 75, the launcher's marker, no checkpoint; then it goes on."""
    words = [*ALONE, f"weights={weights(tmp_path / 'weights')}", f"out={tmp_path / 'ladder'}"]
    assert run([*words, "machine.wall_minutes=1e-6"]) == 75
    folder = tmp_path / "ladder" / "probe-seed0"
    assert (folder / "stopped").exists() and not list((folder / "checkpoints").iterdir())
    assert run(words) == 0 and not (folder / "stopped").exists()
