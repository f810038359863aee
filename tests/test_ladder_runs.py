"""Ladders that run: a stop in every stage, frozen parts, a carried head."""

from pathlib import Path

import pytest
import torch
from ladder_words import ALONE, RUNGS, SMALL, run, weights
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from vitfw import checkpoint
from vitfw.config import ConfigError
from vitfw.help import explain
from vitfw.ladder import read_results


@pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning remarks that frozen modules are in evaluation mode
def test_a_ladder_stopped_in_every_rung_gives_the_table_of_the_uncut_one(tmp_path: Path) -> None:
    words = [*SMALL, f"weights={weights(tmp_path / 'weights')}"]
    assert run([*words, f"out={tmp_path / 'whole'}"]) == 0
    for stop in ("probe.machine.wall_minutes=1e-6", "last_block.stop_after=2", "full.stop_after=2"):
        assert run([*words, f"out={tmp_path / 'cut'}", stop]) == 75
        assert not (tmp_path / "cut" / "ladder.json").exists()
    assert run([*words, f"out={tmp_path / 'cut'}"]) == 0
    whole, cut = read_results(tmp_path / "whole"), read_results(tmp_path / "cut")
    assert [result.rung for result in whole] == list(RUNGS) and len(cut) == 3
    assert all(a.same_outcome(b) for a, b in zip(whole, cut, strict=True))
    assert whole[0].trainable == 25 * 10 and whole[1].trainable < whole[2].trainable == whole[2].parameters
    assert (tmp_path / "whole" / "ladder.png").stat().st_size > 1_000
    text = (tmp_path / "whole" / "ladder.md").read_text()
    assert text.count("\n| ") == 4 and "Use " in text
    assert "- probe: linear probe: 13 heads" in text and "of 60 images held out of data.train (seed 0)" in text
    frozen_is_bit_equal(tmp_path)
    again = [(tmp_path / "whole" / "probe-seed0" / "rung.json").stat().st_mtime_ns]
    assert run([*words, f"out={tmp_path / 'whole'}"]) == 0  # a finished ladder only shows its table again
    assert again == [(tmp_path / "whole" / "probe-seed0" / "rung.json").stat().st_mtime_ns]


def frozen_is_bit_equal(folder: Path) -> None:
    """The frozen part of each rung's last checkpoint against the weights it began with."""
    before = load_file(folder / "weights" / "model.safetensors")
    for rung, free in (("probe", ("head.",)), ("last_block", ("blocks.1.", "norm.", "fc_norm.", "head."))):
        state = checkpoint.load(folder / "whole" / f"{rung}-seed0" / "checkpoints" / "last.ckpt")["model"]
        for name, value in before.items():
            found = state[next(key for key in state if key.endswith(f".{name}"))]
            assert torch.equal(found, value) == (not name.startswith(free)), (rung, name)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_carried_head__the_upper_rung_starts_from_the_probes(tmp_path: Path) -> None:
    words = [
        *(word for word in SMALL if not word.startswith("full.")),
        f"weights={weights(tmp_path / 'weights')}",
        "ladder.carry_head=true",
        "ladder.rungs=[probe,last_block]",
    ]
    out = tmp_path / "ladder"
    assert run([*words, "last_block.optim.lr=1e-12", f"out={out}"]) == 0
    heads = [
        checkpoint.load(out / f"{rung}-seed0" / "checkpoints" / "last.ckpt")["model"]
        for rung in ("probe", "last_block")
    ]
    name = next(key for key in heads[0] if key.endswith("head.weight"))
    torch.testing.assert_close(heads[0][name], heads[1][name])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_trained_probe__is_a_run_and_no_grid_takes_its_folder(tmp_path: Path) -> None:
    """What the ladder did before it had a grid, on request."""
    words = [*ALONE, f"weights={weights(tmp_path / 'weights')}", f"out={tmp_path / 'ladder'}"]
    assert run([*words, "ladder.probe=train", "probe.stop_after=2"]) == 75
    with pytest.raises(
        ConfigError, match=r"probe-seed0 holds a trained probe \(ladder.probe=train\), now a probe chosen"
    ):
        run(words)
    assert run([*words, "ladder.probe=train"]) == 0
    (result,) = read_results(tmp_path / "ladder")
    assert result.training_bytes == 16 * 250 and "trained for 6 steps; nothing is chosen" in result.protocol


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_stages__stopped_in_pretraining_and_in_a_rung_give_the_table_of_the_uncut_ones(tmp_path: Path) -> None:
    """Pretraining, probe and fine-tuning in one folder; the encoder below the probe's head is the pretrained one."""
    words = """recipe=mae_digits_stages pretrain.train.epochs=2 pretrain.data.fraction=0.1 pretrain.optim.warmup_epochs=1
        pretrain.task.neighbours=0 data.per_class=6 train.epochs=2 train.global_batch=20 full.optim.warmup_epochs=0
        machine.workers=0 machine.threads=1 log.progress=off ladder.rungs=[probe,full]""".split()
    assert run([*words, f"out={tmp_path / 'whole'}"]) == 0
    cut = f"out={tmp_path / 'cut'}"
    assert run([*words, cut, "pretrain.stop_after=3"]) == 75 and not (tmp_path / "cut" / "probe-seed0").exists()
    assert run([*words, cut, "full.stop_after=2"]) == 75
    assert run([*words, cut]) == 0
    whole = read_results(tmp_path / "whole")
    assert all(a.same_outcome(b) for a, b in zip(whole, read_results(tmp_path / "cut"), strict=True))
    assert f"Weights: {tmp_path}/whole/pretrain/checkpoints/last.ckpt" in (tmp_path / "whole" / "ladder.md").read_text()
    before, probed = (
        checkpoint.load(tmp_path / "whole" / stage / "checkpoints" / "last.ckpt")["model"]
        for stage in ("pretrain", "probe-seed0")
    )
    for name, value in before.items():
        if name.startswith("encoder."):
            assert torch.equal(probed[f"net.{name.removeprefix('encoder.')}"], value), name


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_stages__the_published_probe_and_fine_tuning_of_mae_in_small(tmp_path: Path) -> None:
    """The stages of recipe mae_b_stages with another data set and size: BatchNorm, LARS, a fresh norm behind the mean."""
    small = "model.variant=mae_ti2 model.image_size=8 model.in_channels=1 model.width=24 model.depth=2 model.heads=2"
    words = ["recipe=mae_b_stages", *small.split(), *(f"pretrain.{word}" for word in small.split())]
    words += """task.num_classes=10 data.train=data/digits/train-*.tar data.val=data/digits/val-*.tar
        data.fraction=0.05 pretrain.data.fraction=0.05 augment.policy=digits pretrain.augment.policy=digits
        full.augment.mixup=0 full.augment.cutmix=0 full.augment.erasing=0 train.global_batch=16 pretrain.train.global_batch=16
        train.epochs=1 pretrain.train.epochs=1 optim.warmup_epochs=0 pretrain.optim.warmup_epochs=0
        pretrain.task.decoder_width=16 pretrain.task.decoder_depth=1 pretrain.task.decoder_heads=2 pretrain.task.neighbours=0
        machine.workers=0 machine.threads=1 log.progress=off""".split()
    assert run([*words, f"out={tmp_path}"]) == 0
    probe, full = read_results(tmp_path)
    assert probe.trainable == 25 * 10 and "recipe mae_b_probe, trained for 4 steps" in probe.protocol
    assert full.trainable == full.parameters and full.scores["samples"] == 359


def test_a_rung_is_scored_again_where_it_went_on(tmp_path: Path) -> None:
    """By resume=changed the run keeps its name; its weights are others."""
    words = [*ALONE, f"weights={weights(tmp_path / 'weights')}", f"out={tmp_path / 'ladder'}"]
    assert run(words) == 0
    before = read_results(tmp_path / "ladder")[0].scores
    assert run([*words, "grid.rates=[1e-6]", "resume=changed"]) == 0
    after = read_results(tmp_path / "ladder")[0].scores
    assert after != before
    record = tmp_path / "ladder" / "probe-seed0" / "rung.json"
    record.write_text(record.read_text()[:50])  # a disk that was full
    assert run([*words, "grid.rates=[1e-6]"]) == 0
    assert read_results(tmp_path / "ladder")[0].scores == after


def test_other_weights_behind_the_same_name_are_refused(tmp_path: Path) -> None:
    place = tmp_path / "weights"
    words = [*ALONE, f"weights={weights(place)}", f"out={tmp_path / 'ladder'}"]
    assert run(words) == 0
    state = load_file(place / "model.safetensors")
    with safe_open(place / "model.safetensors", framework="pt") as file:
        metadata = file.metadata()
    save_file(state, place / "model.safetensors", metadata=metadata)
    assert run(words) == 0  # the same weights, written anew
    save_file({name: value + 0.01 for name, value in state.items()}, place / "model.safetensors", metadata=metadata)
    with pytest.raises(ConfigError, match=r"holds other weights than those that .*probe-seed0 started from; remove"):
        run(words)
    (tmp_path / "ladder" / "probe-seed0").rename(tmp_path / "old")
    assert run(words) == 0


def test_rungs_of_a_pretraining_that_is_gone_are_refused(tmp_path: Path) -> None:
    """Before the first step, and without pretraining again first."""
    recipe = tmp_path / "stages.yaml"
    recipe.write_text("ladder: {rungs: [probe]}\npretrain: {recipe: digits, train.epochs: 1}\nprobe: {recipe: probe}\n")
    rung = tmp_path / "ladder" / "probe-seed0"
    rung.mkdir(parents=True)
    (rung / "config.yaml").write_text("grid: {}\n")
    shared = [word for word in ALONE if not word.startswith(("recipe=", "train."))]
    words = [f"recipe={recipe}", *shared, f"out={tmp_path / 'ladder'}", "data.val=data/digits/val-*.tar"]
    with pytest.raises(
        ConfigError, match=r"last.ckpt is gone, and there are rungs that started from it: remove .*seed0"
    ):
        run([*words, "data.train=data/digits/train-*.tar"])
    assert not (tmp_path / "ladder" / "pretrain").exists()


def test_a_mistake_in_a_word_of_one_rung_is_named_with_the_rung(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^full\.optim\.lrr"):
        run([*SMALL, "full.optim.lrr=1", f"out={tmp_path / 'ladder'}"])
    with pytest.raises(ConfigError, match=r"^optim\.lrr"):
        run([*SMALL, "optim.lrr=1", f"out={tmp_path / 'ladder'}"])
    assert "ladder.seeds=1  (" in explain("ladder.seeds") and "grid.rates=[" in explain("grid")
