"""Lengths and schedules against the sources' own values and against timm's and torch's schedulers."""

import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.scheduler.cosine_lr import CosineLRScheduler
from timm.scheduler.scheduler_factory import create_scheduler_v2

from vitfw.schedules import (
    Length,
    ScheduleConfig,
    TrainConfig,
    cosine_between,
    learning_rate,
    resolve_length,
    warmup_images,
)

IMAGENET = 1_281_167
DEIT = ScheduleConfig(warmup_epochs=5, warmup_lr=1e-6, end_lr=1e-5, per="epoch", epoch_lag=1, decay_from="start")


def length(epochs: float, batch: int = 1024, images: int = IMAGENET) -> Length:
    return resolve_length(TrainConfig(epochs=epochs, global_batch=batch), images)


@pytest.mark.parametrize(("batch", "steps"), [(512, 2502), (1024, 1251), (2048, 625), (4096, 312), (16384, 78)])
def test_steps_of_an_imagenet_epoch(batch: int, steps: int) -> None:
    assert length(1, batch).steps_per_epoch == steps
    assert length(1, batch).dropped_per_epoch == IMAGENET - steps * batch


def test_length_in_images_and_fractions() -> None:
    assert resolve_length(TrainConfig(images=10_000, global_batch=64), 640).total_steps == 156
    half = resolve_length(TrainConfig(epochs=0.5, global_batch=64), 640)
    assert (half.total_steps, half.epochs, half.total_images) == (5, 0.5, 320)
    assert resolve_length(TrainConfig(images=1, global_batch=64), 640).total_steps == 1
    text = resolve_length(TrainConfig(epochs=2, global_batch=4096), 50_000).describe()
    assert "848 left out of each epoch" in text
    assert "24 updates" in text


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (TrainConfig(), "train.epochs=None, train.images=None: neither is set; give exactly one"),
        (TrainConfig(epochs=1, images=5), "train.epochs=1, train.images=5: both are set"),
        (TrainConfig(epochs=1, global_batch=128), "train.global_batch=128: the training set has only 100 images"),
    ],
)
def test_a_length_that_cannot_be_is_refused(train: TrainConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_length(train, 100)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"epochs": 0.0}, "train.epochs=0.0: must be a finite number above 0"),
        ({"epochs": math.nan}, "train.epochs=nan"),
        ({"images": 0}, "train.images=0: must be at least 1"),
        ({"global_batch": 0}, "train.global_batch=0: must be at least 1 image"),
        ({"seed": -1}, "train.seed=-1: must be 0 or more"),
    ],
)
def test_train_section_checks_ranges(keys: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**keys)


def test_deit_rates_by_epoch() -> None:
    """DeiT steps after the epoch, so epochs 0 and 1 share the warm-up rate and the peak is never reached."""
    run = length(300)
    rates = [learning_rate(DEIT, 1e-3, epoch * run.images_per_epoch, run) for epoch in range(300)]
    expected = [1e-6, 1e-6, 2.008e-4, 4.006e-4, 6.004e-4, 8.002e-4, 9.9932e-4]
    assert rates[:7] == pytest.approx(expected, rel=1e-5)
    assert rates[299] == pytest.approx(1.011e-5, rel=1e-3)
    assert max(rates) < 1e-3
    inside = [learning_rate(DEIT, 1e-3, 7 * run.images_per_epoch + step * 1024, run) for step in (0, 1, 1250)]
    assert len(set(inside)) == 1


def test_deit_equals_timm_stepped_after_the_epoch() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    scheduler = CosineLRScheduler(optimizer, t_initial=300, lr_min=1e-5, warmup_t=5, warmup_lr_init=1e-6)
    run = length(300)
    for epoch in range(300):
        ours = learning_rate(DEIT, 1e-3, epoch * run.images_per_epoch, run)
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        scheduler.step(epoch)


def test_timm_train_script_with_warmup_prefix() -> None:
    """timm's current script steps with epoch + 1; with a prefix of 5 its 300 epochs are 305 in all."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    scheduler, epochs = create_scheduler_v2(
        optimizer, "cosine", num_epochs=300, min_lr=1e-5, warmup_lr=1e-6, warmup_epochs=5, warmup_prefix=True
    )
    assert epochs == 305
    run = length(305)
    config = ScheduleConfig(warmup_epochs=5, warmup_lr=1e-6, end_lr=1e-5, per="epoch")
    rates = []
    for epoch in range(305):
        rates.append(learning_rate(config, 1e-3, epoch * run.images_per_epoch, run))
        assert rates[-1] == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        scheduler.step(epoch + 1)
    assert rates[:2] == pytest.approx([1e-6, 2.008e-4])
    assert rates[5] == pytest.approx(1e-3)


MAE_PRETRAIN = {0: 0, 0.5: 3e-5, 1: 6e-5, 20: 1.2e-3, 40: 2.4e-3, 200: 2.147e-3, 420: 1.2e-3, 600: 3.873e-4, 800: 0}
MAE_FINETUNE = {1: 4e-4, 5: 2e-3, 50: 1.083e-3, 99: 1.55e-6}


@pytest.mark.parametrize(
    ("batch", "peak", "warmup", "epochs", "end", "points"),
    [(4096, 2.4e-3, 40, 800, 0.0, MAE_PRETRAIN), (1024, 2e-3, 5, 100, 1e-6, MAE_FINETUNE)],
    ids=["pretrain", "finetune"],
)
def test_mae_rates_by_fractional_epoch(
    batch: int, peak: float, warmup: int, epochs: int, end: float, points: dict[float, float]
) -> None:
    run, config = length(epochs, batch), ScheduleConfig(warmup_epochs=warmup, end_lr=end)
    for epoch, expected in points.items():
        value = learning_rate(config, peak, round(epoch * run.images_per_epoch), run)
        assert value == pytest.approx(expected, rel=3e-3, abs=1e-12)


def test_torchvision_rates_per_epoch() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-3)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.033, total_iters=30)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=270)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[30])
    run, config = length(300, 4096), ScheduleConfig(warmup_epochs=30, warmup_share=0.033, per="epoch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR calls step with an epoch, which torch itself deprecates
        for epoch in range(300):
            ours = learning_rate(config, 3e-3, epoch * run.images_per_epoch, run)
            assert ours == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9, abs=1e-15)
            optimizer.step()
            scheduler.step()


def test_bigvision_rates_per_step() -> None:
    """Linear warm-up over 10,000 steps, then half a cosine to 0; the rsqrt form joins it without a jump."""
    run = length(90)
    cosine, steps = ScheduleConfig(warmup_steps=10_000), run.total_steps
    for step in (0, 1, 9_999, 10_000, 60_000, steps - 1, steps):
        progress = (step - 10_000) / (steps - 10_000)
        expected = min(1, step / 10_000) * (0.5 * (1 + math.cos(math.pi * max(0, progress))))
        assert learning_rate(cosine, 1.0, step * 1024, run) == pytest.approx(expected, abs=1e-12)
    rsqrt = ScheduleConfig(schedule="rsqrt", warmup_steps=10_000)
    for step in (10_000, 20_000, 90_000):
        expected = 1 / math.sqrt(1 + (step - 10_000) / 10_000)
        assert learning_rate(rsqrt, 1.0, step * 1024, run) == pytest.approx(expected)


def test_linear_constant_and_wsd() -> None:
    run = length(10, 100, 1000)
    linear = ScheduleConfig(schedule="linear", end_share=0.1)
    assert [learning_rate(linear, 2.0, seen, run) for seen in (0, 5000, 10_000)] == pytest.approx([2.0, 1.1, 0.2])
    constant = ScheduleConfig(schedule="constant", warmup_epochs=1)
    assert [learning_rate(constant, 2.0, seen, run) for seen in (0, 500, 1000, 10_000)] == [0.0, 1.0, 2.0, 2.0]
    wsd = ScheduleConfig(schedule="wsd", warmup_images=1000, cooldown_share=0.2)
    values = [learning_rate(wsd, 2.0, seen, run) for seen in (500, 1000, 8000, 9000, 10_000)]
    assert values == pytest.approx([1.0, 2.0, 2.0, 1.0, 0.0])
    root = ScheduleConfig(schedule="wsd", cooldown_share=0.2, cooldown_form="sqrt")
    assert learning_rate(root, 2.0, 8500, run) == pytest.approx(2.0 * (1 - math.sqrt(0.25)))


def test_end_equal_to_the_peak_is_flat() -> None:
    """DeiT III and DeiT-384 fine-tunes: min_lr keeps its default, which is the peak."""
    run, config = length(20, 512), ScheduleConfig(warmup_epochs=5, warmup_lr=1e-6, end_lr=1e-5)
    rates = {learning_rate(config, 1e-5, round(epoch * run.images_per_epoch), run) for epoch in (5, 10, 19.5, 20)}
    assert all(rate == pytest.approx(1e-5) for rate in rates)


def test_weight_decay_cosine() -> None:
    run = length(10, 100, 1000)
    values = [cosine_between(0.04, 0.4, seen, run) for seen in (0, 5000, 10_000, 20_000)]
    assert values == pytest.approx([0.04, 0.22, 0.4, 0.4])


@given(
    epochs=st.integers(2, 40),
    batch=st.integers(1, 64),
    images=st.integers(64, 5000),
    schedule=st.sampled_from(["cosine", "linear", "constant", "rsqrt", "wsd"]),
    per=st.sampled_from(["update", "epoch"]),
)
def test_every_schedule_stays_between_its_bounds(epochs: int, batch: int, images: int, schedule, per) -> None:
    """The rate rises only in the warm-up, lies within [0, peak], and does not move after the run's end."""
    run = resolve_length(TrainConfig(epochs=epochs, global_batch=batch), images)
    config = ScheduleConfig(
        schedule=schedule, per=per, warmup_epochs=epochs / 4, cooldown_share=0.25 if schedule == "wsd" else 0.0
    )
    warm = warmup_images(config, run)
    previous = None
    for part in range(41):
        seen = part * run.total_images // 40
        value = learning_rate(config, 0.3, seen, run)
        assert 0 <= value <= 0.3 + 1e-12
        if previous is not None and previous[0] >= warm + run.images_per_epoch:
            assert value <= previous[1] + 1e-12
        previous = (seen, value)
    end = learning_rate(config, 0.3, run.total_images, run)
    assert learning_rate(config, 0.3, 2 * run.total_images, run) == end


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"warmup_epochs": 1, "warmup_steps": 2}, "optim.warmup_epochs, optim.warmup_steps: several lengths"),
        ({"warmup_epochs": -1}, "optim.warmup_epochs=-1: must be 0 or more"),
        ({"warmup_lr": 1e-6, "warmup_share": 0.1}, "optim.warmup_lr and optim.warmup_share are both set"),
        ({"warmup_lr": 1e-6}, "without a warm-up; set optim.warmup_epochs"),
        ({"end_lr": -1.0}, "optim.end_lr=-1.0: a learning rate must be 0 or more"),
        ({"end_share": 2.0}, r"optim.end_share=2.0: must lie in \[0, 1\]"),
        ({"epoch_lag": 1}, "optim.epoch_lag=1: must be 0 or more, and 0 unless optim.per=epoch"),
        ({"schedule": "wsd"}, "optim.cooldown_share=0: schedule wsd needs a share above 0"),
        ({"cooldown_share": 0.1}, "optim.cooldown_share=0.1: schedule cosine has none; use wsd or rsqrt"),
        ({"schedule": "constant", "end_lr": 1e-5}, "schedule constant never reaches it"),
        ({"schedule": "wsd", "cooldown_share": 0.1, "decay_from": "start"}, "optim.decay_from=start: holds for cosine"),
        ({"rsqrt_steps": 5}, "optim.rsqrt_steps=5: must be at least 1 update, and null unless rsqrt"),
        ({"cooldown_form": "sqrt"}, "optim.cooldown_form=sqrt: there is no cooldown"),
    ],
)
def test_contradictions_are_refused(keys: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScheduleConfig(**keys)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ScheduleConfig(warmup_epochs=10), "optim.warmup_epochs=10: the warm-up .* is not shorter than the run"),
        (ScheduleConfig(end_lr=1.0), "optim.end_lr=1 lies above the peak learning rate 0.1"),
        (
            ScheduleConfig(schedule="wsd", cooldown_share=0.9, warmup_epochs=5),
            "the warm-up reaches into the cooldown .optim.cooldown_share=0.9",
        ),
    ],
)
def test_schedules_that_do_not_fit_the_run_are_refused(config: ScheduleConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        learning_rate(config, 0.1, 0, length(10, 100, 1000))
