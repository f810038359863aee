"""Names of the published MAE weight files <-> those of our encoder and decoder.

A published file holds the encoder under a ViT's plain names, and beside it `mask_token`, `decoder_embed`,
`decoder_pos_embed`, `decoder_blocks`, `decoder_norm`, `decoder_pred`. Files for fine-tuning hold the encoder alone.
"""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

ENCODER, DECODER = "encoder.", "decoder."


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


def has_decoder(state: Mapping[str, Tensor]) -> bool:
    """Whether a state dict, under our names or the published ones, can reconstruct images."""
    return any(name.startswith((DECODER, "decoder_")) for name in state)


def refuse_without_decoder(state: Mapping[str, Tensor], source: str) -> None:
    """Raises ValueError for a file that holds an encoder alone."""
    if not has_decoder(state):
        raise ValueError(
            f"{source}: holds no decoder weights (it is an encoder alone, for fine-tuning), so it cannot reconstruct "
            "images or go on with pretraining; use a checkpoint of the pretraining run, or the published file with "
            "decoder weights"
        )


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
