"""Loading weights: every place, name dialect and prefix; positions, patches and heads of other sizes; what is
refused.
"""

import argparse
import json
import os
import re

import numpy as np
import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import Tensor, nn

from vitfw.models.build import build_model
from vitfw.models.positions import resize_positions, sincos_table
from vitfw.models.timm_bridge import read_architecture
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
    with pytest.raises(ValueError, match=r"needs code to be read .*set trust=true"):
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


# Dialects of names


def test_dinov2_published_names(tmp_path):
    options = {"registers": 2, "qkv_bias": "qkv"}
    original = noisy(small("dinov2_b16", mlp="swiglu", **options))  # its table covers the class token only in the file
    state = original.state_dict()
    prefix = state["pos_embed"][:, :1]
    table = torch.cat([prefix, state["pos_embed"][:, 3:]], 1)
    file = {"register_tokens": state["reg_token"] + state["pos_embed"][:, 1:3], "pos_embed": table}
    file |= {"mask_token": torch.ones(1, 48)}
    for name, value in state.items():
        if name not in ("reg_token", "pos_embed") and not name.startswith("head"):
            name = name.replace("blocks.0.", "blocks.0.0.").replace("blocks.1.", "blocks.1.1.")
            file[name.replace("mlp.fc1", "mlp.w12").replace("mlp.fc2", "mlp.w3")] = value
    torch.save({"teacher": {f"backbone.{k}": v for k, v in file.items()}}, tmp_path / "file.pth")
    for position_prefix in (True, False):
        model = small("dinov2_b16", mlp="swiglu", position_prefix=position_prefix, num_classes=0, **options)
        report = load(model, tmp_path / "file.pth")
        assert (report.dialect, report.entry, report.prefix) == ("dinov2", "teacher", "backbone.")
        assert report.dropped == ("mask_token",)
        with torch.no_grad():
            torch.testing.assert_close(model(IMAGES), original(IMAGES, output="pooled"), atol=1e-5, rtol=1e-5)


def test_dinov3_published_names(tmp_path):
    original = noisy(small("dinov3_splus16", mlp_ratio=2.0, qkv_bias="qv", num_classes=0))
    file = {}
    for name, value in original.state_dict().items():
        if name.endswith("attn.v_bias"):
            continue
        if name.endswith("attn.q_bias"):
            place = name.removesuffix("q_bias")
            both = value, original.state_dict()[f"{place}v_bias"]
            file[f"{place}qkv.bias"] = torch.cat([both[0], torch.full_like(value, 9.0), both[1]])
            file[f"{place}qkv.bias_mask"] = torch.ones(3 * len(value))
            continue
        for ours, theirs in (("reg_token", "storage_tokens"), ("fc1_g", "w1"), ("fc1_x", "w2"), ("mlp.fc2", "mlp.w3")):
            name = name.replace(ours, theirs)
        file[name] = value
    file |= {"mask_token": torch.ones(1, 48), "rope_embed.periods": torch.ones(3)}
    torch.save(file, tmp_path / "file.pth")
    model = small("dinov3_splus16", mlp_ratio=2.0, qkv_bias="qv", num_classes=0)
    report = load(model, tmp_path / "file.pth")
    assert report.dialect == "dinov3"
    assert torch.equal(logits(model), logits(original))
    with pytest.raises(ValueError, match="norm_eps is 1e-05 in the file and 1e-06 here"):
        load(small("dinov3_splus16", mlp_ratio=2.0, qkv_bias="qv", norm_eps=1e-6, num_classes=0), tmp_path / "file.pth")
    with pytest.raises(ValueError, match=r"has query and value biases in the file, none here; set model.qkv_bias=qv"):
        load(small("dinov3_splus16", mlp_ratio=2.0, num_classes=0), tmp_path / "file.pth")


def test_deit3_and_eva_names(tmp_path):
    original = noisy(small("deit3_b16"))
    file = {re.sub(r"ls([12])\.gamma", r"gamma_\1", k): v for k, v in original.state_dict().items()}
    torch.save({"model": file}, tmp_path / "deit3.pth")
    model = small("deit3_b16")
    load(model, tmp_path / "deit3.pth")
    assert torch.equal(logits(model), logits(original))
    net = noisy(timm.create_model("eva02_base_patch14_224", **TIMM_SMALL))
    torch.save(net.state_dict(), tmp_path / "eva.pth")
    arch = read_architecture(net)
    model = ViT(arch, 7).eval()
    load(model, tmp_path / "eva.pth")
    assert torch.equal(logits(model), logits(net))


def test_mae_pretraining_file(tmp_path):
    original = noisy(small("mae_b16", num_classes=0))
    decoder = {
        "decoder_embed.weight": torch.ones(2, 2),
        "decoder_pos_embed": torch.ones(1, 2, 2),
        "mask_token": torch.ones(1, 1, 32),
    }
    decoder |= {"decoder_blocks.0.norm1.weight": torch.ones(2), "decoder_pred.bias": torch.ones(2)}
    torch.save({"model": original.state_dict() | decoder, "args": argparse.Namespace(lr=1.0)}, tmp_path / "file.pth")
    model = small("mae_b16")
    report = load(model, tmp_path / "file.pth")
    assert report.dialect == "mae"
    assert set(report.dropped) == set(decoder)
    assert report.fresh == ("head.weight", "head.bias")


def test_deit_distilled_file(tmp_path):
    original = noisy(timm.create_model("deit_base_distilled_patch16_224", **TIMM_SMALL))
    torch.save({"model": original.state_dict()}, tmp_path / "file.pth")
    model = small("deit_b16_distilled")
    load(model, tmp_path / "file.pth")
    assert torch.equal(logits(model), logits(original))
    with pytest.raises(ValueError, match="table has rows for 2 prefix tokens, the model's for 1"):
        load(small("deit_b16"), tmp_path / "file.pth")


def test_openai_clip_names(tmp_path):
    from timm.models.vision_transformer import _convert_openai_clip

    original = noisy(small("clip_b16", num_classes=5))
    nn.init.zeros_(original.head.bias)
    file = {}
    swaps = [("patch_embed.proj", "conv1"), ("cls_token", "class_embedding"), ("pos_embed", "positional_embedding")]
    swaps += [("blocks.", "transformer.resblocks."), ("norm_pre", "ln_pre"), (".norm1", ".ln_1"), (".norm2", ".ln_2")]
    swaps += [("qkv.", "in_proj_"), ("attn.proj", "attn.out_proj"), ("fc1", "c_fc"), ("fc2", "c_proj")]
    for name, value in original.state_dict().items():
        if name.startswith("head"):
            continue
        for ours, theirs in swaps:
            name = name.replace(ours, theirs)
        file["visual." + re.sub(r"^norm\.", "ln_post.", name)] = value
    file["visual.class_embedding"] = file["visual.class_embedding"].flatten()
    file["visual.positional_embedding"] = file["visual.positional_embedding"][0]
    file["visual.proj"] = original.head.weight.T.contiguous()
    file["logit_scale"] = torch.ones(())
    torch.save(file, tmp_path / "file.pth")
    model = small("clip_b16", num_classes=5)
    report = load(model, tmp_path / "file.pth")
    assert (report.dialect, report.outside) == ("clip", ("logit_scale",))
    assert torch.equal(logits(model), logits(original))
    theirs = _convert_openai_clip({k: v.clone() for k, v in file.items()}, None)  # timm agrees on the names
    assert all(torch.equal(theirs[k], v) for k, v in model.state_dict().items() if k in theirs)


def test_transformers_folder(tmp_path):
    original = noisy(small("vit_b16", norm_eps=1e-12))
    file = {}
    swaps = [("patch_embed.proj", "embeddings.patch_embeddings.projection"), ("cls_token", "embeddings.cls_token")]
    swaps += [("pos_embed", "embeddings.position_embeddings"), ("attn.proj", "attention.output.dense")]
    swaps += [("norm1", "layernorm_before"), ("norm2", "layernorm_after"), ("mlp.fc1", "intermediate.dense")]
    swaps += [("mlp.fc2", "output.dense"), ("blocks.", "encoder.layer.")]
    for name, value in original.state_dict().items():
        if name.startswith("head."):
            file[name.replace("head", "classifier")] = value
            continue
        for ours, theirs in swaps:
            name = name.replace(ours, theirs)
        name = "vit." + re.sub(r"^norm\.", "layernorm.", name)
        if ".attn.qkv." in name:
            for part, third in zip(("query", "key", "value"), value.chunk(3), strict=True):
                file[name.replace("attn.qkv", f"attention.attention.{part}")] = third.clone()
        else:
            file[name] = value
    from safetensors.torch import save_file

    save_file(file, tmp_path / "model.safetensors")
    config = {"model_type": "vit", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {
        "intermediate_size": 192,
        "image_size": 32,
        "patch_size": 8,
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = small("vit_b16", norm_eps=1e-12, num_classes=0)
    report = load(model, tmp_path)
    assert (report.dialect, report.prefix) == ("transformers", "vit.")
    with torch.no_grad():
        assert torch.equal(model(IMAGES), original(IMAGES, output="pooled"))
    with pytest.raises(ValueError, match="norm_eps is 1e-12 in the file"):
        load(small("vit_b16"), tmp_path)


def jax_arrays(net: nn.Module, *, kind: str) -> dict[str, np.ndarray]:
    """A timm ViT in the layout of the original JAX files."""
    state = {k: v.detach().numpy() for k, v in net.state_dict().items()}
    heads, width = net.blocks[0].attn.num_heads, net.embed_dim
    out = {
        "embedding/kernel": state["patch_embed.proj.weight"].transpose(2, 3, 1, 0),
        "embedding/bias": state["patch_embed.proj.bias"],
    }

    def norm(place, name):
        out[f"{place}/scale"], out[f"{place}/bias"] = state[f"{name}.weight"], state[f"{name}.bias"]

    def dense(place, name):
        out[f"{place}/kernel"], out[f"{place}/bias"] = state[f"{name}.weight"].T, state[f"{name}.bias"]

    def attention(place, weights, biases, name):
        for part, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
            out[f"{place}/{part}/kernel"] = weight.T.reshape(width, heads, -1)
            out[f"{place}/{part}/bias"] = bias.reshape(heads, -1)
        out[f"{place}/out/kernel"] = state[f"{name}.weight"].T.reshape(heads, -1, width)
        out[f"{place}/out/bias"] = state[f"{name}.bias"]

    big = kind != "vit_jax"
    numbers = {"ln": ("0", "1"), "att": "0", "mlp": "0"} if big else {"ln": ("0", "2"), "att": "1", "mlp": "3"}
    for i in range(len(net.blocks)):
        block, ours = f"Transformer/encoderblock_{i}", f"blocks.{i}"
        norm(f"{block}/LayerNorm_{numbers['ln'][0]}", f"{ours}.norm1")
        norm(f"{block}/LayerNorm_{numbers['ln'][1]}", f"{ours}.norm2")
        weights, biases = (np.split(state[f"{ours}.attn.qkv.{part}"], 3) for part in ("weight", "bias"))
        attention(f"{block}/MultiHeadDotProductAttention_{numbers['att']}", weights, biases, f"{ours}.attn.proj")
        for j in (0, 1):
            dense(f"{block}/MlpBlock_{numbers['mlp']}/Dense_{j}", f"{ours}.mlp.fc{j + 1}")
    norm("Transformer/encoder_norm", "norm")
    out["pos_embedding" if big else "Transformer/posembed_input/pos_embedding"] = state["pos_embed"]
    if "cls_token" in state:
        out["cls"] = state["cls_token"]
    dense("head", "head")
    if big:
        pool = "MAPHead_0/MultiHeadDotProductAttention_0"
        weights = [state["attn_pool.q.weight"], *np.split(state["attn_pool.kv.weight"], 2)]
        biases = [state["attn_pool.q.bias"], *np.split(state["attn_pool.kv.bias"], 2)]
        attention(pool, weights, biases, "attn_pool.proj")
        out["MAPHead_0/probe"] = state["attn_pool.latent"]
        norm("MAPHead_0/LayerNorm_0", "attn_pool.norm")
        for j in (0, 1):
            dense(f"MAPHead_0/MlpBlock_0/Dense_{j}", f"attn_pool.mlp.fc{j + 1}")
    if kind == "scanned":
        names = [n.split("/", 2)[2] for n in out if n.startswith("Transformer/encoderblock_0/")]
        for name in names:
            parts = [out.pop(f"Transformer/encoderblock_{i}/{name}") for i in range(len(net.blocks))]
            out[f"Transformer/encoderblock/{name}"] = np.stack(parts)
    return {f"params/{k}": v for k, v in out.items()} if big else out


@pytest.mark.parametrize("kind", ["vit_jax", "big_vision", "scanned"])
def test_jax_files_equal_timms_reading_of_them(tmp_path, kind):
    name, variant = (
        ("vit_base_patch16_224", "vit_b16") if kind == "vit_jax" else ("vit_base_patch16_siglip_224", "siglip_b16")
    )
    net = noisy(timm.create_model(name, **TIMM_SMALL))
    np.savez(tmp_path / "file.npz", **jax_arrays(net, kind=kind))
    read_by_timm = timm.create_model(name, **TIMM_SMALL).eval()
    read_by_timm.load_pretrained(str(tmp_path / "file.npz"))
    assert torch.equal(logits(read_by_timm), logits(net))
    model = small(variant)
    report = load(model, tmp_path / "file.npz")
    assert report.dialect == "jax"
    assert torch.equal(logits(model), logits(net))


# Models of timm


def test_timm_models_take_their_own_files(tmp_path):
    config = ModelConfig(variant="timm:resnet10t", image_size=32)
    original = build_model(config, num_classes=5).eval()
    torch.save({"state_dict": {f"module.{k}": v for k, v in original.net.state_dict().items()}}, tmp_path / "file.pth")
    model = build_model(config, num_classes=5).eval()
    load(model, tmp_path / "file.pth")
    assert torch.equal(logits(model), logits(original))
    other = build_model(config, num_classes=3)
    assert load(other, tmp_path / "file.pth").fresh == ("fc.weight", "fc.bias")
    with pytest.raises(ValueError, match="no networks with the names of timm:resnet10t"):
        torch.save(small().state_dict(), tmp_path / "vit.pth")
        load(model, tmp_path / "vit.pth")
