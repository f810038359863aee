"""Supervised training through the real command: accumulation, layer decay in the live optimiser, clipping, heads of zeros."""

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, tiny
from make_shards import make_shards, write_tar
from PIL import Image

from vitfw import checkpoint
from vitfw.config import load
from vitfw.data.augment import eval_transform, resolve_policy
from vitfw.launch import Launch
from vitfw.models.variants import resolve
from vitfw.prepare import prepare
from vitfw.report.recorder import read_metrics
from vitfw.train import main

PLAIN = [
    "model.drop_path=0",
    "augment.mixup=0",
    "augment.cutmix=0",
    "ema.decay=null",
    "eval.every_epochs=0",
    "data.val=null",
]
SGD = [
    "optim.name=sgd",
    "optim.momentum=0",
    "optim.weight_decay=0",
    "optim.schedule=constant",
    "optim.warmup_epochs=null",
]
DEPTHS = {12: 0.65, 24: 0.75, 32: 0.75}  # blocks: layer decay, of MAE's fine-tuning of B, L and H
LAYOUTS = {  # what lies around the network while it trains
    "ddp": ["machine.strategy=ddp"],
    "fsdp2": ["machine.strategy=fsdp2"],
    "compiled": ["machine.strategy=ddp", "machine.compile=true"],
}


def final(folder: Path) -> dict[str, Any]:
    return checkpoint.load(folder / "checkpoints" / "last.ckpt")


def start_of(words: list[str]) -> dict[str, torch.Tensor]:
    """The weights that a run with these words begins with."""
    return prepare(load(words), Launch("python")).task.state_dict()


def run_cells(cells: list[dict[str, Any]], folder: Path) -> None:
    """All cells in one torchrun of two processes: starting costs more than training."""
    (folder / "cells.json").write_text(json.dumps(cells))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "tests/groups_worker.py", str(folder / "cells.json")],
        capture_output=True, text=True, timeout=600, cwd=ROOT, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"


ACCUMULATED = tiny(*PLAIN, *SGD, "optim.lr=0.5", "optim.clip_norm=null", "train.global_batch=8", "train.epochs=1")


def deep(depth: int) -> list[str]:
    """Two epochs of two updates under a warm-up and a cosine."""
    return tiny(
        *PLAIN, f"model.depth={depth}", "model.width=8", "model.heads=1", f"optim.layer_decay={DEPTHS[depth]}",
        "optim.lr=1e-2", "optim.warmup_epochs=1", "optim.warmup_lr=1e-4", "optim.end_lr=1e-5", "optim.weight_decay=0.1",
        "train.global_batch=8", "train.epochs=2", "data.fraction=0.015",
    )  # fmt: skip


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every run of this file on two processes."""
    folder = tmp_path_factory.mktemp("pairs")
    cells = [{"name": "accumulated", "words": [*ACCUMULATED, "machine.images_per_device=2"], "status": 0}]
    for depth in DEPTHS:
        for layout, words in LAYOUTS.items():
            cells.append({"name": f"{layout} {depth}", "words": [*deep(depth), *words], "status": 0})
        for layout, stop, status in (("ddp", "1", 75), ("fsdp2", "3", 75), ("compiled", "null", 0)):
            words = [*deep(depth), *LAYOUTS[layout], f"stop_after={stop}"]
            cells.append({"name": f"resumed {depth}", "words": words, "status": status})
    for cell in cells:
        cell["words"].append(f"out={folder / cell['name']}")
    run_cells(cells, folder)
    return folder


# Accumulation


def test_one_process_accumulating_4_equals_two_accumulating_2_and_the_whole_batch(pairs: Path, tmp_path: Path) -> None:
    """P24: SGD over one epoch, the same weights to 1e-6 and the same number of steps."""
    for name, images in (("whole", 8), ("four", 2)):
        assert main([*ACCUMULATED, f"machine.images_per_device={images}", f"out={tmp_path / name}"]) == 0
    folders = [tmp_path / "whole", tmp_path / "four", pairs / "accumulated"]
    whole, four, two = (final(folder) for folder in folders)
    assert whole["progress"]["step"] == four["progress"]["step"] == two["progress"]["step"] == 14
    begin = start_of([*ACCUMULATED, f"out={tmp_path / 'begin'}"])
    assert max((whole["model"][name] - begin[name]).abs().max().item() for name in begin) > 0.01  # it did train
    for other in (four, two):
        for name, value in whole["model"].items():
            torch.testing.assert_close(
                other["model"][name], value, rtol=1e-6, atol=1e-6, msg=lambda t, n=name: f"{n}: {t}"
            )
    rates = [[row["learning_rate"] for row in read_metrics(folder, "train")] for folder in folders]
    assert rates[0] == rates[1] == rates[2]


def test_a_tail_that_fills_no_batch_is_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """P24: 20 images, batch 8 in micro-batches of 2: 2 updates an epoch, and the cosine ends with the last of them."""
    pattern = make_shards(tmp_path, [20], size=8)
    words = tiny(
        *PLAIN, *(word for word in SGD if "schedule" not in word), "optim.schedule=cosine", "optim.lr=0.1", "optim.end_lr=0.01",
        "optim.clip_norm=null", f"data.train={pattern}", "data.fraction=1.0", "data.window=0", "model.in_channels=3",
        "train.global_batch=8", "train.epochs=3", "machine.images_per_device=2", f"out={tmp_path / 'run'}",
    )  # fmt: skip
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "3 epochs of 2 updates = 6 updates" in out
    assert "4 left out of each epoch" in out
    rates = [row["learning_rate"] for row in read_metrics(tmp_path / "run", "train")]
    expected = [0.01 + 0.09 * (1 + math.cos(math.pi * step / 6)) / 2 for step in range(6)]
    assert rates == pytest.approx(expected, rel=1e-6)


# Layer decay


def place(name: str, depth: int) -> int:
    """0 before the blocks, i + 1 block i, depth + 1 the head; the final norm counts with the last block."""
    parts = name.removeprefix("net.").split(".")
    if parts[0] == "blocks":
        return int(parts[1]) + 1
    return {"head": depth + 1, "fc_norm": depth + 1, "norm": depth}.get(parts[0], 0)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("layout", [*LAYOUTS, "resumed"])
def test_layer_decay_in_the_live_optimiser_at_every_step(pairs: Path, layout: str, depth: int) -> None:
    """P11, P12: rate = schedule x decay ^ (depth + 1 - place), and weight decay on matrices alone, whatever wraps the network.
    The resumed runs were stopped twice and went on under another strategy each time."""
    lines = (pairs / f"{layout} {depth}.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert len(steps) == 4
    words = deep(depth)
    task = prepare(load(words), Launch("python")).task
    shapes = {name: parameter.ndim for name, parameter in task.named_parameters()}
    tops = [row["net.head.weight"][0] for row in steps]
    assert tops == pytest.approx([row["learning_rate"] for row in read_metrics(pairs / f"{layout} {depth}", "train")])
    assert len({round(top, 9) for top in tops}) >= 3
    for row, top in zip(steps, tops, strict=True):
        assert row.keys() == shapes.keys()  # every parameter once, bare names
        for name, (rate, decay) in row.items():
            assert rate == pytest.approx(top * DEPTHS[depth] ** (depth + 1 - place(name, depth)), rel=1e-9), name
            matrix = shapes[name] > 1 and name not in ("net.pos_embed", "net.cls_token")
            assert decay == (0.1 if matrix else 0.0), name
    assert steps[0]["net.patch_embed.proj.weight"][0] == pytest.approx(tops[0] * DEPTHS[depth] ** (depth + 1))


# Clipping


@pytest.mark.parametrize("images", [32, 8], ids=["one batch", "accumulated 4"])
def test_clipping_bounds_the_step_and_reports_the_norm_before(tmp_path: Path, images: int) -> None:
    """P53: SGD at rate 1 moves the weights by the clip norm; the norm in the record is the one before; 0 and null: off."""
    words = tiny(*PLAIN, *SGD, "optim.lr=1.0", f"machine.images_per_device={images}")
    words = [word for word in words if not word.startswith("optim.clip_norm")]
    moved, norms = {}, {}
    for clip in ("0.01", "0", "null"):
        folder = tmp_path / clip
        assert main([*words, f"optim.clip_norm={clip}", f"out={folder}", "stop_after=1"]) == 75
        begin, end = start_of([*words, f"out={tmp_path / 'begin'}"]), final(folder)["model"]
        moved[clip] = torch.cat([(end[name] - begin[name]).flatten() for name in begin]).norm().item()
        norms[clip] = read_metrics(folder, "train")[0]["gradient_norm"]
    assert moved["0.01"] == pytest.approx(0.01, rel=1e-3)
    assert norms["0.01"] == pytest.approx(norms["null"], rel=1e-6) and norms["null"] > 0.1
    assert moved["0"] == moved["null"] == pytest.approx(norms["null"], rel=1e-4)


# A head of zeros


@pytest.mark.parametrize("classes", [10, 100, 1000])
def test_a_head_of_zeros_starts_at_ln_k_and_moves_no_backbone(tmp_path: Path, classes: int) -> None:
    """P77: the first loss is ln K under mixing and smoothing; after the first step of SGD the backbone is bit for bit what it
    was, so its gradients were exactly 0; after the second it is not; a resume does not put the zeros back."""
    words = tiny(
        *SGD, "optim.lr=0.1", "model.zero_head=true", f"task.num_classes={classes}", f"out={tmp_path / 'run'}",
        "model.drop_path=0", "ema.decay=null", "data.val=null", "optim.clip_norm=null", "train.epochs=1",
    )  # fmt: skip
    begin = start_of(words)
    assert not begin["net.head.weight"].any() and not begin["net.head.bias"].any()
    for step in (1, 2):
        assert main([*words, f"stop_after={step}"]) == 75
        found = final(tmp_path / "run")
        state = found["model"]
        backbone = [name for name in found["optimizer"] if not name.startswith("net.head.")]
        moved = {name: not torch.equal(state[name], begin[name]) for name in backbone}
        if step == 1:
            assert not any(moved.values())
        else:  # a vector may stay: a gradient that vanishes beside the 1.0 of a norm, or that of a key's bias
            assert all(moved[name] for name in moved if begin[name].ndim > 1)
        assert state["net.head.weight"].any() and state["net.head.bias"].any()
    assert read_metrics(tmp_path / "run", "train")[0]["loss"] == pytest.approx(math.log(classes), rel=1e-6)


def test_a_head_of_zeros_under_bce_and_a_usual_head(tmp_path: Path) -> None:
    """P77, P80: with DeiT III's loss the first value is ln 2; without `zero_head` the head has its standard deviation."""
    words = tiny(
        *SGD, "optim.lr=0.1", "task.loss=bce", "task.smoothing=0", "task.num_classes=1000", "model.width=48",
        f"out={tmp_path / 'run'}", "stop_after=1",
    )  # fmt: skip
    usual = start_of(words)["net.head.weight"]
    assert usual.std().item() == pytest.approx(0.02, rel=0.1)
    assert main([*words, "model.zero_head=true"]) == 75
    assert read_metrics(tmp_path / "run", "train")[0]["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert not torch.equal(usual, final(tmp_path / "run")["model"]["net.head.weight"])


# Averages


def test_an_average_under_bf16_is_float32_and_moves(tmp_path: Path) -> None:
    """P35: weights and average stay in float32, in the checkpoint and in the export."""
    from safetensors.torch import load_file

    words = tiny(
        "machine.precision=bf16",
        "ema.decay=0.9",
        "optim.warmup_epochs=null",
        "train.epochs=1",
        f"out={tmp_path / 'run'}",
    )
    begin = start_of(words)
    assert main(words) == 0
    state = final(tmp_path / "run")
    for name, value in state["ema"].items():
        if name not in ("updates", "net.pos_embed"):  # the fixed table of positions stands still
            assert value.dtype == state["model"][name].dtype == torch.float32, name
            assert not torch.equal(value, begin[name]) and not torch.equal(value, state["model"][name]), name
    assert state["ema"]["updates"] == 3
    exported = load_file(tmp_path / "run" / "export" / "model.safetensors")
    assert {value.dtype for value in exported.values()} == {torch.float32}


# Small images and few classes


def test_three_classes_have_no_top_5_and_one_class_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """P79."""
    pattern = make_shards(tmp_path, [24], size=8)
    words = tiny(
        "augment.mixup=0", "augment.cutmix=0", f"data.train={pattern}", f"data.val={pattern}", "data.fraction=1.0",
        "data.window=0", "model.in_channels=3", "train.global_batch=8", "train.epochs=1", "task.num_classes=0",
        "optim.warmup_epochs=null",
    )  # fmt: skip
    assert main([*words, f"out={tmp_path / 'run'}"]) == 0
    record = read_metrics(tmp_path / "run", "val")[-1]
    assert "acc1" in record and "acc5" not in record
    one = [word for word in words if not word.startswith("task.num_classes")]
    assert main([*one, "task.num_classes=1", f"out={tmp_path / 'one'}"]) == 2
    assert "task.num_classes=1: must be 2 or more" in capsys.readouterr().err


def test_small_images_are_handled_as_small_images(tmp_path: Path) -> None:
    """P76: CIFAR's recipes see 64 patches, a padded crop and the whole image in evaluation, and learn ten coloured classes."""
    config = load(["recipe=cifar10_vit_ti"])
    grid = resolve(config.model).grid
    assert grid == (8, 8)
    policy = resolve_policy(config.augment)
    assert policy.crop == "padded" and policy.eval_crop == 1.0
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    seen = eval_transform(config.augment, size=(32, 32))(Image.fromarray(pixels))
    assert torch.equal(seen, torch.from_numpy(pixels).permute(2, 0, 1))

    colours = np.random.default_rng(1).integers(40, 216, (10, 1, 1, 3))
    noise = np.random.default_rng(2).normal(0, 20, (200, 32, 32, 3))
    members = []
    for number in range(200):
        buffer = io.BytesIO()
        Image.fromarray((colours[number % 10] + noise[number]).clip(0, 255).astype(np.uint8)).save(buffer, "PNG")
        members += [(f"{number:03d}.png", buffer.getvalue()), (f"{number:03d}.cls", str(number % 10).encode())]
    tar = write_tar(tmp_path / "colours.tar", members)
    words = [
        "recipe=cifar10_vit_ti", "machine=cpu", "machine.threads=1", f"data.train={tar}", f"data.val={tar}", "model.depth=2",
        "model.width=48", "model.heads=3", "train.epochs=12", "train.global_batch=20", "optim.warmup_epochs=2", "optim.lr=2e-3",
        "eval.every_epochs=0", "augment.operations=", f"out={tmp_path / 'run'}",
    ]  # fmt: skip
    assert main(words) == 0
    assert read_metrics(tmp_path / "run", "val")[-1]["acc1"] > 90


TWO_HEADS = ["model.distillation_token=true", "model.pool=cls", "model.class_token=true"]


def test_a_second_head_needs_a_teacher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such a network answers with two rows of logits while it trains."""
    assert main(tiny(*TWO_HEADS, f"out={tmp_path / 'run'}")) == 2
    assert "nothing would teach the distillation head; set model.distillation_token=false" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_frozen_network_with_two_heads_trains_both_on_the_labels(tmp_path: Path) -> None:
    """It answers with their mean, in training as in evaluation: the probe of a distilled network."""
    assert main(tiny(*TWO_HEADS, "freeze.rung=probe", "train.epochs=2", f"out={tmp_path / 'run'}")) == 0
