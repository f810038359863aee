"""Recomputed and compiled blocks in one process; what shards do is in tests/test_distributed.py."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from vitfw.launch import Launch, MachineConfig
from vitfw.models.build import build_model
from vitfw.models.variants import ModelConfig
from vitfw.parallel import blocks_of, compile_blocks, normalise_in_float32, place, recompute, share_buffers, whole

PYTHON = Launch("python")


def model(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    shape = {"image_size": 8, "in_channels": 1, "width": 24, "heads": 2, "drop_path": 0.3}
    return build_model(ModelConfig(variant="vit_ti2", **(shape | options)), num_classes=5)


def gradients(network: nn.Module, seed: int = 1) -> dict[str, Tensor]:
    network.zero_grad()
    torch.manual_seed(seed)
    network(torch.randn(6, 1, 8, 8)).square().sum().backward()
    return {name: value.grad.clone() for name, value in network.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("every", [1, 2])
def test_recomputed_blocks_give_the_same_gradients_and_keep_less(every: int) -> None:
    """Dropout and drop-path draw the same numbers again."""
    network = model(depth=4, dropout=0.2)
    expected = gradients(network)
    names = list(network.state_dict())
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.numel()) or tensor, lambda tensor: tensor
    ):
        gradients(network)
    before = sum(kept)
    place(network, MachineConfig(device="cpu", recompute_every=every), PYTHON)
    assert list(network.state_dict()) == names
    found = gradients(network)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=lambda text, n=name: f"{n}: {text}")
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.numel()) or tensor, lambda tensor: tensor
    ):
        torch.manual_seed(1)
        network(torch.randn(6, 1, 8, 8)).sum()
    assert sum(kept) < before * (0.6 if every == 1 else 0.9)


def test_recomputing_leaves_evaluation_alone() -> None:
    network = model(depth=2).eval()
    images = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        expected = network(images)
        for block in blocks_of(network):
            recompute(block)
        assert torch.equal(network(images), expected)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    """Blocks are compiled by a back end that only counts; torch's limits return to what they were."""
    torch._dynamo.reset()
    count, original = CompileCounter(), nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: original(self, backend=count, fullgraph=True))
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256):
        yield count


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own, while it traces
def test_every_block_of_a_deep_network_is_compiled_once(counter: CompileCounter) -> None:
    """P82: blocks share their code but not their drop-path rate, and torch gives up after 8 variants with a log line."""
    network = model(depth=12)
    expected, names = gradients(network), list(network.state_dict())
    compile_blocks(blocks_of(network))
    found = gradients(network)
    assert counter.frame_count == 12
    for seed in (2, 3):
        gradients(network, seed)
    assert counter.frame_count == 12
    assert list(network.state_dict()) == names
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_evaluation_after_training_compiles_at_most_one_variant_more(counter: CompileCounter) -> None:
    network = model(depth=2, drop_path=0.0)
    compile_blocks(blocks_of(network))
    gradients(network)
    trained = counter.frame_count
    network.eval()
    with torch.no_grad():
        for count in (6, 12, 12, 6):
            network(torch.randn(count, 1, 8, 8))
    assert counter.frame_count <= trained + 4


def test_blocks_of_other_networks_are_found() -> None:
    import timm

    assert len(blocks_of(timm.create_model("deit_tiny_patch16_224"))) == 12
    assert len(blocks_of(timm.create_model("swin_tiny_patch4_window7_224"))) == 12
    assert blocks_of(nn.Linear(2, 2)) == []


@pytest.mark.parametrize("key", ["recompute_every", "compile"])
def test_a_key_that_needs_blocks_is_refused_without_them(key: str) -> None:
    machine = MachineConfig(device="cpu", **{key: 1 if key == "recompute_every" else True})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"machine\.{key}=.*no list called `blocks`"):
        place(nn.Linear(2, 2), machine, PYTHON)


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.LayerNorm(8, bias=False), nn.RMSNorm(8, eps=1e-6)])
def test_norms_read_bfloat16_weights_as_float32(norm: Any) -> None:
    x = torch.randn(4, 8)
    expected = norm(x)
    normalise_in_float32(norm)
    assert torch.equal(norm(x), expected)
    norm.to(torch.bfloat16)
    assert norm(x).dtype == torch.float32


def test_whole_is_a_copy_and_one_process_has_nothing_to_share() -> None:
    value = torch.zeros(3)
    copy = whole(value)
    value += 1
    assert copy.tolist() == [0, 0, 0]
    assert whole(value, keep=False) is None
    assert whole(7) == 7
    share_buffers(nn.BatchNorm1d(3))


def test_fused_optimisers_get_unscaled_gradients_before_clipping() -> None:
    """P53: with a gradient scaler Lightning leaves the unscaling to a fused optimiser, which is after the clipping."""
    from vitfw.ema import EmaConfig
    from vitfw.module import Module
    from vitfw.optim import OptimConfig
    from vitfw.schedules import TrainConfig, resolve_length

    weight = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.AdamW([weight], lr=1.0, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    module = Module(
        nn.Module(),  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        optim=OptimConfig(lr=1.0, clip_norm=1.0),
        length=resolve_length(TrainConfig(epochs=1, global_batch=4), 8),
        ema=EmaConfig(),
        seed=0,
        accumulation=1,
        rank=0,
        world=1,
    )
    module._trainer = type("Trainer", (), {"precision_plugin": type("Plugin", (), {"scaler": scaler})()})()  # type: ignore[assignment]
    scaler.scale((weight * 5.0).sum()).backward()  # gradient of norm 10
    module.configure_gradient_clipping(optimizer)
    assert module.gradient_norm is not None and module.gradient_norm.item() == pytest.approx(10.0)
    assert weight.grad is not None and weight.grad.norm().item() == pytest.approx(1.0, rel=1e-4)
    scaler.step(optimizer)
    assert weight.detach().abs().max() > 0
