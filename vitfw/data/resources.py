"""CPUs and shared memory that this job may use, as opposed to what the machine has."""

import os
import shutil
import warnings
from pathlib import Path
from typing import Literal

_SHARED_MEMORY = Path("/dev/shm")


def usable_cpus() -> int:
    """CPUs of this task: the scheduler's number if it states one, never more than affinity mask and cgroup quota."""
    limits = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    quota = _cgroup_cpus()
    if quota is not None:
        limits.append(quota)
    for name in ("SLURM_CPUS_PER_TASK", "PBS_NCPUS"):
        if os.environ.get(name, "").isdigit():
            limits.append(int(os.environ[name]))
            break
    return max(1, min(limits))


def _cgroup_cpus() -> int | None:
    """The quota of a container (cgroup v2), rounded up; None if there is none."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else -(-int(quota) // int(period))


def resolve_workers(workers: int | Literal["auto"], *, local_world: int = 1) -> int:
    """Loader processes of one rank: usable CPUs / ranks of this node - 1, at least 0; a given number is kept, with a
    warning where all ranks together would start more than there are CPUs.

    Under SLURM with one task a rank, the scheduler's number is already per rank; affinity then says so, too.
    """
    cpus = usable_cpus()
    # under torchrun inside srun the task is a node, and torchrun's ranks share its CPUs
    task_is_rank = {
        "SLURM_CPUS_PER_TASK",
        "SLURM_LOCALID",
    } <= os.environ.keys() and "TORCHELASTIC_RUN_ID" not in os.environ
    per_rank = cpus if task_is_rank else cpus // local_world
    if workers == "auto":
        return max(0, per_rank - 1)
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
        raise ValueError(f"machine.workers={workers!r}: must be auto, or a number of processes from 0 on")
    if workers > max(per_rank, 1):
        warnings.warn(
            f"machine.workers={workers} for each of {local_world} process(es), but only {cpus} CPU(s) may be used; "
            f"machine.workers=auto would take {max(0, per_rank - 1)}",
            stacklevel=2,
        )
    return workers


def free_shared_memory() -> int | None:
    """Free bytes of /dev/shm, through which workers hand over batches; None where there is no such place."""
    return shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else None


def fit_prefetch(prefetch: int, *, workers: int, batch_bytes: int, local_world: int = 1) -> int:
    """Batches each worker keeps ready, lowered (with a warning that states need and free size) to what /dev/shm holds.

    batch_bytes: of one batch of one rank. Each worker holds `prefetch` finished batches and one in the making.
    Raises ValueError where not even prefetch 1 fits.
    """
    free = free_shared_memory()
    if workers == 0 or free is None:
        return prefetch
    each = workers * batch_bytes * local_world
    need = each * (prefetch + 1)
    if need <= free:
        return prefetch
    fits = min(prefetch, free // each - 1)
    sizes = (
        f"{_megabytes(need)} of shared memory are needed ({workers} workers x {prefetch + 1} batches of "
        f"{_megabytes(batch_bytes)} x {local_world} rank(s)), {_megabytes(free)} of /dev/shm are free"
    )
    if fits < 1:
        raise ValueError(
            f"{sizes}: lower machine.workers or machine.images_per_device, or enlarge it (docker run --shm-size)"
        )
    warnings.warn(f"{sizes}; each worker keeps {fits} batch(es) ready instead of {prefetch}", stacklevel=2)
    return fits


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.0f} MB" if count >= 1e7 else f"{count / 1e6:.2g} MB"
