"""Which part of a network a run trains: the head alone, the last blocks as well, or everything.

What is frozen takes no gradient (and so keeps no activations), and stays in evaluation mode whatever `train()` is
called: dropout and drop-path are off in it and BatchNorm statistics stand still, so it is the same bit for bit before
and after. Rungs of the fine-tune ladder of He et al. 2022, section 5.
"""

import types
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from vitfw.models.build import TimmModel
from vitfw.models.vit import ViT
from vitfw.tasks.task import Task

Rung = Literal["probe", "last_block", "full"]


@dataclass(frozen=True, kw_only=True)
class FreezeConfig:
    """Section `freeze`."""

    rung: Rung = field(
        default="full",
        metadata={"help": "probe: the head; last_block: last blocks, final norm, head; full: everything"},
    )
    blocks: int = field(default=1, metadata={"help": "how many last blocks train with rung=last_block"})

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise ValueError(f"freeze.blocks={self.blocks}: must be 1 or more; for none use freeze.rung=probe")
        if self.blocks > 1 and self.rung != "last_block":
            raise ValueError(f"freeze.blocks={self.blocks}: only freeze.rung=last_block reads it, not {self.rung}")


def freeze(task: Task, config: FreezeConfig) -> tuple[str, ...]:
    """Freezes all but the rung's part of `task.network`, and returns the names of the modules that stay trainable.

    To be called on the plain task, before compiling, wrapping and building the optimiser. Raises ValueError where the
    network has no such part.
    """
    if config.rung == "full":
        return ("",)
    names = trainable_modules(task.network, config)
    parts = [task.network.get_submodule(name) for name in names]
    live = {id(module) for part in parts for module in part.modules()}
    trained = {id(parameter) for part in parts for parameter in part.parameters()}
    if not trained:
        raise ValueError(f"freeze.rung={config.rung}: {', '.join(names)} of this network hold no parameter")
    for parameter in task.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    for module in task.network.modules():
        if id(module) not in live:
            module.train = types.MethodType(_train_children, module)
    task.train(task.training)
    return names


def _train_children(module: nn.Module, mode: bool = True) -> nn.Module:
    """Takes the place of `train` of a frozen module: only what is trainable inside it ever changes its mode."""
    nn.Module.train(module, mode)
    module.training = False
    return module


def trainable_modules(network: nn.Module, config: FreezeConfig) -> tuple[str, ...]:
    """Names of the submodules that the rung trains."""
    if isinstance(network, ViT):
        heads = [name for name in ("head", "head_dist") if getattr(network, name) is not None]
        if not heads:
            raise ValueError(f"freeze.rung={config.rung}: this network has no head; give it task.num_classes")
        if config.rung == "probe":
            return tuple(heads)
        if config.blocks >= network.depth:
            raise ValueError(
                f"freeze.blocks={config.blocks}: the network has only {network.depth}; use freeze.rung=full for all"
            )
        blocks = [f"blocks.{number}" for number in range(network.depth - config.blocks, network.depth)]
        behind = [name for name in ("norm", "fc_norm", "attn_pool", "pre_logits") if _has_parameters(network, name)]
        return (*blocks, *behind, *heads)
    if isinstance(network, TimmModel) and config.rung == "probe":
        head = network.net.get_classifier()  # type: ignore[operator]
        name = next((name for name, module in network.named_modules() if module is head), None)
        if name is None or not list(head.parameters()):
            raise ValueError(f"freeze.rung=probe: timm:{network.name} has no classifier; give it task.num_classes")
        return (name,)
    raise ValueError(
        f"freeze.rung={config.rung}: {type(network).__name__} has no numbered blocks that vitfw knows; "
        "use a variant of vitfw, or freeze.rung=probe"
    )


def trainable_share(task: nn.Module) -> tuple[int, int]:
    """(trainable parameters, all parameters)."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in task.parameters()]
    return sum(size for size, trains in sizes if trains), sum(size for size, _ in sizes)


def training_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that training costs beside activations: weight, gradient and state of each parameter the optimiser holds.

    From the live optimiser after a step (before one there is no state): 16 bytes a parameter for AdamW in fp32.
    Counters of one number are left out. Sharded tensors count this rank's part.
    """
    tensors: list[Tensor] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = [value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor)]
            tensors += [parameter, *([] if parameter.grad is None else [parameter.grad])]
            tensors += [value for value in state if value.ndim > 0]
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]  # type: ignore[operator]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def _has_parameters(network: nn.Module, name: str) -> bool:
    module = getattr(network, name)
    return module is not None and any(True for _ in module.parameters())
