"""Logistic regression to convergence on stored features: L-BFGS in float64, L2 swept on held-out training images.

Protocol of DINOv2's evaluation (45 values of C, chosen on a held-out share of the training set, then fitted on all of
it); the objective is scikit-learn's: C times the summed cross-entropy plus half the squared weights, the bias free.
N images, W width, K classes.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vitfw.evaluate.features import Features
from vitfw.evaluate.holdout import Split
from vitfw.evaluate.multilabel import average_precision
from vitfw.evaluate.scores import label_ranks


@dataclass(frozen=True, kw_only=True)
class LogisticConfig:
    """The sweep and when a fit counts as converged."""

    strengths: tuple[float, ...] = field(
        default=tuple(float(10.0 ** (-6 + 0.25 * step)) for step in range(45)),
        metadata={"help": "values of C, the inverse strength of L2"},
    )
    iterations: int = field(default=1000, metadata={"help": "L-BFGS iterations of a fit at most"})
    tolerance: float = field(default=1e-6, metadata={"help": "largest entry of the mean gradient at which a fit ends"})
    chunk: int = field(default=65536, metadata={"help": "images worked on at once (memory only)"})

    def __post_init__(self) -> None:
        if not self.strengths or min(self.strengths) <= 0:
            raise ValueError(f"logistic.strengths={self.strengths}: one or more numbers above 0")
        if self.iterations < 1 or self.chunk < 1 or not self.tolerance > 0:
            raise ValueError(
                f"logistic.iterations={self.iterations}, logistic.chunk={self.chunk}, "
                f"logistic.tolerance={self.tolerance}: must be above 0"
            )


@dataclass(frozen=True)
class LogisticResult:
    """weight float64 [W, K], bias [K] of the final fit; table: one row a value of C; protocol: line for the result."""

    weight: np.ndarray
    bias: np.ndarray
    columns: tuple[str, ...]
    table: tuple[dict[str, float], ...]
    chosen: dict[str, float]
    protocol: str

    def logits(self, features: Features, *, chunk: int = 65536) -> np.ndarray:
        """First view -> float32 [N, K]."""
        rows = np.arange(len(features.labels))
        parts = [
            features.take(self.columns, rows[start : start + chunk]).astype(np.float64) @ self.weight + self.bias
            for start in range(0, len(rows), chunk)
        ]
        return np.concatenate(parts).astype(np.float32)


def logistic_regression(
    train: Features,
    split: Split,
    config: LogisticConfig,
    *,
    columns: tuple[str, ...],
    num_classes: int,
    device: torch.device | str = "cpu",
) -> LogisticResult:
    """Sweeps C on split.fit, from strong to weak L2, each fit starting at the last; chooses on split.held; fits all."""
    fit = _Problem(train, split.fit, columns, num_classes, config, device)
    held = train.take(columns, split.held).astype(np.float64)
    labels = train.labels[split.held]
    table: list[dict[str, float]] = []
    weights: list[Tensor] = []
    start = torch.zeros(fit.width + 1, num_classes, dtype=torch.float64, device=device)
    for strength in sorted(config.strengths):
        start, iterations = fit.solve(strength, start)
        values = start.cpu().numpy()
        score = _score(held @ values[:-1] + values[-1], labels)
        table.append({"C": strength, "held_score": score, "iterations": float(iterations)})
        weights.append(start)
    best = max(range(len(table)), key=lambda number: (table[number]["held_score"], -table[number]["C"]))
    everything = _Problem(train, np.sort(np.concatenate([split.fit, split.held])), columns, num_classes, config, device)
    final, iterations = everything.solve(table[best]["C"], weights[best])
    values = final.cpu().numpy()
    protocol = (
        f"logistic regression on {'+'.join(columns)}: L-BFGS, {len(table)} values of C, {table[best]['C']:.3g} chosen "
        f"on {split.name}, then fitted with them ({'converged' if iterations < config.iterations else 'NOT converged'} "
        f"after {iterations} iterations); features of {train.place}"
    )
    return LogisticResult(values[:-1], values[-1], columns, tuple(table), table[best], protocol)


class _Problem:
    """Objective and gradient over chunks of rows, so that only `chunk` rows are in float64 at a time."""

    def __init__(
        self,
        train: Features,
        rows: np.ndarray,
        columns: tuple[str, ...],
        num_classes: int,
        config: LogisticConfig,
        device: torch.device | str,
    ) -> None:
        self.train, self.rows, self.columns, self.config = train, rows, columns, config
        self.num_classes, self.device = num_classes, device
        self.width = len(columns) * train.values.shape[3]

    def solve(self, strength: float, start: Tensor) -> tuple[Tensor, int]:
        """Weights and bias float64 [W + 1, K] at the minimum for this C, and the L-BFGS iterations it took."""
        value = start.clone().requires_grad_()
        optimizer = torch.optim.LBFGS(
            [value],
            max_iter=self.config.iterations,
            max_eval=self.config.iterations * 5 // 4 + 1,
            history_size=10,
            tolerance_grad=self.config.tolerance,
            tolerance_change=1e-14,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            loss, value.grad = self.objective(value.detach(), strength)
            return loss

        optimizer.step(closure)
        return value.detach(), int(optimizer.state[value]["n_iter"])

    def objective(self, value: Tensor, strength: float) -> tuple[Tensor, Tensor]:
        """Weights and bias [W + 1, K] -> (scalar, gradient): mean cross-entropy + |W|^2 / (2 C N)."""
        penalty = 1.0 / (strength * len(self.rows))
        loss = 0.5 * penalty * (value[:-1] ** 2).sum()
        gradient = torch.cat([penalty * value[:-1], torch.zeros_like(value[-1:])])
        for start in range(0, len(self.rows), self.config.chunk):
            rows = self.rows[start : start + self.config.chunk]
            x = torch.from_numpy(self.train.take(self.columns, rows)).to(self.device).double()
            target = torch.from_numpy(self.train.labels[rows]).to(self.device)
            logits = x @ value[:-1] + value[-1]
            if target.ndim == 1:
                logs = logits.log_softmax(dim=1)
                error, own = logs.exp(), target[:, None]
                loss -= logs.gather(1, own).sum() / len(self.rows)
                error.scatter_add_(1, own, torch.full_like(own, -1, dtype=error.dtype))
            else:  # one yes or no a class, summed
                target = target.double()
                error = logits.sigmoid() - target
                loss += (torch.nn.functional.softplus(logits) - target * logits).sum() / len(self.rows)
            gradient[:-1] += x.T @ error / len(self.rows)
            gradient[-1] += error.sum(dim=0) / len(self.rows)
        return loss, gradient


def _score(logits: np.ndarray, labels: np.ndarray) -> float:
    if labels.ndim == 2:
        return 100.0 * float(np.nanmean(average_precision(logits, labels)))
    return 100.0 * float(np.mean(label_ranks(logits, labels) == 0))
