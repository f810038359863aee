"""Weights into a model: found, renamed, resized, checked, copied, and reported. Nothing is left out in silence."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitfw.models.architecture import Architecture
from vitfw.models.build import TimmModel
from vitfw.models.dialects import Translated, prefixes, translate, unwrap
from vitfw.models.fitting import MisfitError, fit_head, fit_patch_embed, fit_positions, fit_qkv_bias
from vitfw.models.load_report import BEHAVIOUR, LoadConfig, LoadReport, some
from vitfw.models.reading import NETWORKS, Source, State, read
from vitfw.models.vit import ViT

HEAD = re.compile(r"(head|head_dist|classifier|fc)\.(weight|bias)")
BESIDE_BACKBONE = re.compile(r"(head|head_dist|pre_logits|classifier|fc)\..*|mask_token")
MINIMUM_COVERAGE = 0.95


def load(model: nn.Module, place: str | Path, config: LoadConfig | None = None) -> LoadReport:
    """Copies weights from any place `reading.read` knows into a built `ViT` or `TimmModel`, and says what it did.

    Raises ValueError, and leaves the model as it was, if any part of the backbone stays without weights, the file has
    parts the model has not, shapes do not fit, or the file's network computes something else (epsilon, activation,
    heads, ...).
    """
    config = config or LoadConfig()
    return load_source(model, read(place, which=config.which, trust=config.trust), config)


def load_source(model: nn.Module, source: Source, config: LoadConfig) -> LoadReport:
    """`load` for a file that has been read."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            f"weights={source.place}: the model is on the meta device; call build.materialise before loading"
        )
    if isinstance(model, TimmModel):
        return _load_timm(model, source, config)
    if not isinstance(model, ViT):
        raise ValueError(f"weights={source.place}: a {type(model).__name__} is neither a ViT nor a TimmModel")
    state, prefix, outside = locate(unwrap(source.state), source, config)
    told = translate(state)
    _compare(model.arch, source, told, config.differ)
    return _apply(model, source, told, config, prefix, outside)


def locate(state: State, source: Source, config: LoadConfig) -> tuple[State, str, tuple[str, ...]]:
    """The network's own tensors without their prefix, the prefix, and the names outside it."""
    if any(name.endswith("embedding/kernel") for name in state):
        return state, "", ()
    found = prefixes(state)
    if config.prefix is not None:
        if not any(name.startswith(config.prefix) for name in state):
            raise ValueError(
                f"weights={source.place}: nothing under load.prefix={config.prefix!r}; there is {_roots(state)}"
            )
        found = [config.prefix]
    elif source.own:
        found = [name for name in NETWORKS if name in found][:1] or found
    if not found:
        raise ValueError(
            f"weights={source.place}: 0 of {len(state)} tensors can be placed: no patch embedding of a ViT among the "
            f"names; there is {_roots(state)}"
        )
    if len(found) > 1:
        raise ValueError(f"weights={source.place}: several networks, under {found}; choose one with load.prefix")
    prefix = found[0]
    inside = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    return inside, prefix, tuple(name for name in state if not name.startswith(prefix))


def _compare(arch: Architecture, source: Source, told: Translated, allowed: Sequence[str]) -> None:
    """Raises ValueError where the file's network is known to compute something else."""
    facts: dict[str, Any] = dict(told.implied)
    if source.architecture is not None:
        facts = {key: getattr(source.architecture, key) for key in BEHAVIOUR}
        if facts["mlp"] != "mlp":
            del facts["activation"]  # a gated MLP has its own
        if facts["rope"] == "none":
            facts = {key: value for key, value in facts.items() if not key.startswith("rope_")}
    wrong = [
        f"{key} is {value!r} in the file and {getattr(arch, key)!r} here"
        for key, value in facts.items()
        if key not in allowed and getattr(arch, key) != value
    ]
    if wrong:
        raise ValueError(
            f"weights={source.place}: the file's network computes something else: {'; '.join(wrong)}. Set model.KEY to "
            "the file's value, or name the key in load.differ if it is meant"
        )


def _apply(
    model: ViT, source: Source, told: Translated, config: LoadConfig, prefix: str, outside: tuple[str, ...]
) -> LoadReport:
    own = dict(model.state_dict(keep_vars=True))
    state, dropped = _without(told.state, config.ignore)
    resized: dict[str, str] = {}
    try:
        new_norm, old_norm = _final_norm(state, own, config)
        dropped += old_norm
        dropped += fit_qkv_bias(state, own)
        dropped += _mask_token(state, own, mae=told.dialect == "mae")
        fit_patch_embed(state, own, resized)
        fit_positions(state, model, source.architecture, config.grid, resized)
        dropped += fit_head(state, own, config.head, config.head_rows, resized)
    except MisfitError as error:
        raise ValueError(f"weights={source.place}: {error}") from None
    missing = [name for name in own if name not in state]
    fresh = [name for name in missing if HEAD.fullmatch(name) or name in new_norm or matches(name, config.fresh)]
    fresh += [name for name in missing if name == "mask_token"]
    _refuse_gaps(source, own, state, [name for name in missing if name not in fresh])
    taken = [name for name in own if name in state]
    coverage = _coverage(own, taken)
    if coverage < MINIMUM_COVERAGE:
        raise ValueError(
            f"weights={source.place}: the file has only {100 * coverage:.1f} % of the backbone's parameters, "
            f"{100 * MINIMUM_COVERAGE:.0f} % are needed; start without weights instead"
        )
    with torch.no_grad():
        for name in taken:
            own[name].copy_(state[name])
    if model.arch.zero_head:  # acts after loading too
        for name in [name for name in taken if HEAD.fullmatch(name)]:
            taken.remove(name)
            fresh.append(f"{name} (model.zero_head)")
        for head in [head for head in (model.head, model.head_dist) if head is not None]:
            head.reset_parameters()
    return LoadReport(
        source.place,
        source.entry,
        prefix,
        told.dialect,
        tuple(taken),
        resized,
        tuple(fresh),
        (*told.dropped, *dropped),
        outside,
        coverage,
        source.preprocessing,
    )


def _without(state: State, ignore: Sequence[str]) -> tuple[State, list[str]]:
    dropped = [name for name in state if matches(name, ignore)]
    return {name: value for name, value in state.items() if name not in dropped}, dropped


def _final_norm(state: State, own: Mapping[str, Tensor], config: LoadConfig) -> tuple[list[str], list[str]]:
    """The final norm may stand on the tokens (`norm`) or on the pooled vector (`fc_norm`).

    Returns the model's names that start fresh, and the file's that are left out.
    """
    for theirs, ours in (("norm", "fc_norm"), ("fc_norm", "norm")):
        if f"{theirs}.weight" not in state or f"{theirs}.weight" in own or f"{ours}.weight" not in own:
            continue
        if config.final_norm == "same":
            where = {"norm": "tokens", "fc_norm": "pooled"}
            raise MisfitError(
                f"the file's final norm is {theirs!r}, the model's {ours!r}: set model.final_norm={where[theirs]}, or "
                "load.final_norm=move (keep its numbers in the new place) or fresh (start it anew, as MAE does)"
            )
        names = [name for name in state if name.startswith(f"{theirs}.")]
        values = [state.pop(name) for name in names]
        if config.final_norm == "fresh":
            return [name for name in own if name.startswith(f"{ours}.")], names
        state.update({name.replace(theirs, ours, 1): value for name, value in zip(names, values, strict=True)})
    return [], []


def _mask_token(state: State, own: Mapping[str, Tensor], *, mae: bool) -> list[str]:
    """MAE's mask token belongs to its decoder; others' is of no use to a model without one."""
    if "mask_token" not in state:
        return []
    if mae or "mask_token" not in own:
        del state["mask_token"]
        return ["mask_token"]
    state["mask_token"] = state["mask_token"].reshape(1, 1, -1)
    return []


def _refuse_gaps(source: Source, own: Mapping[str, Tensor], state: State, missing: Sequence[str]) -> None:
    """Raises ValueError listing what is missing, unexpected, or of another shape, with the counts."""
    unexpected = [name for name in state if name not in own]
    shapes = [
        f"{name} is {list(state[name].shape)} in the file and {list(own[name].shape)} here"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    broken = [name for name in own if name in state and not state[name].isfinite().all()]
    if broken:
        raise ValueError(f"weights={source.place}: not finite: {some(broken, 4)}; take an earlier checkpoint")
    if not (missing or unexpected or shapes):
        return
    depths = [_depth(names) for names in (state, own)]
    depth = f"; the file has {depths[0]} blocks, the model {depths[1]}" if depths[0] != depths[1] else ""
    matched = sum(name in state for name in own)
    parts = [f"{matched} of the model's {len(own)} tensors are in the file{depth}"]
    for title, names in (("missing", missing), ("unexpected", unexpected), ("other shape", shapes)):
        if names:
            parts.append(f"{len(names)} {title}: {some(names, 4)}")
    raise ValueError(
        f"weights={source.place}: {'; '.join(parts)}. Change the model to the file's, or allow names in load.fresh "
        "(may be missing) and load.ignore (leave out)"
    )


def _load_timm(model: TimmModel, source: Source, config: LoadConfig) -> LoadReport:
    """A timm model takes files with its own names only; the head follows the same rules."""
    own = dict(model.net.state_dict(keep_vars=True))
    state = unwrap(source.state)
    found = [config.prefix] if config.prefix is not None else _timm_prefixes(state, own)
    if source.own and config.prefix is None:
        found = [f"{name}net." for name in NETWORKS if f"{name}net." in found][:1] or found
    if len(found) != 1:
        raise ValueError(
            f"weights={source.place}: {'several' if found else 'no'} networks with the names of timm:{model.name}"
            f"{f', under {found}; choose one with load.prefix' if found else f'; there is {_roots(state)}'}"
        )
    prefix = found[0]
    outside = tuple(name for name in state if not name.startswith(prefix))
    state = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    state, dropped = _without(state, config.ignore)
    resized: dict[str, str] = {}
    classifier: str = model.net.default_cfg.get("classifier", "head")  # type: ignore[union-attr,operator]
    try:
        dropped += fit_head(state, own, config.head, config.head_rows, resized, name=classifier)
    except MisfitError as error:
        raise ValueError(f"weights={source.place}: {error}") from None
    missing = [name for name in own if name not in state]
    fresh = [name for name in missing if name.startswith(f"{classifier}.") or matches(name, config.fresh)]
    _refuse_gaps(source, own, state, [name for name in missing if name not in fresh])
    taken = [name for name in own if name in state]
    with torch.no_grad():
        for name in taken:
            own[name].copy_(state[name])
    coverage = _coverage(own, taken)
    return LoadReport(
        source.place,
        source.entry,
        prefix,
        "timm",
        tuple(taken),
        resized,
        tuple(fresh),
        tuple(dropped),
        outside,
        coverage,
        source.preprocessing,
    )


def _timm_prefixes(state: State, own: Mapping[str, Tensor]) -> list[str]:
    """Prefixes under which most of the model's own names stand; the best only, all of them if several are as good."""
    first = next(iter(own))
    candidates = {name.removesuffix(first) for name in state if name == first or name.endswith("." + first)}
    scores = {prefix: sum(prefix + name in state for name in own) for prefix in candidates}
    best = max(scores.values(), default=0)
    return sorted(prefix for prefix, score in scores.items() if score == best and 2 * score > len(own))


def _coverage(own: Mapping[str, Tensor], taken: Sequence[str]) -> float:
    backbone = {name: value.numel() for name, value in own.items() if not BESIDE_BACKBONE.fullmatch(name)}
    return sum(backbone[name] for name in taken if name in backbone) / max(sum(backbone.values()), 1)


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(re.fullmatch(pattern, name) or name.startswith(f"{pattern}.") for pattern in patterns)


def _depth(names: Mapping[str, Any]) -> int:
    return 1 + max((int(m[1]) for name in names if (m := re.match(r"blocks\.(\d+)\.", name))), default=-1)


def _roots(state: Mapping[str, Any]) -> str:
    return some(sorted({name.split(".")[0] for name in state}), 8)
