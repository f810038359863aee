"""Attention and blocks: windows, capture, masks, rotary layouts, drop-path, initialisations, and no causal mask."""

import copy
import math

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers.pos_embed_sincos import RotaryEmbeddingCat, RotaryEmbeddingDinoV3
from timm.models.vision_transformer_sam import VisionTransformerSAM
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from vitfw.models.attention import from_windows, to_windows
from vitfw.models.blocks import Block, Context, residual
from vitfw.models.build import build_model
from vitfw.models.positions import rope_table, rotate
from vitfw.models.variants import ModelConfig
from vitfw.models.vit import ViT, parameter_layers

SMALL = {"image_size": 32, "patch_size": 8, "width": 48, "depth": 3, "heads": 4}
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def small(**options) -> ViT:
    model = build_model(ModelConfig(**{"variant": "vit_b16", **SMALL, **options}), num_classes=7)
    assert isinstance(model, ViT)
    return model


def noisy(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.mark.parametrize(
    "options",
    [
        {"variant": "vit_b16"},
        {"variant": "deit_b16_distilled"},
        {"variant": "vit_b16_reg4_gap"},
        {"variant": "siglip_b16"},
        {"variant": "dinov3_b16"},
        {"variant": "vit_b16", "parallel": True, "qkv_bias": "none"},
        {"variant": "vit_b16", "attention": "explicit"},
    ],
)
def test_every_patch_reaches_the_output(options):
    """With a causal mask left in, the class token would see nothing and later patches would not reach earlier ones."""
    model = noisy(small(**{**options, "depth": 1}))
    with torch.no_grad():
        before = model(IMAGES, output="tokens")
        logits = model(IMAGES)
        for patch in range(16):
            changed = IMAGES.clone()
            row, column = 8 * (patch // 4), 8 * (patch % 4)
            changed[:, :, row : row + 8, column : column + 8] += 1.0
            assert ((model(changed) - logits).abs().amax(1) > 1e-6).all(), patch
            assert ((model(changed, output="tokens") - before).abs().amax(2) > 1e-7).all(), patch


# Windows


@pytest.mark.parametrize(("side", "window"), [(32, 3), (48, 2), (40, 5)])
def test_windows_equal_sam(side, window):
    sizes = {"img_size": side, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 4, "num_classes": 0}
    plan = {
        "window_size": window,
        "global_attn_indexes": (1,),
        "use_rel_pos": False,
        "use_abs_pos": True,
        "neck_chans": 0,
    }
    reference = noisy(VisionTransformerSAM(**sizes, **plan))
    options = {"variant": "sam_b16", "image_size": side, "window": window, "global_blocks": (1,)}
    model = noisy(small(**options))
    state = {k: v for k, v in reference.state_dict().items() if k.startswith(("patch_embed", "blocks"))}
    state["pos_embed"] = reference.pos_embed.flatten(1, 2)
    missing = model.load_state_dict(state, strict=False)
    assert set(missing.missing_keys) == {"norm.weight", "norm.bias", "head.weight", "head.bias"}
    assert not missing.unexpected_keys
    images = torch.randn(2, 3, side, side)
    with torch.no_grad():
        tokens = model(images, output="tokens", blocks=(2,), block_norm=False).blocks[2]
        expected = reference.blocks(reference.patch_embed(images) + reference.pos_embed)
    torch.testing.assert_close(tokens, expected.flatten(1, 2), atol=1e-4, rtol=1e-4)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_windows_there_and_back(rows, columns, side):
    x = torch.randn(2, rows * columns, 3)
    windows = to_windows(x, (rows, columns), side)
    count = -(-rows // side) * -(-columns // side)
    assert windows.shape == (2 * count, side * side, 3)
    assert torch.equal(from_windows(windows, (rows, columns), side), x)
    assert windows.sum().item() == pytest.approx(x.sum().item(), abs=1e-4)


def test_a_window_over_the_whole_grid_is_global_attention():
    whole = noisy(small(variant="sam_b16", window=4, global_blocks=()))
    plain = small(variant="sam_b16", window=0).eval()
    plain.load_state_dict(whole.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(whole(IMAGES), plain(IMAGES), atol=1e-5, rtol=1e-5)


# Capture


def test_capture_of_blocks_and_attention():
    model = noisy(small(variant="dinov3_b16"))
    with torch.no_grad():
        plain = model(IMAGES)
        taken = model(IMAGES, blocks=(0, -1), attention=(1,))
        tokens = model(IMAGES, output="tokens")
    torch.testing.assert_close(taken.output, plain, atol=1e-5, rtol=1e-5)
    assert sorted(taken.blocks) == [0, 2]
    torch.testing.assert_close(taken.blocks[2], tokens, atol=1e-5, rtol=1e-5)
    assert list(taken.attention) == [1]
    assert taken.attention[1].shape == (2, 4, 21, 21)
    torch.testing.assert_close(taken.attention[1].sum(-1), torch.ones(2, 4, 21))
    with pytest.raises(ValueError, match=r"forward\(blocks=\[3\]\): this model has blocks 0 to 2"):
        model(IMAGES, blocks=(3,))
    windowed = small(variant="sam_b16", window=2, global_blocks=(1,))
    with pytest.raises(ValueError, match="only blocks without windows"):
        windowed(IMAGES, attention=(0,))


def test_capture_equals_timms_attention(monkeypatch):
    net = timm.create_model("vit_base_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=4)
    noisy(net)
    seen = []
    for block in net.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda module, args, output: seen.append(output))
    net(IMAGES)
    model = small().eval()
    model.load_state_dict({k: v for k, v in net.state_dict().items() if not k.startswith("head")}, strict=False)
    taken = model(IMAGES, attention=(0, 1, 2))
    for i in range(3):
        torch.testing.assert_close(taken.attention[i], seen[i], atol=1e-5, rtol=1e-5)


# Masks and kept patches


def test_mask_token_stands_for_masked_patches():
    model = noisy(small(mask_token=True))
    masked = torch.zeros(2, 16, dtype=torch.bool)
    with torch.no_grad():
        torch.testing.assert_close(model(IMAGES, masked=masked), model(IMAGES))
        masked[:, 5] = True
        changed = IMAGES.clone()
        changed[:, :, 8:16, 8:16] = 9.0
        assert torch.equal(model(IMAGES, masked=masked), model(changed, masked=masked))
        assert not torch.equal(model(IMAGES, masked=masked), model(IMAGES))
    with pytest.raises(ValueError, match=r"set model\.mask_token=true"):
        small()(IMAGES, masked=masked)
    with pytest.raises(ValueError, match=r"masked must be bool \[2, 16\], got torch.int64"):
        model(IMAGES, masked=masked.long())


def test_kept_patches_ignore_the_rest():
    model = noisy(small(variant="eva02_b16"))
    keep = torch.tensor([[3, 0, 7], [1, 2, 15]])
    changed = IMAGES.clone()
    changed[:, :, 8:16, :8] = 5.0  # patch 4 is kept nowhere
    with torch.no_grad():
        tokens = model(IMAGES, keep=keep, output="tokens")
        assert tokens.shape == (2, 1 + 3, 48)
        assert torch.equal(tokens, model(changed, keep=keep, output="tokens"))
    with pytest.raises(ValueError, match=r"keep must be int64 \[2, K\], got torch.bool"):
        model(IMAGES, keep=torch.ones(2, 16, dtype=torch.bool))
    windowed = small(variant="sam_b16", window=2, global_blocks=(1,))
    with pytest.raises(ValueError, match=r"forward\(keep=...\): windows need the whole grid"):
        windowed(IMAGES, keep=keep)


# Rotary positions


@pytest.mark.parametrize("grid", [(4, 4), (3, 7), (7, 3), (1, 5)])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rope_tables_equal_timm(grid, layout):
    half = layout == "half"
    common = {"feat_shape": grid, "rotate_half": half}
    centered = RotaryEmbeddingDinoV3(16, temperature=100.0, **common).get_embed()
    ours = rope_table(grid, 16, kind="centered", temperature=100.0, layout=layout, reference=0, prefix=2)
    torch.testing.assert_close(ours[2:], centered, atol=1e-6, rtol=1e-6)
    index = RotaryEmbeddingCat(16, temperature=10000.0, in_pixels=False, ref_feat_shape=(16, 16), **common).get_embed()
    ours = rope_table(grid, 16, kind="index", temperature=10000.0, layout=layout, reference=16, prefix=2)
    torch.testing.assert_close(ours[2:], index, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_prefix_tokens_are_never_rotated_and_scores_depend_on_distance_only(layout):
    table = rope_table((5, 5), 16, kind="index", temperature=100.0, layout=layout, reference=0, prefix=3)
    x = torch.randn(1, 1, 28, 16)
    assert torch.equal(rotate(x, table, layout)[:, :, :3], x[:, :, :3])
    query, key = (torch.randn(16).expand(1, 1, 28, 16) for _ in range(2))
    scores = (rotate(query, table, layout) @ rotate(key, table, layout).transpose(-1, -2))[0, 0, 3:, 3:]
    scores = scores.reshape(5, 5, 5, 5)  # row and column of the query, row and column of the key
    torch.testing.assert_close(scores[1, 2, 0, 1], scores[3, 4, 2, 3], atol=1e-4, rtol=1e-4)
    assert not torch.isclose(scores[1, 2, 0, 1], scores[0, 1, 1, 2])


def test_rope_tables_made_in_inference_mode_serve_training():
    model = small(variant="dinov3_b16")
    with torch.inference_mode():
        model(IMAGES)
    model(IMAGES).sum().backward()


# Other sizes on the fly


@pytest.mark.parametrize("variant", ["vit_b16", "mae_b16", "dinov3_b16", "eva02_b16"])
def test_other_sizes_equal_a_model_built_for_them(variant):
    model = noisy(small(variant=variant, dynamic_size=True))
    larger = small(variant=variant, image_height=48, image_width=24).eval()
    state = model.state_dict()
    if "pos_embed" in state:
        table = model._table((6, 3))
        state["pos_embed"] = table.detach()
    larger.load_state_dict(state)
    images = torch.randn(2, 3, 48, 24)
    with torch.no_grad():
        torch.testing.assert_close(model(images), larger(images), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"images are 36 x 24 pixels, not divisible by the patch"):
        model(torch.randn(1, 3, 36, 24))


# Drop-path


def test_drop_path_rates():
    linear = small(drop_path=0.2).arch.path_rates()
    assert linear == pytest.approx([0.0, 0.1, 0.2])
    assert small(drop_path=0.2, drop_path_mode="constant").arch.path_rates() == pytest.approx([0.2] * 3)


@pytest.mark.parametrize("skip", [False, True])
def test_drop_path_keeps_the_expectation(skip):
    torch.manual_seed(0)
    x = torch.zeros(8, 2, 3)
    runs = [residual(x, lambda y, c: torch.ones_like(y), Context(), rate=0.25, skip=skip) for _ in range(400)]
    values = torch.stack(runs)
    factors = values.unique().tolist()
    assert factors == pytest.approx([0.0, 8 / 6 if skip else 1 / 0.75])
    assert values.mean().item() == pytest.approx(1.0, abs=0.05)
    assert (values == values[:, :, :1, :1]).all()  # whole samples
    if skip:
        assert ((values[:, :, 0, 0] > 0).sum(1) == 6).all()


def test_skipping_drop_path_computes_less_and_gathers_rope():
    sizes = []
    model = small(variant="dinov3_b16", drop_path=0.5, drop_path_mode="constant", drop_path_skip=True).train()
    model.blocks[0].attn.register_forward_hook(lambda module, args, output: sizes.append(args[0].shape[0]))
    keep = torch.stack([torch.randperm(16)[:4] for _ in range(8)])
    model(torch.randn(8, 3, 32, 32), keep=keep).sum().backward()
    assert sizes == [4]


# Initialisation


def test_initialisations():
    torch.manual_seed(0)
    timm_like = small(width=192).blocks[0].attn.qkv
    assert timm_like.weight.std().item() == pytest.approx(0.02, rel=0.05)
    mae = small(width=192, init="mae")
    bound = math.sqrt(6 / (4 * 192))
    assert bound * 0.99 < mae.blocks[0].attn.qkv.weight.abs().max() <= bound
    assert mae.patch_embed.proj.weight.abs().max() <= math.sqrt(6 / (192 + 192))
    assert mae.cls_token.std().item() == pytest.approx(0.02, rel=0.3)
    jax = small(width=192, init="jax")
    bound = math.sqrt(6 / (2 * 192))
    assert bound * 0.99 < jax.blocks[0].attn.qkv.weight.abs().max() <= bound
    assert jax.patch_embed.proj.weight.std().item() == pytest.approx(math.sqrt(1 / 192), rel=0.05)
    assert 0 < jax.blocks[0].mlp.fc1.bias.abs().max() < 1e-5
    assert not jax.cls_token.any()
    assert not jax.patch_embed.proj.bias.any()
    prior = small(head_bias=-6.9, zero_head=True)
    assert torch.equal(prior(IMAGES), torch.full((2, 7), -6.9))
    assert small(width=192, head_std=2e-5).head.weight.std().item() == pytest.approx(2e-5, rel=0.1)


def test_pre_head_layer():
    model = noisy(small(pre_head="tanh"))
    with torch.no_grad():
        pooled = model(IMAGES, output="pooled")
        expected = torch.tanh(model.pre_logits(model(IMAGES, output="tokens")[:, 0]))
    assert torch.equal(pooled, expected)
    assert {"pre_logits.weight", "pre_logits.bias"} <= set(model.state_dict())


@pytest.mark.parametrize("variant", ["vit_b16", "dinov3_b16", "siglip_b16"])
def test_compiles_without_a_graph_break(variant):
    model = noisy(small(variant=variant, depth=1))
    with torch.no_grad():
        logits = torch.compile(model, fullgraph=True, backend="eager")(IMAGES)
        torch.testing.assert_close(logits, model(IMAGES), atol=1e-5, rtol=1e-5)


def test_activation_checkpointing_and_copies_change_nothing():
    model = small(variant="dinov3_b16", drop_path=0.5, drop_path_mode="constant")
    torch.manual_seed(0)
    model(IMAGES).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    twin = copy.deepcopy(model)
    twin.zero_grad()
    apply_activation_checkpointing(twin, check_fn=lambda module: isinstance(module, Block))
    torch.manual_seed(0)
    twin(IMAGES).square().sum().backward()
    for gradient, parameter in zip(expected, twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert list(parameter_layers(twin).values()) == list(parameter_layers(model).values())
