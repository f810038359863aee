"""How this process was started: torchrun, srun or plain python; worked out from the environment before all else."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from vitfw.data.resources import usable_cpus
from vitfw.machine import MachineConfig

T = TypeVar("T")


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

    Raises ValueError where the variables contradict each other, or where a launcher was meant and not used: such a
    start would train several times, or wait for processes that nobody starts.
    """
    if "TORCHELASTIC_RUN_ID" in environment or "RANK" in environment or "WORLD_SIZE" in environment:
        keys = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        launch = Launch("torchrun", *(_number(environment, key) for key in keys))
    elif "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment and _batch_step(environment) is False:
        launch = _srun_launch(environment)
    else:
        _refuse_forgotten_launcher(environment)
        launch = Launch("python")
    if (
        launch.world % launch.local_world
        or not 0 <= launch.rank < launch.world
        or not 0 <= launch.local_rank < launch.local_world
    ):
        raise ValueError(
            f"inconsistent launch by {launch.kind}: rank {launch.rank} of {launch.world}, on this node "
            f"{launch.local_rank} of {launch.local_world}; every node must start the same number of processes"
        )
    return launch


def _number(environment: Mapping[str, str], key: str) -> int:
    if key not in environment:
        raise ValueError(
            f"the launcher's variable {key} is missing from the environment: start with torchrun, or unset RANK and "
            "WORLD_SIZE"
        )
    try:
        return int(environment[key])
    except ValueError:
        raise ValueError(f"the launcher's variable {key}={environment[key]} is not a number") from None


def _batch_step(environment: Mapping[str, str]) -> bool:
    """Whether this is the shell of the job file itself, which SLURM numbers as the step -5, and not a task of srun."""
    return environment["SLURM_STEP_ID"] in ("4294967291", "-5", "batch")


def _srun_launch(environment: Mapping[str, str]) -> Launch:
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS")
    nodes = _number(environment, "SLURM_STEP_NUM_NODES")
    layout = environment.get("SLURM_STEP_TASKS_PER_NODE", "")  # "2(x3)": 2 on each of 3 nodes; "2,1": uneven
    if tasks % nodes or "," in layout:
        raise ValueError(
            f"srun started {tasks} tasks on {nodes} nodes ({layout or 'unevenly'}): every node needs the same number, "
            "so start with srun --ntasks-per-node=N"
        )
    rank, local_rank = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_LOCALID")
    return Launch("srun", rank, tasks, local_rank, tasks // nodes)


def _refuse_forgotten_launcher(environment: Mapping[str, str]) -> None:
    tasks = environment.get("SLURM_NTASKS", "1")
    if "SLURM_JOB_ID" in environment and tasks.isdigit() and int(tasks) > 1:
        raise ValueError(
            f"this SLURM job has {tasks} tasks (SLURM_NTASKS), but python was started once: write srun python "
            "train.py ..., or srun torchrun ..., or ask for one task"
        )
    for key in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if environment.get(key, "1").isdigit() and int(environment.get(key, "1")) > 1:
            raise ValueError(
                f"mpirun started {environment[key]} processes ({key}): start with torchrun or srun instead"
            )


def check_launch(launch: Launch, machine: MachineConfig) -> None:
    """Refuses a launch that is not what the machine section says. Raises ValueError with both numbers and a command."""
    wanted = machine.devices or launch.local_world, machine.nodes or launch.nodes
    if wanted != (launch.local_world, launch.nodes):
        raise ValueError(
            f"machine.devices={machine.devices} and machine.nodes={machine.nodes} ask for {wanted[0]} processes on "
            f"each of {wanted[1]} nodes, but {launch.kind} started {launch.local_world} on each of {launch.nodes}: "
            f"start with torchrun --nnodes {wanted[1]} --nproc-per-node {wanted[0]} train.py ..., or set both to 0 to take "
            "what was started"
        )
    resolve_strategy(launch, machine)
    on_gpu = uses_gpu(machine)
    if machine.device == "gpu" and not torch.cuda.is_available():
        raise ValueError(
            "machine.device=gpu, but torch sees no GPU: use machine=cpu, or install a driver and a CUDA build"
        )
    if on_gpu and launch.local_world > torch.cuda.device_count():
        raise ValueError(
            f"{launch.local_world} processes on this node, but torch sees {torch.cuda.device_count()} GPUs: "
            "start one process a GPU"
        )
    if machine.precision == "fp16" and not on_gpu:
        raise ValueError("machine.precision=fp16 needs a GPU: use bf16 or fp32 on the CPU")


def resolve_strategy(launch: Launch, machine: MachineConfig) -> Literal["single", "ddp", "fsdp2", "hsdp"]:
    """What `auto` means here; ddp of one process is single. Raises ValueError where the processes do not fit."""
    if machine.strategy == "single" and launch.world > 1:
        raise ValueError(
            f"machine.strategy=single, but {launch.kind} started {launch.world} processes: use ddp or auto"
        )
    if machine.strategy == "hsdp":
        shard = shard_size(launch, machine)
        if launch.world % shard or not 1 < shard < launch.world:
            raise ValueError(
                f"machine.strategy=hsdp with machine.shard_size={shard} of {launch.world} processes: it must divide "
                "them into at least 2 copies of at least 2 shards; use fsdp2 or ddp otherwise"
            )
    if machine.strategy in ("fsdp2", "hsdp"):
        if machine.precision == "fp16":
            raise ValueError(
                f"machine.precision=fp16 with machine.strategy={machine.strategy}: sharded runs use bf16 or fp32"
            )
        return machine.strategy
    return "single" if launch.world == 1 else "ddp"


def shard_size(launch: Launch, machine: MachineConfig) -> int:
    """Processes that share one copy of the weights under hsdp."""
    return machine.shard_size or launch.local_world


def uses_gpu(machine: MachineConfig) -> bool:
    return machine.device == "gpu" or (machine.device == "auto" and torch.cuda.is_available())


def device_of(launch: Launch, machine: MachineConfig) -> torch.device:
    return torch.device("cuda", launch.local_rank) if uses_gpu(machine) else torch.device("cpu")


def set_threads(launch: Launch, machine: MachineConfig) -> int:
    """Gives each process its share of the CPUs: torchrun alone would give 1, srun all of them. Returns the number."""
    share = 1 if launch.kind == "srun" and "SLURM_CPUS_PER_TASK" in os.environ else launch.local_world
    threads = machine.threads or max(1, usable_cpus() // share)  # SLURM's number is already one task's
    torch.set_num_threads(threads)
    return threads


def join_processes(launch: Launch, machine: MachineConfig) -> None:
    """Connects the processes, with a short wait: one that never started is noticed in seconds, not in 30 minutes.

    Raises ConnectionError that names the address and what to change.
    """
    backend = "nccl" if uses_gpu(machine) else "gloo"
    device = device_of(launch, machine) if uses_gpu(machine) else None
    if device is not None:
        torch.cuda.set_device(
            device
        )  # what `broadcast` sends goes by the current device, which would be the first for all
    if launch.world == 1:
        if resolve_strategy(launch, machine) in ("fsdp2", "hsdp"):  # shards need a group, even one of a single process
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, device_id=device)
        return
    if launch.kind == "srun":
        os.environ.setdefault("MASTER_ADDR", _first_host(os.environ.get("SLURM_STEP_NODELIST", "127.0.0.1")))
        os.environ.setdefault("MASTER_PORT", str(_srun_port(os.environ)))
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store: Any = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            launch.world,
            is_master=launch.is_main and not agent_store,  # torchrun's agent may already hold the store
            timeout=timedelta(seconds=machine.rendezvous_seconds),
            wait_for_workers=False,
        )
        if agent_store:  # which lives on: a restarted group must not read the keys that the last one left
            store = PrefixStore(f"vitfw/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        store.set(f"here/{launch.rank}", "1")
        store.wait([f"here/{rank}" for rank in range(launch.world)], timedelta(seconds=machine.rendezvous_seconds))
        dist.init_process_group(
            backend,
            store=store,
            rank=launch.rank,
            world_size=launch.world,
            timeout=timedelta(minutes=machine.collective_minutes),
            device_id=device,
        )
    except (KeyError, ValueError, RuntimeError, dist.DistStoreError) as error:
        raise ConnectionError(
            f"rank {launch.rank} of {launch.world} could not join the others at {address} within "
            f"{machine.rendezvous_seconds} s ({str(error).splitlines()[0]}): another job may hold the port "
            "(torchrun --standalone picks a free one), or a process did not start"
        ) from error


def _srun_port(environment: Mapping[str, str]) -> int:
    """A port that two jobs, or two steps of a job, do not share: 15000 to 24999."""
    job, step = int(environment.get("SLURM_JOB_ID", "0")), int(environment.get("SLURM_STEP_ID", "0"))
    return 15000 + (job + 1009 * step) % 10000


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


def on_any(value: bool) -> bool:
    """Whether `value` is true on any rank. Called on all ranks, which wait for each other."""
    if not dist.is_initialized():
        return value
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return any(values)


def on_main(launch: Launch, call: Callable[[], T]) -> T:
    """The result of `call` on rank 0, for all ranks; its ValueError is raised on all of them."""
    result, error = None, None
    if launch.is_main:
        try:
            result = call()
        except ValueError as caught:
            error = caught
    result, error = broadcast((result, error))
    if error is not None:
        raise error
    return result


def leave_processes() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def split_batch(global_batch: int, world: int, limit: int) -> tuple[int, int]:
    """(images of a micro-batch, micro-batches a process sums): the largest micro-batch of at most `limit` images.

    Raises ValueError where the global batch does not divide among the processes, or only into micro-batches under a
    quarter of what fits.
    """
    share, remainder = divmod(global_batch, world)
    if remainder or share == 0:
        near = max(world, round(global_batch / world) * world)
        raise ValueError(
            f"train.global_batch={global_batch} does not divide among {world} processes; the nearest that does: {near}"
        )
    accumulation = next(parts for parts in range(-(-share // limit), share + 1) if share % parts == 0)
    if accumulation > 1 and share // accumulation < limit / 4:
        raise ValueError(
            f"train.global_batch={global_batch} on {world} processes is {share} images each, which divides only into "
            f"micro-batches of {share // accumulation}, while machine.images_per_device={limit} fit: change one of them"
        )
    return share // accumulation, accumulation
