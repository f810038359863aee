"""The ViT itself: equality with timm, outputs, tokens, initialisation, and what is refused."""

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vitfw.models.build import build_model, count_model, has_zero_head, materialise
from vitfw.models.build import parameter_layers as layers_of
from vitfw.models.variants import ModelConfig
from vitfw.models.vit import ViT, parameter_layers

SMALL = {"image_size": 32, "patch_size": 8, "width": 48, "depth": 3, "heads": 4}
TIMM_SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 4, "num_classes": 7}


def small(variant: str = "vit_b16", num_classes: int = 7, **options) -> ViT:
    model = build_model(ModelConfig(variant=variant, **{**SMALL, **options}), num_classes=num_classes)
    assert isinstance(model, ViT)
    return model


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("vit_b16", "vit_base_patch16_224"), ("deit_b16_distilled", "deit_base_distilled_patch16_224")],
)
def test_supervised_models_equal_timm(ours, theirs):
    reference = timm.create_model(theirs, **TIMM_SMALL).eval()
    model = small(ours).eval()
    model.load_state_dict(reference.state_dict(), strict=True)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model(images), reference(images))


@pytest.mark.parametrize(
    ("variant", "image_size", "num_classes", "count"),
    [
        ("vit_ti16", 224, 1000, 5_717_416),
        ("vit_s16", 224, 1000, 22_050_664),
        ("vit_b16", 224, 1000, 86_567_656),
        ("vit_b16", 224, 0, 85_798_656),
        ("vit_b16", 384, 1000, 86_859_496),
        ("vit_l16", 224, 1000, 304_326_632),
        ("vit_l32", 224, 1000, 306_535_400),
        ("vit_h14", 224, 1000, 632_045_800),
        ("vit_teaching16", 64, 10, 2_822_602),
    ],
)
def test_parameter_counts_on_the_meta_device(variant, image_size, num_classes, count):
    with torch.device("meta"):
        model = build_model(ModelConfig(variant=variant, image_size=image_size), num_classes=num_classes)
    assert sum(p.numel() for p in model.parameters()) == count


def test_materialised_later_equals_built_directly():
    torch.manual_seed(0)
    direct = small("siglip_b16", init="jax")
    with torch.device("meta"):
        later = small("siglip_b16", init="jax")
    torch.manual_seed(0)
    materialise(later, "cpu")
    state = later.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in direct.state_dict().items())


def test_every_module_with_tensors_can_reset_itself():
    for variant in ("deit_b16_distilled", "mae_b16", "eva02_b14", "siglip_b16", "vit_22b14", "dinov3_b16_qkvb"):
        size = 28 if variant in ("eva02_b14", "vit_22b14") else 32
        patch = 7 if size == 28 else 8
        for module in small(variant, image_size=size, patch_size=patch).modules():
            if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                assert callable(getattr(module, "reset_parameters", None)), type(module)


def test_outputs_have_the_documented_shapes():
    model = small("deit_b16_distilled", registers=2)
    images = torch.randn(2, 3, 32, 32)
    pair = model(images)
    assert [tuple(p.shape) for p in pair] == [(2, 7), (2, 7)]
    model.eval()
    assert model(images).shape == (2, 7)
    assert model(images, output="pooled").shape == (2, 48)
    assert model(images, output="tokens").shape == (2, 4 + 16, 48)
    assert small(num_classes=0)(images).shape == (2, 48)


def test_kept_patches_equal_the_full_run_when_all_are_kept():
    for variant in ("vit_b16", "dinov3_b16"):
        model = small(variant).eval()
        images = torch.randn(2, 3, 32, 32)
        order = torch.stack([torch.randperm(16) for _ in range(2)])
        full = model(images, output="tokens")
        kept = model(images, output="tokens", keep=order)
        prefix = model.num_prefix_tokens
        torch.testing.assert_close(kept[:, :prefix], full[:, :prefix], atol=1e-5, rtol=1e-5)
        expected = full[:, prefix:].gather(1, order[:, :, None].expand(-1, -1, 48))
        torch.testing.assert_close(kept[:, prefix:], expected, atol=1e-5, rtol=1e-5)


def test_parameter_layers():
    layers = parameter_layers(small("deit_b16_distilled", registers=1, pre_norm=True, mask_token=True))
    assert {layers[n] for n in ("cls_token", "dist_token", "reg_token", "mask_token", "pos_embed")} == {0}
    assert layers["patch_embed.proj.weight"] == layers["norm_pre.weight"] == 0
    assert [layers[f"blocks.{i}.attn.qkv.weight"] for i in range(3)] == [1, 2, 3]
    assert layers["norm.weight"] == 3
    assert layers["head.weight"] == layers["head_dist.bias"] == 4
    assert parameter_layers(small(), final_norm="head")["norm.weight"] == 4


@pytest.mark.parametrize("variant", ["dinov3_b16_qkvb", "eva02_b16", "siglip_b16", "vit_b16_reg4_gap", "sam_b16"])
def test_explicit_and_fused_attention_agree_in_every_family(variant):
    options = {"qk_norm": True} | ({"global_blocks": (1,), "window": 2} if variant == "sam_b16" else {})
    fused, explicit = (small(variant, attention=kind, **options).eval() for kind in ("fused", "explicit"))
    for parameter in fused.parameters():
        nn.init.normal_(parameter, std=0.3)
    explicit.load_state_dict(fused.state_dict())
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(explicit(images), fused(images), atol=1e-4, rtol=1e-4)
    explicit(images).square().sum().backward(), fused(images).square().sum().backward()
    for a, b in zip(explicit.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-2, rtol=1e-2)


def test_explicit_and_fused_attention_agree_and_auto_is_explicit_under_bfloat16():
    fused, explicit = small(attention="fused").eval(), small(attention="explicit").eval()
    explicit.load_state_dict(fused.state_dict())
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(explicit(images), fused(images), atol=1e-5, rtol=1e-5)
    auto = small().eval()
    auto.load_state_dict(fused.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(auto(images), explicit(images))


@given(st.sampled_from([(16, 24), (24, 16), (8, 40)]), st.sampled_from([(4, 8), (8, 4), (8, 8)]), st.integers(1, 5))
@settings(max_examples=8, deadline=None)
def test_any_image_patch_and_channel_shape(image, patch, channels):
    config = ModelConfig(
        **{**SMALL, "depth": 1, "patch_size": None},
        image_height=image[0],
        image_width=image[1],
        patch_height=patch[0],
        patch_width=patch[1],
        in_channels=channels,
    )
    model = build_model(config, num_classes=2)
    assert model.grid_size == (image[0] // patch[0], image[1] // patch[1])
    assert model(torch.randn(1, channels, *image)).shape == (1, 2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"heads": 5}, r"model.heads=5: must divide model.width=48"),
        ({"patch_size": 7}, r"model.image_size=\(32, 32\).*divisible by the patch size \(7, 7\)"),
        ({"class_token": False}, "model.pool='cls'.*needs model.class_token=true"),
        ({"drop_path": 1.0}, "model.drop_path=1.0: is a rate"),
        ({"variant": "vit_b"}, "model.variant='vit_b' is unknown; nearest: vit_b"),
        ({"window": 2}, "model.window=2: windows hold patches only"),
    ],
)
def test_contradictions_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        build_model(ModelConfig(**{**SMALL, **options}), num_classes=2)


def test_wrong_images_are_refused():
    model = small()
    with pytest.raises(ValueError, match=r"expected \[B, 3, H, W\] \(model.in_channels\)"):
        model(torch.randn(1, 1, 32, 32))
    with pytest.raises(ValueError, match=r"images are 40 x 32 pixels, the model was built for 32 x 32; set"):
        model(torch.randn(1, 3, 40, 32))


def test_timm_models_build_and_refuse_options_they_would_ignore():
    config = ModelConfig(variant="timm:resnet10t", image_size=32)
    model = build_model(config, num_classes=5)
    images = torch.randn(2, 3, 32, 32)
    assert model(images).shape == (2, 5)
    assert model(images, output="pooled").shape == (2, 512)
    with pytest.raises(ValueError, match=r"model\.registers=4 has no effect on timm:resnet10t"):
        build_model(ModelConfig(variant="timm:resnet10t", registers=4), num_classes=5)
    with pytest.raises(ValueError, match="timm has no such model"):
        build_model(ModelConfig(variant="timm:resnet_not"), num_classes=5)


@pytest.mark.parametrize(
    "name",
    [
        "swin_tiny_patch4_window7_224",
        "convnext_atto",
        "mobilenetv3_small_050",
        "tf_efficientnet_lite0",
        "deit_tiny_patch16_224",
    ],
)
def test_other_families_come_from_timm(name):
    with torch.device("meta"):
        model = build_model(ModelConfig(variant=f"timm:{name}", drop_path=0.1), num_classes=5)
        images = torch.empty(2, 3, 224, 224)
    assert model(images).shape == (2, 5)
    assert model(images, output="pooled").shape == (2, model.embed_dim)
    with pytest.raises(ValueError, match="gives logits or pooled"):
        model(images, output="tokens")


@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224"])
def test_timm_models_materialise_completely(name):
    config = ModelConfig(variant=f"timm:{name}", image_size=32)
    with torch.device("meta"):
        model = build_model(config, num_classes=5)
    materialise(model, "cpu")
    assert all(t.isfinite().all() for t in model.state_dict().values())
    logits = model.eval()(torch.randn(2, 3, 32, 32))
    assert logits.isfinite().all()
    direct = build_model(config, num_classes=5).state_dict()
    for key, value in model.state_dict().items():
        if value.is_floating_point() and value.numel() > 1000:
            assert value.std().item() == pytest.approx(direct[key].std().item(), rel=0.3, abs=1e-7), key


def test_timm_models_that_cannot_be_materialised_say_so_instead_of_training_on_garbage():
    with torch.device("meta"):
        model = build_model(ModelConfig(variant="timm:convnext_atto", image_size=32), num_classes=5)
    with pytest.raises(ValueError, match=r"timm:convnext_atto cannot be built on the meta device: .*gamma"):
        materialise(model, "cpu")


def test_dropout_and_drop_path_are_off_in_evaluation():
    """P83."""
    rates = dict.fromkeys(("dropout", "position_dropout", "projection_dropout", "attention_dropout", "drop_path"), 0.5)
    model, plain = small(**rates).eval(), small().eval()
    plain.load_state_dict(model.state_dict())
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(images), model(images))
    assert torch.equal(model(images), plain(images))
    assert not torch.equal(model.train()(images), plain(images))


def test_zero_head_gives_zero_logits_and_no_backbone_gradient():
    model = small(zero_head=True, num_classes=10)
    logits = model(torch.randn(4, 3, 32, 32))
    assert torch.equal(logits, torch.zeros(4, 10))
    nn.functional.cross_entropy(logits, torch.arange(4)).backward()
    assert model.head.weight.grad.abs().sum() > 0
    assert all(p.grad.abs().sum() == 0 for n, p in model.named_parameters() if not n.startswith("head"))
    assert 0.015 < small(num_classes=100).head.weight.std() < 0.025


def test_layers_of_timm_models_are_those_of_timm_and_agree_with_ours():
    config = ModelConfig(variant="timm:vit_tiny_patch16_224", image_size=32)
    theirs = layers_of(build_model(config, num_classes=3))
    ours = layers_of(build_model(ModelConfig(variant="vit_ti16", image_size=32), num_classes=3))
    assert {name.removeprefix("net."): place for name, place in theirs.items()} == ours
    with pytest.raises(ValueError, match="a Linear is neither a ViT nor a TimmModel"):
        layers_of(nn.Linear(1, 1))


def test_counts_of_any_model_as_text():
    assert "86,567,656" in count_model(ModelConfig(), num_classes=1000)
    text = count_model(ModelConfig(variant="timm:resnet18"), num_classes=1000, images=10)
    assert "11,689,512" in text
    assert "training FLOPs of the run" in text


def test_a_head_of_zeros_is_recognised():
    assert has_zero_head(small(zero_head=True))
    assert not has_zero_head(small())
    assert not has_zero_head(small(num_classes=0))
    model = build_model(ModelConfig(variant="timm:resnet10t", image_size=32), num_classes=5)
    assert not has_zero_head(model)
    nn.init.zeros_(model.net.fc.weight), nn.init.zeros_(model.net.fc.bias)
    assert has_zero_head(model)
