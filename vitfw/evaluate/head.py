"""The head of a probe as the head of its network: what was chosen on stored features goes into the weights.

K classes, W width of the feature.
"""

import torch
from torch import Tensor, nn

from vitfw.evaluate.features import head_column
from vitfw.evaluate.probe import Heads, Pool
from vitfw.models.build import TimmModel
from vitfw.models.vit import ViT


def own_pools(network: nn.Module, *, either: bool) -> tuple[Pool, ...]:
    """The pools of which a linear head makes an ordinary network: the one that its head reads; with `either` the mean
    of the patches and the class token, where `model.pool` alone decides between them.

    Features of several blocks, or class token and mean side by side, are no such pool: `vitfw probe` has them.
    """
    column = head_column(network)
    if column == "pooled":
        return ("pooled",)
    assert isinstance(network, ViT)
    own: Pool = "cls" if column == "cls-1" else "mean"
    return ("cls", "mean") if either and network.arch.class_token else (own,)


@torch.no_grad()
def folded(heads: Heads, number: int = 0) -> tuple[Tensor, Tensor]:
    """Weight [K, W] and bias [K], float32, of the linear layer on raw features that does what head `number` does on
    standardised ones."""
    weight = heads.weight[number].double() / heads.deviation.double()[:, None]
    bias = heads.bias[number].double() - heads.mean.double() @ weight
    return weight.T.float(), bias.float()


@torch.no_grad()
def put_head(network: nn.Module, weight: Tensor, bias: Tensor) -> None:
    """Makes a linear layer the network's head; both heads of a network with two, whose mean is its answer.

    Raises ValueError for a network whose head is no linear layer of that size.
    """
    for head in head_layers(network):
        if not isinstance(head, nn.Linear) or head.bias is None or head.weight.shape != weight.shape:
            raise ValueError(
                f"ladder.probe=grid: the head of this network is no linear layer {list(weight.shape)} with a bias, so a "
                "probe cannot take its place; use ladder.probe=train"
            )
        head.weight.copy_(weight)
        head.bias.copy_(bias)


def head_layers(network: nn.Module) -> list[nn.Module]:
    """The layer or layers that give logits."""
    if isinstance(network, ViT):
        return [head for head in (network.head, network.head_dist) if head is not None]
    assert isinstance(network, TimmModel)
    return [network.net.get_classifier()]  # type: ignore[operator]
