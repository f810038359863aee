"""Packed images of several sizes: the same numbers as each image alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitfw.models.build import build_model
from vitfw.models.packing import Packed, fill, pack, unpack
from vitfw.models.variants import ModelConfig
from vitfw.models.vit import ViT

SMALL = {"image_size": 32, "patch_size": 8, "width": 48, "depth": 2, "heads": 4}

FAMILIES = {
    "class token, interpolated positions": {"variant": "vit_b16"},
    "registers and mean": {"variant": "vit_b16_reg4_gap"},
    "distilled": {"variant": "deit_b16_distilled"},
    "attention pool": {"variant": "siglip_b16"},
    "factorised positions": {"variant": "vit_b16", "position": "factorised", "image_size": 64},
    "fixed positions": {"variant": "mae_b16"},
    "rotary, centered": {"variant": "dinov3_b16"},
    "rotary, index": {"variant": "eva02_b16"},
    "parallel": {"variant": "vit_b16", "parallel": True, "qkv_bias": "none", "qk_norm": True},
}


def model_of(**options) -> ViT:
    model = build_model(ModelConfig(**{**SMALL, **options, "dynamic_size": True}), num_classes=5)
    assert isinstance(model, ViT)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


SIZES = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=4)


@pytest.mark.parametrize("family", FAMILIES)
@given(grids=SIZES)
@settings(max_examples=6, deadline=None)
def test_packed_images_equal_each_image_alone(family, grids):
    model = model_of(**FAMILIES[family])
    images = [torch.randn(3, 8 * rows, 8 * columns) for rows, columns in grids]
    with torch.no_grad():
        for output in ("logits", "pooled"):
            together = model(pack(images, (8, 8)), output=output)
            alone = torch.cat([model(image[None], output=output) for image in images])
            torch.testing.assert_close(together, alone, atol=2e-5, rtol=2e-5)


def test_gradients_of_packed_images_equal_the_sum_over_images():
    model = model_of(variant="siglip_b16")
    images = [torch.randn(3, 16, 24), torch.randn(3, 32, 8)]
    model(pack(images, (8, 8))).square().sum().backward()
    packed = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    sum(model(image[None]).square().sum() for image in images).backward()
    for together, parameter in zip(packed, model.parameters(), strict=True):
        torch.testing.assert_close(together, parameter.grad, atol=1e-3, rtol=1e-3)


def test_tokens_and_attention_of_packed_images():
    model = model_of(variant="vit_b16")
    images = [torch.randn(3, 16, 16), torch.randn(3, 8, 8)]
    with torch.no_grad():
        taken = model(pack(images, (8, 8)), output="tokens", blocks=(0,), attention=(-1,))
        alone = model(images[1][None], output="tokens")
    assert taken.output.shape == taken.blocks[0].shape == (2, 5, 48)
    torch.testing.assert_close(taken.output[1, :2], alone[0], atol=1e-5, rtol=1e-5)
    assert not taken.output[1, 2:].any()
    weights = taken.attention[1]
    assert weights.shape == (1, 4, 7, 7)
    assert not weights[0, :, :5, 5:].any()
    assert not weights[0, :, 5:, :5].any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4, 7))


def test_drop_path_of_packed_images_drops_whole_images():
    model = build_model(
        ModelConfig(**SMALL, drop_path=0.5, drop_path_mode="constant", dynamic_size=True), num_classes=5
    )
    plain = build_model(ModelConfig(**SMALL, dynamic_size=True), num_classes=5)
    plain.load_state_dict(model.state_dict())
    images = [torch.randn(3, 16, 16) for _ in range(64)]
    torch.manual_seed(0)
    first = model(pack(images, (8, 8)), blocks=(0,), block_norm=False).blocks[0]
    for block in plain.blocks:  # what an image gives that keeps neither branch of block 0
        block.attn.proj.weight.data.zero_(), block.attn.proj.bias.data.zero_()
        block.mlp.fc2.weight.data.zero_(), block.mlp.fc2.bias.data.zero_()
    untouched = plain(pack(images, (8, 8)), blocks=(0,), block_norm=False).blocks[0]
    same = (first == untouched).flatten(1).all(1)
    assert 6 <= int(same.sum()) <= 28  # a quarter of 64 on average
    with pytest.raises(ValueError, match=r"model\.drop_path_skip=true .* a packed sequence needs false"):
        skipping = build_model(
            ModelConfig(**SMALL, drop_path=0.5, drop_path_skip=True, dynamic_size=True), num_classes=5
        )
        skipping(pack(images[:2], (8, 8)))


def test_patches_are_those_of_the_convolution():
    images = [torch.randn(3, 16, 24)]
    model = model_of(variant="vit_b16")
    packed = pack(images, (8, 8))
    assert packed.grids == ((2, 3),)
    torch.testing.assert_close(model.patch_embed(packed.patches), model.patch_embed(images[0][None])[0])


@given(st.lists(st.integers(1, 20), max_size=30))
def test_fill_places_every_image_once_within_capacity(counts):
    bins = fill(counts, 20)
    assert sorted(n for group in bins for n in group) == list(range(len(counts)))
    assert all(sum(counts[n] for n in group) <= 20 for group in bins)
    assert len(bins) <= 2 * -(-sum(counts) // 20) or not counts


def test_unpack_pads_with_zeros():
    padded, valid = unpack(torch.arange(5.0).reshape(1, 5, 1), [2, 3])
    assert padded[..., 0].tolist() == [[0, 1, 0], [2, 3, 4]]
    assert valid.tolist() == [[True, True, False], [True, True, True]]


def test_refusals():
    with pytest.raises(ValueError, match="pack: image 1 is 12 x 8 pixels, not divisible by the patch 8 x 8"):
        pack([torch.zeros(3, 8, 8), torch.zeros(3, 12, 8)], (8, 8))
    with pytest.raises(ValueError, match="pack: image 1 has 1 channels, image 0 has 3"):
        pack([torch.zeros(3, 8, 8), torch.zeros(1, 8, 8)], (8, 8))
    with pytest.raises(ValueError, match="pack: no images"):
        pack([], (8, 8))
    with pytest.raises(ValueError, match="fill: image 0 has 9 tokens, a sequence holds 8"):
        fill([9], 8)
    model = model_of(variant="vit_b16", position="factorised")
    with pytest.raises(ValueError, match="a grid of 5 x 1 patches is larger than the factorised positions, 4 x 4"):
        model(pack([torch.zeros(3, 40, 8)], (8, 8)))
    with pytest.raises(ValueError, match="a packed batch takes neither keep nor masked"):
        model(pack([torch.zeros(3, 8, 8)], (8, 8)), keep=torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="packed patches have 10 values, this model's patches have 192"):
        model(Packed(torch.zeros(1, 10), ((1, 1),)))
    windowed = model_of(variant="sam_b16", window=2, global_blocks=(0,))
    with pytest.raises(ValueError, match="windows need images of one size"):
        windowed(pack([torch.zeros(3, 8, 8)], (8, 8)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the variable-length kernel runs on CUDA")
@pytest.mark.parametrize("family", ["class token, interpolated positions", "rotary, centered", "attention pool"])
def test_the_variable_length_kernel_equals_the_mask(family):
    model = model_of(**FAMILIES[family], attention="auto").cuda()
    images = [torch.randn(3, 8 * rows, 8 * columns, device="cuda") for rows, columns in ((2, 3), (4, 4), (1, 7))]
    packed = pack(images, (8, 8))
    with torch.autocast("cuda", torch.bfloat16):
        ragged = model(packed)
        dense = model(packed, attention=(0, 1)).output  # asking for weights takes the mask
    torch.testing.assert_close(ragged, dense, atol=5e-2, rtol=5e-2)
    ragged.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
