"""Weights out and in again: timm folders, ONNX, any checkpoint; preprocessing travels with them."""

import dataclasses
import json
import warnings

import pytest
import timm
import torch
import yaml

from vitfw.models.build import build_model
from vitfw.models.export import export, export_checkpoint, export_onnx
from vitfw.models.preprocess import Preprocessing, check, differences
from vitfw.models.reading import read
from vitfw.models.variants import ModelConfig
from vitfw.models.vit import ViT
from vitfw.models.weights import load

SMALL = {"image_size": 32, "patch_size": 8, "width": 48, "depth": 2, "heads": 4}
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
PREPARED = Preprocessing(
    size=(32, 32),
    mean=(0.5, 0.4, 0.3),
    std=(0.2, 0.3, 0.4),
    interpolation="bilinear",
    crop=0.9,
    class_names=tuple("abcdefg"),
)


def small(variant: str = "vit_b16", num_classes: int = 7, **options) -> ViT:
    torch.manual_seed(0)
    model = build_model(ModelConfig(variant=variant, **{**SMALL, **options}), num_classes=num_classes)
    assert isinstance(model, ViT)
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model(IMAGES)


@pytest.mark.parametrize(
    "variant",
    [
        *(
            "vit_b16",
            "vit_b16_reg4_gap",
            "deit_b16_distilled",
            "deit3_b16",
            "clip_b16_quickgelu",
            "siglip_b16",
            "dinov2_g16",
        ),
        *("dinov3_b16", "dinov3_splus16", "dinov3_b16_qkvb", "eva02_b16", "rope_b16", "mae_b16"),
    ],
)
def test_folder_that_timm_loads_with_equal_logits(tmp_path, variant):
    model = small(variant)
    export(model, tmp_path, preprocessing=PREPARED)
    net = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    torch.testing.assert_close(logits(net), logits(model), atol=1e-6, rtol=1e-6)
    data = timm.data.resolve_data_config(model=net)
    assert [tuple(data[k]) for k in ("input_size", "mean", "std")] == [(3, 32, 32), PREPARED.mean, PREPARED.std]
    assert (data["interpolation"], data["crop_pct"]) == ("bilinear", 0.9)
    assert net.pretrained_cfg["label_names"] == list("abcdefg")
    again = small(variant, head_std=1.0)
    report = load(again, tmp_path)
    assert torch.equal(logits(again), logits(model))
    assert report.preprocessing == PREPARED


def test_networks_that_timm_lacks_go_to_our_own_format(tmp_path):
    model = small("sam_b16", depth=3, global_blocks=(1,), window=3)
    with pytest.raises(ValueError, match=r"model\.window=3: timm has no such model.*; format=vitfw exports it"):
        export(model, tmp_path)
    export(model, tmp_path, format="vitfw", preprocessing=PREPARED)
    exported = export_checkpoint(tmp_path, tmp_path / "again", format="vitfw")
    again = read(exported.folder)
    assert again.architecture == model.arch
    assert again.preprocessing == PREPARED
    assert all(torch.equal(again.state[k], v) for k, v in model.state_dict().items())
    assert read(tmp_path / "model.safetensors").architecture == model.arch  # the file says it without its folder


# What else a task may hold: a probe with a head, and a teacher with the names of a ViT.
OTHERS = {"probe.head.weight": torch.ones(3, 48), "teacher.patch_embed.proj.weight": torch.ones(2)}


def checkpoint(path, model, section: ModelConfig, averaged=None):
    """A file in the layout of vitfw.checkpoint: plain containers, names of the task."""
    tree = {
        "format": 1,
        "progress": {"step": 3},
        "model": {f"net.{k}": v for k, v in model.state_dict().items()} | OTHERS,
        "optimizer": {},
        "ema": None
        if averaged is None
        else {"updates": torch.tensor(3), **{f"net.{k}": v for k, v in averaged.items()}},
        "config": yaml.safe_dump(
            {"model": {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(section).items()}}
        ),
        "versions": {},
    }
    torch.save(tree, path)


def test_any_checkpoint_raw_or_averaged(tmp_path):
    section = ModelConfig(variant="sam_b16", **{**SMALL, "depth": 3}, window=0)
    raw, averaged = (build_model(section, num_classes=7).eval() for _ in range(2))
    checkpoint(tmp_path / "last.ckpt", raw, section, averaged.state_dict())
    for which, model, entry in (("raw", raw, "model"), ("ema", averaged, "ema"), ("auto", averaged, "ema")):
        exported = export_checkpoint(tmp_path / "last.ckpt", tmp_path / which, which=which, preprocessing=PREPARED)
        assert exported.entry == entry
        net = timm.create_model(f"local-dir:{exported.folder}", pretrained=True).eval()
        torch.testing.assert_close(logits(net), logits(model), atol=1e-6, rtol=1e-6)
    checkpoint(tmp_path / "raw.ckpt", raw, section)
    assert export_checkpoint(tmp_path / "raw.ckpt", tmp_path / "out").entry == "model"
    with pytest.raises(ValueError, match="the checkpoint has no averaged weights; set which=raw"):
        export_checkpoint(tmp_path / "raw.ckpt", tmp_path / "out", which="ema")


def test_checkpoint_of_a_timm_model(tmp_path):
    section = ModelConfig(variant="timm:resnet10t", image_size=32)
    model = build_model(section, num_classes=5).eval()
    checkpoint(tmp_path / "last.ckpt", model, section)
    exported = export_checkpoint(tmp_path / "last.ckpt", tmp_path / "out", preprocessing=PREPARED)
    net = timm.create_model(f"local-dir:{exported.folder}", pretrained=True).eval()
    torch.testing.assert_close(logits(net), logits(model), atol=1e-6, rtol=1e-6)


def test_a_file_that_does_not_name_its_network_is_refused(tmp_path):
    torch.save(small().state_dict(), tmp_path / "file.pth")
    with pytest.raises(ValueError, match="the file does not say which network it holds"):
        export_checkpoint(tmp_path / "file.pth", tmp_path / "out")


@pytest.mark.parametrize("variant", ["deit_b16_distilled", "dinov3_b16", "siglip_b16"])
def test_onnx_equals_the_model(tmp_path, variant):
    pytest.importorskip("onnxscript")
    import onnx

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's exporter warns about its own dependencies
        difference = export_onnx(small(variant), tmp_path / "model.onnx", preprocessing=PREPARED)
    assert difference < 1e-5
    properties = {p.key: p.value for p in onnx.load(tmp_path / "model.onnx").metadata_props}
    assert Preprocessing.from_plain(json.loads(properties["preprocessing"])) == PREPARED


def test_preprocessing_travels_and_differences_are_told():
    assert Preprocessing.from_plain(json.loads(json.dumps(PREPARED.plain()))) == PREPARED
    assert Preprocessing.from_timm_config(PREPARED.timm_config(7)) == PREPARED
    assert differences(PREPARED, PREPARED) == {}
    cropped = dataclasses.replace(PREPARED, crop=1.0, size=(64, 64))
    assert check(PREPARED, cropped) == [
        "preprocessing differs from the weights' own: size: trained with (32, 32), used with (64, 64)",
        "preprocessing differs from the weights' own: crop: trained with 0.9, used with 1.0",
    ]
    with pytest.raises(ValueError, match=r"mean: trained with \(0.5, 0.4, 0.3\), used with \(0.485.*Set augment.mean"):
        check(PREPARED, dataclasses.replace(PREPARED, mean=(0.485, 0.456, 0.406)))
    with pytest.raises(ValueError, match="class_names"):
        check(PREPARED, dataclasses.replace(PREPARED, class_names=tuple("gfedcba")))
    assert check(PREPARED, dataclasses.replace(PREPARED, class_names=())) == []
    with pytest.raises(ValueError, match="unknown keys colour"):
        Preprocessing.from_plain({"colour": 1})
