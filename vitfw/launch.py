"""How this process was started: torchrun, srun or plain python, worked out from the environment before anything is built."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from vitfw.data.resources import usable_cpus


@dataclass(frozen=True, kw_only=True)
class MachineConfig:
    """Section `machine`: what must not change the result."""

    device: Literal["auto", "cpu", "gpu"] = field(
        default="auto", metadata={"help": "auto takes the GPU where there is one"}
    )
    devices: int = field(default=0, metadata={"help": "processes a node; 0: as many as were started"})
    nodes: int = field(default=0, metadata={"help": "nodes; 0: as many as were started"})
    strategy: Literal["auto", "single", "ddp"] = field(
        default="auto", metadata={"help": "auto: single for one process, ddp for several"}
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
    rendezvous_seconds: int = field(default=120, metadata={"help": "seconds to wait for the other processes at start"})
    collective_minutes: int = field(default=30, metadata={"help": "minutes until a stuck collective ends the run"})

    def __post_init__(self) -> None:
        for name in ("devices", "nodes", "eval_images_per_device", "threads", "save_every_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"machine.{name}={getattr(self, name)}: must be 0 (automatic) or more")
        for name in ("images_per_device", "rendezvous_seconds", "collective_minutes"):
            if getattr(self, name) < 1:
                raise ValueError(f"machine.{name}={getattr(self, name)}: must be at least 1")
        if self.workers < -1:
            raise ValueError(f"machine.workers={self.workers}: must be -1 (automatic) or more")


@dataclass(frozen=True)
class Launch:
    """One process among `world`: `rank` of all, `local_rank` of the `local_world` on this node."""

    kind: Literal["torchrun", "srun", "python"]
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1

    @property
    def nodes(self) -> int:
        return self.world // self.local_world

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def detect_launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """The launch that the environment describes: torchrun's variables first, then a real srun step, else one process.

    Raises ValueError where the variables contradict each other.
    """
    try:
        if "TORCHELASTIC_RUN_ID" in environment or {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= environment.keys():
            launch = Launch(
                "torchrun",
                *(int(environment[key]) for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK")),
                int(environment.get("LOCAL_WORLD_SIZE", "1")),
            )
        elif "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:
            tasks = int(environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1")))
            nodes = int(environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES", "1")))
            if tasks % nodes:
                raise ValueError(f"srun started {tasks} tasks on {nodes} nodes: the same number on each is needed")
            launch = Launch(
                "srun", int(environment["SLURM_PROCID"]), tasks, int(environment["SLURM_LOCALID"]), tasks // nodes
            )
        else:
            launch = Launch("python")
    except KeyError as error:
        raise ValueError(f"the launcher's variable {error} is missing from the environment") from error
    if launch.world % launch.local_world or not 0 <= launch.rank < launch.world:
        raise ValueError(
            f"inconsistent launch: rank {launch.rank} of {launch.world} with {launch.local_world} processes on this node"
        )
    return launch


def check_launch(launch: Launch, machine: MachineConfig) -> None:
    """Refuses a launch that is not what the machine section says. Raises ValueError with both numbers and the command."""
    wanted = machine.devices or launch.local_world, machine.nodes or launch.nodes
    if wanted != (launch.local_world, launch.nodes):
        raise ValueError(
            f"machine.devices={machine.devices} and machine.nodes={machine.nodes} ask for {wanted[0]} processes on each of "
            f"{wanted[1]} nodes, but {launch.kind} started {launch.local_world} on each of {launch.nodes}: start with "
            f"torchrun --nnodes {wanted[1]} --nproc-per-node {wanted[0]} train.py ..., or set both to 0 to take what was started"
        )
    if machine.strategy == "single" and launch.world > 1:
        raise ValueError(f"machine.strategy=single, but {launch.kind} started {launch.world} processes: use ddp or auto")
    on_gpu = uses_gpu(machine)
    if machine.device == "gpu" and not torch.cuda.is_available():
        raise ValueError("machine.device=gpu, but torch sees no GPU: use machine=cpu, or install a driver and a CUDA build")
    if on_gpu and launch.local_world > torch.cuda.device_count():
        raise ValueError(
            f"{launch.local_world} processes on this node, but torch sees {torch.cuda.device_count()} GPUs: "
            "start one process a GPU"
        )
    if machine.precision == "fp16" and not on_gpu:
        raise ValueError("machine.precision=fp16 needs a GPU: use bf16 or fp32 on the CPU")


def uses_gpu(machine: MachineConfig) -> bool:
    return machine.device == "gpu" or (machine.device == "auto" and torch.cuda.is_available())


def device_of(launch: Launch, machine: MachineConfig) -> torch.device:
    return torch.device("cuda", launch.local_rank) if uses_gpu(machine) else torch.device("cpu")


def set_threads(launch: Launch, machine: MachineConfig) -> int:
    """Gives each process its share of the CPUs: torchrun alone would give 1, srun all of them. Returns the number."""
    threads = machine.threads or max(1, usable_cpus() // launch.local_world)
    torch.set_num_threads(threads)
    return threads


def join_processes(launch: Launch, machine: MachineConfig) -> None:
    """Connects the processes, with a short wait: a process that never started should be noticed in seconds, not in 30 min."""
    if launch.world == 1:
        return
    if launch.kind == "srun":
        os.environ.setdefault("MASTER_ADDR", _first_host(os.environ.get("SLURM_STEP_NODELIST", "127.0.0.1")))
        os.environ.setdefault("MASTER_PORT", str(15000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 10000))
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            launch.world,
            # torchrun's agent may already hold the store; then every rank is a client of it
            is_master=launch.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            timeout=timedelta(seconds=machine.rendezvous_seconds),
            wait_for_workers=False,
        )
        # a restarted group must not read the keys that the last one left in the agent's store
        prefix = f"vitfw/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        dist.init_process_group(
            "nccl" if uses_gpu(machine) else "gloo",
            store=dist.PrefixStore(prefix, store),
            rank=launch.rank,
            world_size=launch.world,
            timeout=timedelta(minutes=machine.collective_minutes),
            device_id=device_of(launch, machine) if uses_gpu(machine) else None,
        )
    except (KeyError, RuntimeError, dist.DistStoreError) as error:
        raise ConnectionError(
            f"rank {launch.rank} of {launch.world} could not join the others at {address} within "
            f"{machine.rendezvous_seconds} s ({str(error).splitlines()[0]}): another job may hold the port "
            "(torchrun --standalone picks a free one), or a process did not start"
        ) from error


def _first_host(nodelist: str) -> str:
    """The first name of SLURM's compressed list, `node[03-05,9],other` -> `node03`."""
    head, bracket, tail = nodelist.partition("[")
    if not bracket or "," in head:
        return head.split(",")[0]
    return head + tail.split("]")[0].split(",")[0].split("-")[0]


def broadcast(value: Any) -> Any:
    """Rank 0's value on every rank (plain Python objects)."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def leave_processes() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def split_batch(global_batch: int, world: int, limit: int) -> tuple[int, int]:
    """(images of a micro-batch, micro-batches a process sums): the largest micro-batch of at most `limit` images.

    Raises ValueError where the global batch does not divide among the processes, or only into micro-batches under a quarter
    of what fits.
    """
    share, remainder = divmod(global_batch, world)
    if remainder or share == 0:
        near = max(world, round(global_batch / world) * world)
        raise ValueError(
            f"train.global_batch={global_batch} does not divide among {world} processes; the nearest that does is {near}"
        )
    accumulation = next(parts for parts in range(-(-share // limit), share + 1) if share % parts == 0)
    if accumulation > 1 and share // accumulation < limit / 4:
        raise ValueError(
            f"train.global_batch={global_batch} on {world} processes is {share} images each, which divides only into "
            f"micro-batches of {share // accumulation}, while machine.images_per_device={limit} fit: change one of the two"
        )
    return share // accumulation, accumulation
