"""cost.py against the published figures, and against torch: parameters counted and FLOPs seen on the meta device."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from vitfw.models import cost
from vitfw.models.architecture import Architecture
from vitfw.models.build import build_model
from vitfw.models.cost import Shape
from vitfw.models.variants import ModelConfig, resolve, shape_of, variant_names, variant_values

B16 = Shape()
TI16 = Shape(width=192, heads=3, mlp_hidden=768)
S16 = Shape(width=384, heads=6, mlp_hidden=1536)
L16 = Shape(width=1024, depth=24, heads=16, mlp_hidden=4096)
L32 = dataclasses.replace(L16, patch=(32, 32))
H14 = Shape(width=1280, depth=32, heads=16, mlp_hidden=5120, patch=(14, 14))
MAP = {"class_token": False, "pool": "map"}


def shape(variant: str, **options) -> Shape:
    return shape_of(resolve(ModelConfig(variant=variant, **options)))


def total(parts: dict[str, int]) -> int:
    return sum(parts.values())


@pytest.mark.parametrize(
    ("shape", "parameters", "tokens", "giga_macs"),
    [
        (TI16, 5_717_416, 197, 1.25),
        (S16, 22_050_664, 197, 4.60),
        (B16, 86_567_656, 197, 17.56),
        (L16, 304_326_632, 197, 61.55),
        (L32, 306_535_400, 50, 15.38),
        (H14, 632_045_800, 257, 167.3),
    ],
)
def test_published_table(shape, parameters, tokens, giga_macs):
    assert total(cost.parameters(shape, 1000)) == parameters
    assert shape.tokens == tokens
    assert total(cost.forward_macs(shape, 1000)) / 1e9 == pytest.approx(
        giga_macs, abs=0.06 if giga_macs > 100 else 0.01
    )


@pytest.mark.parametrize(
    ("variant", "parameters", "macs"),
    [("vit_so400m14", 412e6, 109.5e9), ("vit_g14", 1_011e6, 266.0e9), ("vit_G14", 1_843e6, 481.8e9)],
)
def test_scaled_models_without_class_token_and_head(variant, parameters, macs):
    scaled = shape(variant, class_token=False, pool="gap")
    assert scaled.tokens == 256
    assert total(cost.parameters(scaled)) == pytest.approx(parameters, rel=1.5e-3)
    assert total(cost.forward_macs(scaled)) == pytest.approx(macs, rel=1e-3)


def test_attention_pool_and_the_largest_models():
    assert total(cost.parameters(shape("siglip_so400m14"))) == pytest.approx(428e6, rel=2e-3)
    assert cost.block_matrices(shape("vit_22b14")) == pytest.approx(21_743e6, rel=1e-4)
    without_pool = (
        total(cost.forward_macs(shape("vit_22b14"))) - cost.forward_macs(shape("vit_22b14"))["attention pool"]
    )
    assert without_pool == pytest.approx(5.61e12, rel=2e-3)
    dino = shape("dinov3_7b16")
    assert dino.tokens == 201
    assert cost.block_matrices(dino) == 40 * (4 * 4096**2 + 3 * 4096 * 8192)
    assert total(cost.parameters(dino)) == pytest.approx(6.7e9, rel=5e-3)
    assert total(cost.forward_macs(dino)) == pytest.approx(1.36e12, rel=5e-3)


def test_pieces_of_b16():
    parts, block = cost.parameters(B16, 1000), cost.block_parameters(B16)
    assert parts["patch embedding"] == 590_592
    assert parts["tokens"] == 768
    assert parts["positions"] == 151_296
    assert total(block) == 7_087_872
    assert (block["norms"], block["qkv"], block["attention output"]) == (3_072, 1_771_776, 590_592)
    assert block["mlp"] == 2_362_368 + 2_360_064
    assert parts["blocks"] == 85_054_464
    assert parts["norms"] == 1_536
    assert parts["head"] == 769_000
    assert total(cost.parameters(B16)) == 85_798_656
    assert total(cost.parameters(B16, 10)) == 85_806_346
    assert total(cost.parameters(dataclasses.replace(B16, image=(384, 384)), 1000)) == 86_859_496


def test_pieces_of_s16_and_the_teaching_model():
    parts = cost.parameters(S16, 1000)
    pieces = (parts["patch embedding"], parts["tokens"], parts["positions"], parts["blocks"] // 12, parts["norms"])
    assert (*pieces, parts["head"]) == (295_296, 384, 75_648, 1_774_464, 768, 385_000)
    teaching = shape("vit_teaching16", image_size=64)
    parts = cost.parameters(teaching, 10)
    assert (parts["patch embedding"], parts["tokens"], parts["positions"]) == (147_648, 192, 3_264)
    assert total(cost.block_parameters(teaching)) == 444_864
    assert (parts["norms"], parts["head"], total(parts)) == (384, 1_930, 2_822_602)


def test_macs_of_b16_by_term_and_at_other_sizes():
    macs = cost.forward_macs(B16, 1000)
    assert macs["patch embedding"] == 115_605_504
    assert macs["linear"] == 16_732_127_232
    assert macs["attention"] == 715_327_488
    assert macs["head"] == 768_000
    assert total(macs) == 17_563_828_224
    for side, giga, share in ((384, 55.48, 0.111), (1024, 659.8, 0.469)):
        macs = cost.forward_macs(dataclasses.replace(B16, image=(side, side)), 1000)
        assert total(macs) / 1e9 == pytest.approx(giga, rel=1e-3)
        assert macs["attention"] / total(macs) == pytest.approx(share, abs=1e-3)
    ti = cost.forward_macs(TI16, 1000)
    assert ti["attention"] / (ti["attention"] + ti["linear"]) == pytest.approx(0.14, abs=0.01)


def test_linear_and_attention_flops_of_a_b_block():
    for side, linear, attention in ((224, 2.79, 0.12), (448, 11.1, 1.9), (640, 22.7, 7.9), (1024, 58.0, 51.6)):
        macs = cost.forward_macs(dataclasses.replace(B16, depth=1, image=(side, side)))
        assert 2 * macs["linear"] / 1e9 == pytest.approx(linear, rel=5e-3)
        assert 2 * macs["attention"] / 1e9 == pytest.approx(attention, abs=0.05)


def test_score_matrices():
    for tokens, entries in ((197, 38_809), (785, 616_225), (50, 2_500)):
        counted = Shape(depth=1, heads=1, image=(16, 16 * (tokens - 1)))
        assert cost.attention_numbers(counted) == entries


def test_a_distillation_token_adds_a_token_a_row_and_a_head():
    plain, distilled = cost.parameters(B16, 1000), cost.parameters(shape("deit_b16_distilled"), 1000)
    added = {key: distilled[key] - plain[key] for key in plain if distilled[key] != plain[key]}
    assert added == {"tokens": 768, "positions": 768, "head": 769_000}
    registers = cost.parameters(shape("vit_b16", registers=4, position_prefix=False), 1000)
    assert registers["positions"] == 196 * 768


def test_crossover():
    assert cost.crossover(B16) == (1088, 4625)
    assert cost.crossover(TI16)[0] == 544
    assert 2 * 768 + 3072 == 4608


def test_windows_of_sam_and_swin():
    sam = shape("sam_h16", image_size=1024)
    assert (sam.windows, sam.windowed_blocks) == (25, 28)
    plain = dataclasses.replace(sam, window=0, global_blocks=())
    assert cost.forward_macs(plain)["attention"] == pytest.approx(1.37e12, rel=5e-3)
    assert cost.forward_macs(sam)["attention"] == pytest.approx(0.24e12, rel=0.02)
    swin = Shape(image=(224, 224), patch=(4, 4), depth=1, window=7, class_token=False, pool="gap")
    assert cost.attention_pairs(dataclasses.replace(swin, window=0)) == 9_834_496
    assert cost.attention_pairs(swin) == swin.windows * 2_401
    assert cost.attention_pairs(dataclasses.replace(swin, window=0)) == 64 * cost.attention_pairs(swin)


def test_attention_memory():
    assert cost.attention_numbers(dataclasses.replace(B16, depth=1)) == 465_708
    assert cost.attention_numbers(dataclasses.replace(B16, depth=1)) // 12 == 38_809
    assert pytest.approx(0.93, abs=0.01) == 2 * 465_708 / 1e6
    assert cost.attention_numbers(B16, fused=True) == 12 * 12 * 197


@pytest.mark.parametrize(
    ("shape", "epochs", "exaflops", "tolerance"),
    [
        (dataclasses.replace(B16, patch=(32, 32)), 7, 55, 0.06),
        (B16, 7, 224, 0.0015),
        (L32, 7, 196, 0.003),
        (L16, 7, 783, 0.0015),
        (L16, 14, 1567, 0.0015),
        (H14, 14, 4262, 0.0015),
    ],
)
def test_training_compute_of_the_vit_paper(shape, epochs, exaflops, tolerance):
    flops = cost.training_flops(shape, 18_291, epochs * 303_000_000)
    assert flops / 1e18 == pytest.approx(exaflops, rel=tolerance)


def test_masked_encoders():
    for shape, giga in ((TI16, 0.31), (S16, 1.14), (B16, 4.41), (L16, 15.38)):
        assert total(cost.forward_macs(shape, kept=49)) / 1e9 == pytest.approx(giga, abs=0.12)
    with pytest.raises(ValueError, match="kept=200: must be from 1 to the 196 patches"):
        cost.forward_macs(B16, kept=200)


def test_fine_tuning_ladder():
    rungs = cost.ladder(B16, 10)
    assert list(rungs.values()) == [7_690, 7_097_098, 85_806_346]
    assert [cost.training_bytes(n) // 1024 for n in rungs.values()] == [120, 110_892, 1_340_724]


@pytest.mark.parametrize("variant", variant_names())
def test_every_named_variant_equals_torch(variant):
    patch = variant_values(variant)["patch"][0]
    check(ModelConfig(variant=variant, image_size=4 * patch), 10)


@st.composite
def configs(draw) -> ModelConfig:
    values = {
        "variant": "vit_b16",
        "image_height": draw(st.sampled_from([16, 24])),
        "image_width": draw(st.sampled_from([16, 40])),
        "patch_height": 8,
        "patch_width": draw(st.sampled_from([4, 8])),
        "in_channels": draw(st.integers(1, 4)),
        "width": 24,
        "depth": draw(st.integers(1, 3)),
        "heads": 3,
        "mlp_ratio": draw(st.sampled_from([0.5, 2.0, 3.7362])),
        "norm": draw(st.sampled_from(["layernorm", "rmsnorm"])),
        "position": draw(st.sampled_from(["learned", "sincos", "factorised", "none"])),
        "pre_head": draw(st.sampled_from(["none", "tanh"])),
    }
    for key in ("norm_bias", "proj_bias", "patch_bias", "qk_norm", "mask_token", "position_prefix", "pre_norm"):
        values[key] = draw(st.booleans())
    values["layer_scale"] = draw(st.sampled_from([None, 1e-5]))
    kind = draw(st.sampled_from(["plain", "parallel", "windows"]))
    if kind == "parallel":
        values |= {"parallel": True, "qkv_bias": draw(st.sampled_from(["qkv", "none"]))}
    else:
        values |= {
            "mlp": draw(st.sampled_from(["mlp", "swiglu", "swiglu_split"])),
            "mlp_norm": draw(st.booleans()),
            "attention_norm": draw(st.booleans()),
            "qkv_bias": draw(st.sampled_from(["qkv", "qv", "none"])),
        }
    if kind == "windows":
        values |= {
            "window": 2,
            "global_blocks": (0,),
            "class_token": False,
            "pool": draw(st.sampled_from(["gap", "map"])),
        }
    else:
        values["registers"] = draw(st.integers(0, 2))
        values["rope"] = draw(st.sampled_from(["none", "centered", "index"]))
        values |= draw(
            st.sampled_from(
                [
                    {},
                    {"distillation_token": True},
                    {"class_token": False, "pool": "gap", "final_norm": "pooled"},
                    {"pool": "map"},
                ]
            )
        )
    return ModelConfig(**values)


@given(configs(), st.sampled_from([0, 7]))
@settings(max_examples=40, deadline=None)
def test_every_combination_equals_torch(config, num_classes):
    check(config, num_classes)


def check(config: ModelConfig, num_classes: int) -> None:
    arch = resolve(config)
    counted = shape_of(arch)
    with torch.device("meta"):
        model = build_model(config, num_classes=num_classes)
        images = torch.empty(1, arch.in_channels, *arch.image)
    assert sum(p.numel() for p in model.parameters()) == total(cost.parameters(counted, num_classes))
    model.requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        model(images)
    assert counter.get_total_flops() == 2 * total(cost.forward_macs(counted, num_classes))


def test_b16_flops_seen_by_torch():
    assert 2 * total(cost.forward_macs(B16, 1000)) == 35_127_656_448


def test_shape_repeats_no_default_of_the_architecture_wrongly():
    for field in dataclasses.fields(Shape):
        assert getattr(Shape(), field.name) == getattr(Architecture(), field.name), field.name


def test_table_names_every_count():
    text = cost.count_table(B16, 1000, images=1_281_167 * 300)
    for figure in ("86,567,656", "17,563,828,224", "715,327,488", "4.1 %", "1088 px (4,625 tokens)", "7,087,872"):
        assert figure in text
