"""Peak host memory of each process until a sharded network stands, from its building on.

    torchrun --standalone --nproc-per-node 2 benchmarks/start_memory.py

A ViT of 304 million parameters (1.2 GB in float32) under fsdp2. One line a process: memory when everything is imported, and
the largest since then. `mode=whole` in front of it lets every process build the whole network, as under ddp.
"""

import resource
import sys

import torch
import torch.distributed as dist

from vitfw.launch import detect_launch, join_processes, set_threads
from vitfw.machine import MachineConfig
from vitfw.models.variants import ModelConfig
from vitfw.parallel import place, starts_on_rank_0
from vitfw.seeding import seed_all
from vitfw.tasks import build_task
from vitfw.tasks.classify import ClassifyConfig


def main(words: list[str]) -> None:
    launch = detect_launch()
    machine = MachineConfig(device="cpu", strategy="fsdp2", threads=1)
    set_threads(launch, machine)
    join_processes(launch, machine)
    before = peak()
    seed_all(0)
    apart = starts_on_rank_0(machine, launch) and "mode=whole" not in words
    with torch.device("meta" if apart and launch.rank else "cpu"):
        task = build_task(ClassifyConfig(num_classes=1000), ModelConfig(variant="vit_l16"), num_classes=1000)
    size = sum(parameter.numel() * parameter.element_size() for parameter in task.parameters()) / 1e9
    place(task, machine, launch)
    print(
        f"rank {launch.rank} of {launch.world}: network {size:.2f} GB, imports {before:.2f} GB, "
        f"start +{peak() - before:.2f} GB",
        flush=True,
    )
    dist.destroy_process_group()


def peak() -> float:
    """The largest resident memory of this process so far, in GB (Linux counts it in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


if __name__ == "__main__":
    main(sys.argv[1:])
