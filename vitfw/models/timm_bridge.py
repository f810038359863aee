"""Between timm's classes and ours: read a timm model's architecture, and say which timm model holds our weights.

timm has two ViT classes: `VisionTransformer` (with `VisionTransformerDistilled`) and `Eva` (rotary positions, no key
bias, split SwiGLU). Our names are those of the first; Eva's differ in the residual factors and in separate projections.
"""

import re
from typing import Any

import torch
from torch import Tensor, nn

from vitfw.models.architecture import Activation, Architecture

State = dict[str, Tensor]

_ACTIVATIONS: dict[str, Activation] = {
    "GELU": "gelu",
    "GELUTanh": "gelu_tanh",
    "QuickGELU": "quick_gelu",
    "ReLU": "relu",
    "SiLU": "silu",
}
_BACK = {"gelu": "gelu", "gelu_tanh": "gelu_tanh", "quick_gelu": "quick_gelu", "relu": "relu", "silu": "silu"}


def read_architecture(net: nn.Module) -> Architecture:
    """The architecture of a timm `VisionTransformer`, `VisionTransformerDistilled` or `Eva`.

    Raises ValueError naming the part, if the model has one that ours has not.
    """
    kind = type(net).__name__
    if kind not in ("VisionTransformer", "VisionTransformerDistilled", "Eva"):
        raise ValueError(f"timm's {kind} has no counterpart among vitfw's models; build it as model.variant=timm:NAME")
    model: Any = net
    block = model.blocks[0]
    values = _token_values(model) | _block_values(block) | _norm_values(model, block)
    if model.pos_embed is None:
        values["position"] = "none"
    if kind == "Eva" and model.rope is not None:
        values |= _rope_values(model)
    return Architecture(**values)


def _token_values(model: Any) -> dict[str, Any]:
    pools = {"token": "cls", "avg": "gap", "map": "map"}
    if model.global_pool not in pools:
        raise ValueError(f"timm's global_pool={model.global_pool!r} has no counterpart; use token, avg or map")
    prefix = model.num_prefix_tokens
    pools_prefix = getattr(model, "pool_include_prefix", type(model).__name__ == "Eva" and model.global_pool == "map")
    if pools_prefix and prefix:
        raise ValueError("this timm model pools its class and register tokens too; ours pools patches only")
    distilled = getattr(model, "dist_token", None) is not None
    return {
        "image": tuple(model.patch_embed.img_size),
        "patch": tuple(model.patch_embed.patch_size),
        "in_channels": model.patch_embed.proj.in_channels,
        "patch_bias": model.patch_embed.proj.bias is not None,
        "width": model.embed_dim,
        "depth": len(model.blocks),
        "class_token": model.cls_token is not None,
        "distillation_token": distilled,
        "registers": 0 if model.reg_token is None else model.reg_token.shape[1],
        "position_prefix": not model.no_embed_class,
        "pool": pools[model.global_pool],
    }


def _block_values(block: Any) -> dict[str, Any]:
    kind = type(block).__name__
    if kind == "ParallelScalingBlock":
        return {
            "heads": block.num_heads,
            "mlp_hidden": block.mlp_out_proj.in_features
            if block.mlp_out_proj is not None
            else _refuse("fuse_out_proj"),
            "activation": _activation(block.mlp_act),
            "parallel": True,
            "qkv_bias": "qkv" if block.in_proj.bias is not None else "none",
            "proj_bias": block.attn_out_proj.bias is not None,
            "qk_norm": not isinstance(block.q_norm, nn.Identity),
            "layer_scale": None if isinstance(block.ls, nn.Identity) else block.ls.init_values,
        }
    if kind not in ("Block", "EvaBlock"):
        _refuse(kind)
    attention, mlp = block.attn, block.mlp
    if type(attention).__name__ not in ("Attention", "EvaAttention", "AttentionRope") or attention.gate is not None:
        _refuse(type(attention).__name__)
    mlps = {"Mlp": "mlp", "GluMlp": "swiglu", "SwiGLU": "swiglu_split"}
    if type(mlp).__name__ not in mlps:
        _refuse(type(mlp).__name__)
    gated = type(mlp).__name__ != "Mlp"
    if gated and _activation(mlp.act) != "silu":
        _refuse(f"a gated MLP with {type(mlp.act).__name__}")
    layer_scale = block.init_values if kind == "EvaBlock" else getattr(block.ls1, "init_values", None)
    return {
        "heads": attention.num_heads,
        "mlp_hidden": mlp.fc2.in_features,
        "mlp": mlps[type(mlp).__name__],
        "mlp_norm": not isinstance(mlp.norm, nn.Identity),
        "activation": "gelu" if gated else _activation(mlp.act),
        "qkv_bias": _qkv_bias(attention),
        "proj_bias": attention.proj.bias is not None,
        "qk_norm": not isinstance(attention.q_norm, nn.Identity),
        "attention_norm": not isinstance(attention.norm, nn.Identity),
        "layer_scale": layer_scale,
    }


def _qkv_bias(attention: Any) -> str:
    if getattr(attention, "q_bias", None) is not None:
        return "qv"
    if attention.qkv is not None:
        return "qkv" if attention.qkv.bias is not None else "none"
    query, key = attention.q_proj.bias is not None, attention.k_proj.bias is not None
    return {(True, True): "qkv", (True, False): "qv", (False, False): "none"}[query, key]


def _norm_values(model: Any, block: Any) -> dict[str, Any]:
    norm = block.in_norm if hasattr(block, "in_norm") else block.norm1
    kinds = {"LayerNorm": "layernorm", "RmsNorm": "rmsnorm"}
    if type(norm).__name__ not in kinds:
        _refuse(type(norm).__name__)
    on_tokens, on_pooled = (not isinstance(part, nn.Identity) for part in (model.norm, model.fc_norm))
    if on_tokens == on_pooled:
        _refuse("both final norms" if on_tokens else "no final norm")
    return {
        "norm": kinds[type(norm).__name__],
        "norm_eps": norm.eps,
        "final_norm": "tokens" if on_tokens else "pooled",
        "pre_norm": not isinstance(model.norm_pre, nn.Identity),
    }


def _rope_values(model: Any) -> dict[str, Any]:
    rope = model.rope
    kinds = {"RotaryEmbeddingDinoV3": "centered", "RotaryEmbeddingCat": "index"}
    if type(rope).__name__ not in kinds or rope.grid_offset or rope.grid_indexing != "ij":
        _refuse(type(rope).__name__)
    reference = getattr(rope, "ref_feat_shape", None) or (0, 0)
    if reference[0] != reference[1] or getattr(rope, "in_pixels", False):
        _refuse("rotary positions in pixels or with a rectangular reference")
    return {
        "rope": kinds[type(rope).__name__],
        "rope_temperature": float(rope.temperature),
        "rope_layout": "half" if model.blocks[0].attn.rotate_half else "interleaved",
        "rope_reference": reference[0],
    }


def _activation(module: nn.Module) -> Activation:
    name = type(module).__name__
    if name not in _ACTIVATIONS:
        _refuse(name)
    if isinstance(module, nn.GELU) and module.approximate == "tanh":
        return "gelu_tanh"
    return _ACTIVATIONS[name]


def _refuse(part: str) -> Any:
    raise ValueError(f"this timm model has {part}, which vitfw's ViT has not; build it as model.variant=timm:NAME")


def timm_arguments(arch: Architecture) -> tuple[str, dict[str, Any]]:
    """The timm entry point and keyword arguments (all of them plain values) of the same network.

    Raises ValueError naming the key, if timm has no such network.
    """
    for key, present in {
        "window": arch.window,
        "pre_head": arch.pre_head != "none",
        "norm_bias": not arch.norm_bias,
        "position": arch.position == "factorised",
        "patch_bias": arch.patch_bias == arch.pre_norm,
    }.items():
        if present:
            raise ValueError(f"model.{key}={getattr(arch, key)!r}: timm has no such model, so there is no export to it")
    eva = arch.rope != "none" or arch.qkv_bias == "qv" or arch.mlp == "swiglu_split"
    entry = _eva_entry(arch) if eva else _vit_entry(arch)
    arguments = {
        "img_size": arch.image,
        "patch_size": arch.patch,
        "in_chans": arch.in_channels,
        "embed_dim": arch.width,
        "depth": arch.depth,
        "num_heads": arch.heads,
        "mlp_ratio": _ratio(arch, 2 if not eva and arch.mlp == "swiglu" else 1),
        "qkv_bias": arch.qkv_bias != "none",
        "qk_norm": arch.qk_norm,
        "init_values": arch.layer_scale,
        "class_token": arch.class_token,
        "no_embed_class": not arch.position_prefix,
        "global_pool": {"cls": "token", "gap": "avg", "map": "map"}[arch.pool],
        "dynamic_img_size": arch.dynamic_size,
    }
    return entry, arguments | (_eva_arguments(arch) if eva else _vit_arguments(arch))


def _vit_entry(arch: Architecture) -> str:
    """timm takes norm and block classes from the entry point, so it must be one that has the right ones."""
    if arch.parallel:
        return "vit_base_patch16_xp_224"
    eps = {1e-6: "vit_base_patch16_224", 1e-5: "vit_base_patch16_clip_224"}
    if arch.mlp == "swiglu":
        eps = {1e-6: "vit_giant_patch14_dinov2"}
    if arch.distillation_token:
        if arch.registers:
            raise ValueError(f"model.registers={arch.registers}: timm's distilled model has no registers")
        eps = {1e-6: "deit_base_distilled_patch16_224"}
    if arch.norm == "rmsnorm" and arch.norm_eps != 1e-6:
        eps = {}
    if arch.norm_eps not in eps:
        raise ValueError(
            f"model.norm_eps={arch.norm_eps}: timm has no entry point for it with these blocks; known: {list(eps)}"
        )
    return eps[arch.norm_eps]


def _vit_arguments(arch: Architecture) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "pos_embed": "none" if arch.position == "none" else "learn",
        "pre_norm": arch.pre_norm,
        "fc_norm": arch.final_norm == "pooled",
        "proj_bias": arch.proj_bias,
        "scale_attn_norm": arch.attention_norm,
        "scale_mlp_norm": arch.mlp_norm,
        "act_layer": "silu" if arch.mlp == "swiglu" else _BACK[arch.activation],
    }
    if not arch.distillation_token:
        arguments["reg_tokens"] = arch.registers
    if arch.norm == "rmsnorm" or arch.parallel:
        arguments["norm_layer"] = arch.norm
    return arguments


def _eva_entry(arch: Architecture) -> str:
    for key, present in {
        "distillation_token": arch.distillation_token,
        "norm": arch.norm != "layernorm",
        "proj_bias": not arch.proj_bias,
        "activation": arch.mlp == "mlp" and arch.activation != "gelu",
        "pool": arch.pool == "map" and arch.prefix > 0,
        "mlp_norm": arch.mlp == "swiglu" and arch.mlp_norm,
    }.items():
        if present:
            raise ValueError(
                f"model.{key}={getattr(arch, key)!r}: timm's Eva cannot have it, so there is no export to it"
            )
    entries = {1e-6: "eva02_base_patch14_224", 1e-5: "vit_base_patch16_dinov3"}
    if arch.norm_eps not in entries:
        raise ValueError(f"model.norm_eps={arch.norm_eps}: timm's Eva has entry points for {list(entries)} only")
    return entries[arch.norm_eps]


def _eva_arguments(arch: Architecture) -> dict[str, Any]:
    return {
        "num_reg_tokens": arch.registers,
        "qkv_fused": True,
        "attn_type": "rope" if arch.qkv_bias == "qkv" else "eva",
        "swiglu_mlp": arch.mlp != "mlp",
        "swiglu_align_to": 1 if arch.mlp == "swiglu_split" else 0,  # any alignment selects split matrices
        "scale_mlp": arch.mlp_norm,
        "scale_attn_inner": arch.attention_norm,
        "use_abs_pos_emb": arch.position != "none",
        "use_rot_pos_emb": arch.rope != "none",
        "rope_type": "dinov3" if arch.rope == "centered" else "cat",
        "rope_temperature": arch.rope_temperature,
        "rope_rotate_half": arch.rope_layout == "half",
        "ref_feat_shape": (arch.rope_reference, arch.rope_reference) if arch.rope_reference else None,
        "use_pre_transformer_norm": arch.pre_norm,
        "use_post_transformer_norm": arch.final_norm == "tokens",
        "use_fc_norm": arch.final_norm == "pooled",
    }


def _ratio(arch: Architecture, matrices: int) -> float:
    """A ratio from which timm's int(width * ratio) gives the hidden width back exactly."""
    hidden = arch.mlp_hidden * matrices
    ratio = hidden / arch.width
    return ratio if int(arch.width * ratio) == hidden else (hidden + 0.5) / arch.width


def from_eva(state: State) -> State:
    """Eva's names -> ours: residual factors `gamma_i`, and separate query, key, value projections fused."""
    fused: State = {}
    groups: dict[tuple[str, str], dict[str, Tensor]] = {}
    for name, value in state.items():
        separate = re.fullmatch(r"(.*\.attn\.)([qkv])_proj\.(weight|bias)", name)
        if separate:
            groups.setdefault((separate[1], separate[3]), {})[separate[2]] = value
        else:
            fused[re.sub(r"\.gamma_([12])$", r".ls\1.gamma", name)] = value
    for (place, kind), parts in groups.items():
        if kind == "bias" and "k" not in parts:  # no key bias: kept apart, so that training cannot create one
            fused[f"{place}q_bias"], fused[f"{place}v_bias"] = parts["q"], parts["v"]
        else:
            suffix = f"qkv.{kind}"
            fused[place + suffix] = torch.cat([parts["q"], parts["k"], parts["v"]])
    return fused


def to_eva(state: State) -> State:
    """Our names -> those of an Eva with fused projections."""
    return {re.sub(r"\.ls([12])\.gamma$", r".gamma_\1", name): value for name, value in state.items()}


def to_timm(state: State, arch: Architecture) -> State:
    """Our state dict -> that of `timm_arguments(arch)`; a mask token, which timm has not, stays behind."""
    entry, _ = timm_arguments(arch)
    kept = {name: value for name, value in state.items() if name != "mask_token"}
    return to_eva(kept) if entry in ("eva02_base_patch14_224", "vit_base_patch16_dinov3") else kept
