"""The averaged weights against timm, torchvision and closed formulas."""

import copy
import math

import pytest
import torch
from timm.utils import ModelEmaV2, ModelEmaV3
from torch import nn
from torch.optim.swa_utils import AveragedModel

from vitfw.ema import Ema, EmaConfig, bare_name, ema_decay, full_decay
from vitfw.schedules import TrainConfig, resolve_length

LENGTH = resolve_length(TrainConfig(epochs=300, global_batch=1024), 1_281_167)
SMALL = resolve_length(TrainConfig(epochs=4, global_batch=10), 50)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.bn = nn.BatchNorm1d(2)


def tensors(net: nn.Module) -> dict[str, torch.Tensor]:
    return dict(net.named_parameters()) | dict(net.named_buffers())


def move(net: nn.Module, step: int) -> None:
    """What an optimiser step and BatchNorm do: all tensors change, the counter goes up."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for value in tensors(net).values():
            if value.is_floating_point():
                value.add_(torch.randn(value.shape, generator=generator))
            else:
                value.add_(1)


@pytest.mark.parametrize("ours", [EmaConfig(decay=0.9), EmaConfig(decay=0.9, ramp="power")], ids=["constant", "ramp"])
def test_average_equals_timms(ours: EmaConfig) -> None:
    """Constant as ModelEmaV2 (DeiT), ramp as ModelEmaV3 with warm-up; buffers included, counters copied."""
    net = Net()
    ema = Ema(tensors(net).items(), ours, SMALL)
    theirs = ModelEmaV3(net, decay=0.9, use_warmup=True) if ours.ramp == "power" else ModelEmaV2(net, decay=0.9)
    for step in range(1, 21):
        move(net, step)
        ema.update(step * 10)
        theirs.update(net, step) if isinstance(theirs, ModelEmaV3) else theirs.update(net)
        for name, value in tensors(theirs.module).items():
            if value.is_floating_point():
                torch.testing.assert_close(ema.shadow[name], value)
    assert ema.shadow["bn.num_batches_tracked"].item() == 20


@pytest.mark.parametrize(
    ("updates", "decay"), [(0, 0.0), (1, 0.3700), (10, 0.798), (100, 0.9539), (1000, 0.99001), (10_000, 0.99785)]
)
def test_ramp_values(updates: int, decay: float) -> None:
    config = EmaConfig(decay=0.9999, ramp="power")
    assert ema_decay(config, LENGTH, updates=updates, images_seen=0) == pytest.approx(decay, abs=5e-4)


def test_ramp_reaches_its_decay() -> None:
    config = EmaConfig(decay=0.9998, ramp="power")
    assert ema_decay(config, LENGTH, updates=353_551, images_seen=0) < 0.9998
    assert ema_decay(config, LENGTH, updates=353_553, images_seen=0) == 0.9998


def test_torchvision_adjustment() -> None:
    """8 x 512 images, every 32 steps, 300 epochs: 0.99998 becomes 0.99126, and the warm-up copies."""
    run = resolve_length(TrainConfig(epochs=300, global_batch=4096), 1_281_167)
    config = EmaConfig(decay=0.99998, every=32, scale="torchvision", copy_epochs=30)
    assert full_decay(config, run) == pytest.approx(0.9912619, abs=1e-7)
    warm, later = 29 * run.images_per_epoch, 31 * run.images_per_epoch
    assert ema_decay(config, run, updates=7, images_seen=warm) == 0
    assert ema_decay(config, run, updates=8, images_seen=later) == pytest.approx(0.9912619, abs=1e-7)


def test_average_equals_torchvisions_script() -> None:
    """AveragedModel as references/classification drives it: its counter is reset while the rate warms up."""
    decay = 1 - min(1.0, (1 - 0.99) * SMALL.global_batch / SMALL.epochs)
    net = Net()
    ema = Ema(net.named_parameters(), EmaConfig(decay=0.99, scale="torchvision", copy_epochs=2), SMALL)
    theirs = AveragedModel(net, avg_fn=lambda average, value, _: decay * average + (1 - decay) * value)
    for step in range(SMALL.total_steps):
        move(net, step)
        theirs.update_parameters(net)
        if step // SMALL.steps_per_epoch < 2:
            theirs.n_averaged.fill_(0)
        ema.update((step + 1) * SMALL.global_batch)
        for name, value in theirs.module.named_parameters():
            torch.testing.assert_close(ema.shadow[name], value.detach())


def test_deit_average_without_ramp_still_holds_the_start() -> None:
    """0.99996 after 10,000 steps: 67 % of the initial weights."""
    net = nn.Linear(1, 1, bias=False).double()
    net.weight.data.fill_(1.0)
    ema = Ema(net.named_parameters(), EmaConfig(decay=0.99996), LENGTH)
    net.weight.data.fill_(0.0)
    for step in range(1, 10_001):
        ema.update(step * 1024)
    assert ema.shadow["weight"].item() == pytest.approx(0.670, abs=1e-3)


def test_half_life_in_images_is_the_same_for_any_batch() -> None:
    config = EmaConfig(half_life_images=1000)
    for batch in (10, 50):
        run = resolve_length(TrainConfig(epochs=1, global_batch=batch), 1000)
        net = nn.Linear(1, 1, bias=False)
        net.weight.data.fill_(1.0)
        ema = Ema(net.named_parameters(), config, run)
        net.weight.data.fill_(0.0)
        for step in range(1, 1000 // batch + 1):
            ema.update(step * batch)
        assert ema.shadow["weight"].item() == pytest.approx(0.5, rel=1e-5)


def test_bfloat16_weights_have_a_float32_average_that_moves() -> None:
    """P35."""
    net = nn.Linear(1, 1, bias=False).bfloat16()
    net.weight.data.fill_(1.0)
    ema = Ema(net.named_parameters(), EmaConfig(decay=0.9999), LENGTH)
    net.weight.data.fill_(1.5)
    for step in range(1, 2001):
        ema.update(step * 1024)
    assert ema.shadow["weight"].dtype == torch.float32
    assert ema.shadow["weight"].item() == pytest.approx(1.5 - 0.5 * 0.9999**2000, abs=1e-4)
    assert ema.state_dict()["weight"].dtype == torch.float32


def test_every_counts_optimiser_steps() -> None:
    net = nn.Linear(1, 1, bias=False)
    net.weight.data.fill_(0.0)
    ema = Ema(net.named_parameters(), EmaConfig(decay=0.5, every=3), SMALL)
    for step in range(1, 8):
        net.weight.data.fill_(float(step))
        ema.update(step * 10)
    assert ema.updates == 2
    assert ema.shadow["weight"].item() == 0.25 * 0 + 0.25 * 3 + 0.5 * 6


def test_swapped_gives_the_average_and_takes_it_back() -> None:
    net = Net()
    ema = Ema(tensors(net).items(), EmaConfig(decay=0.5), SMALL)
    move(net, 1)
    ema.update(10)
    own, average = copy.deepcopy(net.state_dict()), {name: value.clone() for name, value in ema.shadow.items()}
    pointers = {name: value.data_ptr() for name, value in tensors(net).items()}
    with ema.swapped():
        assert all(torch.equal(net.state_dict()[name], average[name]) for name in average)
        assert ema.is_swapped
        with pytest.raises(RuntimeError, match=r"Ema.update inside Ema.swapped"):
            ema.update(20)
        with pytest.raises(RuntimeError, match=r"Ema.swapped inside Ema.swapped"), ema.swapped():
            pass
    with pytest.raises(KeyError), ema.swapped():
        raise KeyError("an evaluation that fails")
    assert all(torch.equal(value, own[name]) for name, value in net.state_dict().items())
    assert all(torch.equal(ema.shadow[name], average[name]) for name in average)
    assert {
        name: value.data_ptr() for name, value in tensors(net).items()
    } == pointers  # in place: optimiser and DDP hold


def test_never_scored_before_it_holds_anything() -> None:
    net = Net()
    ema = Ema(net.named_parameters(), EmaConfig(decay=0.5, every=2), SMALL)
    ema.update(10)
    assert not ema.holds_average
    with pytest.raises(RuntimeError, match="before the first update"), ema.swapped():
        pass
    ema.update(20)
    assert ema.holds_average
    empty = Ema(Net().named_parameters(), EmaConfig(decay=0.5, every=2), SMALL)
    empty.load_state_dict(ema.state_dict())
    assert empty.holds_average


def test_resume_continues_exactly() -> None:
    """Raw weights, average and counter are three things; restored apart, they go on as in the uncut run."""
    config = EmaConfig(decay=0.999, ramp="power")
    uncut, cut = Net(), Net()
    cut.load_state_dict(uncut.state_dict())
    whole, first = (Ema(tensors(net).items(), config, SMALL) for net in (uncut, cut))
    for step in range(1, 6):
        for net, ema in ((uncut, whole), (cut, first)):
            move(net, step)
            ema.update(step * 10)
    saved = copy.deepcopy({"raw": cut.state_dict(), "ema": first.state_dict()})
    resumed = Net()
    resumed.load_state_dict(saved["raw"])
    second = Ema(tensors(resumed).items(), config, SMALL)
    second.load_state_dict(saved["ema"])
    assert not torch.equal(second.shadow["fc.weight"], resumed.fc.weight)
    for step in range(6, 11):
        for net, ema in ((uncut, whole), (resumed, second)):
            move(net, step)
            ema.update(step * 10)
    assert all(torch.equal(whole.shadow[name], second.shadow[name]) for name in whole.shadow)
    assert whole.updates == second.updates == 10


def test_state_of_another_model_is_refused() -> None:
    ema = Ema(nn.Linear(3, 2).named_parameters(), EmaConfig(decay=0.5), SMALL)
    with pytest.raises(ValueError, match=r"averaged weights: missing \['bias', 'updates'\], unknown \['other'\]"):
        ema.load_state_dict({"weight": torch.zeros(2, 3), "other": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"weight has shape \(2, 4\), the model \(2, 3\)"):
        ema.load_state_dict(Ema(nn.Linear(4, 2).named_parameters(), EmaConfig(decay=0.5), SMALL).state_dict())


def test_names_are_bare_under_wrappers() -> None:
    net = torch.compile(nn.Sequential(nn.Linear(2, 2)))
    ema = Ema(net.named_parameters(), EmaConfig(decay=0.5), SMALL)
    assert ema.shadow.keys() == {"0.weight", "0.bias"}
    assert bare_name("module._orig_mod.blocks.0._checkpoint_wrapped_module.fc.weight") == "blocks.0.fc.weight"
    assert bare_name("network.module.weight") == "network.module.weight"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"decay": 1.0}, r"ema.decay=1.0: must lie in \[0, 1\)"),
        ({"decay": 0.9, "half_life_images": 5}, "ema.decay and ema.half_life_images are both set"),
        ({"half_life_images": 0.0}, "ema.half_life_images=0.0: must be above 0"),
        ({"decay": 0.9, "every": 0}, "ema.every=0: must be at least 1"),
        ({"decay": 0.9, "copy_epochs": -1.0}, "ema.copy_epochs=-1.0"),
        ({"ramp": "power"}, "there is no average; set ema.decay"),
        ({"scale": "torchvision", "half_life_images": 5}, "scales ema.decay, which is null"),
    ],
)
def test_section_refuses_contradictions(keys: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EmaConfig(**keys)


def test_off_by_default() -> None:
    assert not EmaConfig().enabled
    with pytest.raises(ValueError, match="there is no average to keep"):
        Ema(nn.Linear(2, 2).named_parameters(), EmaConfig(), SMALL)
    assert math.isclose(full_decay(EmaConfig(decay=0.5), SMALL), 0.5)
