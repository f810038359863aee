"""Names of other code bases -> ours (timm's). Each dialect is recognised by a name only it has.

A dialect may also say what the files of its family imply but do not store: the epsilon of the norms, say.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vitfw.models.timm_bridge import from_eva

State = dict[str, Tensor]

# What a name ends with, if the part before it is a wrapper's prefix; most telling first.
ANCHORS = (
    "patch_embed.proj.weight",
    "embeddings.patch_embeddings.projection.weight",
    "conv1.weight",
)
WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module"}

# Parts that pretraining leaves behind and a backbone has no use for.
PRETRAINING = re.compile(
    r"(decoder_\w+|decoder|dino_head|ibot_head|lm_head|projectors|local_cls_norm|projector|predictor)\b.*"
    r"|(rope|rope_embed)\.(periods|freqs|bands)|.*\.bias_mask|.*\.relative_position_index|embeddings\.mask_token|pooler\..*"
)


@dataclass(frozen=True)
class Translated:
    """State with our names; dropped: pretraining parts left out; implied: architecture facts of the family."""

    state: State
    dialect: str
    dropped: tuple[str, ...] = ()
    implied: dict[str, Any] = field(default_factory=dict)


def unwrap(state: State) -> State:
    """Takes the names of wrappers (DDP, compile, checkpointing, sharding) out, wherever in a name they stand."""
    return {".".join(part for part in name.split(".") if part not in WRAPPERS): value for name, value in state.items()}


def prefixes(state: State) -> list[str]:
    """The prefixes under which a ViT lies in the state, such as "model.backbone."; a name without prefix gives ""."""
    for anchor in ANCHORS:
        found = {name.removesuffix(anchor) for name in state if name == anchor or name.endswith("." + anchor)}
        if anchor == "conv1.weight":  # also the stem of a ResNet; a CLIP tower has a class embedding beside it
            found = {prefix for prefix in found if f"{prefix}class_embedding" in state}
        if found:
            return sorted(found)
    return []


def translate(state: State) -> Translated:
    """State without prefix, in any known dialect -> our names."""
    implied: dict[str, Any] = {}
    dialect = "timm"
    if any(name.endswith("embedding/kernel") for name in state):
        state, dialect, implied = _from_jax(state), "jax", {"norm_eps": 1e-6}
    elif "class_embedding" in state:
        state, dialect, implied = _from_clip(state), "clip", {"norm_eps": 1e-5}
    elif "embeddings.patch_embeddings.projection.weight" in state:
        state, dialect = from_transformers(state), "transformers"
    elif "storage_tokens" in state:
        state, dialect, implied = _from_dinov3(state), "dinov3", {"norm_eps": 1e-5, "rope": "centered"}
    elif "register_tokens" in state or any(".mlp.w12." in name for name in state) or _chunked(state):
        state, dialect, implied = _from_dinov2(state), "dinov2", {"norm_eps": 1e-6}
    elif any(re.search(r"\.gamma_[12]$|\.attn\.[qkv]_proj\.weight$", name) for name in state):
        state, dialect = from_eva(state), "eva or deit3"
    elif any(name.startswith("decoder_blocks.") for name in state):
        dialect, implied = "mae", {"norm_eps": 1e-6}
    dropped = tuple(name for name in state if PRETRAINING.fullmatch(name))
    kept = {name: value for name, value in state.items() if name not in dropped}
    return Translated(kept, dialect, dropped, implied)


def _rename(state: State, rules: list[tuple[str, str]]) -> State:
    renamed: State = {}
    for name, value in state.items():
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        renamed[name] = value
    return renamed


def _chunked(state: State) -> bool:
    return any(re.match(r"blocks\.\d+\.\d+\.", name) for name in state)


def _from_dinov2(state: State) -> State:
    """DINOv2's published files: registers under their own name, SwiGLU matrices w12 and w3, blocks in chunks.

    With registers its position table covers the class token only; the loader folds that row as the model needs it.
    """
    rules = [
        (r"^register_tokens$", "reg_token"),
        (r"^blocks\.\d+\.(\d+)\.", r"blocks.\1."),
        (r"\.mlp\.w12\.", ".mlp.fc1."),
        (r"\.mlp\.w3\.", ".mlp.fc2."),
    ]
    return _rename(state, rules)


def _from_dinov3(state: State) -> State:
    """DINOv3's published files. The key third of a qkv bias is masked to zero there, so it is left out."""
    rules = [
        (r"^storage_tokens$", "reg_token"),
        (r"^blocks\.\d+\.(\d+)\.", r"blocks.\1."),
        (r"\.mlp\.w1\.", ".mlp.fc1_g."),
        (r"\.mlp\.w2\.", ".mlp.fc1_x."),
        (r"\.mlp\.w3\.", ".mlp.fc2."),
    ]
    renamed: State = {}
    for name, value in _rename(state, rules).items():
        if name.endswith(".attn.qkv.bias"):
            query, _, key_value = value.chunk(3)
            place = name.removesuffix("qkv.bias")
            renamed[f"{place}q_bias"], renamed[f"{place}v_bias"] = query, key_value
        else:
            renamed[name] = value
    return renamed


def _from_clip(state: State) -> State:
    """OpenAI's image tower (prefix `visual.`); its projection becomes a head without bias."""
    rules = [
        (r"^conv1\.", "patch_embed.proj."),
        (r"^class_embedding$", "cls_token"),
        (r"^positional_embedding$", "pos_embed"),
        (r"^transformer\.resblocks\.", "blocks."),
        (r"^ln_pre\.", "norm_pre."),
        (r"^ln_post\.", "norm."),
        (r"\.ln_([12])\.", r".norm\1."),
        (r"\.in_proj_(weight|bias)$", r".qkv.\1"),
        (r"\.out_proj\.", ".proj."),
        (r"\.c_fc\.", ".fc1."),
        (r"\.c_proj\.", ".fc2."),
    ]
    renamed = _rename(state, rules)
    renamed["cls_token"] = renamed["cls_token"].reshape(1, 1, -1)
    renamed["pos_embed"] = renamed["pos_embed"][None]
    if "proj" in renamed:
        renamed["head.weight"] = renamed.pop("proj").T.contiguous()
        renamed["head.bias"] = torch.zeros(len(renamed["head.weight"]))
    return renamed


def from_transformers(state: State) -> State:
    """ViT, DeiT and DINOv2 as the transformers library names them."""
    rules = [
        (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
        (r"^embeddings\.cls_token$", "cls_token"),
        (r"^embeddings\.distillation_token$", "dist_token"),
        (r"^embeddings\.register_tokens$", "reg_token"),
        (r"^embeddings\.position_embeddings$", "pos_embed"),
        (r"^encoder\.layer\.", "blocks."),
        (r"\.attention\.attention\.(query|key|value)\.", r".attn.\1."),
        (r"\.attention\.output\.dense\.", ".attn.proj."),
        (r"\.layernorm_before\.", ".norm1."),
        (r"\.layernorm_after\.", ".norm2."),
        (r"\.intermediate\.dense\.", ".mlp.fc1."),
        (r"^(blocks\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
        (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
        (r"\.mlp\.weights_in\.", ".mlp.fc1."),
        (r"\.mlp\.weights_out\.", ".mlp.fc2."),
        (r"^layernorm\.", "norm."),
        (r"^(cls_)?classifier\.", "head."),
        (r"^distillation_classifier\.", "head_dist."),
    ]
    renamed = _rename(state, rules)
    for name in [name for name in renamed if ".attn.query." in name]:
        parts = [renamed.pop(name.replace(".query.", f".{part}.")) for part in ("query", "key", "value")]
        renamed[name.replace(".query.", ".qkv.")] = torch.cat(parts)
    return renamed


def _from_jax(arrays: State) -> State:
    """The original JAX files: vit_jax (encoderblock_i, LayerNorm_0 and _2) and big_vision (params/, scanned or not).

    Kernels are (inputs..., outputs...); attention kernels have a head axis; scanned blocks a leading block axis.
    """
    root = next(name.removesuffix("embedding/kernel") for name in arrays if name.endswith("embedding/kernel"))
    flat = {name.removeprefix(root): value for name, value in arrays.items() if name.startswith(root)}
    blocks = _jax_blocks(flat)
    state: State = {
        "patch_embed.proj.weight": flat["embedding/kernel"].permute(3, 2, 0, 1).contiguous(),
        "patch_embed.proj.bias": flat["embedding/bias"],
    }
    for ours, theirs in {"cls_token": "cls", "head": "head", "pre_logits": "pre_logits"}.items():
        if theirs in flat:
            state[ours] = flat[theirs].reshape(1, 1, -1)
        elif f"{theirs}/kernel" in flat:
            state |= _jax_linear(flat, theirs, ours)
    for name in ("pos_embedding", "Transformer/posembed_input/pos_embedding"):
        if name in flat:
            state["pos_embed"] = flat[name].reshape(1, -1, flat[name].shape[-1])
    state |= _jax_norm(flat, "Transformer/encoder_norm", "norm")
    for index, block in enumerate(blocks):
        state |= _jax_block(block, f"blocks.{index}.")
    if "MAPHead_0/probe" in flat:
        state |= _jax_pool({n.removeprefix("MAPHead_0/"): v for n, v in flat.items() if n.startswith("MAPHead_0/")})
    return state


def _jax_blocks(flat: State) -> list[State]:
    scanned = "Transformer/encoderblock/"
    inner = {name.removeprefix(scanned): value for name, value in flat.items() if name.startswith(scanned)}
    if inner:
        return [{name: value[i] for name, value in inner.items()} for i in range(len(next(iter(inner.values()))))]
    numbers = {int(m[1]) for name in flat if (m := re.match(r"Transformer/encoderblock_(\d+)/", name))}
    return [
        {n.split("/", 2)[2]: v for n, v in flat.items() if n.startswith(f"Transformer/encoderblock_{i}/")}
        for i in sorted(numbers)
    ]


def _jax_block(block: State, to: str) -> State:
    """Sub-modules are numbered by creation in flax; only their order within a kind is common to both code bases."""
    first, second = sorted({n.split("/")[0] for n in block if n.startswith("LayerNorm_")})
    attention = next(n.split("/")[0] for n in block if n.startswith("MultiHeadDotProductAttention_"))
    mlp = next(n.split("/")[0] for n in block if n.startswith("MlpBlock_"))
    parts = [_jax_attention_input(block, attention, part) for part in ("query", "key", "value")]
    out = block[f"{attention}/out/kernel"]
    return {
        **_jax_norm(block, first, f"{to}norm1"),
        f"{to}attn.qkv.weight": torch.cat([weight for weight, _ in parts]),
        f"{to}attn.qkv.bias": torch.cat([bias for _, bias in parts]),
        f"{to}attn.proj.weight": out.flatten(0, 1).T.contiguous(),
        f"{to}attn.proj.bias": block[f"{attention}/out/bias"],
        **_jax_norm(block, second, f"{to}norm2"),
        **_jax_linear(block, f"{mlp}/Dense_0", f"{to}mlp.fc1"),
        **_jax_linear(block, f"{mlp}/Dense_1", f"{to}mlp.fc2"),
    }


def _jax_pool(head: State) -> State:
    attention = "MultiHeadDotProductAttention_0"
    (query, query_bias), *pairs = [_jax_attention_input(head, attention, part) for part in ("query", "key", "value")]
    return {
        "attn_pool.latent": head["probe"].reshape(1, 1, -1),
        "attn_pool.q.weight": query,
        "attn_pool.q.bias": query_bias,
        "attn_pool.kv.weight": torch.cat([weight for weight, _ in pairs]),
        "attn_pool.kv.bias": torch.cat([bias for _, bias in pairs]),
        "attn_pool.proj.weight": head[f"{attention}/out/kernel"].flatten(0, 1).T.contiguous(),
        "attn_pool.proj.bias": head[f"{attention}/out/bias"],
        **_jax_norm(head, "LayerNorm_0", "attn_pool.norm"),
        **_jax_linear(head, "MlpBlock_0/Dense_0", "attn_pool.mlp.fc1"),
        **_jax_linear(head, "MlpBlock_0/Dense_1", "attn_pool.mlp.fc2"),
    }


def _jax_attention_input(arrays: State, place: str, part: str) -> tuple[Tensor, Tensor]:
    """Kernel [D, heads, head width] and bias [heads, head width] -> weight [D, D] and bias [D]."""
    return arrays[f"{place}/{part}/kernel"].flatten(1).T.contiguous(), arrays[f"{place}/{part}/bias"].flatten()


def _jax_linear(arrays: State, theirs: str, ours: str) -> State:
    return {f"{ours}.weight": arrays[f"{theirs}/kernel"].T.contiguous(), f"{ours}.bias": arrays[f"{theirs}/bias"]}


def _jax_norm(arrays: State, theirs: str, ours: str) -> State:
    return {f"{ours}.weight": arrays[f"{theirs}/scale"], f"{ours}.bias": arrays[f"{theirs}/bias"]}
