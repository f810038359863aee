"""`vitfw probe PLACE data.train=... data.val=...`: what the features of a network are worth, without training it.

One feature pass, then a grid of linear probes, nearest neighbours, logistic regression and few-shot on the stored
features. Every choice is made on images held out of data.train; data.val is only scored, once, at the end.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch.utils.data import DataLoader

from vitfw.data.augment import AugmentConfig, train_transform
from vitfw.data.dataset import ImageDataset
from vitfw.data.index import Samples
from vitfw.data.ledger import Ledger
from vitfw.data.loader import Batches, Loader, WorkerStart, collate
from vitfw.data.order import Draw, eval_order
from vitfw.data.policies import POLICIES
from vitfw.data.resources import resolve_workers
from vitfw.data.section import DataConfig, open_split
from vitfw.evaluate.features import Features, extract_features, head_column
from vitfw.evaluate.few_shot import FewShotConfig, few_shot
from vitfw.evaluate.holdout import Split, split_training
from vitfw.evaluate.knn import KnnConfig, knn_votes
from vitfw.evaluate.logistic import LogisticConfig, logistic_regression
from vitfw.evaluate.multilabel import fit_thresholds, multilabel_scores
from vitfw.evaluate.probe import ProbeConfig, predict_heads, probe
from vitfw.evaluate.scores import classification_scores
from vitfw.launch import Launch, MachineConfig, broadcast
from vitfw.models.reading import Which
from vitfw.opened import EvaluationSet, Opened, by_name, evaluation_set, open_network, parse, start
from vitfw.run import write_text

Method = Literal["probe", "knn", "logistic", "few_shot"]


@dataclass(frozen=True, kw_only=True)
class FeatureConfig:
    """Section `features`: what is stored, and the images on which choices are made."""

    folder: str = field(default="runs/features", metadata={"help": "where features are kept, shared by all nodes"})
    views: int = field(default=1, metadata={"help": "1: the evaluation view; more: augmented views of each image"})
    policy: str = field(default="flip_crop", metadata={"help": "augment.policy of the views: crop and flip only"})
    holdout: float = field(default=0.01, metadata={"help": "share of data.train on which choices are made"})
    holdout_least: int = field(default=256, metadata={"help": "images held out at least (at most a fifth)"})
    seed: int = field(default=0, metadata={"help": "chooses the held-out images and augments the views"})

    def __post_init__(self) -> None:
        if self.views < 1:
            raise ValueError(f"features.views={self.views}: must be at least 1")
        if self.policy not in POLICIES:
            raise ValueError(f"features.policy={self.policy}: one of {', '.join(POLICIES)}")


@dataclass(frozen=True, kw_only=True)
class ProbeCommandConfig:
    """The words of `vitfw probe`."""

    data: DataConfig = field(default_factory=DataConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    features: FeatureConfig = field(default_factory=FeatureConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    knn: KnnConfig = field(default_factory=KnnConfig)
    logistic: LogisticConfig = field(default_factory=LogisticConfig)
    few_shot: FewShotConfig = field(default_factory=FewShotConfig)
    methods: tuple[str, ...] = field(
        default=("probe", "knn"), metadata={"help": "some of probe, knn, logistic, few_shot"}
    )
    which: Which = field(default="auto", metadata={"help": "raw or averaged weights"})
    out: str | None = field(default=None, metadata={"help": "folder for results.json; default: only the text"})

    def __post_init__(self) -> None:
        known = ("probe", "knn", "logistic", "few_shot")
        if not self.methods or not set(self.methods) <= set(known):
            raise ValueError(f"methods={list(self.methods)}: one or more of {', '.join(known)}")


def probe_place(place: str, words: Sequence[str]) -> dict[str, Any]:
    """`vitfw probe`: {method: {"protocol": line, "scores": ...}}, printed, and written to `out`; on every rank."""
    config = parse(ProbeCommandConfig, words)
    launch = start(config.machine)
    opened = open_network(place, launch, config.machine, which=config.which)
    train, test = stored_features(opened, config, launch)
    split = split_training(
        train.labels, share=config.features.holdout, least=config.features.holdout_least, seed=config.features.seed
    )
    results = probe_results(opened, train, test, split, config, launch)
    if launch.is_main:
        if config.out is not None:
            Path(config.out).mkdir(parents=True, exist_ok=True)
            write_text(Path(config.out) / "results.json", json.dumps(results, indent=2) + "\n")
        for method, found in results.items():
            print(f"{method}: {json.dumps(found['scores'])}\n  {found['protocol']}", flush=True)
    return results


def stored_features(opened: Opened, config: ProbeCommandConfig, launch: Launch) -> tuple[Features, Features]:
    """Features of data.train and data.val, both with labels; the classes of data.val are among those of data.train."""
    train_samples, test_samples = open_split(config.data, "train"), open_split(config.data, "val")
    for name, samples in (("train", train_samples), ("val", test_samples)):
        if not samples.labelled:
            raise ValueError(f"data.{name} has no labels: a probe needs them")
    if train_samples.classes is not None:
        test_samples = by_name(test_samples, train_samples.classes, "data.val", "data.train", launch)
    if train_samples.multi_label and test_samples.multi_label:
        wide = max(train_samples.num_classes, test_samples.num_classes)
        train_samples, test_samples = train_samples.with_classes(wide), test_samples.with_classes(wide)
    if test_samples.num_classes > train_samples.num_classes:
        raise ValueError(
            f"data.val has labels up to {test_samples.num_classes - 1}, data.train only up to "
            f"{train_samples.num_classes - 1}: heads learn the classes of data.train"
        )
    test_set = evaluation_set(opened, config.data, config.machine, launch, samples=test_samples)
    train_set = evaluation_set(opened, config.data, config.machine, launch, samples=train_samples)
    if config.features.views == 1:
        views, about = [train_set.loader], "evaluation"
    else:
        policy = AugmentConfig(
            policy=config.features.policy,  # type: ignore[arg-type] - AugmentConfig names the policies it knows
            mean=opened.preprocessing.mean,
            std=opened.preprocessing.std,
        )
        views = [_view(opened, train_samples, config, policy, view, launch) for view in range(config.features.views)]
        about = f"{config.features.policy}, seed {config.features.seed}"

    def features(found: EvaluationSet, views: list[Any], view: str, name: str) -> Features:
        folder = Path(config.features.folder)
        return features_of(opened, found, config.data, config.machine, folder=folder, views=views, view=view, name=name)

    train = features(train_set, views, about, "data.train")
    return train, features(test_set, [test_set.loader], "evaluation", "data.val")


def probe_results(
    opened: Opened, train: Features, test: Features, split: Split, config: ProbeCommandConfig, launch: Launch
) -> dict[str, Any]:
    """Every method that was asked for. Neighbours are shared out over ranks; the rest is small and runs on rank 0."""
    classes = train.labels.shape[1] if train.multi_label else int(max(train.labels.max(), test.labels.max())) + 1
    column = (head_column(opened.network),)
    results: dict[str, Any] = {}
    for method in config.methods:
        if method == "knn":
            results |= _neighbours(train, test, column, config, classes, opened)
        elif launch.is_main:
            results |= _on_main(method, train, test, split, column, config, classes, opened)
        results = broadcast(results)
    return results


def _on_main(
    method: str,
    train: Features,
    test: Features,
    split: Split,
    column: tuple[str, ...],
    config: ProbeCommandConfig,
    classes: int,
    opened: Opened,
) -> dict[str, Any]:
    if method == "few_shot":
        shots = few_shot(train, split, test, config.few_shot, columns=column, num_classes=classes)
        scores = {f"{one.shots}_shot": {"acc1": one.mean, "spread": one.spread} for one in shots}
        return {"few_shot": {"protocol": "; ".join(one.protocol for one in shots), "scores": scores}}
    if method == "probe":
        found = probe(train, split, config.probe, num_classes=classes, device=opened.device)
        held = predict_heads(found.heads, train, split.held)[0]
        extra = {"table": [dict(row) for row in found.table], "chosen": dict(found.chosen)}
        logits = found.logits(test)
    else:
        found = logistic_regression(
            train, split, config.logistic, columns=column, num_classes=classes, device=opened.device
        )
        held = train.take(column, split.held) @ found.weight.astype(np.float32) + found.bias.astype(np.float32)
        extra = {"table": [dict(row) for row in found.table], "chosen": dict(found.chosen)}
        logits = found.logits(test)
    return {method: {"protocol": found.protocol, "scores": _scores(logits, test, held, train, split)} | extra}


def _neighbours(
    train: Features,
    test: Features,
    column: tuple[str, ...],
    config: ProbeCommandConfig,
    classes: int,
    opened: Opened,
) -> dict[str, Any]:
    """Training features are those of the first view, as of the evaluation transform where there is one view."""
    place, results = train.columns.index(column[0]), {}
    votes = knn_votes(
        train.values[0][:, place],
        train.labels,
        test.values[0][:, place],
        config.knn,
        num_classes=classes,
        device=opened.device,
    )
    for count, shares in votes.items():
        protocol = f"{count} nearest neighbours on {column[0]}, T {config.knn.temperature}; {train.place}"
        if train.multi_label:
            protocol += "; a label is given where it has half of the votes"
            scores = multilabel_scores(shares, test.labels, np.full(classes, 0.5))
        else:
            scores = {"acc1": 100.0 * float(np.mean(shares.argmax(axis=1) == test.labels)), "samples": len(shares)}
        results[f"knn_{count}"] = {"protocol": protocol, "scores": scores}
    return results


def _scores(logits: np.ndarray, test: Features, held: np.ndarray, train: Features, split: Split) -> dict[str, float]:
    """Scores on the reported set; thresholds of several labels come from the held-out images."""
    if test.multi_label:
        thresholds = fit_thresholds(held, train.labels[split.held]).values
        return multilabel_scores(logits, test.labels, thresholds)
    return classification_scores(logits, test.labels)


def features_of(
    opened: Opened,
    found: EvaluationSet,
    data: DataConfig,
    machine: MachineConfig,
    *,
    folder: Path,
    views: list[Any],
    view: str,
    name: str,
    blocks: int = 4,
) -> Features:
    """The stored features of one set, of the last `blocks` blocks; computed by all ranks where they are not there yet."""
    prepared = {key: value for key, value in opened.preprocessing.plain().items() if key != "class_names"}
    return extract_features(
        opened.network,
        views,
        folder=folder,
        facts={
            "set": found.samples.fingerprint(),
            "preprocessing": prepared,
            "view": view,
            "precision": machine.precision,
            "background": data.background,
            "exif": data.exif,
        },
        num_rows=len(found.samples),
        prepare=found.prepare,
        device=opened.device,
        autocast=found.autocast,
        place=f"{opened.place} ({opened.entry}) on {name}, {view} view",
        blocks=blocks,
    )


def _view(
    opened: Opened, samples: Samples, config: ProbeCommandConfig, policy: AugmentConfig, view: int, launch: Launch
) -> Loader:
    """One augmented view of this rank's share: the images of an evaluation pass, augmented as of epoch `view`."""
    machine = config.machine
    batch = machine.eval_images_per_device or 2 * machine.images_per_device
    size = opened.preprocessing.size
    dataset = ImageDataset(
        samples,
        train_transform(policy, size=size, channels=opened.channels),
        seed=config.features.seed,
        channels=opened.channels,
        background=config.data.background,
        exif=config.data.exif,
        on_bad_sample=config.data.on_bad_sample,
        replace=False,
    )
    rows = eval_order(len(samples), batch=batch, rank=launch.rank, world=launch.world)
    draws = [[Draw(view, draw.index, 0) for draw in part] for part in rows]
    workers = resolve_workers("auto" if machine.workers < 0 else machine.workers, local_world=launch.local_world)
    loader = DataLoader(
        dataset, batch_sampler=Batches(draws), collate_fn=collate, num_workers=workers, worker_init_fn=WorkerStart()
    )
    return Loader(loader, samples, Ledger(config.data.bad_limit, len(samples), launch.world, None, print))
