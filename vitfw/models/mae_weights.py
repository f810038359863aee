"""Weights of masked autoencoders: encoder and decoder from one file, and the names of the published files.

A published file holds the encoder under a ViT's plain names, and beside it `mask_token`, `decoder_embed`,
`decoder_pos_embed`, `decoder_blocks`, `decoder_norm`, `decoder_pred`; a checkpoint of vitfw holds `encoder.*` and
`decoder.*`; the transformers library `vit.*` and `decoder.*`. Files for fine-tuning hold the encoder alone.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitfw.models.decoder import Decoder
from vitfw.models.dialects import from_transformers, translate, unwrap
from vitfw.models.load_report import LoadConfig, LoadReport, some
from vitfw.models.positions import sincos_table
from vitfw.models.reading import Source, read
from vitfw.models.vit import ViT
from vitfw.models.weights import load_source, locate, matches

ENCODER, DECODER = "encoder.", "decoder."
PUBLISHED_ENCODER_HEADS = {768: 12, 1024: 16, 1280: 16}  # by width
PUBLISHED_DECODER, PUBLISHED_DECODER_HEADS = (512, 8), 16  # width and depth
FRESH = "it starts from its initialisation"
WHERE = "checkpoints of a pretraining run have one, exports and files for fine-tuning have not"


def load_autoencoder(
    encoder: ViT, decoder: Decoder, place: str | Path, config: LoadConfig, *, normalise_target: bool
) -> LoadReport:
    """Copies the encoder from any place `reading.read` knows, and the decoder where the file has one; says what it did.

    Raises ValueError, and leaves both as they were, for whatever `weights.load` refuses and for a decoder of another
    size, with other heads or other targets. `load.ignore=[decoder]` leaves the file's decoder out.
    """
    source = read(place, which=config.which, trust=config.trust)
    found, told = {}, (f"left out as load.ignore says, {FRESH}",)
    if not matches("decoder", config.ignore):
        found, told = decoder_state(source, config), (f"none in the file, {FRESH} ({WHERE})",)
    if found:
        told = _check_decoder(decoder, found, source, config, normalise_target=normalise_target)
    report = load_source(encoder, source, config)
    if not found:
        return replace(report, decoder=told)
    own = decoder.state_dict(keep_vars=True)
    with torch.no_grad():
        for name in own.keys() - {"pos_embed"}:  # fixed: a function of the grid
            own[name].copy_(found[name])
    return replace(
        report,
        loaded=(*report.loaded, *(f"{DECODER}{name}" for name in own)),
        dropped=tuple(name for name in report.dropped if not _of_decoder(name)),
        outside=tuple(name for name in report.outside if DECODER not in name),
        decoder=told,
    )


def decoder_state(source: Source, config: LoadConfig) -> dict[str, Tensor]:
    """The decoder's tensors under the names of `Decoder`; empty where the file has none.

    Raises ValueError for a decoder of other names, and for one whose positions are not fixed.
    """
    state = unwrap(source.state)
    inside, prefix, _ = locate(state, source, config)
    if any(name.startswith("decoder_") for name in inside):
        own = from_published(inside)
        found = {name.removeprefix(DECODER): value for name, value in own.items() if name.startswith(DECODER)}
    else:  # beside the encoder, whose own name is the last part of the prefix
        start = re.sub(r"[^.]+\.$", "", prefix) + DECODER
        found = {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}
        found = _from_transformers(found) if "decoder_pos_embed" in found else found
    if found and not {"mask_token", "embed.weight", "pos_embed"} <= found.keys():
        raise ValueError(
            f"weights={source.place}: the file's decoder has other names than those vitfw knows: "
            f"{some(sorted(found), 4)}; leave it out with load.ignore=[decoder]"
        )
    return found


def _check_decoder(
    decoder: Decoder, found: Mapping[str, Tensor], source: Source, config: LoadConfig, *, normalise_target: bool
) -> tuple[str, ...]:
    """What the report says. Raises ValueError for a decoder that is not the one built here."""
    own = decoder.state_dict()
    missing, unexpected = ([n for n in a if n not in b] for a, b in ((own, found), (found, own)))
    sizes, facts = decoder_sizes(own), decoder_sizes(found)
    here: dict[str, Any] = {**sizes, "decoder_heads": decoder.arch.heads, "normalise_target": normalise_target}
    facts |= {key: source.task[key] for key in ("decoder_heads", "normalise_target") if key in source.task}
    published = (facts["decoder_width"], facts["decoder_depth"]) == PUBLISHED_DECODER
    if published and not source.own:
        facts["decoder_heads"] = PUBLISHED_DECODER_HEADS
    wrong = {key: value for key, value in facts.items() if value != here[key] and key not in config.differ}
    if wrong:
        listed = "; ".join(f"task.{key} is {value} in the file and {here[key]} here" for key, value in wrong.items())
        cure = " ".join(f"task.{key}={str(value).lower()}" for key, value in wrong.items())
        raise ValueError(
            f"weights={source.place}: the file's decoder is another one: {listed}. Set {cure}, or leave the file's "
            "decoder out with load.ignore=[decoder], so that one starts from its initialisation"
        )
    compared = own.keys() & found.keys() - {"pos_embed", "embed.weight"}  # of another width: the encoder is refused
    shapes = [name for name in own if name in compared and own[name].shape != found[name].shape]
    if "pred.weight" in shapes:
        raise ValueError(
            f"weights={source.place}: the file's decoder predicts {len(found['pred.weight'])} values a patch, "
            f"{len(own['pred.weight'])} are needed here (height x width x channels of a patch): set model.patch_size "
            "and model.in_channels to the file's, or leave its decoder out with load.ignore=[decoder]"
        )
    listed = [("missing", missing), ("unexpected", unexpected), ("of another shape", shapes)]
    listed += [("not finite", [name for name in own if name in found and not found[name].isfinite().all()])]
    if any(names for _, names in listed):
        parts = [f"{len(names)} {title}: {some(names, 4)}" for title, names in listed if names]
        raise ValueError(
            f"weights={source.place}: the file's decoder does not fit: {'; '.join(parts)}; leave it out with "
            "load.ignore=[decoder]"
        )
    return (f"all {len(own)} tensors loaded", *_positions(decoder, found["pos_embed"], source), *_assumed(facts, here))


def decoder_sizes(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of section `task` that the tensors of a decoder show."""
    width = state["mask_token"].shape[-1]
    hidden = next((len(state[name]) for name in state if name.endswith("mlp.fc1.weight")), 0)
    depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    return {"decoder_width": width, "decoder_depth": depth, "decoder_mlp_ratio": hidden / width}


def _positions(decoder: Decoder, table: Tensor, source: Source) -> Sequence[str]:
    """The fixed table is computed, never copied; a table that is not sin-cos belongs to another kind of decoder."""
    count, width = table.shape[1:]
    grids = [(rows, count // rows) for rows in range(1, count + 1) if count % rows == 0]
    fits = [grid for grid in grids if torch.allclose(table[0].float(), sincos_table(grid, width), atol=1e-4)]
    if not fits:
        raise ValueError(
            f"weights={source.place}: the decoder's positions are learned, those of vitfw's decoder are the fixed "
            "sin-cos table; leave the decoder out with load.ignore=[decoder]"
        )
    if decoder.grid in fits:
        return ()
    return (f"positions {fits[0][0]} x {fits[0][1]} -> {decoder.grid[0]} x {decoder.grid[1]}, computed anew (sin-cos)",)


def _assumed(facts: Mapping[str, Any], here: Mapping[str, Any]) -> Sequence[str]:
    """What no tensor shows and the file does not say."""
    assumed = [
        f"task.{key}={str(here[key]).lower()}" for key in ("decoder_heads", "normalise_target") if key not in facts
    ]
    return (f"the file does not say {' and '.join(assumed)}: taken to be so",) if assumed else ()


def encoder_sizes(source: Source, config: LoadConfig) -> dict[str, Any]:
    """The keys of section `model` that the tensors of a published encoder show; `heads` where its width was published.

    Raises ValueError where the patches are not a square grid.
    """
    state = translate(locate(unwrap(source.state), source, config)[0]).state
    width, channels, height, across = state["patch_embed.proj.weight"].shape
    patches = state["pos_embed"].shape[1] - 1
    if math.isqrt(patches) ** 2 != patches:
        raise ValueError(f"{source.place}: {patches} patches are no square grid, so the size of the images is unknown")
    sizes = {"image_height": math.isqrt(patches) * height, "image_width": math.isqrt(patches) * across}
    sizes |= {"patch_height": height, "patch_width": across, "in_channels": channels, "width": width}
    sizes["depth"] = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    ratio = len(state["blocks.0.mlp.fc1.weight"]) / width
    heads = {"heads": PUBLISHED_ENCODER_HEADS[width]} if width in PUBLISHED_ENCODER_HEADS else {}
    return {**sizes, "mlp_ratio": ratio, **heads}


def from_published(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Published names -> `encoder.*` and, if the file has a decoder, `decoder.*`."""
    return {_own_name(name): _own_value(name, value, state) for name, value in state.items()}


def to_published(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of an MAE task -> a file that the published code reads; other entries (a probe) are left out."""
    published: dict[str, Tensor] = {}
    for name, value in state.items():
        if name.startswith(ENCODER):
            published[name.removeprefix(ENCODER)] = value
        elif name.startswith(DECODER):
            part = name.removeprefix(DECODER)
            published[part if part == "mask_token" else f"decoder_{part}"] = value
    table, encoder_table = published["decoder_pos_embed"], published["pos_embed"]
    prefix = encoder_table.shape[1] - table.shape[1]
    published["decoder_pos_embed"] = F.pad(table, (0, 0, prefix, 0))
    return published


def _from_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The decoder of the transformers library's ViTMAEForPreTraining; its table has a row for the class token."""
    layers = {name.replace("decoder_layers.", "encoder.layer."): value for name, value in state.items()}
    own = {name.removeprefix("decoder_"): value for name, value in from_transformers(layers).items()}
    return own | {"pos_embed": own["pos_embed"][:, 1:]}


def _of_decoder(name: str) -> bool:
    return name == "mask_token" or re.match(r"decoder[._]", name) is not None


def _own_name(name: str) -> str:
    if name == "mask_token":
        return f"{DECODER}mask_token"
    if name.startswith("decoder_"):
        return DECODER + name.removeprefix("decoder_")
    return ENCODER + name


def _own_value(name: str, value: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """The decoder's published position table has a row of zeros for each prefix token; ours has patches only."""
    if name != "decoder_pos_embed":
        return value
    prefix = sum(state[token].shape[1] for token in ("cls_token", "reg_token") if token in state)
    if value[:, :prefix].any():
        raise ValueError(
            f"decoder_pos_embed: the rows of the {prefix} prefix tokens are not zero, so this is not the fixed sin-cos "
            "table of a published MAE"
        )
    return value[:, prefix:]
