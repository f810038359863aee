"""Every strategy trains what one process trains, and a run moves between strategies and numbers of processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, TINY
from torch import nn

from vitfw import checkpoint
from vitfw.models.build import build_model
from vitfw.models.export import export
from vitfw.models.preprocess import Preprocessing
from vitfw.models.variants import ModelConfig
from vitfw.report.recorder import read_metrics
from vitfw.train import main

# 4 micro-batches of 8 images whatever the number of processes, so that all draw the same numbers; 4 updates
SHORT = [*TINY, "machine.images_per_device=8", "train.epochs=2", "data.fraction=0.05", "eval.every_epochs=0"]
TAUGHT = ["task.name=distill", "task.teacher=TEACHER"]  # the folder that `runs` makes
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {"words": ["optim.clip_norm=null", "ema.decay=null"]},
    "accumulation": {"words": ["machine.images_per_device=4"]},
    "clipping": {"words": ["optim.clip_norm=0.05"]},
    "frozen, layer decay": {
        "words": ["optim.layer_decay=0.7"],
        "freeze": ["net.patch_embed.", "net.blocks.0.", "net.pos_embed"],
    },
    "average": {"words": ["ema.decay=0.8"]},
    "mae": {
        "words": [
            "recipe=mae_digits",
            "task.probe=false",
            "task.neighbours=0",
            "task.decoder_width=24",
            "augment.mixup=0",
            "augment.cutmix=0",
        ]
    },
    "distillation": {"words": [*TAUGHT, "model.distillation_token=true", "model.class_token=true", "model.pool=cls"]},
    "distillation, features": {"words": [*TAUGHT, "task.form=feature", "task.weight=1"]},
    "recomputed": {"words": ["machine.recompute_every=1", "model.dropout=0.1"]},
    "bf16": {"words": ["machine.precision=bf16"], "rtol": 2e-3},
    "compiled, recomputed": {"words": ["machine.compile=true", "machine.recompute_every=2"]},
}
TWO = {"ddp": FEATURES.keys(), "fsdp2": FEATURES.keys()}
FOUR = {"ddp": FEATURES.keys(), "fsdp2": FEATURES.keys(), "hsdp": FEATURES.keys()}
# a run of 9 steps that is cut in mid-epoch and taken on by (processes, strategy, last step of this part)
CHAIN = [
    (1, "single", 1),
    (2, "fsdp2", 2),
    (2, "ddp", 4),
    (4, "hsdp", 5),
    (4, "fsdp2", 7),
    (4, "ddp", 8),
    (1, "single", None),
]


def words_of(feature: str) -> list[str]:
    """The later word of a key wins, as a person would edit the command."""
    pairs = dict(word.split("=", 1) for word in [*SHORT, *FEATURES[feature]["words"]])
    return [f"{key}={value}" for key, value in pairs.items()]


def run_cells(processes: int, cells: list[dict[str, Any]], folder: Path, *, status: int = 0) -> tuple[str, str]:
    """One torchrun for many runs: starting costs more than training."""
    file = folder / f"cells{processes}.json"
    file.write_text(json.dumps(cells))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*launcher, "tests/strategies_worker.py", str(file)],
        capture_output=True,
        text=True,
        timeout=1800,
        cwd=ROOT,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == status, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout, done.stderr


def cell(folder: Path, feature: str, strategy: str) -> dict[str, Any]:
    name = f"{strategy} {feature}"
    words = [word.replace("TEACHER", str(folder.parent / "teacher")) for word in words_of(feature)]
    words += [f"machine.strategy={strategy}", f"out={folder / name}"]
    words += ["machine.shard_size=2"] if strategy == "hsdp" else []
    return {"name": name, "words": words, "freeze": FEATURES[feature].get("freeze", [])}


def link(folder: Path, strategy: str, last: int | None) -> dict[str, Any]:
    words = [*TINY, "machine.images_per_device=8", f"machine.strategy={strategy}", f"out={folder / 'chain'}"]
    words += ["machine.shard_size=2"] if strategy == "hsdp" else []
    words += [] if last is None else [f"stop_after={last}"]
    return {"name": f"link {strategy}", "words": words, "status": 0 if last is None else 75}


def make_teacher(folder: Path) -> None:
    """A folder of timm's kind with a random network, so sure of itself that rounding never changes its best class."""
    torch.manual_seed(1)
    config = ModelConfig(variant="vit_ti2", image_size=8, in_channels=1, width=24, depth=2, heads=2)
    net = build_model(config, num_classes=10)
    nn.init.normal_(net.head.weight)  # type: ignore[union-attr,arg-type]
    export(net, folder, preprocessing=Preprocessing(size=(8, 8), mean=(0.4,), std=(0.3,)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs of this file, in one torchrun for each number of processes; `singles/` holds the references."""
    folder = tmp_path_factory.mktemp("runs")
    make_teacher(folder / "teacher")
    for processes, table in ((1, {"single": FEATURES}), (2, TWO), (4, FOUR)):
        (folder / str(processes)).mkdir()
        links = [link(folder, strategy, last) for count, strategy, last in CHAIN[:-1] if count == processes]
        cells = [cell(folder / str(processes), feature, strategy) for strategy in table for feature in table[strategy]]
        run_cells(processes, [*links, *cells], folder)
    assert main([*link(folder, "single", None)["words"]]) == 0
    assert main([*TINY, "machine.images_per_device=8", f"out={folder / 'uncut'}"]) == 0
    return folder


def values(folder: Path, split: str, name: str) -> list[float]:
    return [record[name] for record in sorted(read_metrics(folder, split), key=lambda record: record["step"])]


CELLS = [(2, s, f) for s in TWO for f in TWO[s]] + [(4, s, f) for s in FOUR for f in FOUR[s]]


@pytest.mark.parametrize(("processes", "strategy", "feature"), CELLS)
def test_every_strategy_trains_what_one_process_trains(runs: Path, processes: int, strategy: str, feature: str) -> None:
    ours, reference = runs / str(processes) / f"{strategy} {feature}", runs / "1" / f"single {feature}"
    rtol = FEATURES[feature].get("rtol", 1e-5)
    parts = ("distillation_loss", "label_loss") if feature.startswith("distillation") else ()
    for name in ("loss", "gradient_norm", "learning_rate", *parts):
        expected = values(reference, "train", name)
        assert len(expected) == 4
        assert values(ours, "train", name) == pytest.approx(
            expected, rel=10 * rtol if name == "gradient_norm" else rtol
        )
    one, other = (checkpoint.load(folder / "checkpoints" / "last.ckpt") for folder in (ours, reference))
    assert list(one["model"]) == list(other["model"])
    assert list(one["optimizer"]) == list(other["optimizer"])
    close = {"rtol": 0.05, "atol": 2e-2 if feature == "bf16" else 5e-4}  # Adam blows rounding up where gradients vanish
    for part in ("model", "ema"):
        if other[part] is not None:
            for name, value in other[part].items():
                assert value.dtype == one[part][name].dtype, name
                torch.testing.assert_close(one[part][name], value, **close, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("feature", ["average", "mae"])
@pytest.mark.parametrize(("processes", "strategy"), [(2, "ddp"), (2, "fsdp2"), (4, "fsdp2"), (4, "hsdp")])
def test_an_evaluation_counts_each_image_once(runs: Path, processes: int, strategy: str, feature: str) -> None:
    """Raw and averaged weights, shards or not: no sum may know how the images were dealt out or padded."""
    ours, reference = runs / str(processes) / f"{strategy} {feature}", runs / "1" / f"single {feature}"
    for split in ("val", "val_ema"):
        assert values(ours, split, "loss") == pytest.approx(values(reference, split, "loss"), rel=1e-5)


def test_frozen_parts_stay_bit_for_bit(runs: Path) -> None:
    """P49: frozen and trained parameters in one shard group; nothing of a frozen part moves or reaches the optimiser."""
    places = [(1, "single"), (2, "ddp"), (2, "fsdp2"), (4, "fsdp2"), (4, "hsdp")]
    folders = [runs / str(count) / f"{strategy} frozen, layer decay" for count, strategy in places]
    first, *rest = (checkpoint.load(folder / "checkpoints" / "last.ckpt") for folder in folders)
    frozen = [name for name in first["model"] if name.startswith(tuple(FEATURES["frozen, layer decay"]["freeze"]))]
    assert len(frozen) >= 12
    for state in [first, *rest]:
        assert not set(frozen) & state["optimizer"].keys()
        for name in frozen:
            torch.testing.assert_close(state["model"][name], first["model"][name], rtol=0, atol=0)


def trace(folder: Path) -> list[tuple[int, int, tuple[str, ...]]]:
    """(epoch, images before the step, sorted keys of the step) over all ranks, in order."""
    steps: dict[tuple[int, int], list[str]] = {}
    for file in sorted(folder.glob("trace-train-rank*.jsonl")):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            steps.setdefault((record["epoch"], record["images"]), []).extend(record["keys"])
    return [(*place, tuple(sorted(keys))) for place, keys in sorted(steps.items())]


def test_a_run_moves_between_strategies_and_numbers_of_processes(runs: Path) -> None:
    """P03, P48, P51: saved under each and taken on by another, in mid-epoch: the same samples in each global batch, the
    losses, weights and averages of the uncut run."""
    ours, uncut = runs / "chain", runs / "uncut"
    assert trace(ours) == trace(uncut)
    for split, name in (("train", "loss"), ("train", "gradient_norm"), ("val", "acc1"), ("val_ema", "acc1")):
        assert values(ours, split, name) == pytest.approx(values(uncut, split, name), rel=1e-4), (split, name)
    assert values(ours, "train", "learning_rate") == values(uncut, "train", "learning_rate")
    one, other = (checkpoint.load(folder / "checkpoints" / "last.ckpt") for folder in (ours, uncut))
    for part in ("model", "ema"):
        for name, value in other[part].items():
            torch.testing.assert_close(
                one[part][name], value, rtol=1e-2, atol=5e-4, msg=lambda text, n=name: f"{n}: {text}"
            )
    assert one["ema"]["updates"] == 9
    assert one["progress"]["attempt"] == len(CHAIN) - 1


def test_the_export_of_a_sharded_run_loads_into_timm(runs: Path) -> None:
    import timm

    folder = runs / "4" / "hsdp average"
    network = timm.create_model(f"local-dir:{folder / 'export'}", pretrained=True)
    state = checkpoint.load(folder / "checkpoints" / "last.ckpt")
    raw = {name.removeprefix("net."): value for name, value in state["model"].items() if name.startswith("net.")}
    assert network.state_dict().keys() == raw.keys()
