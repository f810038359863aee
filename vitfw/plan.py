"""`dry_run=true`: the resolved configuration, what every parameter gets, the schedule and the costs, without training."""

import contextlib
from pathlib import Path

import yaml

from vitfw.config import Config
from vitfw.data.patterns import expand, expand_braces, is_remote, split_list, split_slice
from vitfw.launch import Launch
from vitfw.models.build import count_model
from vitfw.models.grouping import layer_table
from vitfw.models.load_report import LoadReport
from vitfw.optim import parameter_groups
from vitfw.prepare import begin, prepare, settle
from vitfw.schedules import Length, learning_rate

IMAGENET_1K = 1_281_167  # training images; what a plan counts with where the data is not at hand


def plan_text(config: Config, launch: Launch, *, weights_later: bool = False) -> str:
    """The plan. Raises ValueError and OSError for everything that the run itself would refuse before its first step; where the
    data is not at hand, for what can be known without it. weights_later: `weights` are made by a run before this one."""
    absent = _absent(config)
    if absent is None:
        prepared = prepare(config, launch, planned=True, weights_later=weights_later)
        begun = settled = prepared
        held = "none" if prepared.val_set is None else prepared.val_set.describe()
        num_classes, data_text = prepared.train_set.num_classes, f"train {prepared.train_set.describe()}; val {held}"
    else:
        num_classes = getattr(config.task, "num_classes", 0) or 1000
        data_text = f"not at hand ({absent}): counted with ImageNet-1k's {IMAGENET_1K:,} images"
        begun = begin(config, launch, num_images=IMAGENET_1K, num_classes=num_classes, planned=True)
        later = weights_later or _weights_absent(config.weights)
        settled = settle(config, launch, begun.task, None, planned=True, weights_later=later)
    task, length, rate = begun.task, begun.length, begun.rate
    layers = task.parameter_layers(config.optim.norm_layer)
    groups = parameter_groups(task.named_parameters(), layers, config.optim, length.global_batch)
    parts = [
        ("configuration", yaml.safe_dump(config.recipe_part(), sort_keys=False, default_flow_style=None, width=120).rstrip()),
        ("parameters", layer_table(groups)),
        ("schedule", _schedule(config, length, rate.value)),
        ("cost", count_model(config.model, num_classes=task.num_classes or 0, images=length.total_images)),
        ("run", "\n".join([
            f"data           {data_text}",
            f"weights        {_weights_text(config.weights, settled.load_report)}",
            f"length         {length.describe()}",
            f"learning rate  {rate.text}",
            f"global batch   {length.global_batch} = {launch.world} processes x {begun.accumulation} micro-batches x "
            f"{begun.images_per_device} images",
        ])),
    ]  # fmt: skip
    return "\n\n".join(f"== {title}\n{text}" for title, text in parts)


def _absent(config: Config) -> str | None:
    """Why the training data is not at hand: none is named, or none of its files exists here. Any other fault is a mistake."""
    if config.data.train is None:
        return "data.train is not given"
    for source in split_list(config.data.train):
        for name in expand_braces(split_slice(source)[0]):
            if is_remote(name):
                return None
            with contextlib.suppress(FileNotFoundError):
                expand(name)
                return None
    return f"data.train={config.data.train}: no such file"


def _weights_absent(weights: str | None) -> bool:
    return (
        weights is not None
        and not weights.startswith("timm:")
        and not Path(weights.removeprefix("local-dir:")).exists()
    )


def _weights_text(weights: str | None, report: LoadReport | None) -> str:
    if weights is None:
        return "none: a fresh network"
    return f"{weights}, not read for this plan" if report is None else f"{weights}, read and found to fit"


def _schedule(config: Config, length: Length, peak: float) -> str:
    """Epoch and learning rate at the start, in the warm-up, along the run and at its last step."""
    marks = {0, 1, 2, 3, 4, 5, *(round(length.total_steps * share / 10) for share in range(11))}
    warmup = [round(epoch * length.steps_per_epoch) for epoch in range(7)]
    steps = sorted(step for step in marks | set(warmup) | {length.total_steps - 1} if step < length.total_steps)
    rows = [
        f"step {step:>9,}  epoch {step / length.steps_per_epoch:>8.2f}  learning rate "
        f"{learning_rate(config.optim, peak, step * length.global_batch, length):.4e}"
        for step in steps
    ]
    return "\n".join(rows)
