"""One command to a trained and exported network: what the run folder holds and what the words on the screen say."""

import io
import json
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import yaml
from conftest import ROOT, TINY, tiny, torchrun
from make_shards import picture, write_tar
from PIL import Image

from vitfw import checkpoint
from vitfw.config import load, names_of
from vitfw.data.index import open_samples
from vitfw.launch import Launch
from vitfw.models.build import build_model
from vitfw.models.export import export
from vitfw.models.preprocess import Preprocessing
from vitfw.models.variants import ModelConfig
from vitfw.plan import plan_text
from vitfw.report.recorder import read_metrics
from vitfw.tasks.classify import ClassifyConfig, ClassifyTask
from vitfw.tasks.distill import DistillConfig
from vitfw.train import main


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert main([*TINY, f"out={folder}", "train.seed=null"]) == 0
    return folder


def test_the_run_folder_is_complete(finished: Path) -> None:
    names = {str(path.relative_to(finished)) for path in finished.rglob("*") if path.is_file()}
    assert names >= {
        "config.yaml", "provenance.json", "metrics.jsonl", "log.txt",
        "checkpoints/last.ckpt", "checkpoints/best.ckpt", "export/model.safetensors", "export/config.json",
    }  # fmt: skip
    provenance = json.loads((finished / "provenance.json").read_text())
    attempt = provenance["attempts"][0]
    assert attempt["versions"]["torch"] == version("torch")
    assert attempt["words"][0] == "recipe=digits"
    assert provenance["seed"] == yaml.safe_load((finished / "config.yaml").read_text())["train"]["seed"]
    assert set(provenance["finished"]) == {"val/acc1", "val_ema/acc1"}


def test_every_record_says_where_it_stands(finished: Path) -> None:
    records = read_metrics(finished)
    assert {record["split"] for record in records} == {"train", "val", "val_ema"}
    for record in records:
        assert record["images"] == record["step"] * 32
        assert record["epoch"] == pytest.approx(record["step"] / 3, abs=1e-6)
        assert record["attempt"] == 0
    train = read_metrics(finished, "train")
    assert [record["step"] for record in train] == list(range(1, 10))
    assert set(train[0]) >= {"loss", "acc1", "learning_rate", "gradient_norm", "images_per_second", "time"}
    val = read_metrics(finished, "val")
    assert [record["step"] for record in val] == [3, 6, 9]
    assert all(record["samples"] == 359 and record["acc1"] <= 100.0 for record in val)


def test_the_drawn_seed_reproduces_the_run(finished: Path, tmp_path: Path) -> None:
    recipe = finished / "config.yaml"
    assert (
        main([f"recipe={recipe}", "machine=cpu", "machine.threads=1", "log.every=1", f"out={tmp_path / 'again'}"]) == 0
    )
    assert [r["loss"] for r in read_metrics(tmp_path / "again", "train")] == [
        r["loss"] for r in read_metrics(finished, "train")
    ]


def test_the_export_is_what_timm_loads_and_what_was_measured(finished: Path) -> None:
    model = timm.create_model(f"local-dir:{finished / 'export'}", pretrained=True).eval()
    state = checkpoint.load(finished / "checkpoints" / "last.ckpt")
    assert {f"net.{name}": value.shape for name, value in model.state_dict().items()} == {
        name: value.shape for name, value in state["model"].items()
    }
    assert model.pretrained_cfg["label_names"] == [str(digit) for digit in range(10)]
    assert model.pretrained_cfg["input_size"] == (1, 8, 8)
    best = {name: state["progress"]["best"][name] for name in ("val/acc1", "val_ema/acc1")}
    assert best == json.loads((finished / "provenance.json").read_text())["finished"]


def test_recorded_scores_equal_a_plain_evaluation_of_the_export(finished: Path) -> None:
    """359 images in batches of 128 leave padding, which counts nowhere: not in the accuracy, and not in the loss."""
    best = checkpoint.load(finished / "checkpoints" / "last.ckpt")["progress"]
    split = max(("val", "val_ema"), key=lambda name: best["best"][f"{name}/acc1"])
    record = next(r for r in read_metrics(finished, split) if r["step"] == best["best_step"][f"{split}/acc1"])
    model = timm.create_model(f"local-dir:{finished / 'export'}", pretrained=True).eval()
    samples = open_samples("data/digits/val-*.tar")
    pixels = [np.array(Image.open(io.BytesIO(samples.read(row)))) for row in range(len(samples))]
    images = torch.from_numpy(np.stack(pixels)).float()[:, None] / 255
    mean, std = model.pretrained_cfg["mean"][0], model.pretrained_cfg["std"][0]
    labels = torch.from_numpy(samples.labels).long()
    with torch.no_grad():
        logits = model((images - mean) / std)
    assert record["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert record["acc1"] == pytest.approx(100 * (logits.argmax(1) == labels).double().mean().item(), abs=1e-9)
    assert record["samples"] == 359


def test_the_checkpoint_opens_with_the_safe_loader(finished: Path) -> None:
    """P39."""
    state = torch.load(finished / "checkpoints" / "last.ckpt", weights_only=True)
    assert state["progress"]["step"] == 9
    assert state["versions"]["timm"] == timm.__version__
    assert yaml.safe_load(state["config"])["model"]["variant"] == "vit_ti2"
    assert set(state["optimizer"]) == {name for name in state["model"] if name != "net.pos_embed"} | (
        {"net.pos_embed"} & set(state["optimizer"])
    )


def test_the_summary_names_all_that_follows_from_the_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, f"out={tmp_path / 'run'}", "machine.images_per_device=16", "stop_after=1"]) == 75
    out = capsys.readouterr().out
    for text in (
        "116 images in",
        "359 images in",
        "10,162 parameters, 10,162 trainable (100.0%)",
        "32 = 1 processes x 2 micro-batches x 16 images",
        "3 epochs of 3 updates = 9 updates",
        "20 left out of each epoch",
        "2e-3 (absolute), adamw, cosine",
        "stopped and saved at step 1: start the same command again to go on",
    ):
        assert text in out, text
    assert out in (tmp_path / "run" / "log.txt").read_text()


def test_few_patches_are_remarked_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """P76: the patch of 16 on a small image, copied from a recipe for large ones."""
    assert main(tiny(f"out={tmp_path / 'run'}", "model.patch_size=4", "stop_after=1")) == 75
    assert "only 2 x 2 patches: such a ViT learns little; lower model.patch_size" in capsys.readouterr().out


def test_accumulation_changes_nothing(tmp_path: Path) -> None:
    """One micro-batch of 32 or two of 16 make the same step, to rounding; nothing here depends on the other images of a batch."""
    words = tiny("augment.mixup=0", "augment.cutmix=0", "model.drop_path=0")
    assert main([*words, f"out={tmp_path / 'one'}"]) == 0
    assert main([*words, f"out={tmp_path / 'two'}", "machine.images_per_device=16"]) == 0
    one, two = (read_metrics(tmp_path / name, "train") for name in ("one", "two"))
    for a, b in zip(one, two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=1e-4)
        assert a["learning_rate"] == b["learning_rate"]


def test_without_evaluation_data_the_last_weights_are_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, f"out={tmp_path / 'run'}", "data.val=null"]) == 0
    assert "none: nothing will be evaluated" in capsys.readouterr().out
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()


def test_weights_start_a_new_run_from_another(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = tiny(
        f"out={tmp_path / 'run'}", f"weights={finished / 'export'}", "optim.lr=1e-12", "optim.warmup_epochs=null"
    )
    assert main(words) == 0
    assert "100.00 % of the backbone" in capsys.readouterr().out
    theirs = json.loads((finished / "provenance.json").read_text())["finished"]
    ours = json.loads((tmp_path / "run" / "provenance.json").read_text())["finished"]
    assert ours["val/acc1"] == pytest.approx(max(theirs.values()), abs=0.3)  # nothing was learned on top


def test_bad_runs_leave_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for word, text in (
        ("data.train=nowhere-*.tar", "nowhere"),
        ("train.global_batch=100000", "train.global_batch=100000"),
        ("optim.warmup_epochs=99", "optim.warmup_epochs=99"),
        ("model.heads=7", "heads"),
        ("task.num_classes=3", "labels up to 9"),
        ("augment.statistics=imagenet", "statistics imagenet"),
        ("augment.operations=foo", "augment.operations"),
        ("data.weights=[1,2]", "data.weights"),
        ("machine.device=gpu", "torch sees no GPU"),
        ("machine.devices=4", "torchrun --nnodes 1 --nproc-per-node 4"),
    ):
        assert main(tiny(word, f"out={tmp_path / 'run'}")) == 2, word
        assert text in capsys.readouterr().err
        assert not (tmp_path / "run").exists()


def test_images_without_labels_are_refused_by_a_task_that_needs_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pattern = write_tar(tmp_path / "plain.tar", [(f"{number}.png", picture(number)) for number in range(60)])
    for word, split in ((f"data.train={pattern}", "train"), (f"data.val={pattern}", "val")):
        words = tiny(word, "data.fraction=1", "data.classes=null", f"out={tmp_path / 'run'}")
        assert main(words) == 2
        assert f"task.name=classify needs labels, and data.{split} has none" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()


def test_training_accuracy_on_a_fixed_clean_slice(tmp_path: Path) -> None:
    """Under mixup the training accuracy is of mixed images; the slice is scored as evaluation sees it, the same images always."""
    assert main(tiny(f"out={tmp_path / 'run'}", "eval.train_images=50")) == 0
    records = read_metrics(tmp_path / "run", "train_clean")
    assert [(record["step"], record["samples"]) for record in records] == [(3, 50), (6, 50), (9, 50)]
    assert main(tiny(f"out={tmp_path / 'without'}")) == 0  # and it changes nothing
    runs = (read_metrics(tmp_path / name, "train") for name in ("run", "without"))
    assert len({tuple(record["loss"] for record in run) for run in runs}) == 1


def test_class_weights_and_logit_adjustment_reach_the_loss() -> None:
    """A long tail of 6, 3 and 1 images: torch's own weighted loss, and logits moved by the log of each share."""
    counts, logits, labels = torch.tensor([6, 3, 1]), torch.randn(8, 3), torch.tensor([0, 0, 1, 2, 0, 1, 2, 0])
    net = torch.nn.Identity()
    weights = 10 / 3 / counts  # mean 1 over the 10 images
    task = ClassifyTask(net, ClassifyConfig(class_weights="balanced"), num_classes=3)
    task.see_classes(counts)
    found = task.losses({"image": logits, "label": labels}, 0.0)["loss"]
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(logits, labels, weight=weights))
    task = ClassifyTask(net, ClassifyConfig(logit_adjustment=1.0), num_classes=3)
    task.see_classes(counts)
    found = task.losses({"image": logits, "label": labels}, 0.0)["loss"]
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(logits + (counts / 10).log(), labels))
    with pytest.raises(ValueError, match=r"classes \[2\] have no training image"):
        task.see_classes(torch.tensor([6, 3]))


def test_a_batch_of_one_image_is_refused_where_a_norm_needs_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """P75: before anything is written; a task without such a norm takes a single image."""
    small = ["data.fraction=0.01", "train.epochs=2", "machine.images_per_device=1", "train.global_batch=2"]
    small += ["optim.warmup_epochs=null"]
    words = ["recipe=mae_digits", "machine=cpu", "machine.threads=1", *small, f"out={tmp_path / 'run'}"]
    assert main(words) == 2
    assert "machine.images_per_device=1: the BatchNorm of the task's probe needs 2 images" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main(tiny(*small, "stop_after=1", f"out={tmp_path / 'run'}")) == 75


def test_wandb_gets_the_same_records_offline_and_once(tmp_path: Path) -> None:
    done = torchrun(2, [*TINY, f"out={tmp_path / 'run'}", "log.wandb=true"])
    assert done.returncode == 0, done.stderr
    runs = list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(runs) == 1
    sys.path.insert(0, str(ROOT / "tests"))
    from wandb_offline import read_history

    history = read_history(runs[0])
    for split, name in (("train", "loss"), ("val", "acc1"), ("val_ema", "loss")):
        sent = {row["step"]: row[f"{split}/{name}"] for row in history if f"{split}/{name}" in row}
        assert sent == {record["step"]: record[name] for record in read_metrics(tmp_path / "run", split)}
    assert (
        len(done.stdout.split("stopped")) == 1 and done.stdout.count("run folder:") == 1
    )  # each line once, not once a rank


def test_a_failing_wandb_never_ends_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import wandb

    def fail(**_: object) -> None:
        raise RuntimeError("no service today")

    monkeypatch.setattr(wandb, "init", fail)
    assert main([*TINY, f"out={tmp_path / 'run'}", "log.wandb=true"]) == 0
    assert "W&B failed and is off for the rest of this run: no service today" in capsys.readouterr().err


RECIPES = names_of("recipes")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network for the recipes that distil, in place of the published one."""
    small = ModelConfig(variant="vit_ti4", image_size=16, width=24, depth=1, heads=2)
    preprocessing = Preprocessing(size=(16, 16), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    folder = tmp_path_factory.mktemp("teacher")
    return export(build_model(small, num_classes=1000), folder, preprocessing=preprocessing)


def substitute(name: str, teacher: Path) -> list[str]:
    """A recipe's own task, augmentation, optimiser, schedule and averaging on a model and data of a second."""
    config = load([f"recipe={name}"])
    words = (
        "model.image_size=16 model.patch_size=4 model.width=24 model.depth=2 model.heads=2 model.mlp_ratio=1".split()
    )
    words += "data.train=data/digits/train-*.tar data.val=null data.fraction=0.08 data.classes=null".split()
    words += "weights=null load.head=auto load.final_norm=same load.ignore=[] load.fresh=[]".split()
    words += "train.global_batch=12 train.epochs=10000 train.images=null".split()  # longer than any warm-up in steps
    words += "machine=cpu machine.threads=1 machine.precision=fp32 log.every=1 stop_after=1".split()
    if config.optim.base_lr is not None:
        words.append("optim.base_batch=12")  # the scaled rate, as the rule gives it at the recipe's own batch
    if isinstance(config.task, DistillConfig):
        words.append(f"task.teacher={teacher}")
    return [f"recipe={name}", *words]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_takes_a_step(name: str, teacher: Path, tmp_path: Path) -> None:
    assert main([*substitute(name, teacher), f"out={tmp_path / 'run'}"]) == 75
    (record,) = read_metrics(tmp_path / "run", "train")
    assert record["step"] == 1 and isinstance(record["loss"], float)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_plans_without_data(name: str) -> None:
    text = plan_text(load([f"recipe={name}", "machine.images_per_device=1024"]), Launch("python"))
    for title in ("== configuration", "== parameters", "== schedule", "== cost", "== run"):
        assert title in text


@pytest.mark.parametrize("name", names_of("configs"))
def test_every_machine_takes_a_step(name: str, tmp_path: Path) -> None:
    """On the CPU, with the processes that are here: what is left of a machine is its batch, precision and workers."""
    here = (
        "machine.device=cpu machine.devices=1 machine.nodes=1 machine.threads=1 machine.workers=0 stop_after=1".split()
    )
    assert main(tiny(f"machine={name}", *here, f"out={tmp_path / 'run'}")) == 75


GOLDEN = ROOT / "tests" / "golden" / "digits_losses.txt"


def test_digits_losses_are_golden(tmp_path: Path) -> None:
    """The first 40 losses of recipe=digits, as text. A change that is not meant to change training leaves them as they are.

    Another CPU or library may round otherwise, which training amplifies: hence 1e-3, and only 40 steps.
    """
    words = [
        "recipe=digits",
        "machine=cpu",
        "machine.threads=1",
        "log.every=1",
        "stop_after=40",
        f"out={tmp_path / 'run'}",
    ]
    assert main(words) == 75
    losses = [record["loss"] for record in read_metrics(tmp_path / "run", "train")]
    golden = [float(line.split()[1]) for line in GOLDEN.read_text().splitlines() if not line.startswith("#")]
    assert losses == pytest.approx(golden, rel=1e-3)
