"""A short fine-tune on few labels, to watch a masked autoencoder while it pretrains: what its features are good for.

A copy of the encoder learns the labels of a few training images at an evaluation and is scored on the validation set;
then it is thrown away. The encoder that pretrains gives its numbers and takes nothing: no gradient, no buffer, no random
number. The copy is whole on each rank, also where the encoder is sharded; the ranks share the images of a step and sum
their gradients. S images of the share, K classes.
"""

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from vitfw.data.index import Samples
from vitfw.data.order import TrainOrder
from vitfw.data.shuffle import shuffled_rows
from vitfw.models.vit import ViT, parameter_layers
from vitfw.optim import OptimConfig, build_optimizer, parameter_groups, set_schedule
from vitfw.parallel import whole
from vitfw.schedules import Length
from vitfw.seeding import derive, seed_all
from vitfw.tasks.mae import MaeConfig
from vitfw.tasks.task import Batch

SEED = 0  # of head, order and augmentation: the same at each evaluation of each run, so that only the encoder differs
WARMUP = 0.1  # of the steps


@dataclass(frozen=True)
class ShortTune:
    """What is done at each evaluation. order: of this rank, over `samples`, the share."""

    samples: Samples
    order: TrainOrder
    steps: int
    optim: OptimConfig
    name: str  # of the result

    @property
    def length(self) -> Length:
        return Length(
            num_images=len(self.samples),
            global_batch=self.order.global_batch,
            steps_per_epoch=self.order.steps_per_epoch,
            total_steps=self.steps,
        )


def plan_short_tune(
    config: MaeConfig, samples: Samples, val: Samples | None, *, rank: int, world: int, images_per_device: int
) -> ShortTune | None:
    """The fine-tune that section `task` asks for, on these training images; None without `task.tune_per_class`.

    Raises ValueError where there are no single labels, too few images of a class, nothing to score on, or a batch that
    does not divide among the processes.
    """
    if not config.tune_per_class:
        return None
    key, batch = f"task.tune_per_class={config.tune_per_class}", config.tune_batch
    if val is None or not val.labelled:
        raise ValueError(
            f"{key}: data.val has no labels to score the fine-tuned copy on; name labelled images, or set 0"
        )
    share = labelled_share(samples, config.tune_per_class)
    if batch % world or batch > len(share):
        raise ValueError(
            f"task.tune_batch={batch}: must be a multiple of the {world} processes, and at most the {len(share)} images "
            f"of {key}"
        )
    # the copy sees all patches: as many tokens a micro-batch as in pretraining
    each, limit = batch // world, max(1, int(images_per_device * (1 - config.mask_ratio)))
    micro = next(size for size in range(min(each, limit), 0, -1) if each % size == 0)
    order = TrainOrder(
        num_samples=len(share),
        shard_sizes=share.shard_sizes,
        global_batch=batch,
        images_per_device=micro,
        seed=SEED,
        rank=rank,
        world=world,
    )
    optim = OptimConfig(
        name="adamw",
        lr=config.tune_lr,
        weight_decay=0.05,
        no_decay="mae_finetune",
        layer_decay=0.75,
        norm_layer="head",
        warmup_steps=round(WARMUP * config.tune_steps),
    )
    return ShortTune(share, order, config.tune_steps, optim, f"tune_n{config.tune_per_class}_s{config.tune_steps}_acc1")


def labelled_share(samples: Samples, per_class: int) -> Samples:
    """`per_class` images of each class, the same ones for every run on this data."""
    key = f"task.tune_per_class={per_class}"
    if not samples.labelled or samples.multi_label:
        raise ValueError(f"{key}: needs training images with one label each; set task.tune_per_class=0")
    order = shuffled_rows(len(samples), derive(SEED, "tune"))
    labels, chosen = samples.labels[order], []
    for label in np.unique(labels[labels >= 0]):
        rows = order[labels == label]
        if len(rows) < per_class:
            raise ValueError(f"{key}: class {label} has only {len(rows)} training images; lower it")
        chosen.append(rows[:per_class])
    return samples.select(np.concatenate(chosen))


def short_tune(
    plan: ShortTune,
    encoder: ViT,
    *,
    train: Callable[[], Iterable[Batch]],
    val: Iterable[Batch],
    prepare: Callable[..., Batch],
    autocast: Callable[[], AbstractContextManager[None]],
    device: torch.device,
) -> dict[str, float]:
    """{name: accuracy in percent on `val`} of a copy that was fine-tuned; the same on all ranks, which all enter.

    train: gives an epoch's micro-batches of this rank, each time the next epoch's. val: this rank's share, index -1 is
    padding. prepare(batch, training=...): to the device, augmented or as evaluation sees it.
    """
    with own_random_numbers(SEED, device):
        network = copy_with_head(encoder, plan.samples.num_classes).to(device)
        with torch.enable_grad():
            _learn(plan, network.train(), train, prepare, autocast)
        return {plan.name: _accuracy(network.eval(), val, prepare, autocast, device)}


def copy_with_head(encoder: ViT, num_classes: int) -> ViT:
    """The encoder as it is fine-tuned in the source: mean of the patches, a fresh norm behind it, a fresh head. Holds
    whole tensors of its own. Called on all ranks of a sharded encoder."""
    arch = dataclasses.replace(encoder.arch, pool="gap", final_norm="pooled", zero_head=False, head_std=2e-5)
    network = ViT(arch, num_classes)
    state = {name: whole(value) for name, value in encoder.state_dict().items() if not name.startswith("norm.")}
    missing, unexpected = network.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert {name.split(".")[0] for name in missing} <= {"fc_norm", "head"}, missing
    return network


@contextmanager
def own_random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds all global generators inside, and leaves them outside as they were."""
    python, array = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([torch.cuda.current_device()] if device.type == "cuda" else []):
            seed_all(derive(seed, "tune"))
            yield
    finally:
        random.setstate(python)
        np.random.set_state(array)


def _learn(
    plan: ShortTune,
    network: ViT,
    train: Callable[[], Iterable[Batch]],
    prepare: Callable[..., Batch],
    autocast: Callable[[], AbstractContextManager[None]],
) -> None:
    order, length = plan.order, plan.length
    groups = parameter_groups(
        network.named_parameters(), parameter_layers(network, final_norm="head"), plan.optim, order.global_batch
    )
    optimizer = build_optimizer(groups, plan.optim)
    for count, batch in enumerate(_rest(train, plan.steps * order.accumulation)):
        step, micro = divmod(count, order.accumulation)
        torch.manual_seed(derive(SEED, "tune", step, micro * order.world + order.rank))
        prepared = prepare(batch, training=True)
        with autocast():
            logits = network(prepared["image"])
        loss = F.cross_entropy(logits.float(), prepared["label"]) / order.accumulation
        loss.backward()
        if micro == order.accumulation - 1:
            _mean_over_ranks([p.grad for p in network.parameters() if p.grad is not None])
            set_schedule(optimizer, plan.optim, length, step * order.global_batch)
            optimizer.step()
            optimizer.zero_grad()


def _rest(train: Callable[[], Iterable[Batch]], micro_batches: int) -> Iterator[Batch]:
    """This many micro-batches, over as many epochs as it takes."""
    while micro_batches > 0:
        for batch in train():
            yield batch
            micro_batches -= 1
            if micro_batches == 0:
                return


def _mean_over_ranks(gradients: list[Tensor]) -> None:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


@torch.no_grad()
def _accuracy(
    network: nn.Module,
    val: Iterable[Batch],
    prepare: Callable[..., Batch],
    autocast: Callable[[], AbstractContextManager[None]],
    device: torch.device,
) -> float:
    """Percent of the labelled images; each counts once."""
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in val:
        prepared = prepare(batch, training=False)
        with autocast():
            logits = network(prepared["image"])
        counted = (prepared["index"] >= 0) & (prepared["label"] >= 0)
        hits = (logits.argmax(dim=1) == prepared["label"]) & counted
        sums += torch.stack([hits.sum(), counted.sum()])
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(sums)
    hits, counted = sums.tolist()
    return 100.0 * hits / max(counted, 1.0)
