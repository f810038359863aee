"""Saves a run beside its training: in one file by rank 0, or, where weights are cut, each process its own pieces."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vitfw import checkpoint
from vitfw.checkpoint_files import Writer
from vitfw.launch import broadcast
from vitfw.machine import MachineConfig
from vitfw.module import Module
from vitfw.run import package_versions
from vitfw.sharded import Team, is_cut


class Saver:
    """One write at a time. Its methods are entered by all ranks, except where they say so."""

    def __init__(
        self, folder: Path, machine: MachineConfig, *, config_text: str, preprocessing: Mapping[str, Any]
    ) -> None:
        self.folder, self.machine = folder, machine
        self.config_text, self.preprocessing = config_text, preprocessing
        self.writer = Writer()
        self._team: Team | None = None

    @property
    def failed(self) -> bool:
        """Whether this rank's last write has ended with an error; `finish` raises it. For each rank by itself."""
        return self.writer.failed

    def save(
        self,
        module: Module,
        optimizer: torch.optim.Optimizer,
        progress: checkpoint.Progress,
        *,
        best_of: Sequence[str],
    ) -> None:
        """Copies what is to be written and returns. An error of the writer ends the run on all ranks, at the next step or
        save."""
        self.finish()
        is_main = module.rank == 0
        team = self._join(module)
        state = checkpoint.collect(module.task, optimizer, module.ema, keep=is_main, cut=team is not None)
        guard = module.guard.state_dict()
        if not state:
            return
        ranked = {int(at) for entries in progress.ranking.values() for _, at in entries}
        keep = checkpoint.Keep(
            last=self.machine.keep_last,
            every=self.machine.keep_every_steps,
            steps=ranked if self.machine.keep_best > 1 else (),  # a single best has its own name
        )
        write = partial(
            checkpoint.save,
            self.folder,
            state | {"guard": guard, "preprocessing": dict(self.preprocessing)},
            progress,
            config=self.config_text,
            versions=package_versions(),
            best_of=best_of,
            keep=keep,
            team=team,
        )
        self.writer.start(write)

    def _join(self, module: Module) -> Team | None:
        """Those who write together; None where rank 0 writes all by itself."""
        wanted = self.machine.checkpoint_format
        if wanted == "file" or (wanted == "auto" and not is_cut(module.task.parameters())):
            return None
        if self._team is None:
            group, minutes = None, timedelta(minutes=self.machine.collective_minutes)
            if module.world > 1:
                group = dist.new_group(backend="gloo", timeout=minutes)
            self._team = Team(module.rank, module.world, group)
        return self._team

    def wait(self) -> None:
        """Until this rank has written. Raises OSError; for each rank by itself."""
        self.writer.wait()

    def finish(self) -> None:
        """Waits for the write that is under way; its error is raised on all ranks."""
        error = None
        try:
            self.writer.wait()
        except OSError as caught:
            error = str(caught)
        if (error := broadcast(error)) is not None:
            raise OSError(error)
