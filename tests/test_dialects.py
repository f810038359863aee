"""Names of other code bases: each family's published layout, made from a random model and read back."""

import argparse
import json
import re

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from vitfw.models.build import build_model
from vitfw.models.timm_bridge import read_architecture
from vitfw.models.variants import ModelConfig
from vitfw.models.vit import ViT
from vitfw.models.weights import load

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
