"""Parameter groups, learning-rate rules, optimisers and clipping against the sources' tables and timm."""

import re
from pathlib import Path
from typing import get_args

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.models import group_parameters
from timm.optim import param_groups_layer_decay
from timm.optim.lamb import Lamb
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

from vitfw.ema import Ema, EmaConfig
from vitfw.models.grouping import check_groups, decays
from vitfw.optim import (
    OptimConfig,
    build_optimizer,
    clip_gradients,
    current_learning_rate,
    layer_table,
    parameter_groups,
    resolve_learning_rate,
    set_schedule,
)
from vitfw.schedules import TrainConfig, resolve_length

LENGTH = resolve_length(TrainConfig(epochs=10, global_batch=10), 1000)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.fc = nn.LayerNorm(width), nn.Linear(width, width)
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gamma * self.fc(self.norm1(x))


class Net(nn.Module):
    """The parameter names of a ViT with all kinds of tokens, and its places for layer decay."""

    def __init__(self, depth: int = 4, width: int = 4) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.reg_token = nn.Parameter(torch.randn(1, 2, width))
        self.dist_token = nn.Parameter(torch.randn(1, 1, width))
        self.mask_token = nn.Parameter(torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, width))
        self.patch_embed = nn.Conv2d(3, width, 2)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 3)
        self.depth = depth

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patch_embed(images).flatten(2).mean(2) + self.pos_embed.mean(1) + self.cls_token[0]
        x = x + self.reg_token.mean(1) + self.dist_token[0] + self.mask_token[0]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def layers(self, norm: int = 0) -> dict[str, int]:
        """`norm` 0: with the last block; 1: with the head."""
        places = {}
        for name, _ in self.named_parameters():
            block = re.match(r"blocks\.(\d+)", name)
            top = {"norm": self.depth + norm, "head": self.depth + 1}
            places[name] = int(block[1]) + 1 if block else top.get(name.split(".")[0], 0)
        return places


def config(**keys) -> OptimConfig:
    return OptimConfig(**({"lr": 1.0, "name": "sgd"} | keys))


def table(groups: list[dict]) -> dict[str, tuple[float, float]]:
    return {name: (group["lr"], group["weight_decay"]) for group in groups for name in group["names"]}


@pytest.mark.parametrize(
    ("base", "reference", "scaling", "batch", "value", "text"),
    [
        (5e-4, 512, "linear", 1024, 1e-3, "1e-3 = 5e-4 x 1024 / 512"),
        (1.5e-4, 256, "linear", 4096, 2.4e-3, "2.4e-3 = 1.5e-4 x 4096 / 256"),
        (5e-4, 256, "linear", 1024, 2e-3, "2e-3 = 5e-4 x 1024 / 256"),
        (0.1, 256, "linear", 16384, 6.4, "6.4 = 0.1 x 16384 / 256"),
        (0.004, 1024, "sqrt", 2048, 5.657e-3, "5.6569e-3 = 4e-3 x sqrt(2048 / 1024)"),
    ],
)
def test_learning_rate_rules(base, reference, scaling, batch, value, text) -> None:
    rate = resolve_learning_rate(OptimConfig(base_lr=base, base_batch=reference, scaling=scaling), batch)
    assert rate.value == pytest.approx(value, rel=1e-4)
    assert rate.text == text


def test_absolute_rate_is_never_scaled() -> None:
    rate = resolve_learning_rate(OptimConfig(lr=4e-3), 2048)
    assert (rate.value, rate.text) == (4e-3, "4e-3 (absolute)")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "optim.lr=None, optim.base_lr=None: no learning rate"),
        ({"lr": 1.0, "base_lr": 0.5}, "optim.lr=1 is absolute .* but optim.base_lr=0.5, .* add optim.base_lr=null"),
        ({"base_lr": 1.0}, "optim.base_batch is missing"),
        ({"lr": 1.0, "base_batch": 256}, "optim.lr=1 is absolute and is never scaled, but .* base_batch=256"),
    ],
)
def test_a_rate_without_a_rule_is_refused(keys: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_learning_rate(OptimConfig(**keys), 1024)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lr": 0.0}, "optim.lr=0.0: must be a finite number above 0"),
        ({"weight_decay": -0.1}, "optim.weight_decay=-0.1: must be a finite number of 0 or more"),
        ({"weight_decay": 0.0, "weight_decay_end": 0.4}, "optim.weight_decay=0 with optim.weight_decay_end"),
        ({"layer_decay": 1.5}, r"optim.layer_decay=1.5: must lie in \(0, 1\]"),
        ({"norm_layer": "head"}, "optim.norm_layer=head: only layer decay reads it"),
        ({"betas": (0.9, 1.0)}, "optim.betas="),
        ({"momentum": 0.9}, "optim.momentum=0.9: adamw does not read it; only sgd, lars, muon do"),
        ({"name": "sgd", "betas": (0.9, 0.95)}, "sgd does not read it"),
        ({"name": "lamb", "nesterov": True}, "optim.nesterov=True: lamb does not read it"),
        ({"trust": 0.01}, "optim.trust=0.01: adamw does not read it; only lars do"),
        ({"momentum": 0.0}, "optim.momentum=0.0: adamw does not read it"),
        ({"name": "sgd", "eps": 0.0}, "optim.eps=0.0: sgd does not read it"),
        ({"name": "lars", "trust": 0.0}, "optim.trust=0.0: must be a finite number above 0"),
        ({"lr": float("inf")}, "optim.lr=inf: must be a finite number above 0"),
        (
            {"name": "sgd", "nesterov": True, "momentum": 0.0},
            "optim.nesterov=true with optim.momentum=0.0: there is nothing",
        ),
        ({"clip_norm": -1.0}, "optim.clip_norm=-1.0"),
    ],
)
def test_section_checks_ranges_and_unread_keys(keys: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimConfig(**keys)


def test_layer_decay_reaches_the_live_optimiser_at_each_step() -> None:
    """P11: depth 4, decay 0.5: the rates of the live groups, under a constant and a warm-up + cosine schedule."""
    net = Net()
    expected = {"head.weight": 1.0, "norm.weight": 0.5, "blocks.3.fc.weight": 0.5, "blocks.2.fc.weight": 0.25}
    expected |= {"blocks.1.fc.weight": 0.125, "blocks.0.fc.weight": 0.0625}
    expected |= dict.fromkeys(("patch_embed.weight", "cls_token", "pos_embed", "reg_token"), 0.03125)
    for keys in ({"schedule": "constant"}, {"warmup_epochs": 1, "warmup_lr": 0.001, "end_lr": 0.01}):
        section = config(layer_decay=0.5, **keys)
        optimizer = build_optimizer(parameter_groups(net.named_parameters(), net.layers(), section, 10), section)
        for images in (0, 10, 500, 1000, 1010, 5000, 9990, 10_000):
            set_schedule(optimizer, section, LENGTH, images)
            rates = {name: rate for name, (rate, _) in table(optimizer.param_groups).items()}
            top = current_learning_rate(optimizer)
            assert {name: rates[name] for name in expected} == pytest.approx(
                {name: top * scale for name, scale in expected.items()}
            )
            if keys == {"schedule": "constant"}:
                assert top == 1.0
    assert top == pytest.approx(0.01)  # the absolute end value is the head's


@pytest.mark.parametrize(
    ("decay", "depth", "embedding", "first", "last"),
    [
        (0.65, 12, 3.697e-3, 5.688e-3, 0.65),
        (0.75, 12, 2.376e-2, 3.168e-2, 0.75),
        (0.75, 24, 7.525e-4, 1.003e-3, 0.75),
        (0.75, 32, 7.5e-5, 1.0e-4, 0.75),
    ],
)
def test_layer_decay_of_12_24_and_32_blocks(decay, depth, embedding, first, last) -> None:
    net, section = Net(depth), config(layer_decay=decay)
    groups = parameter_groups(net.named_parameters(), net.layers(norm=1), section, 1)
    rates = {name: rate for name, (rate, _) in table(groups).items()}
    assert rates["cls_token"] == pytest.approx(embedding, rel=5e-3)
    assert rates["blocks.0.fc.weight"] == pytest.approx(first, rel=5e-3)
    assert rates[f"blocks.{depth - 1}.fc.weight"] == pytest.approx(last)
    assert rates["norm.weight"] == rates["head.bias"] == 1.0  # MAE: the final norm goes with the head


def test_groups_equal_timms_layer_decay() -> None:
    """28 groups and 14 multipliers for 12 blocks, the same rate and decay for every parameter."""
    with torch.device("meta"):
        net = timm.create_model("vit_base_patch16_224")
    places = group_parameters(net, net.group_matcher(coarse=False), reverse=True)
    groups = parameter_groups(
        net.named_parameters(), places, OptimConfig(lr=1.0, layer_decay=0.75, no_decay="timm", weight_decay=0.05), 1
    )
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    theirs = param_groups_layer_decay(net, 0.05, no_weight_decay_list=net.no_weight_decay(), layer_decay=0.75)
    expected = {names[id(p)]: (g["lr_scale"], g["weight_decay"]) for g in theirs for p in g["params"]}
    ours = table(groups)
    assert ours.keys() == expected.keys()
    assert all(ours[name] == pytest.approx(expected[name]) for name in ours)
    assert len(groups) == len(theirs) == 28
    assert len({group["lr"] for group in groups}) == 14


TOKENS = {"cls_token", "reg_token", "dist_token", "mask_token", "pos_embed"}


@pytest.mark.parametrize(
    ("rule", "free_tokens"),
    [
        ("all_tokens", TOKENS),
        ("timm", TOKENS - {"mask_token"}),
        ("deit", {"cls_token", "dist_token", "pos_embed"}),
        ("mae", set()),
        ("mae_finetune", {"cls_token", "pos_embed"}),
        ("mmpretrain", {"cls_token", "pos_embed", "mask_token"}),
        ("dinov2", set()),
        ("bigvision", TOKENS),
    ],
)
def test_no_decay_lists(rule, free_tokens) -> None:
    """P12."""
    net = Net()
    free = {name for name, (_, decay) in table(parameter_groups(net.named_parameters(), net.layers(), config(no_decay=rule), 1)).items() if not decay}  # fmt: skip  # noqa: E501
    vectors = {name for name, parameter in net.named_parameters() if parameter.ndim == 1}
    assert free == vectors | free_tokens


def test_torchvision_decays_everything_and_zero_decay_nothing() -> None:
    net = Net()
    for keys, decay in (({"no_decay": "torchvision", "weight_decay": 0.3}, 0.3), ({"weight_decay": 0.0}, 0.0)):
        rows = table(parameter_groups(net.named_parameters(), net.layers(), config(**keys), 1))
        assert {value for _, value in rows.values()} == {decay}


def test_nested_names_follow_the_same_rules() -> None:
    """A task holds its network as a child: the last part of the name decides."""
    token, vector = torch.zeros(1, 1, 4), torch.zeros(4)
    assert not decays("network.encoder.cls_token", token, "deit")
    assert decays("network.encoder.mask_token", token, "deit")
    assert not decays("network.norm.weight", vector, "mae")


def test_wrappers_and_freezing_change_nothing(tmp_path: Path) -> None:
    """P11, P12: compile, activation checkpointing and DDP rename parameters; frozen blocks must not shift the places."""
    bare, section = Net(), config(layer_decay=0.5, weight_decay=0.1)
    expected = table(parameter_groups(bare.named_parameters(), bare.layers(), section, 1))
    checkpointed = Net()
    checkpointed.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in checkpointed.blocks)
    compiled = torch.compile(Net())
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = [checkpointed, compiled, nn.parallel.DistributedDataParallel(Net())]
        for net in wrapped:
            assert table(parameter_groups(net.named_parameters(), bare.layers(), section, 1)) == expected
    finally:
        torch.distributed.destroy_process_group()
    for parameter in bare.blocks[:2].parameters():
        parameter.requires_grad = False
    frozen = table(parameter_groups(bare.named_parameters(), bare.layers(), section, 1))
    assert frozen == {name: row for name, row in expected.items() if not name.startswith(("blocks.0", "blocks.1"))}


def test_guards() -> None:
    net, section = Net(), config(layer_decay=0.5)
    with pytest.raises(ValueError, match=r"parameter_layers\(\) leaves out 1 parameters of the task: cls_token"):
        places = net.layers()
        del places["cls_token"]
        parameter_groups(net.named_parameters(), places, section, 1)
    with pytest.raises(ValueError, match=r"names 1 parameters that the task does not have: blocks.9"):
        parameter_groups(net.named_parameters(), net.layers() | {"blocks.9.fc.weight": 3}, section, 1)
    with pytest.raises(ValueError, match=r"the parameter head.bias comes twice"):
        twice = [*net.named_parameters(), ("_orig_mod.head.bias", net.head.bias)]
        parameter_groups(twice, net.layers(), section, 1)
    named = dict(net.named_parameters())
    groups = parameter_groups(net.named_parameters(), net.layers(), section, 1)
    with pytest.raises(ValueError, match=r"are in no group: cls_token"):
        check_groups([{"params": [p for n, p in named.items() if n != "cls_token"]}], named)
    with pytest.raises(ValueError, match=r"are in several groups: head.bias"):
        check_groups([*groups, {"params": [net.head.bias]}], named)
    net.head.bias.requires_grad = False
    with pytest.raises(ValueError, match=r"are frozen but in a group: head.bias"):
        check_groups(groups, named)
    net.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter is trainable"):
        parameter_groups(net.named_parameters(), net.layers(), section, 1)


def test_muon_orthogonalises_only_the_matrices_inside_the_blocks() -> None:
    net, section = Net(depth=2), OptimConfig(name="muon", lr=0.01)
    groups = parameter_groups(net.named_parameters(), net.layers(), section, 1)
    hidden = {name for group in groups if not group["use_fallback"] for name in group["names"]}
    assert hidden == {"blocks.0.fc.weight", "blocks.1.fc.weight"}


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "lamb", "lars", "lion", "muon"])
def test_every_optimiser_trains_and_resumes(name: str) -> None:
    """Three steps, or two and one in a new optimiser with the saved state, give the same weights bit for bit."""
    section = OptimConfig(name=name, lr=0.01, warmup_epochs=1, layer_decay=0.9, clip_norm=1.0)
    images = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))

    def step(net: Net, optimizer: torch.optim.Optimizer, number: int) -> None:
        set_schedule(optimizer, section, LENGTH, (number + 1) * 10)
        optimizer.zero_grad()
        net(images).square().sum().backward()
        clip_gradients(net.parameters(), section.clip_norm)
        optimizer.step()

    def build(net: Net) -> torch.optim.Optimizer:
        return build_optimizer(parameter_groups(net.named_parameters(), net.layers(), section, 10), section)

    torch.manual_seed(0)
    whole, start = Net(), None
    start = {key: value.clone() for key, value in whole.state_dict().items()}
    optimizer = build(whole)
    for number in range(3):
        step(whole, optimizer, number)
        if number == 1:
            weights = {key: value.clone() for key, value in whole.state_dict().items()}
            state = torch.utils._pytree.tree_map(
                lambda value: value.clone() if isinstance(value, torch.Tensor) else value, optimizer.state_dict()
            )
    resumed = Net()
    resumed.load_state_dict(weights)
    optimizer = build(resumed)
    optimizer.load_state_dict(state)
    step(resumed, optimizer, 2)
    for key, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key
        assert not torch.equal(value, start[key]), key


def test_bigvision_decay_in_torch_units() -> None:
    """1e-4 of big_vision at lr 1e-3 is AdamW's 0.1: a kernel without gradient shrinks by 1 - 1e-4 at the full rate."""
    section = OptimConfig(lr=1e-3, weight_decay=0.1, no_decay="bigvision", schedule="constant")
    layer = nn.Linear(4, 4)
    before = {name: value.detach().clone() for name, value in layer.named_parameters()}
    optimizer = build_optimizer(
        parameter_groups(layer.named_parameters(), {"weight": 1, "bias": 1}, section, 1), section
    )
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), before["weight"] * (1 - 1e-4), rtol=1e-7, atol=0)
    assert torch.equal(layer.bias, before["bias"])


def test_lars_follows_mae_probe() -> None:
    """Trust scaling on matrices although weight decay is 0, plain SGD with momentum on vectors."""
    section = OptimConfig(name="lars", lr=6.4, weight_decay=0.0, schedule="constant")
    layer = nn.Linear(5, 3)
    groups = parameter_groups(layer.named_parameters(), {"weight": 1, "bias": 1}, section, 1)
    optimizer = build_optimizer(groups, section)
    expected = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    momentum = {name: torch.zeros_like(value) for name, value in expected.items()}
    for seed in range(3):
        for name, parameter in layer.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            update = parameter.grad.clone()
            if parameter.ndim > 1:
                update *= 0.001 * expected[name].norm() / update.norm()
            momentum[name] = 0.9 * momentum[name] + update
            expected[name] -= 6.4 * momentum[name]
        optimizer.step()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-5, atol=1e-6)


def test_lamb_with_clipping_equals_timms_own_clipping() -> None:
    section = OptimConfig(
        name="lamb", lr=4e-3, weight_decay=0.05, clip_norm=1.0, schedule="constant", no_decay="torchvision"
    )
    ours, theirs = nn.Linear(5, 3), nn.Linear(5, 3)
    theirs.load_state_dict(ours.state_dict())
    groups = parameter_groups(ours.named_parameters(), {"weight": 1, "bias": 1}, section, 1)
    optimizer, reference = build_optimizer(groups, section), Lamb(theirs.parameters(), lr=4e-3, weight_decay=0.05)
    for seed in range(3):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = 10 * torch.randn(a.shape, generator=torch.Generator().manual_seed(seed))
            b.grad = a.grad.clone()
        clip_gradients(ours.parameters(), section.clip_norm)
        optimizer.step()
        reference.step()
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_clipping_acts_on_true_gradients(scale: float) -> None:
    """P53: SGD at rate 1 with a gradient of norm 10, clipped to 1 after unscaling: the weights move by 1, 10 is reported."""
    parameter = nn.Parameter(torch.zeros(2, 2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for _ in range(4):  # four micro-batches; a scaler multiplied the loss
        (parameter * torch.full((2, 2), 5.0)).sum().mul(scale / 4).backward()
    assert parameter.grad is not None
    parameter.grad /= scale
    assert clip_gradients([parameter], 1.0).item() == pytest.approx(10)
    optimizer.step()
    assert parameter.detach().norm().item() == pytest.approx(1, rel=1e-5)


@given(norm=st.sampled_from([None, 0, 0.0, 5.0]), count=st.integers(1, 4), scale=st.floats(0, 100))
def test_clipping_against_torch(norm: float | None, count: int, scale: float) -> None:
    """P53."""
    generator = torch.Generator().manual_seed(count)
    mine = [nn.Parameter(torch.zeros(3, 2)) for _ in range(count + 1)]
    for parameter in mine[:-1]:  # the last one has no gradient
        parameter.grad = scale * torch.randn(3, 2, generator=generator)
    gradients = [parameter.grad.clone() for parameter in mine[:-1] if parameter.grad is not None]
    total = clip_gradients(mine, norm)
    reference = torch.cat(gradients).norm()
    torch.testing.assert_close(total, reference)
    factor = min(1.0, norm / (reference.item() + 1e-6)) if norm else 1.0
    for parameter, gradient in zip(mine, gradients, strict=False):
        torch.testing.assert_close(parameter.grad, gradient * factor)


def test_clipping_without_gradients() -> None:
    assert clip_gradients([nn.Parameter(torch.zeros(2))], 1.0).item() == 0


def test_weight_decay_schedule_leaves_free_parameters_free() -> None:
    net, section = Net(), OptimConfig(lr=1.0, weight_decay=0.04, weight_decay_end=0.4)
    optimizer = build_optimizer(parameter_groups(net.named_parameters(), net.layers(), section, 10), section)
    for images, decay in ((0, 0.04), (5000, 0.22), (10_000, 0.4)):
        set_schedule(optimizer, section, LENGTH, images)
        rows = table(optimizer.param_groups)
        assert rows["head.weight"][1] == pytest.approx(decay)
        assert rows["head.bias"][1] == rows["cls_token"][1] == 0


def test_layer_table_shows_every_parameter() -> None:
    net, section = Net(depth=1), config(layer_decay=0.5, weight_decay=0.05, lr=1e-3)
    lines = layer_table(parameter_groups(net.named_parameters(), net.layers(), section, 1)).splitlines()
    assert len(lines) == 1 + len(list(net.parameters()))
    assert lines[0].split() == ["group", "name", "shape", "scale", "lr", "decay"]
    assert ["patch_embed.weight", "4x3x2x2", "0.25", "2.5e-4", "0.05"] in [line.split()[1:] for line in lines]


def _sharded(rank: int, store: str, folder: str) -> None:
    """Two processes with FSDP2: half the images each, an uneven shard (3 rows), a frozen block."""
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    net, images = _partly_frozen()
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    rows, norms, average = _train(net, images[rank::2])
    torch.save({"rows": rows, "norms": norms} | average, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def _partly_frozen() -> tuple[Net, torch.Tensor]:
    torch.manual_seed(0)
    net = Net(depth=2)
    net.blocks[0].requires_grad_(False)
    return net, torch.randn(4, 3, 2, 2)


def _train(net: Net, images: torch.Tensor) -> tuple[dict, list[float], dict]:
    """Five clipped steps with an average of the weights; tensors gathered."""
    section = config(layer_decay=0.5, weight_decay=0.1, lr=0.1, schedule="constant", clip_norm=0.1)
    optimizer = build_optimizer(parameter_groups(net.named_parameters(), net.layers(), section, 10), section)
    ema = Ema(net.named_parameters(), EmaConfig(decay=0.9), LENGTH)
    norms = []
    for step in range(5):
        set_schedule(optimizer, section, LENGTH, step * 10)
        optimizer.zero_grad()
        net(images).square().mean().backward()
        norms.append(clip_gradients(net.parameters(), section.clip_norm).item())
        optimizer.step()
        ema.update((step + 1) * 10)

    def whole(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in tensors.items()}

    live, average = whole(dict(net.named_parameters())), whole(ema.state_dict())
    with ema.swapped():
        swapped = whole(dict(net.named_parameters()))
    fresh = Ema(net.named_parameters(), EmaConfig(decay=0.9), LENGTH)
    fresh.load_state_dict(average)
    tensors = {"live": live, "ema": average, "swapped": swapped, "again": whole(fresh.state_dict())}
    return table(optimizer.param_groups), norms, tensors | {"after": whole(dict(net.named_parameters()))}


def test_sharded_training_equals_one_process(tmp_path: Path) -> None:
    """P12, P46, P48, P49: groups, clipping by the norm over all shards, frozen parts and the average, FSDP2 on two processes."""
    net, images = _partly_frozen()
    start = {name: value.detach().clone() for name, value in net.named_parameters()}
    rows, norms, expected = _train(net, images)
    torch.multiprocessing.spawn(_sharded, (str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found["rows"] == rows
        assert found["norms"] == pytest.approx(norms, rel=1e-5)
        for key in ("live", "ema", "swapped", "again", "after"):
            torch.testing.assert_close(found[key], expected[key], rtol=1e-5, atol=1e-6)
        assert all(torch.equal(found["live"][name], start[name]) for name in start if name.startswith("blocks.0"))
    assert norms[0] > 0.1  # the clipping did act
    assert torch.equal(expected["swapped"]["head.bias"], expected["ema"]["head.bias"])


@pytest.mark.parametrize("name", get_args(OptimConfig.__annotations__["name"]))
@pytest.mark.parametrize(
    "key",
    [{"momentum": 0.0}, {"eps": 0.0}, {"betas": (0.0, 0.0)}, {"nesterov": True}, {"nesterov": True, "momentum": 0.0}],
)
def test_a_key_is_refused_with_the_words_or_built_and_stepped(name: str, key: dict) -> None:
    """No value of a key passes the section and then fails in the optimiser."""
    try:
        config = OptimConfig(name=name, lr=0.1, **key)  # type: ignore[arg-type]
    except ValueError as error:
        assert str(error).startswith("optim.")
        return
    net = nn.Linear(3, 3)
    groups = parameter_groups(net.named_parameters(), {"weight": 1, "bias": 1}, config, 1)
    net(torch.ones(2, 3)).square().sum().backward()
    build_optimizer(groups, config).step()
