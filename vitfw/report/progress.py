"""What a person sees while a run goes on: one bar over the whole run in a terminal, one line an epoch elsewhere."""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tqdm import tqdm

from vitfw.report.recorder import LogConfig
from vitfw.schedules import Length


class ProgressDisplay:
    """Rank 0 shows; the other ranks get `show=False`. Speed counts the images of all ranks since this start of the run."""

    def __init__(self, log: LogConfig, length: Length, *, start_step: int, show: bool) -> None:
        mode = "off" if not show else log.progress
        if mode == "auto":
            mode = "bar" if sys.stderr.isatty() else "lines"
        self._mode, self._length = mode, length
        self._started, self._start_step, self._paused = time.perf_counter(), start_step, 0.0
        self._bar: Any = None
        if mode == "bar":
            self._bar = tqdm(
                total=length.total_steps * length.global_batch,
                initial=start_step * length.global_batch,
                unit="img",
                unit_scale=True,
                dynamic_ncols=True,
                smoothing=0.05,
                desc="training",
            )

    def speed(self, step: int) -> float:
        """Training images a second since this start, evaluations and saves left out."""
        seconds = time.perf_counter() - self._started - self._paused
        return (step - self._start_step) * self._length.global_batch / max(seconds, 1e-9)

    def advance(self) -> None:
        if self._bar is not None:
            self._bar.update(self._length.global_batch)

    def note(self, step: int, values: Mapping[str, float]) -> None:
        """Shows the newest training numbers in the bar."""
        if self._bar is not None:
            epoch = step / self._length.steps_per_epoch
            shown = {name: f"{values[name]:.3g}" for name in ("loss", "learning_rate") if name in values}
            self._bar.set_postfix({"epoch": f"{epoch:.1f}/{self._length.epochs:g}"} | shown, refresh=False)

    def line(self, step: int, text: str) -> None:
        """A line that stays: above the bar, or plain with speed and time left."""
        if self._mode == "off":
            return
        epoch = step / self._length.steps_per_epoch
        head = f"epoch {epoch:g}/{self._length.epochs:g}  step {step:,}/{self._length.total_steps:,}"
        if self._bar is not None:
            self._bar.write(f"{head}  {text}", file=sys.stdout)
            return
        speed = self.speed(step)
        left = (self._length.total_steps - step) * self._length.global_batch / speed if speed > 0 else 0.0
        print(f"{head}  {text}  {speed:,.0f} img/s  {duration(left)} left", flush=True)

    def evaluating(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches of an evaluation, with a bar of their own in a terminal; their time does not count as training."""
        started = time.perf_counter()
        yield from tqdm(batches, desc="evaluating", leave=False, dynamic_ncols=True, disable=self._bar is None)
        self._paused += time.perf_counter() - started

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def duration(seconds: float) -> str:
    """1 h 02 min, 3 min 20 s, 12 s."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def result_text(results: Mapping[str, Mapping[str, float]]) -> str:
    """`val: acc1 97.5 loss 0.112 | val_ema: ...`, shares as percent."""
    parts = []
    for split, values in results.items():
        shown = " ".join(
            f"{name} {value:.2f}" if name.startswith("acc") else f"{name} {value:.4g}"
            for name, value in values.items()
            if name != "samples"
        )
        parts.append(f"{split}: {shown}")
    return " | ".join(parts)
