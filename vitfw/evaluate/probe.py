"""Linear probes on stored features: a grid of learning rates x features, all heads trained at once.

Protocol: DINOv2's linear evaluation (Oquab et al. 2023: SGD, momentum 0.9, no decay, cosine to 0, 13 rates per 256
images) with two differences, both stated in every result: the winner is chosen on images held out of the training set,
and the features are first standardised, as by the BatchNorm without affine of MAE's probe (He et al. 2022) whose
statistics are those of the whole training set. B images a step, L rates, K classes, W width of a feature.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from vitfw.data.index import shuffled_rows
from vitfw.evaluate.features import Features
from vitfw.evaluate.holdout import Split
from vitfw.evaluate.multilabel import average_precision
from vitfw.evaluate.scores import label_ranks
from vitfw.seeding import derive

Pool = Literal["cls", "mean", "cls_mean", "pooled"]
EPS = 1e-6  # MAE's BatchNorm


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """The grid and how its heads are trained."""

    rates: tuple[float, ...] = field(
        default=(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1),
        metadata={"help": "learning rates per 256 images of a step"},
    )
    pools: tuple[str, ...] | None = field(
        default=None, metadata={"help": "cls, mean, cls_mean (DINOv2's), pooled; null: all the network has"}
    )
    blocks: tuple[int, ...] | None = field(
        default=None, metadata={"help": "how many last blocks a feature joins; null: 1 and, where it has them, 4"}
    )
    epochs: float = field(default=10.0, metadata={"help": "passes over the training images"})
    least_steps: int = field(default=500, metadata={"help": "steps at least: small sets get more passes"})
    batch: int = field(default=1024, metadata={"help": "images a step; at most the training images"})
    momentum: float = field(default=0.9, metadata={"help": "momentum of SGD"})
    weight_decay: float = field(default=0.0, metadata={"help": "L2 term of SGD"})
    standardise: bool = field(default=True, metadata={"help": "mean 0 and deviation 1 for each feature (MAE)"})
    refit: bool = field(default=True, metadata={"help": "train the winner again with the held-out images"})
    seed: int = field(default=0, metadata={"help": "order and initial weights"})

    def __post_init__(self) -> None:
        for name in ("rates", "blocks"):
            value = getattr(self, name)
            if value is not None and (not value or min(value) <= 0):
                raise ValueError(f"probe.{name}={value}: one or more numbers above 0")
        known = ("cls", "mean", "cls_mean", "pooled")
        if self.pools is not None and (not self.pools or not set(self.pools) <= set(known)):
            raise ValueError(f"probe.pools={self.pools}: some of {', '.join(known)}, or null")
        for name in ("epochs", "least_steps", "batch"):
            if getattr(self, name) <= 0:
                raise ValueError(f"probe.{name}={getattr(self, name)}: must be above 0")
        if not 0 <= self.momentum < 1 or self.weight_decay < 0:
            raise ValueError(
                f"probe.momentum={self.momentum} must lie in [0, 1), "
                f"probe.weight_decay={self.weight_decay} must be 0 or more"
            )


@dataclass
class Heads:
    """Trained heads on one feature: weight [L, W, K], bias [L, K]; mean and deviation [W] standardise the feature."""

    columns: tuple[str, ...]
    rates: tuple[float, ...]
    weight: Tensor
    bias: Tensor
    mean: Tensor
    deviation: Tensor

    def logits(self, raw: Tensor) -> Tensor:
        """Features [B, W] -> [L, B, K]."""
        return torch.baddbmm(
            self.bias[:, None], ((raw - self.mean) / self.deviation).expand(len(self.rates), -1, -1), self.weight
        )

    def module(self, number: int) -> nn.Sequential:
        """Head `number` as BatchNorm1d without affine and Linear, in evaluation mode: [B, W] -> logits [B, K]."""
        width, classes = self.weight.shape[1:]
        norm, linear = nn.BatchNorm1d(width, affine=False, eps=EPS), nn.Linear(width, classes)
        assert norm.running_mean is not None and norm.running_var is not None
        with torch.no_grad():
            norm.running_mean.copy_(self.mean)
            norm.running_var.copy_(self.deviation**2 - EPS)
            linear.weight.copy_(self.weight[number].T)
            linear.bias.copy_(self.bias[number])
        return nn.Sequential(norm, linear).eval()


@dataclass(frozen=True)
class ProbeResult:
    """heads: one head, the winner. table: one row a candidate. chosen: its row. protocol: the line that travels with
    the numbers and names the images on which the choice was made."""

    heads: Heads
    table: tuple[dict[str, float | str], ...]
    chosen: dict[str, float | str]
    protocol: str

    def logits(self, features: Features, *, chunk: int = 4096) -> np.ndarray:
        """First view of these features -> float32 [N, K] of the winner."""
        return predict_heads(self.heads, features, np.arange(len(features.labels)), chunk=chunk)[0]


def feature_sets(columns: tuple[str, ...], config: ProbeConfig) -> dict[str, tuple[str, ...]]:
    """{name: columns} of the grid: `cls/4` the class tokens of four blocks, `cls_mean/4` those and one mean.

    Raises ValueError for a pool that the network does not have.
    """
    has = {"cls": "cls-1" in columns, "mean": "mean-1" in columns, "pooled": "pooled" in columns}
    has["cls_mean"] = has["cls"] and has["mean"]
    pools = (
        [pool for pool in ("cls", "mean", "cls_mean", "pooled") if has[pool]] if config.pools is None else config.pools
    )
    sets: dict[str, tuple[str, ...]] = {}
    for pool in pools:
        if not has[pool]:
            raise ValueError(f"probe.pools={config.pools}: this network gives no {pool}, only {', '.join(columns)}")
        part = "cls" if pool == "cls_mean" else pool
        stored = [blocks for blocks in (1, 4) if f"{part}-{blocks}" in columns]
        for blocks in (1,) if pool == "pooled" else config.blocks or stored:
            if pool != "pooled" and f"{part}-{blocks}" not in columns:
                raise ValueError(f"probe.blocks={config.blocks}: features of {blocks} blocks were not stored")
            depths = range(blocks, 0, -1)
            names = {
                "pooled": ["pooled"],
                "cls": [f"cls-{depth}" for depth in depths],
                "mean": [f"mean-{depth}" for depth in depths],
                "cls_mean": [*(f"cls-{depth}" for depth in depths), "mean-1"],
            }[pool]
            sets["pooled" if pool == "pooled" else f"{pool}/{blocks}"] = tuple(names)
    return sets


def probe(
    train: Features, split: Split, config: ProbeConfig, *, num_classes: int, device: torch.device | str = "cpu"
) -> ProbeResult:
    """Trains the whole grid on split.fit, chooses on split.held, and trains the winner again on both (`refit`).

    Only training features come in here: the reported set cannot influence anything.
    """
    sets = feature_sets(train.columns, config)
    trained = train_heads(train, split.fit, sets, config.rates, config, num_classes=num_classes, device=device)
    table = [row for name, heads in zip(sets, trained, strict=True) for row in _judge(name, heads, train, split.held)]
    best = max(range(len(table)), key=lambda number: (table[number]["held_score"], -float(table[number]["held_nll"])))
    group, place = divmod(best, len(config.rates))
    winner = trained[group]
    if config.refit:
        rows = np.sort(np.concatenate([split.fit, split.held]))
        name = list(sets)[group]
        again = train_heads(
            train, rows, {name: sets[name]}, (config.rates[place],), config, num_classes=num_classes, device=device
        )
        heads = again[0]
    else:
        one = slice(place, place + 1)
        heads = Heads(
            winner.columns, winner.rates[one], winner.weight[one], winner.bias[one], winner.mean, winner.deviation
        )
    chosen = dict(table[best])
    protocol = (
        f"linear probe: {len(table)} heads ({len(config.rates)} learning rates x {', '.join(sets)}), "
        f"chosen {chosen['feature']} at {chosen['rate']:g} on {split.name}"
        f"{', then trained again with them' if config.refit else ''}; features of {train.place}"
        f"{f', {train.views} augmented views' if train.views > 1 else ''}"
        f"{', standardised' if config.standardise else ''}"
    )
    return ProbeResult(heads, tuple(table), chosen, protocol)


def train_heads(
    train: Features,
    rows: np.ndarray,
    sets: dict[str, tuple[str, ...]],
    rates: tuple[float, ...],
    config: ProbeConfig,
    *,
    num_classes: int,
    device: torch.device | str = "cpu",
) -> list[Heads]:
    """One `Heads` a feature set, all of them on the same batches.

    The gradient of a linear layer under cross-entropy is x^T (p - y) / B, so there is no graph: the L heads of a set
    are two matrix products a step. Multi-label: p = sigmoid, the loss summed over classes.
    """
    groups = [_new_heads(train, rows, columns, rates, config, num_classes, device) for columns in sets.values()]
    speeds = [(torch.zeros_like(heads.weight), torch.zeros_like(heads.bias)) for heads in groups]
    batch = min(config.batch, len(rows))
    steps = max(round(config.epochs * len(rows) / batch), config.least_steps)
    peak = torch.tensor(rates, device=device)[:, None] * (batch / 256)
    used = tuple(dict.fromkeys(name for columns in sets.values() for name in columns))
    for step, (view, chosen) in enumerate(_batches(rows, batch, steps, train.views, config.seed)):
        rate = peak * 0.5 * (1.0 + math.cos(math.pi * step / steps))
        raw = torch.from_numpy(train.take(used, chosen, view)).to(device).unflatten(1, (len(used), -1))
        target = torch.from_numpy(train.labels[chosen]).to(device)
        for heads, speed in zip(groups, speeds, strict=True):
            x = raw[:, [used.index(name) for name in heads.columns]].flatten(1)
            _step(heads, speed, (x - heads.mean) / heads.deviation, target, rate, config)
    return groups


def predict_heads(heads: Heads, features: Features, rows: np.ndarray, *, chunk: int = 4096) -> np.ndarray:
    """First view of rows [n] -> float32 [L, n, K]."""
    parts = []
    for start in range(0, len(rows), chunk):
        raw = torch.from_numpy(features.take(heads.columns, rows[start : start + chunk])).to(heads.weight.device)
        parts.append(heads.logits(raw).cpu().numpy())
    return np.concatenate(parts, axis=1)


def _new_heads(
    train: Features,
    rows: np.ndarray,
    columns: tuple[str, ...],
    rates: tuple[float, ...],
    config: ProbeConfig,
    num_classes: int,
    device: torch.device | str,
) -> Heads:
    mean, deviation = _statistics(train, rows, columns) if config.standardise else (np.float64(0.0), np.float64(1.0))
    width = len(columns) * train.values.shape[3]
    generator = torch.Generator().manual_seed(derive(config.seed, "probe", *columns))
    weight = torch.randn(width, num_classes, generator=generator) * 0.01  # the same start for every rate
    return Heads(
        columns,
        rates,
        weight.to(device).repeat(len(rates), 1, 1),
        torch.zeros(len(rates), num_classes, device=device),
        torch.as_tensor(mean, dtype=torch.float32, device=device).expand(width).contiguous(),
        torch.as_tensor(deviation, dtype=torch.float32, device=device).expand(width).contiguous(),
    )


def _statistics(train: Features, rows: np.ndarray, columns: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation [W] over all views of these rows, in float64, a chunk at a time."""
    total, square, count = 0.0, 0.0, 0
    for view in range(train.views):
        for start in range(0, len(rows), 4096):
            part = train.take(columns, rows[start : start + 4096], view).astype(np.float64)
            total, square, count = total + part.sum(axis=0), square + (part**2).sum(axis=0), count + len(part)
    mean = np.asarray(total / count)
    return mean, np.sqrt(np.maximum(square / count - mean**2, 0.0) + EPS)


def _batches(rows: np.ndarray, batch: int, steps: int, views: int, seed: int) -> Iterator[tuple[int, np.ndarray]]:
    """(view, rows [batch]) of each step; pass e uses view e % V and drops the remainder that fills no batch."""
    done, epoch = 0, 0
    while done < steps:
        order = rows[shuffled_rows(len(rows), derive(seed, "probe order", epoch))]
        for start in range(0, len(order) - batch + 1, batch):
            if done == steps:
                return
            yield epoch % views, order[start : start + batch]
            done += 1
        epoch += 1


def _step(
    heads: Heads, speed: tuple[Tensor, Tensor], x: Tensor, target: Tensor, rate: Tensor, config: ProbeConfig
) -> None:
    """One step of SGD for L heads at once. x [B, W], target int64 [B] or float [B, K], rate [L, 1]."""
    count, (size, width, classes) = len(x), heads.weight.shape
    # one product for all heads: [B, W] x [W, L K]
    logits = (x @ heads.weight.permute(1, 0, 2).reshape(width, -1)).view(count, size, classes) + heads.bias
    if target.ndim == 1:
        error = logits.softmax(dim=2)
        error[torch.arange(count, device=x.device), :, target] -= 1.0
    else:
        error = logits.sigmoid() - target[:, None]
    error /= count
    gradient = (x.T @ error.view(count, -1)).view(width, size, classes).permute(1, 0, 2)
    for value, moving, change, scale in (
        (heads.weight, speed[0], gradient, rate[:, :, None]),
        (heads.bias, speed[1], error.sum(dim=0), rate),
    ):
        moving.mul_(config.momentum).add_(change)
        if config.weight_decay:
            moving.add_(value, alpha=config.weight_decay)
        value.sub_(moving * scale)


def _judge(name: str, heads: Heads, train: Features, held: np.ndarray) -> list[dict[str, float | str]]:
    """One row a rate: score on the held-out images (top-1 or mAP, percent) and their loss, which settles ties."""
    rows: list[dict[str, float | str]] = []
    labels = train.labels[held]
    for rate, logits in zip(heads.rates, predict_heads(heads, train, held), strict=True):
        if not np.isfinite(logits).all():  # this rate diverged: it stays in the table and cannot win
            rows.append({"feature": name, "rate": rate, "held_score": -1.0, "held_nll": math.inf})
            continue
        tensor, target = torch.from_numpy(logits).double(), torch.from_numpy(labels)
        if train.multi_label:
            score = 100.0 * float(np.nanmean(average_precision(logits, labels)))
            loss = nn.functional.binary_cross_entropy_with_logits(tensor, target.double()).item()
        else:
            score = 100.0 * float(np.mean(label_ranks(logits, labels) == 0))
            loss = nn.functional.cross_entropy(tensor, target).item()
        rows.append({"feature": name, "rate": rate, "held_score": score, "held_nll": loss})
    return rows
