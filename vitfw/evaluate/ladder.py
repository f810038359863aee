"""What a ladder of rungs came to: the table, and how far it is worth unfreezing, in words with the reason.

A rung is one way to fine-tune (probe, last_block, full); each ran with S seeds. Accuracies are in percent.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vitfw.evaluate.scores import binomial_error

MEASURES = ("acc1", "acc5", "mean_class_acc", "nll", "ece")
BELIEVED = 2.0  # a gap counts when it is larger than so many standard errors of itself


@dataclass(frozen=True, kw_only=True)
class RungResult:
    """One rung with one seed. scores: of `classification_scores` on the reported set; seconds: of training alone, for a
    grid of its feature pass too; protocol: how the weights came about, and on which images anything was chosen."""

    rung: str
    seed: int
    scores: dict[str, float]
    trainable: int
    parameters: int
    training_bytes: int
    images_per_second: float
    seconds: float
    protocol: str = ""

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def same_outcome(self, other: "RungResult") -> bool:
        """Equal but for the speed, which no two runs share, and the protocol, which names places."""
        own = ("images_per_second", "seconds", "protocol")
        mine, theirs = ({k: v for k, v in one.plain().items() if k not in own} for one in (self, other))
        return mine == theirs


@dataclass(frozen=True)
class Recommendation:
    """rung: how far to unfreeze; text: that, and the reason with its numbers."""

    rung: str
    text: str


def order_of(results: Sequence[RungResult]) -> list[str]:
    """Rungs by trainable parameters, the smallest first."""
    sizes = {result.rung: result.trainable for result in results}
    return sorted(sizes, key=lambda rung: sizes[rung])


def mean_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and standard deviation between seeds (None with one)."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


def noise(results: Sequence[RungResult], rung: str) -> float:
    """Standard error of a rung's mean acc1, in points: the finite test set, and what seeds differ by beside it.

    The test set is the same for all seeds, so more seeds do not shrink its part.
    """
    own = [result.scores for result in results if result.rung == rung]
    mean, spread = mean_and_spread([scores["acc1"] for scores in own])
    between = 0.0 if spread is None else spread**2 / len(own)
    return (binomial_error(mean, own[0]["samples"]) ** 2 + between) ** 0.5


def recommend(results: Sequence[RungResult]) -> Recommendation:
    """The cheapest rung that no dearer one beats by more than twice the noise of the gap, and why.

    Raises ValueError for fewer than two rungs.
    """
    rungs = order_of(results)
    if len(rungs) < 2:
        raise ValueError(f"ladder.rungs={rungs}: a recommendation compares two rungs or more")
    means = {rung: mean_and_spread([r.scores["acc1"] for r in results if r.rung == rung])[0] for rung in rungs}
    seeds = len({result.seed for result in results})
    errors = {rung: noise(results, rung) for rung in rungs}

    def gap_noise(a: str, b: str) -> float:
        return BELIEVED * (errors[a] ** 2 + errors[b] ** 2) ** 0.5

    best = max(rungs, key=lambda rung: means[rung])
    # the cheapest that nothing dearer believably beats; the dearest of all is never beaten by a dearer one
    rung = next(
        rung
        for place, rung in enumerate(rungs)
        if all(means[other] - means[rung] <= gap_noise(rung, other) for other in rungs[place + 1 :])
    )
    gap = means[best] - means[rung]
    images = int(results[0].scores["samples"])
    base = f"{seeds} seed{'s' * (seeds > 1)}, {images:,} test images"
    if rung != best:
        text = (
            f"Use {rung}: {best} is ahead by {gap:.2f} points ({means[best]:.2f} against {means[rung]:.2f}), within "
            f"the noise of {gap_noise(rung, best):.2f} ({base}), and trains "
            f"{_times(results, best, rung)} the parameters."
        )
    elif rung == rungs[0]:
        nearest = max(rungs[1:], key=lambda other: means[other])
        text = (
            f"Use {rung}: it is the best and the cheapest ({means[rung]:.2f}; {nearest} reaches {means[nearest]:.2f}; "
            f"{base}). If {nearest} should be better, look at its settings first: too few epochs, or a rate so high "
            "that it ruins pretrained weights."
        )
    else:
        cheaper = max(rungs[: rungs.index(rung)], key=lambda other: means[other])
        text = (
            f"Use {rung}: it beats {cheaper} by {means[rung] - means[cheaper]:.2f} points ({means[rung]:.2f} against "
            f"{means[cheaper]:.2f}), more than the noise of {gap_noise(rung, cheaper):.2f} ({base})."
        )
    if seeds == 1:
        text += " With one seed the noise is that of the test set alone; ladder.seeds=3 would measure the rest."
    return Recommendation(rung, text)


def table(results: Sequence[RungResult]) -> str:
    """Markdown, one row a rung: mean +- deviation over seeds of each measure, size, memory, speed, time."""
    names = [name for name in MEASURES if all(name in result.scores for result in results)]
    titles = {"acc1": "top-1 %", "acc5": "top-5 %", "mean_class_acc": "mean class %", "nll": "NLL", "ece": "ECE"}
    head = ["rung", *(titles[name] for name in names), "trainable", "share %", "training memory", "images/s", "minutes"]
    rows = [head, ["---"] * len(head)]
    for rung in order_of(results):
        own = [result for result in results if result.rung == rung]
        first = own[0]
        cells = [rung]
        for name in names:
            digits = 2 if name in ("acc1", "acc5", "mean_class_acc") else 4
            cells.append(with_spread([result.scores[name] for result in own], digits))
        cells += [
            f"{first.trainable:,}",
            f"{100 * first.trainable / first.parameters:.3g}",
            bytes_text(first.training_bytes),
            f"{np.mean([result.images_per_second for result in own]):,.0f}",
            f"{np.mean([result.seconds for result in own]) / 60:.1f}",
        ]
        rows.append(cells)
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    )


def with_spread(values: Sequence[float], digits: int) -> str:
    """`81.32 +- 0.11`, or the value alone with one seed."""
    mean, spread = mean_and_spread(values)
    return f"{mean:.{digits}f}" + ("" if spread is None else f" +- {spread:.{digits}f}")


def bytes_text(count: float) -> str:
    """120 KiB, 108 MiB, 1.28 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def _times(results: Sequence[RungResult], larger: str, smaller: str) -> str:
    sizes = {result.rung: result.trainable for result in results}
    return f"{sizes[larger] / sizes[smaller]:,.3g} times"
