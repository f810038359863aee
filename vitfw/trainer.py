"""From the machine section to a Lightning Trainer."""

import logging
import warnings
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

from vitfw.launch import Launch, MachineConfig, device_of, resolve_strategy, uses_gpu

Trainer = pl.Trainer
PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def build_trainer(
    machine: MachineConfig, launch: Launch, *, accumulation: int, callbacks: list[pl.Callback]
) -> pl.Trainer:
    """One pass over a loader that yields the whole rest of the run: epochs, evaluation, logging, saving and resuming are
    ours, so that the position of a run is one number and not the state of nested loops."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # Lightning 2.6 asks torch 2.14 in a way that torch calls deprecated; no user can act on it
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)", category=FutureWarning)
    on_gpu = uses_gpu(machine)
    sharing = resolve_strategy(launch, machine)
    strategy: Any = SingleDeviceStrategy(device=device_of(launch, machine))
    if sharing == "ddp":
        strategy = DDPStrategy(
            find_unused_parameters=False,  # a parameter without gradient is an error, not a search in every step
            gradient_as_bucket_view=True,
            forward_sync_buffers=False,  # see share_buffers: once an evaluation, not once a micro-batch
            process_group_backend="nccl" if on_gpu else "gloo",
        )
    elif sharing in ("fsdp2", "hsdp"):  # the shards are cut in Module.configure_model, on a mesh of our own
        strategy = ModelParallelStrategy(data_parallel_size=launch.world, tensor_parallel_size=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*`srun` command is available on your system but is not used.*")
        trainer = pl.Trainer(
            accelerator="gpu" if on_gpu else "cpu",
            devices=[launch.local_rank] if on_gpu and sharing == "single" else launch.local_world,
            num_nodes=launch.nodes,
            strategy=strategy,
            plugins=[Started(launch)],
            precision=PRECISIONS[machine.precision],  # pyright: ignore[reportArgumentType]
            accumulate_grad_batches=accumulation,
            max_epochs=1,
            limit_val_batches=0,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=callbacks,
        )
    # Lightning's own handling of signals talks to the other ranks inside the handler, where it can wait for ever, and
    # broadcasts in every step; ours agrees without waiting (see preempt)
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    return trainer


class Started(ClusterEnvironment):
    """Tells Lightning what `detect_launch` found, so that it does not guess for itself. The processes are joined by then."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        raise AssertionError("the processes are joined before the Trainer is built")

    @property
    def main_port(self) -> int:
        raise AssertionError("the processes are joined before the Trainer is built")

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self.launch.world

    def set_world_size(self, size: int) -> None:
        assert size == self.launch.world

    def global_rank(self) -> int:
        return self.launch.rank

    def set_global_rank(self, rank: int) -> None:
        assert rank == self.launch.rank

    def local_rank(self) -> int:
        return self.launch.local_rank

    def node_rank(self) -> int:
        return self.launch.rank // self.launch.local_world
