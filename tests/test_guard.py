"""Steps that would ruin the weights: skipped on all ranks, counted, taken back, and the end of the run at last."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, tiny
from torch import nn

from vitfw import checkpoint
from vitfw.guard import FEWEST, LAG, Guard, GuardConfig, check_precision, poison, raise_precision, skip_step
from vitfw.machine import MachineConfig
from vitfw.models.attention import attend
from vitfw.models.build import build_model
from vitfw.models.variants import ModelConfig
from vitfw.parallel import blocks_of
from vitfw.report.recorder import read_metrics
from vitfw.tasks.classify import ClassifyTask
from vitfw.tasks.mae import MaeTask
from vitfw.train import main

BAD = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("value", BAD)
def test_a_loss_that_is_not_finite_poisons_its_gradients(value: float) -> None:
    """A constant infinity in the loss leaves the gradients finite by itself; the other ranks would never hear of it."""
    weight = torch.ones(3, requires_grad=True)
    poison((weight * 2).sum() + value).backward()
    assert weight.grad is not None and weight.grad.isnan().all()


def test_a_good_loss_is_untouched() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = poison((weight * 2).sum())
    loss.backward()
    assert loss.item() == 6.0
    assert weight.grad is not None and weight.grad.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("fused", [True, False])
def test_a_skipped_step_leaves_weights_and_state_alone(fused: bool) -> None:
    """Fused optimisers are told on the device, the others lose their gradients: the same result, weight decay included."""
    torch.manual_seed(0)
    one, other = nn.Linear(3, 2), nn.Linear(3, 2)
    other.load_state_dict(one.state_dict())
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5, fused=fused) for net in (one, other)]
    for step in range(4):
        for net, optimizer in zip((one, other), optimizers, strict=True):
            bad = net is other and step == 2
            optimizer.zero_grad()
            net(torch.ones(4, 3)).square().sum().backward()
            if step == 2 and net is one:
                continue  # the reference never takes this step
            if bad:
                assert net.weight.grad is not None
                net.weight.grad.fill_(math.nan)
            skip_step(optimizer, torch.tensor(bad), scaled=False)
            optimizer.step()
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert optimizers[0].state[mine]["step"] == optimizers[1].state[theirs]["step"] == 3


def feed(guard: Guard, norms: list[float], start: int = 1) -> list[bool]:
    return [bool(guard.judge(step, torch.tensor(norm))) for step, norm in enumerate(norms, start)]


def ordinary(count: int) -> list[float]:
    return [1.0 + 0.1 * math.sin(step) for step in range(count)]


def test_a_spike_is_a_robust_z_score() -> None:
    guard = Guard(GuardConfig(spike=8.0))
    assert not any(feed(guard, ordinary(40)))
    middle = sorted(ordinary(38))[18:20]
    assert guard.limit() == pytest.approx(sum(middle) / 2 + 8 * 1.4826 * 0.07, rel=0.05)
    assert feed(guard, [1.3, 30.0, 1.0, 1.0, 1.0], start=41) == [False, True, False, False, False]
    assert guard.skipped == 1
    assert guard.take_bad_steps() == [(42, 30.0)]
    assert guard.take_bad_steps() == []


def test_without_enough_history_and_without_a_limit_only_the_infinite_is_bad() -> None:
    assert feed(Guard(GuardConfig(spike=8.0)), [*ordinary(FEWEST - 1), 1e9])[-1] is False
    assert feed(Guard(GuardConfig()), [*ordinary(100), 1e30, math.nan, math.inf])[-3:] == [False, True, True]


def test_patience_then_roll_backs_then_the_end() -> None:
    guard = Guard(GuardConfig(patience=3, rollbacks=2))
    verdicts = []
    for step in range(1, 13):
        guard.judge(step, torch.tensor(math.nan))
        verdicts.append(guard.verdict())
    asked = {step: verdict for step, verdict in enumerate(verdicts, 1) if verdict != "go on"}
    assert asked == {3 + LAG: "roll back", 6 + LAG: "roll back", 9 + LAG: "give up"}


def test_a_good_stretch_forgives() -> None:
    guard = Guard(GuardConfig(patience=1, rollbacks=1, window=FEWEST))
    feed(guard, [math.nan, 1.0, 1.0])
    assert guard.verdict() == "roll back"
    feed(guard, [1.0] * (FEWEST + 2), start=4)
    feed(guard, [math.nan, 1.0, 1.0], start=40)
    assert guard.verdict() == "roll back"


@pytest.mark.parametrize("cut", [5, 25, 41, 42, 43, 44])
def test_a_run_cut_anywhere_judges_as_the_uncut_run(cut: int) -> None:
    norms = [*ordinary(40), 1.2, 9.0, 1.0, math.nan, 1.1, 7.0, 1.0, 1.0]
    whole, first, second = (Guard(GuardConfig(spike=6.0)) for _ in range(3))
    expected = feed(whole, norms)
    got = feed(first, norms[:cut])
    state = json.loads(json.dumps(first.state_dict()))  # plain values, as a checkpoint holds them
    second.load_state_dict(state)
    got += feed(second, norms[cut:], start=cut + 1)
    assert got == expected
    assert second.skipped == whole.skipped
    assert second.limit() == whole.limit()


@pytest.mark.parametrize(
    ("key", "value"), [("spike", -1.0), ("spike", math.inf), ("window", 5), ("patience", 0), ("rollbacks", -1)]
)
def test_the_section_names_the_key_and_the_value(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"guard.{key}={value}"):
        GuardConfig(**{key: value})  # type: ignore[arg-type]


def with_faults(
    monkeypatch: pytest.MonkeyPatch, value: float, calls: range | set[int], kind: Any = ClassifyTask
) -> None:
    real = kind.losses
    count = 0

    def faulty(self: Any, batch: Any, progress: float) -> Any:
        nonlocal count
        count += 1
        losses = real(self, batch, progress)
        return losses | {"loss": losses["loss"] + value} if count in calls else losses

    monkeypatch.setattr(kind, "losses", faulty)


@pytest.mark.parametrize("value", BAD)
def test_one_bad_batch_costs_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    """P29: weights as before, counter 1, samples written down, the run goes on and ends with finite weights."""
    with_faults(monkeypatch, value, {5})
    words = [word for word in TINY if not word.startswith("eval.")]
    words += [f"out={tmp_path / 'run'}", "eval.every_epochs=0", "machine.save_every_steps=1", "machine.keep_last=9"]
    assert main(words) == 0
    before, after = (checkpoint.load(tmp_path / "run" / "checkpoints" / f"step-{step:09d}.ckpt") for step in (4, 5))
    for part in ("model", "optimizer"):
        for name, entry in before[part].items():
            for key, tensor in (entry if isinstance(entry, dict) else {"": entry}).items():
                other = after[part][name][key] if key else after[part][name]
                assert torch.equal(tensor, other), (name, key)
    records = read_metrics(tmp_path / "run", "train")
    assert records[-1]["skipped_steps"] == 1
    assert [record["loss"] for record in records if not isinstance(record["loss"], float)] == [str(value)]
    lines = (tmp_path / "run" / "skipped-rank0.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [5]
    trace = [json.loads(line) for line in (tmp_path / "run" / "trace-train-rank0.jsonl").read_text().splitlines()]
    assert json.loads(lines[0])["keys"] == trace[4]["keys"]


def test_a_run_that_stays_bad_fails_and_leaves_the_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """P29: non-zero status; `last` loads and is finite, and so is the average."""
    with_faults(monkeypatch, math.nan, range(14, 1000))
    words = [word for word in TINY if not word.startswith(("eval.", "train.epochs", "log."))]
    assert main([*words, f"out={tmp_path / 'run'}", "train.epochs=20", "eval.every_epochs=0", "log.every=10"]) == 1
    out = capsys.readouterr()
    assert "back to the weights of step" in out.out
    assert "10 steps in a row had a loss or gradient that is not finite" in out.err
    assert "after 2 returns to a checkpoint; the last checkpoint is untouched" in out.err
    state = checkpoint.load(tmp_path / "run" / "checkpoints" / "last.ckpt")
    for part in ("model", "ema"):
        assert all(value.isfinite().all() for value in state[part].values())


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_precise_attention_is_float32_under_autocast(kind: Any) -> None:
    torch.manual_seed(0)
    query, key, value = (4 * torch.randn(2, 3, 17, 8).bfloat16() for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain, _ = attend(query, key, value, kind=kind)
        precise, weights = attend(query, key, value, kind=kind, precise=True, weights=True)
    scores = (query.double() @ key.double().transpose(-2, -1)) * 8**-0.5
    expected = scores.softmax(-1) @ value.double()
    assert precise.dtype is torch.bfloat16
    assert weights is not None and weights.dtype is torch.float32
    torch.testing.assert_close(weights.double(), scores.softmax(-1), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(precise.double(), expected, rtol=2**-8, atol=1e-6)  # but for the last rounding
    assert (plain.double() - expected).abs().mean() > 1.5 * (precise.double() - expected).abs().mean()


class Wrapped(nn.Module):
    """A task's bare bones: one network whose attention can be raised, and a decoder."""

    def __init__(self, network: nn.Module, decoder: nn.Module | None = None) -> None:
        super().__init__()
        self.net = network
        if decoder is not None:
            self.decoder = decoder


@pytest.mark.parametrize("words", [{}, {"variant": "vit_ti4", "pool": "map"}, {"parallel": True, "qk_norm": True}])
def test_all_attention_of_a_network_is_raised_by_name_and_only_then(words: dict[str, Any]) -> None:
    shape: dict[str, Any] = {"width": 24, "depth": 2, "heads": 2, "image_size": 16, "patch_size": 4} | words
    network = build_model(ModelConfig(**shape), num_classes=3).eval()
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        before = network(images)
        raise_precision(Wrapped(network), "none")
        assert torch.equal(network(images), before)
        raise_precision(Wrapped(network), "attention")
        after = network(images)
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, before, rtol=0.05, atol=0.05)


def test_compiled_blocks_are_raised_too() -> None:
    """They were compiled long before."""
    shape: dict[str, Any] = {"width": 24, "depth": 2, "heads": 2, "image_size": 16, "patch_size": 4}
    network = build_model(ModelConfig(**shape), num_classes=3).eval()
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        plain = network(images)
        for block in blocks_of(network):
            block.compile(backend="eager")
        assert torch.equal(network(images), plain)
        raise_precision(Wrapped(network), "attention")
        raised = network(images)
        torch.compiler.reset()
        with torch.compiler.set_stance("force_eager"):
            assert torch.equal(network(images), raised)
    assert not torch.equal(raised, plain)


@pytest.mark.parametrize(
    ("which", "machine", "words"),
    [
        ("attention", {}, "no attention of ours"),
        ("decoder", {}, "no decoder"),
        ("decoder", {"precision": "bf16", "strategy": "fsdp2"}, "gathered in bfloat16"),
    ],
)
def test_parts_that_are_not_there_are_refused(which: Any, machine: dict[str, Any], words: str) -> None:
    decoder = nn.Linear(2, 2) if machine else None
    with pytest.raises(ValueError, match=f"guard.raise_precision={which}.*{words}"):
        check_precision(Wrapped(nn.Linear(2, 2), decoder), which, MachineConfig(**machine))


MAE = ["recipe=mae_digits", "task.probe=false", "task.neighbours=0", "task.decoder_width=24", "augment.mixup=0"]


@pytest.mark.parametrize(("task", "which"), [("classify", "attention"), ("mae", "decoder"), ("mae", "all")])
def test_precision_is_raised_by_a_return_and_stays_over_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], task: str, which: str
) -> None:
    """Two bad steps (4, 5) bring back step 6 after step 7; the uncut run, the one cut after that, and one without the key."""
    kind = {"classify": ClassifyTask, "mae": MaeTask}[task]
    words = ["machine.precision=bf16", "guard.patience=2", "eval.every_epochs=0"]
    words += [*MAE, "augment.cutmix=0"] if task == "mae" else []

    def run(name: str, *more: str, calls: set[int], status: int = 0) -> list[float]:
        parts = "none" if name == "off" else which
        with monkeypatch.context() as patch:
            with_faults(patch, math.nan, calls, kind)
            assert main([*tiny(*words, *more, f"guard.raise_precision={parts}"), f"out={tmp_path / name}"]) == status
        return [record["loss"] for record in read_metrics(tmp_path / name, "train")]

    uncut = run("uncut", calls={4, 5})
    text = "attention and decoder" if which == "all" else which
    assert f"back to the weights of step 6, on with new data; from here on {text} in float32" in capsys.readouterr().out
    run("cut", "stop_after=7", calls={4, 5}, status=75)
    assert checkpoint.load(tmp_path / "cut" / "checkpoints" / "last.ckpt")["guard"]["raised"] is True
    assert str(run("cut", calls=set())) == str(uncut)
    off = run("off", calls={4, 5})
    assert str(off[:7]) == str(uncut[:7])
    assert off[7] != uncut[7]
    assert off[7] == pytest.approx(uncut[7], rel=2e-2)
    assert checkpoint.load(tmp_path / "off" / "checkpoints" / "last.ckpt")["guard"]["raised"] is False
