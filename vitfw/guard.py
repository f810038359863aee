"""Section `guard`: steps that would ruin the weights are skipped on all ranks, counted, and end the run at last.

Nothing here waits for the device. The gradient norm is the one sign that all ranks share: a loss that is not finite on
any rank is turned into gradients that are not, so the norm after the ranks have combined their gradients says the same
everywhere. The step is skipped where the norm is computed; the host reads it two steps later, when it is long there.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitfw.machine import MachineConfig

LAG = 2  # steps after which the host reads a norm
FEWEST = 20  # accepted steps before a spike can be told from an ordinary norm

Verdict = Literal["go on", "roll back", "give up"]
Precise = Literal["none", "attention", "decoder", "all"]


class DivergedError(RuntimeError):
    """Training went wrong again and again; the text says what happened and what to try."""


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """Section `guard`. Steps whose loss or gradient is not finite are always skipped."""

    spike: float = field(
        default=0.0,
        metadata={"help": "also skip a step whose gradient norm has a robust z-score above this; 0: never"},
    )
    window: int = field(default=200, metadata={"help": "accepted steps that the z-score compares with"})
    patience: int = field(
        default=10, metadata={"help": "skipped steps in a row before the last checkpoint's weights return"}
    )
    rollbacks: int = field(default=2, metadata={"help": "such returns before the run ends as failed"})
    raise_precision: Precise = field(
        default="none",
        metadata={"help": "what computes in float32 after the first return, under machine.precision=bf16 or fp16"},
    )

    def __post_init__(self) -> None:
        if self.spike < 0 or not math.isfinite(self.spike):
            raise ValueError(f"guard.spike={self.spike}: must be 0 (off) or a z-score above 0, such as 10")
        if self.window < FEWEST:
            raise ValueError(f"guard.window={self.window}: must be at least {FEWEST} steps")
        if self.patience < 1:
            raise ValueError(f"guard.patience={self.patience}: must be at least 1 step")
        if self.rollbacks < 0:
            raise ValueError(f"guard.rollbacks={self.rollbacks}: must be 0 (end at once) or more")


class Guard:
    """Judges each step on the device and reads the judgements on the host, LAG steps later, so that a run cut anywhere
    decides as the uncut run."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.skipped = 0  # over all attempts
        self.streak = 0  # skipped steps in a row
        self.rollbacks = 0  # since the last full window of good steps
        self.raised = False  # whether `raise_precision` is in force: once it is, it stays
        self.bad_steps: list[tuple[int, float]] = []  # (step, norm) read since they were last taken
        self._accepted: deque[float] = deque(maxlen=config.window)
        self._since_rollback = 0
        self._unread: deque[tuple[int, Any]] = deque()

    def judge(self, step: int, norm: Tensor) -> Tensor:
        """Whether `step` must be skipped: a bool scalar on the norm's device. Called on all ranks once a step."""
        self._read(step - LAG)
        bad = ~torch.isfinite(norm)
        limit = self.limit()
        if limit is not None:
            bad = bad | (norm > limit)
        self._unread.append((step, _copy_to_host(torch.where(bad, -norm.abs(), norm))))
        return bad

    def limit(self) -> float | None:
        """The norm above which a step is a spike: median + z x 1.4826 x median absolute deviation of accepted ones."""
        if self.config.spike == 0 or len(self._accepted) < FEWEST:
            return None
        middle = statistics.median(self._accepted)
        spread = 1.4826 * statistics.median(abs(value - middle) for value in self._accepted)
        return middle + self.config.spike * max(spread, 0.05 * middle)  # a flat stretch must not make a trifle a spike

    def verdict(self) -> Verdict:
        """What the steps read so far ask for; a roll-back is counted when it is asked for."""
        if self.streak < self.config.patience:
            return "go on"
        self.streak = 0
        self.rollbacks += 1
        self._since_rollback = 0
        self._accepted.clear()
        return "roll back" if self.rollbacks <= self.config.rollbacks else "give up"

    def take_bad_steps(self) -> list[tuple[int, float]]:
        taken, self.bad_steps = self.bad_steps, []
        return taken

    def settle(self) -> None:
        """Reads all that is still on its way; waits for the device, so it belongs where the run waits anyway."""
        self._unread = deque((step, handle if isinstance(handle, float) else handle()) for step, handle in self._unread)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, the unread norms included."""
        self.settle()
        return {
            "skipped": self.skipped,
            "streak": self.streak,
            "rollbacks": self.rollbacks,
            "since_rollback": self._since_rollback,
            "raised": self.raised,
            "accepted": list(self._accepted),
            "unread": [[step, value] for step, value in self._unread],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.skipped, self.streak = state["skipped"], state["streak"]
        self.rollbacks, self._since_rollback = state["rollbacks"], state["since_rollback"]
        self.raised = state.get("raised", False)
        self._accepted = deque(state["accepted"], maxlen=self.config.window)
        self._unread = deque((int(step), float(value)) for step, value in state["unread"])

    def _read(self, up_to: int) -> None:
        while self._unread and self._unread[0][0] <= up_to:
            step, handle = self._unread.popleft()
            value = handle if isinstance(handle, float) else handle()
            if value >= 0 and math.isfinite(value):
                self._accept(value)
            else:
                self.skipped += 1
                self.streak += 1
                self.bad_steps.append((step, abs(value)))

    def _accept(self, norm: float) -> None:
        self.streak = 0
        self._accepted.append(norm)
        self._since_rollback += 1
        if self._since_rollback >= self.config.window:
            self.rollbacks = 0


def check_precision(task: nn.Module, which: Precise, machine: MachineConfig) -> None:
    """Refuses what `raise_precision` could not do on this task and machine. Raises ValueError."""
    if which in ("attention", "all") and not _attentions(task):
        raise ValueError(f"guard.raise_precision={which}: this network has no attention of ours to compute in float32")
    if which in ("decoder", "all") and not isinstance(getattr(task, "decoder", None), nn.Module):
        raise ValueError(f"guard.raise_precision={which}: this task has no decoder; use attention or none")
    if which in ("decoder", "all") and machine.precision == "bf16" and machine.strategy in ("fsdp2", "hsdp"):
        raise ValueError(
            f"guard.raise_precision={which} with machine.strategy={machine.strategy} and machine.precision=bf16: the "
            "decoder's weights are gathered in bfloat16 there; use attention, or machine.precision=fp32"
        )


def raise_precision(task: nn.Module, which: Precise) -> None:
    """Lets the named parts of a task compute in float32 under autocast from here on: scores, softmax and weighted sums of
    every attention; the whole decoder of a masked autoencoder. Entered by all ranks alike."""
    if which in ("attention", "all"):
        for attention in _attentions(task):
            attention.precise = True
    if which in ("decoder", "all"):
        decoder: Any = task.get_submodule("decoder")
        decoder.forward = partial(_without_autocast, decoder.forward)


def _attentions(task: nn.Module) -> list[Any]:
    return [module for module in task.modules() if hasattr(module, "precise")]


def _without_autocast(forward: Any, tokens: Tensor, *args: Any, **options: Any) -> Tensor:
    with torch.autocast(tokens.device.type, enabled=False):
        return forward(tokens.float(), *args, **options)


def poison(loss: Tensor) -> Tensor:
    """The loss as it is; one that is not finite gets gradients that are not either, so that every rank learns of it."""
    return loss * torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)


def skip_step(optimizer: torch.optim.Optimizer, bad: Tensor, *, scaled: bool) -> None:
    """Makes the optimiser leave weights and state alone in this step where `bad` is true.

    Fused optimisers of torch take the answer on the device. The others lose their gradients, for which the host must
    know the answer: free on a CPU, a short wait on a GPU. `scaled`: a gradient scaler sets the device's answer itself.
    """
    if optimizer.defaults.get("fused") and not scaled:
        optimizer.grad_scale = None  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.found_inf = bad.float()  # pyright: ignore[reportAttributeAccessIssue]
    elif bad.item():
        optimizer.zero_grad(set_to_none=True)


def _copy_to_host(value: Tensor) -> Any:
    """A number, or a function that gives it once the copy has arrived."""
    if value.device.type == "cpu":
        return float(value)
    host = torch.empty_like(value, device="cpu", pin_memory=True)
    host.copy_(value, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def read() -> float:
        arrived.synchronize()
        return float(host)

    return read
