"""Loading weights: every place, name dialect and prefix; positions, patches and heads of other sizes; what is
refused.
"""

import argparse
import os
import random
import re
from pathlib import Path

import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import Tensor, nn

from vitfw.models.build import build_model
from vitfw.models.positions import resize_positions, sincos_table
from vitfw.models.reading import read
from vitfw.models.teacher import load_teacher
from vitfw.models.variants import ModelConfig
from vitfw.models.vit import ViT
from vitfw.models.weights import LoadConfig, load

SMALL = {"image_size": 32, "patch_size": 8, "width": 48, "depth": 2, "heads": 4}
TIMM_SMALL = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 7, "embed_dim": 48, "num_heads": 4}
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def small(variant: str = "vit_b16", num_classes: int = 7, **options) -> ViT:
    model = build_model(ModelConfig(variant=variant, **{**SMALL, **options}), num_classes=num_classes)
    assert isinstance(model, ViT)
    return model.eval()


def noisy(model: nn.Module) -> nn.Module:
    """Every tensor at random, so that a wrong place shows in the output."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IMAGES)


# Prefixes and entries


def wrapped(state: dict[str, Tensor], way: str) -> dict:
    if way == "plain":
        return state
    if way == "module":
        return {f"module.{k}": v for k, v in state.items()}
    if way == "compiled":
        return {"state_dict": {f"_orig_mod.module.{k}": v for k, v in state.items()}}
    if way == "per block":
        return {
            "model": {
                re.sub(r"^(blocks\.\d+\.)", r"\1_orig_mod._checkpoint_wrapped_module.", k): v for k, v in state.items()
            }
        }
    if way == "lightning":
        others = {"optimizer_states": [], "epoch": 3, "loss.centre": torch.zeros(3)}
        return {
            "state_dict": {**{f"model.backbone.{k}": v for k, v in state.items()}, "criterion.w": torch.ones(2)},
            **others,
        }
    if way == "ema":
        return {
            "model": {k: torch.zeros_like(v) for k, v in state.items()},
            "model_ema": state,
            "args": argparse.Namespace(a=1),
        }
    raise AssertionError(way)


@pytest.mark.parametrize("way", ["plain", "module", "compiled", "per block", "lightning", "ema"])
def test_prefixes_and_entries(tmp_path, way):
    """P05."""
    original = noisy(small())
    torch.save(wrapped(original.state_dict(), way), tmp_path / "file.pth")
    model = small()
    report = load(model, tmp_path / "file.pth")
    assert torch.equal(logits(model), logits(original))
    assert report.coverage == 1.0
    assert len(report.loaded) == len(model.state_dict())
    if way == "lightning":
        assert report.outside == ("criterion.w",)
        assert "outside the network: criterion.w" in report.text()


def test_raw_or_averaged_as_told(tmp_path):
    original = noisy(small())
    torch.save(wrapped(original.state_dict(), "ema"), tmp_path / "file.pth")
    model = small()
    load(model, tmp_path / "file.pth", LoadConfig(which="raw"))
    assert not any(p.any() for p in model.parameters())
    torch.save({"model": original.state_dict()}, tmp_path / "raw.pth")
    with pytest.raises(ValueError, match="no averaged weights among the entries model; set which=raw"):
        load(model, tmp_path / "raw.pth", LoadConfig(which="ema"))


def test_several_networks_need_a_choice(tmp_path):
    student, teacher = noisy(small()), noisy(small())
    both = {
        f"{name}.{k}": v for name, m in (("student", student), ("teacher", teacher)) for k, v in m.state_dict().items()
    }
    torch.save(both, tmp_path / "file.pth")
    model = small()
    with pytest.raises(
        ValueError, match=r"several networks, under \['student.', 'teacher.'\]; choose one with load.prefix"
    ):
        load(model, tmp_path / "file.pth")
    load(model, tmp_path / "file.pth", LoadConfig(prefix="teacher."))
    assert torch.equal(logits(model), logits(teacher))
    with pytest.raises(ValueError, match=r"nothing under load.prefix='pupil.'; there is student, teacher"):
        load(model, tmp_path / "file.pth", LoadConfig(prefix="pupil."))


def test_renamed_and_missing_blocks_are_refused_and_leave_the_model_alone(tmp_path):
    state = small().state_dict()
    renamed = {k.replace("blocks.", "foo."): v for k, v in state.items()}
    without = {k: v for k, v in state.items() if not k.startswith("blocks.1.")}
    deeper = {**state, **{k.replace("blocks.1.", "blocks.2."): v for k, v in state.items() if "blocks.1." in k}}
    model = small()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for name, content, text in (
        ("renamed", renamed, r"8 of the model's 32 tensors.*0 blocks, the model 2; 24 missing.*24 unexpected: foo\.0"),
        (
            "without",
            without,
            r"20 of the model's 32 tensors.*the file has 1 blocks, the model 2; 12 missing: blocks\.1",
        ),
        ("deeper", deeper, r"the file has 3 blocks, the model 2; 12 unexpected: blocks\.2"),
        ("nothing", {"a": torch.ones(2)}, r"0 of 1 tensors can be placed.*there is a"),
    ):
        torch.save(content, tmp_path / f"{name}.pth")
        with pytest.raises(ValueError, match=text):
            load(model, tmp_path / f"{name}.pth")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_names_can_be_allowed_to_miss_and_to_be_left_out(tmp_path):
    torch.save(small("vit_b16").state_dict() | {"extra.weight": torch.ones(1)}, tmp_path / "file.pth")
    model = small("vit_b16", registers=2)
    report = load(model, tmp_path / "file.pth", LoadConfig(fresh=("reg_token",), ignore=("extra",)))
    assert report.fresh == ("reg_token",)
    assert report.dropped == ("extra.weight",)
    with pytest.raises(ValueError, match=r"1 missing: reg_token; 1 unexpected: extra\.weight"):
        load(model, tmp_path / "file.pth")


def test_less_than_95_percent_of_the_backbone_is_refused_whatever_is_allowed(tmp_path):
    state = {k: v for k, v in small().state_dict().items() if not k.startswith("blocks.1.")}
    torch.save(state, tmp_path / "file.pth")
    with pytest.raises(ValueError, match=r"only [56]\d\.\d % of the backbone's parameters, 95 % are needed"):
        load(small(), tmp_path / "file.pth", LoadConfig(fresh=(r"blocks\.1\..*",)))


def test_weights_that_are_not_finite_are_refused(tmp_path):
    state = small().state_dict()
    state["blocks.1.mlp.fc1.bias"] = torch.full((192,), float("nan"))
    torch.save(state, tmp_path / "file.pth")
    with pytest.raises(ValueError, match=r"not finite: blocks\.1\.mlp\.fc1\.bias"):
        load(small(), tmp_path / "file.pth")


# Safety


class Malicious:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_a_pickle_that_needs_code_is_refused_unless_trusted(tmp_path):
    original = noisy(small())
    marker = tmp_path / "marker"
    torch.save({"model": original.state_dict(), "config": Malicious(marker)}, tmp_path / "bad.pth")
    model = small()
    with pytest.raises(ValueError, match=r"needs code to be read .*set load.trust=true"):
        load(model, tmp_path / "bad.pth")
    assert not marker.exists()
    load(model, tmp_path / "bad.pth", LoadConfig(trust=True))
    assert marker.exists()
    assert torch.equal(logits(model), logits(original))


def test_unreadable_places(tmp_path):
    (tmp_path / "text.pth").write_text("not a torch file")
    for place, text in (
        (tmp_path / "absent.pth", "no such file"),
        (tmp_path, "no config.json"),
        (tmp_path / "text.pth", "pth: "),
    ):
        with pytest.raises(ValueError, match=text):
            load(small(), place)


# Heads


def test_head_of_another_size_is_made_new_and_named(tmp_path):
    """P45."""
    original = noisy(small(num_classes=100))
    torch.save(original.state_dict(), tmp_path / "file.pth")
    model = small(num_classes=10)
    report = load(model, tmp_path / "file.pth")
    assert report.fresh == report.dropped == ("head.weight", "head.bias")
    assert "made new: head.weight, head.bias" in report.text()
    with torch.no_grad():
        assert torch.equal(model(IMAGES, output="tokens"), original(IMAGES, output="tokens"))
    with pytest.raises(ValueError, match=r"load.head=keep: head.weight is \[100, 48\] in the file and \[10, 48\] here"):
        load(model, tmp_path / "file.pth", LoadConfig(head="keep"))
    same = small(num_classes=100)
    assert load(same, tmp_path / "file.pth").fresh == ()
    assert load(same, tmp_path / "file.pth", LoadConfig(head="drop")).fresh == ("head.weight", "head.bias")


def test_head_remapped(tmp_path):
    original = noisy(small(num_classes=5))
    torch.save(original.state_dict(), tmp_path / "file.pth")
    model = small(num_classes=3)
    load(model, tmp_path / "file.pth", LoadConfig(head_rows=(4, 0, 2)))
    torch.testing.assert_close(logits(model), logits(original)[:, [4, 0, 2]])
    with pytest.raises(ValueError, match=r"load\.head_rows has 2 entries, the model has 3 classes"):
        load(model, tmp_path / "file.pth", LoadConfig(head_rows=(1, 2)))


def test_zero_head_acts_after_loading(tmp_path):
    torch.save(noisy(small()).state_dict(), tmp_path / "file.pth")
    model = small(zero_head=True)
    report = load(model, tmp_path / "file.pth")
    assert not logits(model).any()
    assert "head.weight (model.zero_head)" in report.fresh


def test_another_width_is_refused(tmp_path):
    torch.save(small(width=64).state_dict(), tmp_path / "file.pth")
    with pytest.raises(ValueError, match=r"other shape: cls_token is \[1, 1, 64\] in the file and \[1, 1, 48\] here"):
        load(small(), tmp_path / "file.pth")


# Positions, patches, channels


def test_positions_keep_rows_and_columns_apart():
    """P37."""
    rows, columns = torch.meshgrid(torch.arange(14.0), torch.arange(14.0), indexing="ij")
    table = torch.stack([rows, columns], -1).reshape(1, 196, 2)
    cls = torch.full((1, 1, 2), 7.0)
    out = resize_positions(torch.cat([cls, table], 1), (14, 14), (28, 14), 1)
    assert torch.equal(out[:, :1], cls)
    grid = out[0, 1:].reshape(28, 14, 2)
    assert (grid[:, :, 0].std(1) < 1e-5).all()
    assert (grid[:, :, 0].diff(dim=0) > -1e-5).all()
    assert (grid[:, :, 1].std(0) < 1e-5).all()
    for side in (61, 115, 122):
        assert resize_positions(table, (14, 14), (side, side), 0).shape == (1, side * side, 2)


def test_position_grids_are_explicit():
    table = torch.randn(1, 32, 4)
    assert resize_positions(table, (4, 8), (4, 8), 0) is table
    assert resize_positions(table, (4, 8), (8, 8), 0).shape == (1, 64, 4)
    with pytest.raises(ValueError, match="a grid of 5 x 8 with 0 prefix rows needs"):
        resize_positions(table, (5, 8), (8, 8), 0)


def test_files_with_rectangular_grids_say_so_or_are_told(tmp_path):
    original = noisy(small(image_width=64, image_height=32))
    torch.save(original.state_dict(), tmp_path / "file.pth")
    model = small(image_size=64)
    with pytest.raises(ValueError, match=r"33 positions is not square; give its rows and columns as load.grid"):
        load(model, tmp_path / "file.pth")
    report = load(model, tmp_path / "file.pth", LoadConfig(grid=(4, 8)))
    assert report.resized["pos_embed"] == "4 x 8 -> 8 x 8 patches, bicubic"
    expected = resize_positions(original.pos_embed, (4, 8), (8, 8), 1)
    assert torch.equal(model.pos_embed, expected)
    with pytest.raises(ValueError, match=r"load.grid=\(4, 4\): the table has 33 rows"):
        load(model, tmp_path / "file.pth", LoadConfig(grid=(4, 4)))


def test_fixed_positions_are_computed_anew(tmp_path):
    torch.save(small("mae_b16").state_dict(), tmp_path / "file.pth")
    for position in ("sincos", "learned"):
        model = small("mae_b16", image_size=64, position=position)
        report = load(model, tmp_path / "file.pth")
        assert report.resized["pos_embed"] == "4 x 4 -> 8 x 8 patches, computed anew (sin-cos)"
        torch.testing.assert_close(model.pos_embed[0, 1:], sincos_table((8, 8), 48))
        assert not model.pos_embed[0, 0].any()
    torch.save(noisy(small()).state_dict(), tmp_path / "learned.pth")
    with pytest.raises(ValueError, match=r"positions are learned, model\.position=sincos are not"):
        load(small("mae_b16"), tmp_path / "learned.pth")


def test_prefix_rows_are_folded_or_filled_without_changing_the_sums(tmp_path):
    covered, bare = noisy(small()), noisy(small(position_prefix=False))
    torch.save(covered.state_dict(), tmp_path / "covered.pth")
    torch.save(bare.state_dict(), tmp_path / "bare.pth")
    into_bare, into_covered = small(position_prefix=False), small()
    load(into_bare, tmp_path / "covered.pth")
    load(into_covered, tmp_path / "bare.pth")
    torch.testing.assert_close(logits(into_bare), logits(covered), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits(into_covered), logits(bare), atol=1e-5, rtol=1e-5)


def test_resized_patches_embed_enlarged_images_alike(tmp_path):
    original = noisy(small())
    torch.save(original.state_dict(), tmp_path / "file.pth")
    model = small(patch_size=16, image_size=64)
    report = load(model, tmp_path / "file.pth")
    assert report.resized["patch_embed.proj.weight"] == "(8, 8) -> (16, 16) pixels, pseudo-inverse"
    enlarged = nn.functional.interpolate(IMAGES, scale_factor=2, mode="bicubic", antialias=True)
    # each patch by itself: interpolation across patches is not part of the claim
    cells = IMAGES.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
    big = nn.functional.interpolate(cells, scale_factor=2, mode="bicubic", antialias=True)
    assert enlarged.shape[2] == 64
    with torch.no_grad():
        torch.testing.assert_close(model.patch_embed(big), original.patch_embed(cells), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("channels", [1, 2, 4, 7])
def test_channels_keep_the_response_to_grey(tmp_path, channels):
    original = noisy(small())
    torch.save(original.state_dict(), tmp_path / "file.pth")
    model = small(in_channels=channels)
    report = load(model, tmp_path / "file.pth")
    assert report.resized["patch_embed.proj.weight (channels)"] == f"3 -> {channels}"
    reference = timm.create_model("vit_base_patch16_224", in_chans=channels, **TIMM_SMALL)
    from timm.models._manipulate import adapt_input_conv

    expected = adapt_input_conv(channels, original.patch_embed.proj.weight.detach())
    torch.testing.assert_close(model.patch_embed.proj.weight.detach(), expected)
    assert reference.patch_embed.proj.weight.shape == expected.shape


# Final norm


def test_final_norm_of_another_place_needs_a_decision(tmp_path):
    original = noisy(small("mae_b16", position="learned"))
    torch.save(original.state_dict(), tmp_path / "file.pth")
    model = small(class_token=True, pool="gap", final_norm="pooled")
    with pytest.raises(ValueError, match=r"set model\.final_norm=tokens, or load\.final_norm=move"):
        load(model, tmp_path / "file.pth")
    report = load(model, tmp_path / "file.pth", LoadConfig(final_norm="fresh"))
    assert report.fresh == ("fc_norm.weight", "fc_norm.bias")
    assert report.dropped == ("norm.weight", "norm.bias")
    assert torch.equal(model.fc_norm.weight, torch.ones(48))
    load(model, tmp_path / "file.pth", LoadConfig(final_norm="move"))
    assert torch.equal(model.fc_norm.weight, original.norm.weight)


# Folders that say what they hold


def test_timm_folder_loads_and_its_facts_are_compared(tmp_path):
    net = noisy(timm.create_model("vit_base_patch16_clip_224", **TIMM_SMALL))
    save_for_hf(net, tmp_path, model_args=TIMM_SMALL, safe_serialization=True)
    model = small("clip_b16")
    report = load(model, f"local-dir:{tmp_path}")
    assert torch.equal(logits(model), logits(net))
    assert report.preprocessing is not None
    assert report.preprocessing.mean == pytest.approx((0.48145466, 0.4578275, 0.40821073))
    for options, text in (
        ({"norm_eps": 1e-6}, "norm_eps is 1e-05 in the file and 1e-06 here"),
        ({"activation": "quick_gelu"}, "activation is 'gelu' in the file and 'quick_gelu' here"),
        ({"heads": 2}, "heads is 4 in the file and 2 here"),
    ):
        other = small("clip_b16", **options)
        with pytest.raises(ValueError, match=text):
            load(other, tmp_path)
        load(other, tmp_path, LoadConfig(differ=tuple(options)))


# Models of timm


def test_timm_models_take_their_own_files(tmp_path):
    config = ModelConfig(variant="timm:resnet18", image_size=32)
    original = build_model(config, num_classes=5).eval()
    torch.save({"state_dict": {f"module.{k}": v for k, v in original.net.state_dict().items()}}, tmp_path / "file.pth")
    model = build_model(config, num_classes=5).eval()
    load(model, tmp_path / "file.pth")
    assert torch.equal(logits(model), logits(original))
    other = build_model(config, num_classes=3)
    assert load(other, tmp_path / "file.pth").fresh == ("fc.weight", "fc.bias")
    with pytest.raises(ValueError, match="no networks with the names of timm:resnet18"):
        torch.save(small().state_dict(), tmp_path / "vit.pth")
        load(model, tmp_path / "vit.pth")


def test_published_weights_come_through_timm(monkeypatch):
    net = noisy(timm.create_model("vit_base_patch16_clip_224", **TIMM_SMALL))
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: net)
    model = small("clip_b16")
    report = load(model, "timm:vit_base_patch16_clip_224")
    assert torch.equal(logits(model), logits(net))
    assert report.preprocessing is not None
    with pytest.raises(ValueError, match="norm_eps is 1e-05 in the file and 1e-06 here"):
        load(small("vit_b16", pre_norm=True, patch_bias=False), "timm:vit_base_patch16_clip_224")


def test_names_timm_cannot_provide():
    with pytest.raises(ValueError, match="weights=timm:vit_nothing: timm cannot provide them"):
        load(small(), "timm:vit_nothing")


def test_a_model_without_memory_is_not_loaded(tmp_path):
    torch.save(small().state_dict(), tmp_path / "file.pth")
    with torch.device("meta"):
        model = small()
    with pytest.raises(ValueError, match=r"on the meta device; call build\.materialise"):
        load(model, tmp_path / "file.pth")


@pytest.mark.parametrize("name", ["w.ckpt", "w.pth", "w.safetensors", "w.npz", "folder/config.json"])
def test_trash_is_named_as_such(tmp_path: Path, name: str) -> None:
    """Whatever the reader of the format makes of it: KeyError, IndexError, SafetensorError, BadZipFile, ..."""
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    place = str(file.parent if name.startswith("folder") else file)
    for seed in range(40):
        file.write_bytes(random.Random(seed).randbytes(200 * seed))
        for call, key in ((read, "weights"), (load_teacher, "task.teacher")):
            with pytest.raises(ValueError, match=rf"^{key}={re.escape(place)}.*"):
                call(place)


def test_a_teacher_that_needs_code_is_not_sent_to_a_key_of_the_student(tmp_path: Path) -> None:
    torch.save({"model": {"a": torch.zeros(1)}, "other": random.Random(0)}, tmp_path / "t.pth")
    with pytest.raises(
        ValueError, match=r"task.teacher=.*needs code to be read \(random.Random\).*\.safetensors once$"
    ) as told:
        load_teacher(str(tmp_path / "t.pth"))
    assert "load.trust" not in str(told.value)
