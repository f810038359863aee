"""Distillation: the teacher's answers, its place outside of the student, the losses of DeiT's code, and real runs."""

import io
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY, torchrun
from efficientnet_lite0 import PHOTOGRAPHS, photograph, teacher_folder
from make_shards import write_tar
from PIL import Image
from torch import Tensor

from vitfw import checkpoint
from vitfw.data.augment import AugmentConfig, eval_transform
from vitfw.data.mix import BatchAugment
from vitfw.models.export import export
from vitfw.models.model_config import ModelConfig
from vitfw.models.preprocess import Preprocessing
from vitfw.models.reading import read
from vitfw.models.teacher import load_teacher, renormalise
from vitfw.optim import OptimConfig, parameter_groups
from vitfw.parallel import blocks_of
from vitfw.report.recorder import read_metrics
from vitfw.tasks.distill import DistillConfig, DistillTask, build_distill
from vitfw.train import main

CLASSES = 7
STATISTICS = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
STUDENT: dict[str, Any] = {"variant": "deit_ti16", "image_size": 32, "width": 24, "depth": 2, "heads": 2}
TWO_HEADS: dict[str, Any] = STUDENT | {"variant": "deit_ti16_distilled"}


@pytest.fixture(scope="module")
def teacher_place(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A ViT of vitfw with 7 classes, exported; its own normalisation differs from the student's."""
    from vitfw.models.build import build_model

    torch.manual_seed(5)
    model = ModelConfig(variant="vit_ti16", image_size=32, width=36, depth=2, heads=3, head_std=1.0)
    folder = tmp_path_factory.mktemp("teacher")
    return str(export(build_model(model, num_classes=CLASSES), folder, preprocessing=Preprocessing(
        size=(32, 32), mean=STATISTICS[0], std=STATISTICS[1]
    )))  # fmt: skip


def task_with(teacher: str, model: dict[str, Any] = TWO_HEADS, **keys: Any) -> DistillTask:
    torch.manual_seed(0)
    return build_distill(DistillConfig(teacher=teacher, **keys), ModelConfig(**model), num_classes=CLASSES).train()


def batch_of(count: int = 6, *, size: int = 32, seed: int = 1) -> dict[str, Tensor]:
    """As the training step hands it over: mixed, smoothed, normalised for the student."""
    torch.manual_seed(seed)
    images = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8)
    augment = BatchAugment(AugmentConfig(policy="deit", mixup=0.8, cutmix=1.0), num_classes=CLASSES, smoothing=0.1)
    return augment({"image": images, "label": torch.randint(CLASSES, (count,))}, training=True)


# The teacher


def test_the_teacher_sees_the_same_mixed_image_in_its_own_normalisation(teacher_place: str) -> None:
    teacher, batch = load_teacher(teacher_place), batch_of()
    mean, std = batch["normalisation"][:, None, :, None, None]
    pixels = batch["image"] * std + mean  # what was mixed, in 0 to 1
    own_mean, own_std = (torch.tensor(values)[:, None, None] for values in STATISTICS)
    wanted = (pixels - own_mean) / own_std
    torch.testing.assert_close(renormalise(batch["image"], batch["normalisation"], teacher.normalisation), wanted)
    torch.testing.assert_close(teacher(batch["image"], batch["normalisation"]), teacher.net(wanted))
    assert not torch.allclose(teacher.net(wanted), teacher.net(batch["image"]), atol=1e-2)


def test_statistics_of_the_configuration_overrule_the_teachers_own(teacher_place: str) -> None:
    task = task_with(teacher_place, teacher_mean=(0.0, 0.0, 0.0), teacher_std=(1.0, 1.0, 1.0))
    batch = batch_of()
    mean, std = batch["normalisation"][:, None, :, None, None]
    given = task.teacher(batch["image"], batch["normalisation"])
    torch.testing.assert_close(given, task.teacher.net(batch["image"] * std + mean))


def test_the_teacher_is_no_part_of_the_task(teacher_place: str) -> None:
    """Neither weights nor buffers of it are anywhere where weights are saved, trained, averaged, sharded, compiled or sent."""
    task = task_with(teacher_place)
    assert {name.split(".")[0] for name, _ in task.named_parameters()} == {"net"}
    assert {name.split(".")[0] for name in task.state_dict()} == {"net"}
    teacher = task.teacher.net
    assert not {id(module) for module in task.modules()} & {id(module) for module in teacher.modules()}
    assert len(blocks_of(task)) == 2
    section = OptimConfig(lr=0.1)
    groups = parameter_groups(task.named_parameters(), task.parameter_layers(section.norm_layer), section, 6)
    assert sum(len(group["params"]) for group in groups) == len(list(task.net.parameters()))
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        task.train().losses(batch_of(), 0.0)["loss"].backward()
        optimizer.step()
    assert not any(module.training for module in teacher.modules())
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in teacher.parameters())
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert all(parameter.grad is not None for parameter in task.parameters())  # nothing for DDP to wait for


def test_the_teacher_changes_nothing_about_the_students_beginning(teacher_place: str) -> None:
    from vitfw.models.build import build_model

    task = task_with(teacher_place)
    torch.manual_seed(0)
    alone = build_model(ModelConfig(**TWO_HEADS), num_classes=CLASSES)
    assert all(torch.equal(value, alone.state_dict()[name]) for name, value in task.net.state_dict().items())


def test_a_teacher_of_another_size_sees_the_image_resized(teacher_place: str) -> None:
    task, batch = task_with(teacher_place, TWO_HEADS | {"image_size": 16}, teacher_size=32), batch_of(size=16)
    own = renormalise(batch["image"], batch["normalisation"], task.teacher.normalisation)
    larger = F.interpolate(own, (32, 32), mode="bicubic", antialias=True)
    torch.testing.assert_close(task.teacher(batch["image"], batch["normalisation"]), task.teacher.net(larger))
    assert task.losses(batch, 0.0)["loss"].isfinite()


def test_a_plan_reads_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with torch.device("meta"):
        task = build_distill(
            DistillConfig(teacher="timm:regnety_160.deit_in1k"), ModelConfig(**TWO_HEADS), num_classes=1000
        )
    assert next(task.teacher.net.parameters()).is_meta
    assert task.teacher.width == 3024


# The losses


@pytest.mark.parametrize("form", ["hard", "soft"])
@pytest.mark.parametrize("model", [STUDENT, TWO_HEADS], ids=["one head", "two heads"])
def test_losses_are_those_of_deits_code(teacher_place: str, form: Any, model: dict[str, Any]) -> None:
    """Labels on the class head, the teacher on the distillation head; with one head both on it."""
    keys: dict[str, Any] = {"temperature": 3.0, "weight": 0.1} if form == "soft" else {}
    task, batch = task_with(teacher_place, model, form=form, smoothing=0.1, **keys), batch_of()
    found = task.losses(batch, 0.0)
    heads = task.net(batch["image"])
    first, second = heads if isinstance(heads, tuple) else (heads, heads)
    assert isinstance(heads, tuple) == (model is TWO_HEADS)
    told = task.teacher(batch["image"], batch["normalisation"])
    labels = torch.sum(-batch["label"] * F.log_softmax(first, dim=-1), dim=-1).mean()
    if form == "hard":
        expected = 0.5 * labels + 0.5 * F.cross_entropy(second, told.argmax(dim=1))
    else:
        student, target = (F.log_softmax(values / 3, dim=1) for values in (second, told))
        expected = 0.9 * labels + 0.1 * F.kl_div(student, target, reduction="sum", log_target=True) * 9 / second.numel()
    torch.testing.assert_close(found["loss"], expected)
    torch.testing.assert_close(found["label_loss"], labels)
    assert found["agreement"].item() == pytest.approx(100 * (second.argmax(1) == told.argmax(1)).float().mean().item())
    assert 0 <= found["teacher_acc1"].item() <= 100


@pytest.mark.parametrize("pool", ["cls", "gap"])
def test_features_go_through_a_projection(teacher_place: str, pool: str) -> None:
    """1 - cosine with the teacher's pooled vector; the projection trains with the head's rate and is not exported."""
    model = STUDENT if pool == "cls" else STUDENT | {"pool": "gap", "class_token": False}
    task, batch = task_with(teacher_place, model, form="feature"), batch_of()
    found = task.losses(batch, 0.0)
    tokens = task.net(batch["image"], output="tokens")
    pooled = tokens[:, 0] if pool == "cls" else tokens.mean(1)
    told = task.teacher(batch["image"], batch["normalisation"], output="pooled")
    assert task.projection is not None
    expected = (1 - F.cosine_similarity(task.projection(pooled), told)).mean()
    torch.testing.assert_close(found["distillation_loss"], expected)
    found["loss"].backward()
    assert all(parameter.grad is not None for parameter in task.parameters())
    layers = task.parameter_layers("last_block")
    assert layers["projection.weight"] == layers["net.head.weight"] == 3
    assert layers.keys() == {name for name, _ in task.named_parameters()}
    assert not any("projection" in name for name, _ in task.network.named_parameters())
    other = task_with(teacher_place, model, form="feature", num_classes=11)  # the teacher's 7 do not matter
    assert other.losses(batch | {"label": torch.zeros(6, dtype=torch.int64)}, 0.0)["loss"].isfinite()


def test_unlabelled_images_learn_from_the_teacher_alone(teacher_place: str) -> None:
    task = task_with(teacher_place, STUDENT, weight=1.0)
    batch = batch_of() | {"label": torch.full((6,), -1)}
    found = task.losses(batch, 0.0)
    assert found["label_loss"].item() == 0
    torch.testing.assert_close(found["loss"], found["distillation_loss"])


def test_evaluation_is_of_the_mean_of_both_heads(teacher_place: str) -> None:
    task, batch = task_with(teacher_place), batch_of()
    first, second = task.net(batch["image"])
    label = torch.tensor([0, 1, 2, 3, -1, 4])
    measures = task.eval().measures()
    task.measure({"image": batch["image"], "label": label}, measures)
    answer = (first + second) / 2
    results = task.results(measures)
    assert results["samples"] == 5
    assert results["acc1"] == pytest.approx(100 * (answer.argmax(1) == label).sum().item() / 5)
    assert results["loss"] == pytest.approx(F.cross_entropy(answer, label, ignore_index=-1).item(), rel=1e-5)


# What is refused


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"weight": 0.0}, r"task.weight=0.0: must lie in \(0, 1\]; without a teacher use task.name=classify"),
        ({"temperature": 3.0}, r"task.temperature=3.0: only task.form=soft reads it, not hard"),
        ({"form": "feature", "per": "image"}, r"task.per=image: only task.form=soft reads it, not feature"),
        ({"form": "soft", "temperature": 0.0}, r"task.temperature=0.0: must be above 0"),
        ({"teacher_mean": (0.5,)}, r"task.teacher_std=None: set both, with one number a channel, or none"),
        ({"teacher_mean": (0.5,), "teacher_std": (0.0,)}, r"task.teacher_std=\(0.0,\): each must be above 0"),
        ({"teacher_size": 0}, r"task.teacher_size=0: must be 1 pixel or more, or null"),
        ({"loss": "bce", "smoothing": 0.1}, r"task.smoothing=0.1 with task.loss=bce"),
        ({"num_classes": 1}, r"task.num_classes=1: must be 2 or more"),
        ({"smoothing": 1.0}, r"task.smoothing=1.0: must lie in \[0, 1\)"),
    ],
)
def test_contradictions_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistillConfig(**keys)


@pytest.mark.parametrize(
    ("model", "keys", "message"),
    [
        (TWO_HEADS, {"weight": 1.0}, "task.weight=1 leaves the class head untrained"),
        (TWO_HEADS, {"form": "feature"}, "set model.distillation_token=false, or task.form=hard or soft"),
        ({"variant": "timm:resnet18", "image_size": 32}, {"form": "feature"}, "the student must be a ViT of vitfw"),
        (TWO_HEADS, {"num_classes": 9}, "it knows 7 classes, the student 9"),
        (TWO_HEADS, {"num_classes": 3}, "task.num_classes=3, and the training data has 7 classes"),
        (TWO_HEADS | {"image_size": 48}, {}, r"cannot take images of 48 x 48 pixels .*set task.teacher_size"),
        (TWO_HEADS | {"in_channels": 1}, {}, "it takes 3 channels, the student's images have 1"),
    ],
)
def test_what_does_not_fit_the_teacher_is_refused(teacher_place: str, model: Any, keys: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task_with(teacher_place, model, **keys)


def test_a_teacher_that_cannot_be_had_is_named(
    teacher_place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    silent = tmp_path / "silent.ckpt"  # says which network it is, not how images were normalised
    source = read(teacher_place)
    (tmp_path / "empty").mkdir()
    config = "model: {variant: vit_ti16, image_size: 32, width: 36, depth: 2, heads: 3}"
    torch.save({"format": 1, "progress": {}, "versions": {}, "config": config, "ema": None,
                "model": {f"net.{name}": value for name, value in source.state.items()}}, silent)  # fmt: skip
    for place, message in (
        ("timm:nonsense", r"timm cannot provide it \(RuntimeError: Unknown model"),
        (str(tmp_path / "nowhere"), "no such file or folder"),
        (str(tmp_path / "empty"), "neither config.json nor export/config.json"),
        (str(silent), "set task.teacher_mean and task.teacher_std"),
    ):
        with pytest.raises(ValueError, match=rf"task\.teacher={re.escape(place)}: .*{message}"):
            load_teacher(place)
    assert load_teacher(str(silent), statistics=STATISTICS).num_classes == CLASSES
    with pytest.raises(ValueError, match=r"task.teacher is missing: timm:NAME, an export or run folder"):
        build_distill(DistillConfig(), ModelConfig(**STUDENT), num_classes=3)


# Real runs

WITH_TEACHER = [*(word for word in TINY if not word.startswith("task.")), "task.name=distill", "model.distillation_token=true",
                "model.class_token=true", "model.pool=cls"]  # fmt: skip


@pytest.fixture(scope="module")
def teacher_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "run"
    assert main([*TINY, f"out={folder}"]) == 0
    return folder


def test_run_folder_export_and_checkpoint_are_the_same_teacher(teacher_run: Path, tmp_path: Path) -> None:
    """And as timm loads the export. A run folder without an export asks for a checkpoint."""
    state = checkpoint.load(teacher_run / "checkpoints" / "last.ckpt")
    best = max(("val/acc1", "val_ema/acc1"), key=lambda name: state["progress"]["best"][name])
    file = teacher_run / "checkpoints" / ("best.ckpt" if best == "val/acc1" else "best_ema.ckpt")
    images, normalisation = torch.randn(4, 1, 8, 8), torch.tensor([[0.5], [0.5]])
    teacher = load_teacher(str(teacher_run))
    expected = teacher(images, normalisation)
    torch.testing.assert_close(load_teacher(str(teacher_run / "export"))(images, normalisation), expected)
    theirs = timm.create_model(f"local-dir:{teacher_run / 'export'}", pretrained=True).eval()
    own = renormalise(images, normalisation, teacher.normalisation)
    torch.testing.assert_close(theirs(own), expected)
    if best == "val_ema/acc1":  # a checkpoint gives its averaged weights first
        torch.testing.assert_close(load_teacher(str(file))(images, normalisation), expected)
    assert load_teacher(str(file)).num_classes == 10
    shutil.copytree(teacher_run / "checkpoints", tmp_path / "unfinished" / "checkpoints")
    with pytest.raises(ValueError, match=r"name a checkpoint, such as checkpoints/best.ckpt"):
        load_teacher(str(tmp_path / "unfinished"))


def test_a_run_on_one_and_on_two_processes_and_its_resume(teacher_run: Path, tmp_path: Path) -> None:
    """DDP and FSDP2 give the losses of one process; nothing of the teacher is in the checkpoint; a stopped run goes on."""
    same = ["model.drop_path=0", "augment.mixup=0", "augment.cutmix=0", f"task.teacher={teacher_run}", "train.epochs=2"]
    words = list({word.partition("=")[0]: word for word in [*WITH_TEACHER, *same]}.values())
    assert main([*words, f"out={tmp_path / 'one'}"]) == 0
    expected = read_metrics(tmp_path / "one", "train")
    assert expected[0].keys() >= {"label_loss", "distillation_loss", "teacher_acc1", "agreement", "acc1"}
    state = checkpoint.load(tmp_path / "one" / "checkpoints" / "last.ckpt")
    for part in ("model", "optimizer", "ema"):
        assert {name.split(".")[0] for name in state[part]} - {"updates"} == {"net"}
    assert state["model"]["net.head_dist.weight"].shape == (10, 24)
    assert main([*words, f"out={tmp_path / 'cut'}", "stop_after=4"]) == 75
    assert main([*words, f"out={tmp_path / 'cut'}"]) == 0
    again = checkpoint.load(tmp_path / "cut" / "checkpoints" / "last.ckpt")["model"]
    assert all(torch.equal(value, again[name]) for name, value in state["model"].items())
    for strategy in ("ddp", "fsdp2"):
        done = torchrun(2, [*words, f"out={tmp_path / strategy}", f"machine.strategy={strategy}"])
        assert done.returncode == 0, done.stderr
        found = read_metrics(tmp_path / strategy, "train")
        for name in ("loss", "distillation_loss", "teacher_acc1", "gradient_norm"):
            assert [row[name] for row in found] == pytest.approx([row[name] for row in expected], rel=1e-4), name
        names = checkpoint.load(tmp_path / strategy / "checkpoints" / "last.ckpt")["model"].keys()
        assert names == state["model"].keys()


def test_the_students_own_export_is_timms_distilled_model(teacher_run: Path, tmp_path: Path) -> None:
    words = [*WITH_TEACHER, f"task.teacher={teacher_run}", f"out={tmp_path / 'run'}"]
    assert main(words) == 0
    net = timm.create_model(f"local-dir:{tmp_path / 'run' / 'export'}", pretrained=True).eval()
    assert type(net).__name__ == "VisionTransformerDistilled"
    assert load_teacher(str(tmp_path / "run")).num_classes == 10  # and can teach in its turn


def test_a_missing_teacher_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WITH_TEACHER, f"task.teacher={tmp_path / 'nowhere'}", f"out={tmp_path / 'run'}"]) == 2
    assert (
        f"task.teacher={tmp_path / 'nowhere'}: weights={tmp_path / 'nowhere'}: no such file" in capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()


def test_classes_in_another_order_are_refused(
    teacher_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten classes teach ten classes, but number 0 must be the same digit: nothing else would show that it is not."""
    names = (ROOT / "data" / "digits" / "classes.txt").read_text().split()
    other = tmp_path / "classes.txt"
    other.write_text("\n".join(f"digit {name}" for name in names))
    words = [*WITH_TEACHER, f"out={tmp_path / 'run'}", f"data.classes={other}"]
    for teacher in (teacher_run, teacher_run / "export", teacher_run / "checkpoints" / "last.ckpt"):
        assert main([*words, f"task.teacher={teacher}"]) == 2
        told = f"task.teacher={teacher}: class 0 is {names[0]!r} for the teacher and 'digit 0' in data.train"
        assert told in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    words = [word for word in words if not word.startswith("model.distillation_token")]
    assert main([*words, f"task.teacher={teacher_run}", "task.form=feature", "stop_after=1"]) == 75


# A real teacher on real photographs


@pytest.fixture(scope="module")
def lite0(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(teacher_folder(tmp_path_factory.mktemp("lite0") / "teacher"))


def photographs() -> Tensor:
    """uint8 [4, 3, 224, 224], as evaluation crops them."""
    transform = eval_transform(AugmentConfig(policy="deit"), size=(224, 224))
    return torch.stack([transform(photograph(name)) for name in PHOTOGRAPHS])


def test_a_real_teacher_names_real_photographs(lite0: str) -> None:
    """Sensible top-1 labels, with the probabilities that the same weights give in their own normalisation."""
    teacher = load_teacher(lite0)
    assert (teacher.num_classes, teacher.width) == (1000, 1280)
    torch.testing.assert_close(teacher.normalisation, torch.full((2, 3), 0.5))
    batch = BatchAugment(AugmentConfig(policy="deit"))({"image": photographs()}, training=True)
    logits = teacher(batch["image"], batch["normalisation"])
    for row, accepted in zip(logits, PHOTOGRAPHS.values(), strict=True):
        assert row.argmax().item() in accepted
    probability = logits.softmax(1).max(1).values
    assert probability.tolist() == pytest.approx([0.39, 0.95, 0.27, 0.54], abs=0.03)


def test_the_students_distillation_head_learns_what_the_real_teacher_says(lite0: str, tmp_path: Path) -> None:
    """All photographs are labelled 7: the class head learns that, the distillation head the teacher's own labels."""
    images, members = photographs(), []
    for number, image in enumerate(images):
        buffer = io.BytesIO()
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(buffer, "PNG")
        members += [(f"{number}.png", buffer.getvalue()), (f"{number}.cls", b"7")]
    write_tar(tmp_path / "photographs.tar", members)
    words = [
        "recipe=deit_ti_distilled", "machine=cpu", "machine.threads=1", "log.every=1", f"out={tmp_path / 'run'}",
        "model.width=96", "model.depth=2", "model.heads=3", "model.patch_size=32", "model.drop_path=0",
        f"data.train={tmp_path / 'photographs.tar'}", f"task.teacher={lite0}", "task.smoothing=0",
        "augment.mixup=0", "augment.cutmix=0", "augment.erasing=0", "augment.repeats=1", "augment.policy=none",
        "augment.statistics=imagenet", "train.epochs=30", "train.global_batch=4", "optim.lr=5e-3", "optim.base_lr=null",
        "optim.base_batch=null", "optim.epoch_lag=0", "optim.warmup_epochs=2", "ema.decay=null",
    ]  # fmt: skip
    assert main(words) == 0
    rows = read_metrics(tmp_path / "run", "train")
    assert rows[-1]["agreement"] == 100.0
    assert rows[-1]["distillation_loss"] < 2 < 5 < rows[0]["distillation_loss"]
    state = checkpoint.load(tmp_path / "run" / "checkpoints" / "last.ckpt")["model"]
    task = build_distill(
        DistillConfig(teacher=lite0), ModelConfig(variant="deit_ti16_distilled", width=96, depth=2, heads=3, patch_size=32),
        num_classes=1000,
    )  # fmt: skip
    task.load_state_dict(state)
    batch = BatchAugment(AugmentConfig(policy="deit"))({"image": images}, training=True)
    told = task.teacher(batch["image"], batch["normalisation"]).argmax(1)
    first, second = task.train().net(batch["image"])
    assert first.argmax(1).tolist() == [7] * len(PHOTOGRAPHS)
    assert second.argmax(1).tolist() == told.tolist()
    assert len(set(told.tolist())) == len(PHOTOGRAPHS)


def test_statistics_for_other_channels_are_named_themselves(teacher_place: str) -> None:
    with pytest.raises(
        ValueError, match=r"^task.teacher_mean and task.teacher_std have 2 numbers, the images have 3 chann"
    ):
        task_with(teacher_place, teacher_mean=(0.5, 0.5), teacher_std=(0.5, 0.5))
