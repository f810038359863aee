"""Section `machine`: what differs between machines, and must not change the result."""

from dataclasses import dataclass, field
from typing import Literal

Strategy = Literal["auto", "single", "ddp", "fsdp2", "hsdp"]


@dataclass(frozen=True, kw_only=True)
class MachineConfig:
    """Section `machine`: what must not change the result."""

    device: Literal["auto", "cpu", "gpu"] = field(
        default="auto", metadata={"help": "auto takes the GPU where there is one"}
    )
    devices: int = field(default=0, metadata={"help": "processes a node; 0: as many as were started"})
    nodes: int = field(default=0, metadata={"help": "nodes; 0: as many as were started"})
    strategy: Strategy = field(
        default="auto",
        metadata={"help": "auto: single for one process, ddp for several; fsdp2 shards over all, hsdp inside a node"},
    )
    shard_size: int = field(
        default=0, metadata={"help": "hsdp: processes that share one copy of the weights; 0: those of a node"}
    )
    precision: Literal["fp32", "bf16", "fp16"] = field(
        default="fp32", metadata={"help": "bf16 and fp16 are autocast over fp32 weights; fp16 needs a GPU"}
    )
    images_per_device: int = field(
        default=64, metadata={"help": "images a process holds at once, at most; accumulation follows from it"}
    )
    eval_images_per_device: int = field(
        default=0, metadata={"help": "the same in evaluation; 0: twice images_per_device"}
    )
    workers: int = field(default=-1, metadata={"help": "loader processes a rank; -1: usable CPUs / local ranks - 1"})
    threads: int = field(default=0, metadata={"help": "CPU threads a process; 0: usable CPUs / local ranks"})
    save_every_steps: int = field(default=0, metadata={"help": "steps between checkpoints; 0: once an epoch"})
    compile: bool = field(default=False, metadata={"help": "torch.compile each block"})
    recompute_every: int = field(
        default=0, metadata={"help": "recompute every n-th block in the backward pass to save memory; 1: all, 0: none"}
    )
    keep_last: int = field(default=2, metadata={"help": "newest checkpoints that are kept"})
    keep_best: int = field(default=1, metadata={"help": "best checkpoints kept for each set of weights scored"})
    keep_every_steps: int = field(
        default=0, metadata={"help": "checkpoints at multiples of this many steps are kept for ever; 0: none"}
    )
    checkpoint_format: Literal["auto", "file", "sharded"] = field(
        default="auto",
        metadata={
            "help": "file, or sharded: a folder into which each process writes its pieces; auto: where weights are cut"
        },
    )
    stop_signal: Literal["USR1", "USR2"] = field(
        default="USR1", metadata={"help": "signal that means save and stop, beside TERM and INT"}
    )
    wall_minutes: float = field(
        default=0.0, metadata={"help": "save and stop this many minutes after the start; 0: no limit of our own"}
    )
    rendezvous_seconds: int = field(default=120, metadata={"help": "seconds to wait for the other processes at start"})
    collective_minutes: int = field(default=30, metadata={"help": "minutes until a stuck collective ends the run"})

    def __post_init__(self) -> None:
        at_least_0 = ("devices", "nodes", "shard_size", "eval_images_per_device", "threads", "save_every_steps")
        for name in (*at_least_0, "recompute_every", "keep_every_steps", "wall_minutes"):
            if getattr(self, name) < 0:
                raise ValueError(f"machine.{name}={getattr(self, name)}: must be 0 or more")
        for name in ("images_per_device", "keep_last", "keep_best", "rendezvous_seconds", "collective_minutes"):
            if getattr(self, name) < 1:
                raise ValueError(f"machine.{name}={getattr(self, name)}: must be at least 1")
        if self.workers < -1:
            raise ValueError(f"machine.workers={self.workers}: must be -1 (automatic) or more")
        if self.shard_size and self.strategy != "hsdp":
            raise ValueError(f"machine.shard_size={self.shard_size}: only hsdp reads it; set machine.strategy=hsdp")
