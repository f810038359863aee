"""Lays a built task out for training: recomputed blocks, then compiled blocks, then shards; in that order."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from vitfw import sharded
from vitfw.launch import Launch, device_of, on_any, resolve_strategy, shard_size, uses_gpu
from vitfw.machine import MachineConfig

ENTRIES = ("losses", "measure")  # the methods of a task that are called from outside, beside `forward`


def place(task: nn.Module, machine: MachineConfig, launch: Launch) -> None:
    """Changes the task in place. Every process comes with the same, whole weights, or rank 0 does and the others with none
    (on the meta device); each keeps its part of them. Entered by all ranks.

    No parameter changes its name. Raises ValueError where a key needs blocks and the task has none.
    """
    blocks = blocks_of(task)
    for key in ("recompute_every", "compile"):
        if getattr(machine, key) and not blocks:
            raise ValueError(
                f"machine.{key}={getattr(machine, key)}: this network has no list called `blocks` to apply it to; "
                f"leave the key out"
            )
    if machine.recompute_every:
        for block in blocks[:: machine.recompute_every]:
            recompute(block)
    if machine.compile:
        compile_blocks(blocks)
    if resolve_strategy(launch, machine) in ("fsdp2", "hsdp"):
        cut(task, blocks, shard_mesh(machine, launch), device_of(launch, machine), reduced=machine.precision == "bf16")


def starts_on_rank_0(machine: MachineConfig, launch: Launch) -> bool:
    """Whether only rank 0 needs a task with weights, since `place` hands out the others' parts."""
    return launch.world > 1 and resolve_strategy(launch, machine) in ("fsdp2", "hsdp")


def cut(task: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, device: torch.device, *, reduced: bool) -> None:
    """Shards a task of which every process, or rank 0 alone, holds the weights. One weight is sent at a time, so a process
    never holds more than its part; rank 0 sends before it gives up what is not its own."""
    empty = any(parameter.is_meta for parameter in task.parameters())
    missing = on_any(empty)
    if empty:
        shard(task, blocks, mesh, reduced=reduced)
        task.to_empty(device=device)
    if missing:
        hand_out(task, device)
    if not empty:
        shard(task, blocks, mesh, reduced=reduced)
    if missing:
        share_buffers(task)


@torch.no_grad()
def hand_out(task: nn.Module, device: torch.device) -> None:
    """Rank 0 sends its whole parameters; the others, whose task is sharded already, keep their parts of them."""
    for parameter in task.parameters():
        if not isinstance(parameter, DTensor):
            dist.broadcast(parameter.detach().to(device), src=0)
            continue
        value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        dist.broadcast(value, src=0)
        parameter.to_local().copy_(sharded.scattered(value).box(*sharded.box_of(parameter)))


def blocks_of(task: nn.Module) -> list[nn.Module]:
    """All transformer blocks of a task's networks: the members of its lists called `blocks`, in order."""
    found = []
    for name, module in task.named_modules():
        if name.rpartition(".")[2] == "blocks" and isinstance(module, nn.ModuleList | nn.Sequential):
            found += list(module)
    return found


def recompute(block: nn.Module) -> None:
    """Lets a block keep only its input and run again in the backward pass, with the same random numbers."""
    forward = block.forward

    def forward_again(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    block.forward = forward_again


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Compiles each block by itself. Blocks share their code, but not their drop-path rate: torch's limit of 8 variants
    a function would leave the later blocks of a deep network uncompiled with no more than a log line."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 4 * len(blocks))  # training and evaluation, two shapes each
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 16 * len(blocks))
    for block in blocks:
        block.compile()


def normalise_in_float32(norm: Any) -> None:
    """Lets a norm read bfloat16 weights as float32, as autocast does on a GPU; on the CPU it leaves the weights alone and
    torch refuses the mixture."""

    def forward(x: Tensor) -> Tensor:
        weight = None if norm.weight is None else norm.weight.float()
        if isinstance(norm, nn.RMSNorm):
            return F.rms_norm(x.float(), norm.normalized_shape, weight, norm.eps)
        bias = None if norm.bias is None else norm.bias.float()
        return F.layer_norm(x.float(), norm.normalized_shape, weight, bias, norm.eps)

    norm.forward = forward


def shard_mesh(machine: MachineConfig, launch: Launch) -> DeviceMesh:
    """All processes in one line (fsdp2), or copies x shards (hsdp), where neighbours share a copy."""
    device = "cuda" if uses_gpu(machine) else "cpu"
    if resolve_strategy(launch, machine) == "fsdp2":
        return init_device_mesh(device, (launch.world,), mesh_dim_names=("shard",))
    size = shard_size(launch, machine)
    return init_device_mesh(device, (launch.world // size, size), mesh_dim_names=("replicate", "shard"))


def shard(task: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, *, reduced: bool) -> None:
    """Shards each block, each network and what is left, with float32 weights kept. With `reduced` the blocks' weights
    are gathered in bfloat16; the gradients of all ranks are summed in float32.

    Weights are always given up after the forward pass, even where keeping them would save a gather: averaged weights
    are put in place and taken out between two forward passes, and a gathered copy would outlive that.
    """
    whole = {"mesh": mesh, "reshard_after_forward": True}
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if reduced:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in blocks:
        if reduced:
            for norm in block.modules():
                if type(norm) in (nn.LayerNorm, nn.RMSNorm):
                    normalise_in_float32(norm)
        fully_shard(block, mp_policy=policy, **whole)
    for network in task.children():  # so that a network can be called by itself as well
        if next(network.parameters(), None) is not None:
            fully_shard(network, **whole)
    fully_shard(task, **whole)
    for name in ENTRIES:
        register_fsdp_forward_method(task, name)


@torch.no_grad()
def share_buffers(task: nn.Module) -> None:
    """Gives every process the buffers of rank 0, such as running statistics. To be called by all ranks before an
    evaluation; no step of the training waits for it."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        for buffer in task.buffers():
            dist.broadcast(buffer, src=0)


def whole(value: Any, *, keep: bool = True) -> Any:
    """A tensor gathered from its shards and copied to the CPU; None on ranks that do not `keep` it. Other values as
    they are. Collective for shards, so it is called on all ranks in the same order."""
    if not isinstance(value, Tensor):
        return value if keep else None
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
    if not keep:
        return None
    value = value.detach()
    return value.cpu() if value.device.type != "cpu" else value.clone()
