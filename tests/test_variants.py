"""Families: equality with timm's models on small random weights, strict both ways; the named table; the section."""

import dataclasses

import pytest
import timm
import torch
from omegaconf import OmegaConf
from torch import nn

from vitfw.models.architecture import Architecture
from vitfw.models.timm_bridge import from_eva, read_architecture, timm_arguments, to_timm
from vitfw.models.variants import ModelConfig, resolve, variant_names, variant_values
from vitfw.models.vit import ViT

SMALL = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 7, "embed_dim": 48, "num_heads": 4}

# timm's entry point and our variant of the same family (None: no named variant of ours).
FAMILIES = {
    "vit_base_patch16_224": "vit_b16",
    "vit_medium_patch16_gap_256": None,
    "vit_base_patch16_reg4_gap_256": "vit_b16_reg4_gap",
    "vit_so150m_patch16_reg4_map_256": None,
    "vit_so150m2_patch16_reg1_gap_256": None,
    "vit_base_patch16_clip_224": "clip_b16",
    "vit_base_patch16_clip_quickgelu_224": "clip_b16_quickgelu",
    "deit_base_patch16_224": "deit_b16",
    "deit_base_distilled_patch16_224": "deit_b16_distilled",
    "deit3_base_patch16_224": "deit3_b16",
    "vit_base_patch14_dinov2": "dinov2_b16",
    "vit_base_patch14_reg4_dinov2": "dinov2_b16_reg4",
    "vit_giant_patch14_reg4_dinov2": "dinov2_g16_reg4",
    "vit_base_patch16_dinov3": "dinov3_b16",
    "vit_base_patch16_dinov3_qkvb": "dinov3_b16_qkvb",
    "vit_small_plus_patch16_dinov3": "dinov3_splus16",
    "vit_7b_patch16_dinov3": "dinov3_7b16",
    "vit_base_patch16_siglip_224": "siglip_b16",
    "vit_so400m_patch14_siglip_224": "siglip_so400m16",
    "vit_so400m_patch16_siglip_256": "siglip_so400m16_tanhgelu",
    "vit_base_patch16_siglip_gap_224": None,
    "eva_giant_patch14_224": "eva_g16",
    "eva02_base_patch14_224": "eva02_b16",
    "eva02_small_patch14_224": "eva02_s16",
    "vit_base_patch16_rope_reg1_gap_256": "rope_b16",
    "vit_base_patch16_xp_224": None,
    "beit3_base_patch16_224": None,
    "test_vit4": None,
}


def randomised(name: str, **options) -> nn.Module:
    """A small timm model in which every tensor counts: no zero biases, no residual factors near zero."""
    net = timm.create_model(name, **{**SMALL, **options}).eval()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3)
    return net


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_timm_and_the_way_back(name):
    reference = randomised(name)
    arch = read_architecture(reference)
    model = ViT(arch, 7).eval()
    model.load_state_dict(from_eva(reference.state_dict()), strict=True)
    images = torch.randn(2, 3, 32, 32)
    entry, arguments = timm_arguments(arch)
    back = timm.create_model(entry, num_classes=7, **arguments).eval()
    back.load_state_dict(to_timm(model.state_dict(), arch), strict=True)
    with torch.no_grad():
        logits, expected, returned = model(images), reference(images), back(images)
    assert expected.abs().mean() > 0.1
    torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(returned, expected, atol=1e-6, rtol=1e-6)
    assert read_architecture(back) == arch


# What timm decides differently from the family: DINOv3's mean pooling, and image sizes on the fly.
IGNORED = ("image", "patch", "width", "depth", "heads", "mlp_hidden", "dynamic_size", "init")


@pytest.mark.parametrize(("name", "variant"), [(n, v) for n, v in FAMILIES.items() if v])
def test_named_families_have_the_constants_of_timm(name, variant):
    options = {"global_pool": "token"} if "dinov3" in name else {}
    theirs = dataclasses.asdict(read_architecture(timm.create_model(name, **SMALL, **options)))
    ours = dataclasses.asdict(resolve(ModelConfig(variant=variant, image_size=32)))
    ignored = (*IGNORED, "rope_temperature", "rope_layout") if theirs["rope"] == "none" else IGNORED
    assert {k: v for k, v in ours.items() if k not in ignored} == {k: v for k, v in theirs.items() if k not in ignored}


SHAPES = {
    "vit_ti16": "vit_tiny_patch16_224",
    "vit_l14": "vit_large_patch14_224",
    "vit_h14": "vit_huge_patch14_224",
    "vit_g14": "vit_giant_patch14_224",
    "vit_G14": "vit_gigantic_patch14_224",
    "deit3_m16": "deit3_medium_patch16_224",
    "siglip_so400m14": "vit_so400m_patch14_siglip_224",
    "dinov2_g14": "vit_giant_patch14_dinov2",
    "dinov3_hplus16": "vit_huge_plus_patch16_dinov3",
    "dinov3_7b16": "vit_7b_patch16_dinov3",
    "eva02_ti14": "eva02_tiny_patch14_224",
    "eva02_l14": "eva02_large_patch14_224",
    "eva_g14": "eva_giant_patch14_224",
}


@pytest.mark.parametrize(("ours", "theirs"), SHAPES.items())
def test_named_sizes_are_those_of_timm(ours, theirs):
    with torch.device("meta"):
        net = timm.create_model(theirs, img_size=224)
    expected, got = read_architecture(net), resolve(ModelConfig(variant=ours))
    for key in ("width", "depth", "heads", "mlp_hidden", "mlp", "patch"):
        assert getattr(got, key) == getattr(expected, key), key


def test_models_without_counterpart_are_refused():
    for name, part in (("vit_base_patch16_18x2_224", "ParallelThingsBlock"), ("resnet10t", "ResNet")):
        with torch.device("meta"):
            net = timm.create_model(name)
        with pytest.raises(ValueError, match=part):
            read_architecture(net)
    with pytest.raises(ValueError, match=r"model\.window=14: timm has no such model"):
        timm_arguments(resolve(ModelConfig(variant="sam_b16")))
    with pytest.raises(ValueError, match=r"model\.norm_eps=1e-05.*with these blocks|model\.norm_eps=1e-05"):
        timm_arguments(resolve(ModelConfig(variant="dinov2_g14", norm_eps=1e-5)))


def test_every_listed_name_resolves():
    assert len(set(variant_names())) == len(variant_names())
    for name in variant_names():
        patch = variant_values(name)["patch"]
        assert resolve(ModelConfig(variant=name, image_size=3 * patch[0])).patch == patch


def test_every_architecture_field_can_be_set_in_the_section():
    derived = {"image", "patch", "mlp_hidden"}
    section = {f.name for f in dataclasses.fields(ModelConfig)}
    assert {f.name for f in dataclasses.fields(Architecture)} - derived <= section
    assert all(f.metadata.get("help") for f in dataclasses.fields(ModelConfig))


def test_the_section_is_a_structured_config():
    node = OmegaConf.merge(
        OmegaConf.structured(ModelConfig),
        OmegaConf.from_dotlist(["variant=sam_b16", "global_blocks=[1,2]", "norm_eps=1e-5", "pool=map"]),
    )
    config = OmegaConf.to_object(node)
    assert isinstance(config, ModelConfig)
    arch = resolve(config)
    assert (arch.global_blocks, arch.norm_eps, arch.pool, arch.window) == ((1, 2), 1e-5, "map", 14)


def test_overrides_and_ratio():
    arch = resolve(ModelConfig(variant="siglip_so400m14", width=64, heads=4))
    assert arch.mlp_hidden == round(64 * 4304 / 1152)
    assert resolve(ModelConfig(variant="dinov2_b14", layer_scale=0.0)).layer_scale is None
    assert resolve(ModelConfig(variant="sam_b16", window=0)).global_blocks == ()
    with pytest.raises(ValueError, match="nearest: vit_b16"):
        resolve(ModelConfig(variant="vit_b61x"))
    with pytest.raises(ValueError, match=r"model\.width=-1: must be above 0"):
        ModelConfig(width=-1)
