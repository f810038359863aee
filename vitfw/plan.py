"""`dry_run=true`: the resolved configuration, what every parameter gets, the schedule and the costs, without training."""

import torch
import yaml

from vitfw.config import Config
from vitfw.data.section import open_data
from vitfw.evaluate.freezing import freeze
from vitfw.launch import Launch, split_batch
from vitfw.models.build import count_model
from vitfw.models.grouping import layer_table
from vitfw.optim import parameter_groups, resolve_learning_rate
from vitfw.schedules import Length, learning_rate, resolve_length
from vitfw.tasks import build_task

IMAGENET_1K = 1_281_167  # training images; what a plan counts with where the data is not at hand


def plan_text(config: Config, launch: Launch) -> str:
    """The plan. Raises ValueError for everything that the run itself would refuse, except missing data."""
    data_text, num_images, num_classes = _data(config)
    length = resolve_length(config.train, num_images)
    rate = resolve_learning_rate(config.optim, length.global_batch)
    micro, accumulation = split_batch(length.global_batch, launch.world, config.machine.images_per_device)
    with torch.device("meta"):
        task = build_task(config.task, config.model, num_classes=num_classes)
    freeze(task, config.freeze)
    layers = task.parameter_layers(config.optim.norm_layer)
    groups = parameter_groups(task.named_parameters(), layers, config.optim, length.global_batch)
    parts = [
        ("configuration", yaml.safe_dump(config.recipe_part(), sort_keys=False, default_flow_style=None, width=120).rstrip()),
        ("parameters", layer_table(groups)),
        ("schedule", _schedule(config, length, rate.value)),
        ("cost", count_model(config.model, num_classes=task.num_classes or 0, images=length.total_images)),
        ("run", "\n".join([
            f"data           {data_text}",
            f"length         {length.describe()}",
            f"learning rate  {rate.text}",
            f"global batch   {length.global_batch} = {launch.world} processes x {accumulation} micro-batches x {micro} images",
        ])),
    ]  # fmt: skip
    return "\n\n".join(f"== {title}\n{text}" for title, text in parts)


def _data(config: Config) -> tuple[str, int, int]:
    """(a line about the data, training images, classes); where it is not at hand, ImageNet-1k's number, and says so."""
    if config.data.train is not None:
        try:
            train, val = open_data(config.data)
        except (ValueError, OSError) as error:
            reason = str(error)
        else:
            held = "none" if val is None else val.describe()
            return f"train {train.describe()}; val {held}", len(train), train.num_classes
    else:
        reason = "data.train is not given"
    classes = getattr(config.task, "num_classes", 0) or 1000
    return f"not at hand ({reason}): counted with ImageNet-1k's {IMAGENET_1K:,} images", IMAGENET_1K, classes


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
