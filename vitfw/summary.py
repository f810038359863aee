"""The words at the start and at the end of a run: what will happen with which numbers, and what came out of it."""

import json

from vitfw.checkpoint import Progress
from vitfw.config import Config
from vitfw.data.resources import resolve_workers
from vitfw.launch import Launch, device_of
from vitfw.models.vit import ViT
from vitfw.prepare import Prepared
from vitfw.run import Run
from vitfw.schedules import Length


def start_text(config: Config, launch: Launch, run: Run, prepared: Prepared, progress: Progress) -> str:
    """The start-up summary; every number that follows from others is shown with its factors."""
    length, machine = prepared.length, config.machine
    parameters = list(prepared.task.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    trainable = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    workers = resolve_workers("auto" if machine.workers < 0 else machine.workers, local_world=launch.local_world)
    where = "from the beginning" if progress.step == 0 else f"from step {progress.step:,} (attempt {run.attempt + 1})"
    device = device_of(launch, machine).type
    micro = f"{prepared.accumulation} micro-batches x {prepared.images_per_device} images"
    rows = [
        ("run", f"{run.folder}, recipe {config.recipe}, {where}"),
        *[("note", text) for text in run.notes],
        ("train data", prepared.train_set.describe()),
        ("val data", prepared.val_set.describe() if prepared.val_set is not None else "none: nothing will be evaluated"),
        ("model", f"{config.model.variant}, {total:,} parameters, {trainable:,} trainable ({trainable / total:.1%})"),
        *([("cost", cost)] if (cost := prepared.task.cost_text()) is not None else []),
        *([("note", few)] if (few := _few_patches(prepared)) is not None else []),
        *([("weights", prepared.load_report.text())] if prepared.load_report is not None else []),
        ("processes", f"{launch.world} ({launch.kind}, {device}, {machine.precision}), {workers} loader workers each"),
        ("global batch", f"{length.global_batch} = {launch.world} processes x {micro}"),
        ("length", length.describe() + _repeats(config, length)),
        ("learning rate", f"{prepared.rate.text}, {config.optim.name}, {config.optim.schedule}"),
        ("seed", str(prepared.seed)),
    ]  # fmt: skip
    return "\n".join(f"  {name:<14}{text}" for name, text in rows)


def _few_patches(prepared: Prepared) -> str | None:
    network = prepared.task.network
    if not isinstance(network, ViT) or network.grid_size[0] * network.grid_size[1] >= 16:
        return None
    rows, columns = network.grid_size
    return (
        f"only {rows} x {columns} patches: such a ViT learns little; lower model.patch_size or enlarge model.image_size"
    )


def _repeats(config: Config, length: Length) -> str:
    repeats = config.augment.repeats
    if repeats == 1:
        return ""
    distinct = -(-length.images_per_epoch // repeats)
    return f"; each image of an epoch comes {repeats} times, so about {distinct:,} different ones in each"


def closing_text(run: Run) -> str:
    """Results of a finished run and where everything lies."""
    provenance = json.loads((run.folder / "provenance.json").read_text(encoding="utf-8"))
    results = provenance["finished"]
    names = {"val/acc1": "validation accuracy", "val_ema/acc1": "validation accuracy of the averaged weights"}
    lines = [
        f"best {names.get(key, key)}: {value:.2f}{' %' if key.endswith('acc1') else ''}"
        for key, value in results.items()
    ]
    lines += [
        f"run folder: {run.folder}",
        f"weights:    {run.export} (timm.create_model('local-dir:{run.export}', pretrained=True))",
    ]
    return "\n".join(lines)
