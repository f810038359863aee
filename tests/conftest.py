"""What the tests of whole runs share: a recipe that takes a second, and ways to start it."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# 3 steps an epoch, 9 in all, with everything random switched on: drop-path, mixup, smoothing, shifted crops
TINY = """
recipe=digits machine=cpu machine.threads=1 log.every=1
data.fraction=0.08 data.trace=true train.global_batch=32 train.epochs=3 eval.every_epochs=1
model.width=24 model.depth=2 model.heads=2 model.drop_path=0.2
augment.mixup=0.8 augment.cutmix=1.0 optim.warmup_epochs=1 optim.clip_norm=1.0 ema.decay=0.9
""".split()


def tiny(*words: str) -> list[str]:
    """TINY with these words in place of its own for the same keys."""
    keys = {word.partition("=")[0] for word in words}
    return [word for word in TINY if word.partition("=")[0] not in keys] + list(words)


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes name the embedded data relative to the repository; no W&B key and no launcher's variables leak in."""
    monkeypatch.chdir(ROOT)
    for name in [*os.environ]:
        if name.startswith(("WANDB_", "SLURM_", "TORCHELASTIC_")) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)


def torchrun(processes: int, words: Sequence[str], *, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """The documented command, with gloo bound to the loopback."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    command = [*launcher, "train.py", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=ROOT, env=environment)
