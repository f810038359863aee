"""The head of MAE's linear probe: BatchNorm without scale and shift, then one linear layer (He et al. 2021)."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from vitfw.models.layers import Linear


class ProbeHead(nn.Module):
    """Features [B, D] -> logits [B, classes], in float32. Each rank normalises by its own batch, as the source does."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, eps=1e-6, affine=False)
        self.head = Linear(width, num_classes, init="timm", role="head", std=0.01)

    def forward(self, features: Tensor) -> Tensor:
        if self.training and len(features) < 2:
            raise ValueError(
                "a probe's BatchNorm needs 2 images or more a micro-batch: raise machine.images_per_device"
            )
        return self.head(self.norm(features.float()))

    @torch.no_grad()
    def average_statistics(self) -> None:
        """The same running statistics on all ranks: their mean. Called on all ranks."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            assert self.norm.running_mean is not None
            assert self.norm.running_var is not None
            for buffer in (self.norm.running_mean, self.norm.running_var):
                dist.all_reduce(buffer)
                buffer /= dist.get_world_size()

    @torch.no_grad()
    def folded(self) -> tuple[Tensor, Tensor]:
        """Weight [classes, D] and bias [classes] of the linear layer that does what this head does in evaluation."""
        mean, variance = self.norm.running_mean, self.norm.running_var
        assert mean is not None
        assert variance is not None
        weight = _whole(self.head.weight) / (variance + self.norm.eps).sqrt()
        return weight, _whole(self.head.bias) - weight @ mean

    @torch.no_grad()
    def fold_into(self, linear: nn.Module) -> None:
        """Makes a linear layer the one of `folded`, sharded or not. Called on all ranks."""
        for name, value in zip(("weight", "bias"), self.folded(), strict=True):
            target = linear.get_parameter(name)
            if isinstance(target, DTensor):
                value = distribute_tensor(value, target.device_mesh, target.placements)
            target.copy_(value)


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
