"""The same weights at other image sizes: position embeddings are interpolated, nothing is trained."""

import dataclasses

import torch
from torch import nn

from vitfw.models.architecture import Architecture
from vitfw.models.vit import ViT


def at_size(network: nn.Module, size: int) -> ViT:
    """A network that takes size x size images and shares every tensor with `network`; positions are resized as they
    would be on loading (bicubic, anti-aliased). Raises ValueError for sizes that the patch does not divide.
    """
    if not isinstance(network, ViT):
        raise ValueError(
            f"size {size}: {type(network).__name__} cannot change its image size after it was built; "
            "only networks of vitfw can"
        )
    rows, columns = network.arch.patch
    if size % rows or size % columns or size < 1:
        near = max(rows, round(size / rows) * rows)
        raise ValueError(f"size {size}: not divisible by the patch {network.arch.patch}; the nearest that is: {near}")
    arch: Architecture = dataclasses.replace(network.arch, dynamic_size=True)
    with torch.device("meta"):
        other = ViT(arch, network.num_classes)
    other.load_state_dict(network.state_dict(keep_vars=True), assign=True)
    return other.train(network.training)
