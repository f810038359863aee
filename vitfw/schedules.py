"""Lengths and schedules as pure functions of images seen: another number of processes changes nothing.

Nothing here knows torch or an optimiser. Time is counted in images; an epoch is `images_per_epoch` of them, an update
is `global_batch` of them.
"""

import math
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Section `train`: how long, how large a batch, which seed."""

    epochs: float | None = field(
        default=None, metadata={"help": "length in passes over the training set; exactly one of epochs and images"}
    )
    images: int | None = field(
        default=None, metadata={"help": "length in training images seen; exactly one of epochs and images"}
    )
    global_batch: int = field(
        default=1024, metadata={"help": "images an optimiser update, over all processes and accumulated micro-batches"}
    )
    seed: int | None = field(
        default=0, metadata={"help": "the root of all randomness; null: drawn and kept by the run"}
    )

    def __post_init__(self) -> None:
        if self.epochs is not None and not (math.isfinite(self.epochs) and self.epochs > 0):
            raise ValueError(f"train.epochs={self.epochs}: must be a finite number above 0, or null")
        if self.images is not None and self.images < 1:
            raise ValueError(f"train.images={self.images}: must be at least 1, or null")
        if self.global_batch < 1:
            raise ValueError(f"train.global_batch={self.global_batch}: must be at least 1 image")
        if self.seed is not None and self.seed < 0:
            raise ValueError(f"train.seed={self.seed}: must be 0 or more, or null")


@dataclass(frozen=True, kw_only=True)
class Length:
    """The resolved length of a run. All counts are over all processes."""

    num_images: int  # images of the training set
    global_batch: int  # images an update
    steps_per_epoch: int  # updates an epoch
    total_steps: int  # updates in the run

    @property
    def images_per_epoch(self) -> int:
        """Images used in one epoch: the remainder that fills no global batch is left out (others each epoch)."""
        return self.steps_per_epoch * self.global_batch

    @property
    def dropped_per_epoch(self) -> int:
        return self.num_images - self.images_per_epoch

    @property
    def total_images(self) -> int:
        return self.total_steps * self.global_batch

    @property
    def epochs(self) -> float:
        return self.total_steps / self.steps_per_epoch

    def epoch(self, images_seen: int) -> float:
        """The fractional epoch at which a run stands after `images_seen` images."""
        return images_seen / self.images_per_epoch

    def step(self, images_seen: int) -> float:
        """The number of updates done after `images_seen` images."""
        return images_seen / self.global_batch

    def describe(self) -> str:
        """One line for the log, with everything that is left out."""
        left = f", {self.dropped_per_epoch:,} left out of each epoch" if self.dropped_per_epoch else ""
        return (
            f"{self.epochs:g} epochs of {self.steps_per_epoch:,} updates = {self.total_steps:,} updates, "
            f"{self.total_images:,} images of a set of {self.num_images:,} (global batch {self.global_batch:,}{left})"
        )


def resolve_length(train: TrainConfig, num_images: int) -> Length:
    """The run's length from section `train` and the size of the training set.

    A fractional number of updates is rounded to the nearest one, and never to none.

    Raises:
        ValueError: neither or both of `train.epochs` and `train.images`, or a set smaller than one global batch.
    """
    if (train.epochs is None) == (train.images is None):
        found = "both are set" if train.epochs is not None else "neither is set"
        raise ValueError(f"train.epochs={train.epochs}, train.images={train.images}: {found}; give exactly one of them")
    if num_images < train.global_batch:
        raise ValueError(
            f"train.global_batch={train.global_batch}: the training set has only {num_images} images, so an epoch "
            f"would have no update; choose a global batch of at most {num_images}"
        )
    steps_per_epoch = num_images // train.global_batch
    if train.epochs is not None:
        total_steps = round(train.epochs * steps_per_epoch)
    else:
        assert train.images is not None
        total_steps = round(train.images / train.global_batch)
    return Length(
        num_images=num_images,
        global_batch=train.global_batch,
        steps_per_epoch=steps_per_epoch,
        total_steps=max(1, total_steps),
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The schedule's part of section `optim` (see docs/optimisation.md for each source's settings)."""

    schedule: Literal["cosine", "linear", "constant", "rsqrt", "wsd"] = field(
        default="cosine", metadata={"help": "form of the decay"}
    )
    per: Literal["update", "epoch"] = field(
        default="update", metadata={"help": "the rate moves at each update, or once an epoch"}
    )
    epoch_lag: int = field(
        default=0,
        metadata={"help": "epochs by which a per-epoch schedule runs behind; 1 for DeiT, which steps after the epoch"},
    )
    warmup_epochs: float | None = field(
        default=None, metadata={"help": "length of the linear warm-up in epochs; at most one warmup length"}
    )
    warmup_images: int | None = field(default=None, metadata={"help": "length of the linear warm-up in images"})
    warmup_steps: int | None = field(
        default=None, metadata={"help": "length of the linear warm-up in updates of the global batch"}
    )
    warmup_lr: float | None = field(
        default=None, metadata={"help": "absolute rate at the start of the warm-up; default 0"}
    )
    warmup_share: float | None = field(
        default=None, metadata={"help": "rate at the start of the warm-up as a share of the peak"}
    )
    decay_from: Literal["warmup_end", "start"] = field(
        default="warmup_end",
        metadata={"help": "where the decay begins: after the warm-up, or at image 0, hidden under the warm-up (DeiT)"},
    )
    end_lr: float | None = field(
        default=None, metadata={"help": "absolute rate at the end; default 0; equal to the peak gives a flat rate"}
    )
    end_share: float | None = field(default=None, metadata={"help": "rate at the end as a share of the peak"})
    rsqrt_steps: int | None = field(
        default=None, metadata={"help": "time scale of rsqrt, in updates of the global batch; default 10,000"}
    )
    cooldown_share: float = field(
        default=0.0, metadata={"help": "last share of the run that falls to the end value (wsd and rsqrt)"}
    )
    cooldown_form: Literal["linear", "sqrt"] = field(
        default="linear", metadata={"help": "form of that fall: linear, or 1 - sqrt"}
    )

    def __post_init__(self) -> None:
        warmups = {key: getattr(self, key) for key in ("warmup_epochs", "warmup_images", "warmup_steps")}
        given = {key: value for key, value in warmups.items() if value is not None}
        if len(given) > 1:
            raise ValueError(f"optim.{', optim.'.join(given)}: several lengths of the warm-up; give one")
        for key, value in given.items():
            if value < 0:
                raise ValueError(f"optim.{key}={value}: must be 0 or more")
        for absolute, share in (("warmup_lr", "warmup_share"), ("end_lr", "end_share")):
            if getattr(self, absolute) is not None and getattr(self, share) is not None:
                raise ValueError(f"optim.{absolute} and optim.{share} are both set; give one of them")
        for key in ("warmup_lr", "end_lr"):
            value = getattr(self, key)
            if value is not None and value < 0:
                raise ValueError(f"optim.{key}={value}: a learning rate must be 0 or more")
        for key in ("warmup_share", "end_share"):
            value = getattr(self, key)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"optim.{key}={value}: must lie in [0, 1], a share of the peak")
        if (self.warmup_lr is not None or self.warmup_share is not None) and not given:
            raise ValueError("optim.warmup_lr or optim.warmup_share without a warm-up; set optim.warmup_epochs")
        if self.epoch_lag < 0 or (self.epoch_lag and self.per == "update"):
            raise ValueError(f"optim.epoch_lag={self.epoch_lag}: must be 0 or more, and 0 unless optim.per=epoch")
        self._check_form()

    def _check_form(self) -> None:
        if self.rsqrt_steps is not None and (self.rsqrt_steps < 1 or self.schedule != "rsqrt"):
            raise ValueError(f"optim.rsqrt_steps={self.rsqrt_steps}: must be at least 1 update, and null unless rsqrt")
        if not 0 <= self.cooldown_share <= 1:
            raise ValueError(f"optim.cooldown_share={self.cooldown_share}: must lie in [0, 1]")
        if self.schedule == "wsd" and self.cooldown_share == 0:
            raise ValueError("optim.cooldown_share=0: schedule wsd needs a share above 0, or use schedule=constant")
        if self.schedule in ("cosine", "linear", "constant") and self.cooldown_share:
            raise ValueError(
                f"optim.cooldown_share={self.cooldown_share}: schedule {self.schedule} has none; use wsd or rsqrt"
            )
        if self.cooldown_form != "linear" and not self.cooldown_share:
            raise ValueError(
                f"optim.cooldown_form={self.cooldown_form}: there is no cooldown; set optim.cooldown_share"
            )
        if self.decay_from == "start" and self.schedule not in ("cosine", "linear"):
            raise ValueError(f"optim.decay_from=start: holds for cosine and linear, not for {self.schedule}")
        constant_end = self.end_lr is not None or self.end_share is not None
        if constant_end and (self.schedule == "constant" or (self.schedule == "rsqrt" and not self.cooldown_share)):
            raise ValueError(f"optim.end_lr or optim.end_share is set, but schedule {self.schedule} never reaches it")


def _bound(absolute: float | None, share: float | None, peak: float, key: str) -> float:
    if share is not None:
        return share * peak
    value = absolute or 0.0
    if value > peak:
        raise ValueError(
            f"optim.{key}={value:g} lies above the peak learning rate {peak:g}; lower it, or give a share of the peak"
        )
    return value


def warmup_images(config: ScheduleConfig, length: Length) -> float:
    """Length of the warm-up in images (0: none).

    Raises:
        ValueError: the warm-up would not end before the run, or its cooldown, does.
    """
    if config.warmup_epochs is not None:
        images, key, value = config.warmup_epochs * length.images_per_epoch, "warmup_epochs", config.warmup_epochs
    elif config.warmup_images is not None:
        images, key, value = float(config.warmup_images), "warmup_images", config.warmup_images
    elif config.warmup_steps is not None:
        images, key, value = float(config.warmup_steps * length.global_batch), "warmup_steps", config.warmup_steps
    else:
        return 0.0
    if images >= length.total_images:
        raise ValueError(
            f"optim.{key}={value}: the warm-up ({images:,.0f} images) is not shorter than the run "
            f"({length.total_images:,} images); shorten it or lengthen the run"
        )
    if images > length.total_images * (1 - config.cooldown_share):
        raise ValueError(
            f"optim.{key}={value}: the warm-up reaches into the cooldown (optim.cooldown_share={config.cooldown_share})"
        )
    return images


def _schedule_time(config: ScheduleConfig, images_seen: float, length: Length) -> float:
    """Images seen, as the schedule counts them: per epoch, the count stands still within an epoch."""
    if config.per == "update":
        return images_seen
    # 1e-9 of an epoch keeps a whole number of epochs whole after the division.
    epoch = math.floor(images_seen / length.images_per_epoch + 1e-9)
    return max(0, epoch - config.epoch_lag) * length.images_per_epoch


def _cooldown(config: ScheduleConfig, time: float, total: float) -> float:
    """What is left of the way to the end value: 1 before the cooldown, 0 at the end of the run."""
    span = config.cooldown_share * total
    done = min(1.0, max(0.0, (time - (total - span)) / span)) if span else 0.0
    return 1 - (math.sqrt(done) if config.cooldown_form == "sqrt" else done)


def learning_rate(config: ScheduleConfig, peak: float, images_seen: float, length: Length) -> float:
    """The learning rate of the update that follows after `images_seen` images, for a parameter with layer scale 1.

    The first update of a run has `images_seen` = 0. Beyond the end of the run the last value stays.
    """
    total, warmup = length.total_images, warmup_images(config, length)
    time = min(_schedule_time(config, images_seen, length), total)
    start = _bound(config.warmup_lr, config.warmup_share, peak, "warmup_lr")
    end = _bound(config.end_lr, config.end_share, peak, "end_lr")
    if time < warmup:
        return start + (peak - start) * time / warmup
    origin = warmup if config.decay_from == "warmup_end" else 0.0
    progress = (time - origin) / (total - origin)
    if config.schedule == "cosine":
        return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * progress))
    if config.schedule == "linear":
        return end + (peak - end) * (1 - progress)
    if config.schedule == "constant":
        return peak
    if config.schedule == "wsd":
        return end + (peak - end) * _cooldown(config, time, total)
    # Inverse square root, continuous at the end of the warm-up: the time scale is counted from there.
    scale = (config.rsqrt_steps or 10_000) * length.global_batch
    value = peak / math.sqrt(max(0.0, time - warmup) / scale + 1)
    return end + (value - end) * _cooldown(config, time, total) if config.cooldown_share else value


def cosine_between(start: float, end: float, images_seen: float, length: Length) -> float:
    """Half a cosine from `start` at image 0 to `end` at the end of the run (weight decay, momentum of a teacher)."""
    progress = min(1.0, images_seen / length.total_images)
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * progress))
