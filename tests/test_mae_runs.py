"""Whole runs of MAE: resume in mid-epoch, two processes, and the way from pretraining to the ladder's recipes."""

from pathlib import Path

import pytest
import timm
import torch
from conftest import tiny, torchrun
from make_shards import make_shards
from torch import nn

from vitfw import checkpoint
from vitfw.report.recorder import read_metrics
from vitfw.show import open_mae
from vitfw.train import main

MAE = "recipe=mae_digits ema.decay=null optim.clip_norm=null task.decoder_width=24 model.heads=2".split()
MIXING = ("augment.mixup", "augment.cutmix", "ema.decay", "model.drop_path")


def mae(*words: str) -> list[str]:
    """A run of nine steps; `words` take the place of its own."""
    keys = {word.partition("=")[0] for word in words}
    own = [word for word in tiny(*MAE) if not word.startswith(MIXING)]
    return [word for word in own if word.partition("=")[0] not in keys] + list(words)


def losses(folder: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_metrics(folder, "train")}


def state(folder: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(folder / "checkpoints" / "last.ckpt")["model"]


def test_resume_in_mid_epoch_and_two_processes(tmp_path: Path) -> None:
    """Stopped after step 4 of 9 and continued: bit-equal, the probe too. Two processes, no search for unused parameters:
    the same losses; the probe's BatchNorm alone sees other batches."""
    assert main(mae(f"out={tmp_path}/uncut")) == 0
    panels = sorted((tmp_path / "uncut" / "panels").glob("*.png"))
    assert [panel.name for panel in panels] == ["step-00000003.png", "step-00000006.png", "step-00000009.png"]
    assert main(mae(f"out={tmp_path}/cut", "stop_after=4")) == 75
    assert main(mae(f"out={tmp_path}/cut")) == 0
    assert losses(tmp_path / "cut") == losses(tmp_path / "uncut")
    whole = state(tmp_path / "uncut")
    assert all(torch.equal(value, whole[name]) for name, value in state(tmp_path / "cut").items())
    small = mae("machine.images_per_device=16")
    assert main([*small, f"out={tmp_path}/one"]) == 0
    two = torchrun(2, [*small, f"out={tmp_path}/two"])
    assert two.returncode == 0, two.stderr
    for step, loss in losses(tmp_path / "one").items():
        assert abs(losses(tmp_path / "two")[step] - loss) < 1e-5 * abs(loss)
    one, two_values = ({r["step"]: r["loss"] for r in read_metrics(tmp_path / name, "val")} for name in ("one", "two"))
    for step, loss in one.items():
        assert abs(two_values[step] - loss) < 1e-5 * loss


def test_the_short_fine_tune_leaves_the_run_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Losses and weights are bit-equal with and without it, and after a stop in mid-epoch; its cost is told before. With
    sharded weights the copy is made whole, and scores as in one process."""
    tune = ["task.tune_per_class=4", "task.tune_steps=12", "task.tune_batch=16"]
    name = "tune_n4_s12_acc1"
    assert main(mae(f"out={tmp_path}/without")) == 0
    assert main(mae(*tune, f"out={tmp_path}/with")) == 0
    assert "the short fine-tune at each evaluation, 12 updates of 16 whole images" in capsys.readouterr().out
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    plain = state(tmp_path / "without")
    assert all(torch.equal(value, plain[name]) for name, value in state(tmp_path / "with").items())
    assert main(mae(*tune, f"out={tmp_path}/cut", "stop_after=4")) == 75
    assert main(mae(*tune, f"out={tmp_path}/cut")) == 0
    scores, again = ([r[name] for r in read_metrics(tmp_path / run, "val")] for run in ("with", "cut"))
    assert scores == again
    assert len(scores) == 3
    small = [*mae("machine.images_per_device=16"), *tune]
    assert main([*small, f"out={tmp_path}/one"]) == 0
    sharded = torchrun(2, [*small, "machine.strategy=fsdp2", f"out={tmp_path}/sharded"])
    assert sharded.returncode == 0, sharded.stderr
    for step, loss in losses(tmp_path / "one").items():
        assert abs(losses(tmp_path / "sharded")[step] - loss) < 1e-5 * abs(loss)
    one, two = ([r[name] for r in read_metrics(tmp_path / run, "val")] for run in ("one", "sharded"))
    assert all(abs(a - b) < 1.5 for a, b in zip(one, two, strict=True))


def test_pretraining_goes_on_from_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`weights=` takes encoder and decoder of a run's checkpoint: without learning, the loss is the one it ended with. The
    export holds an encoder alone, which timm reads, and the start-up summary says so."""
    once = ["train.epochs=1", "optim.warmup_epochs=0"]
    assert main(mae(*once, f"out={tmp_path}/first")) == 0
    exported = timm.create_model(f"local-dir:{tmp_path}/first/export", pretrained=True).eval()
    task, _ = open_mae(f"{tmp_path}/first")
    images = torch.rand(2, 1, 8, 8)
    with torch.no_grad():
        tokens = task.encoder(images, output="tokens")
        torch.testing.assert_close(exported.forward_features(images), tokens, rtol=0, atol=1e-5)
    still = [*once, "optim.lr=1e-12", "optim.weight_decay=0"]
    checkpoint_of_first = f"weights={tmp_path}/first/checkpoints/last.ckpt"
    assert main(mae(*still, checkpoint_of_first, f"out={tmp_path}/second")) == 0
    assert "decoder: all 20 tensors loaded" in capsys.readouterr().out
    ended, went_on = (read_metrics(tmp_path / name, "val")[-1]["loss"] for name in ("first", "second"))
    assert abs(went_on - ended) < 1e-5 * ended
    assert main(mae(*still, f"weights={tmp_path}/first", f"out={tmp_path}/third", "stop_after=1")) == 75
    assert "decoder: none in the file, it starts from its initialisation" in capsys.readouterr().out
    assert main(mae(*still, checkpoint_of_first, f"out={tmp_path}/fourth", "task.decoder_width=48")) == 2
    assert "task.decoder_width is 24 in the file and 48 here. Set task.decoder_width=24" in capsys.readouterr().err
    assert main(mae(*still, checkpoint_of_first, f"out={tmp_path}/fifth", "task.normalise_target=true")) == 2
    assert "task.normalise_target is False in the file and True here" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own, while it traces
def test_compiled_runs_have_the_same_losses_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P82: blocks without a graph break; compiled and not, the same losses and names, and one goes on where the other stopped."""
    original = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: original(self, backend="eager", fullgraph=True))
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 64)
    assert main(mae(f"out={tmp_path}/plain")) == 0
    assert main(mae(f"out={tmp_path}/compiled", "machine.compile=true")) == 0
    assert main(mae(f"out={tmp_path}/mixed", "machine.compile=true", "stop_after=4")) == 75
    assert main(mae(f"out={tmp_path}/mixed")) == 0
    expected, names = losses(tmp_path / "plain"), state(tmp_path / "plain").keys()
    for run in ("compiled", "mixed"):
        assert losses(tmp_path / run) == pytest.approx(expected, rel=1e-5)
        assert state(tmp_path / run).keys() == names


def test_nine_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """P75: batches of four, one and two processes, five images on two ranks: the runs end and count nine; the saved network
    answers for a single image. P25: a probe on an encoder without weights is remarked on."""
    data = f"data.train={make_shards(tmp_path, [9])} data.val={make_shards(tmp_path, [9])}".split()
    small = [
        *data,
        "data.fraction=1",
        "train.global_batch=4",
        "train.epochs=2",
        "optim.warmup_epochs=0",
        "machine.workers=0",
    ]
    small += ["model.in_channels=3", "machine.images_per_device=2", "log.every=1"]
    probe = [word for word in mae(*small) if not word.startswith(("recipe=", "task.decoder", "data.trace"))]
    probe += "recipe=mae_b_probe model.variant=mae_ti2 model.image_size=8 task.num_classes=3 augment.policy=mae_probe".split()
    for name, words in {"pretrain": mae(*small), "probe": probe}.items():
        assert main([*words, f"out={tmp_path}/{name}"]) == 0
        assert read_metrics(tmp_path / name, "val")[-1]["samples"] == 9
        shown = capsys.readouterr().out
        assert "1 left out of each epoch" in shown
        assert ("without weights=: the frozen part is random" in shown) == (name == "probe")
    two = torchrun(2, [*probe, f"out={tmp_path}/two"])
    assert two.returncode == 0, two.stderr
    assert read_metrics(tmp_path / "two", "val")[-1]["samples"] == 9
    network = timm.create_model(f"local-dir:{tmp_path}/two/export", pretrained=True).eval()
    assert network(torch.zeros(1, 3, 8, 8)).shape == (1, 3)


def test_from_pretraining_to_probe_and_fine_tuning(tmp_path: Path) -> None:
    """The encoder of a run loads into the published probe and the published fine-tuning; what is new there is named."""
    run = tmp_path / "pretrain"
    once = ["train.epochs=1", "optim.warmup_epochs=0"]
    assert main(mae(*once, f"out={run}")) == 0
    from_run = [*once, f"weights={run}/checkpoints/last.ckpt", "model.variant=mae_ti2", "model.image_size=8"]
    from_run += ["model.in_channels=1", "model.mlp_ratio=2", "model.class_token=false", "task.num_classes=10"]
    from_run += ["data.train=data/digits/train-*.tar", "data.val=data/digits/val-*.tar", "augment.policy=digits"]
    rest = [word for word in mae(*from_run) if not word.startswith(("recipe=", "task.decoder"))]
    probe = [*rest, "recipe=mae_b_probe", "model.pool=gap", "machine.images_per_device=16"]
    assert main([*probe, f"out={tmp_path}/probe"]) == 0
    sharded = torchrun(2, [*probe, "machine.strategy=fsdp2", f"out={tmp_path}/sharded"])
    assert sharded.returncode == 0, sharded.stderr
    one, two = (read_metrics(tmp_path / name, "val")[-1] for name in ("probe", "sharded"))
    assert one["samples"] == two["samples"] == 359
    # the ranks' BatchNorm statistics are averaged, one process follows its last micro-batch more: near, not equal
    assert abs(one["loss"] - two["loss"]) < 0.05 * one["loss"]
    tune = ["recipe=mae_b_finetune", "augment.mixup=0", "augment.cutmix=0", "augment.erasing=0"]
    assert main([*rest, *tune, f"out={tmp_path}/tune"]) == 0
    before, after = state(run), state(tmp_path / "probe")
    for name, value in before.items():
        if name.startswith("encoder."):
            assert torch.equal(after[f"net.{name.removeprefix('encoder.')}"], value), name
    tuned = state(tmp_path / "tune")
    assert "net.fc_norm.weight" in tuned
    assert "net.norm.weight" not in tuned
    moved = (tuned["net.blocks.0.mlp.fc1.weight"] - before["encoder.blocks.0.mlp.fc1.weight"]).abs().max()
    assert 0 < moved < 0.02  # three steps away from the pretrained weights, not from a fresh start
