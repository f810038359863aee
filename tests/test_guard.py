"""Steps that would ruin the weights: skipped on all ranks, counted, taken back, and the end of the run at last."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY
from torch import nn

from vitfw import checkpoint
from vitfw.guard import FEWEST, LAG, Guard, GuardConfig, poison, skip_step
from vitfw.report.recorder import read_metrics
from vitfw.tasks.classify import ClassifyTask
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


def with_faults(monkeypatch: pytest.MonkeyPatch, value: float, calls: range | set[int]) -> None:
    real = ClassifyTask.losses
    count = 0

    def faulty(self: ClassifyTask, batch: Any, progress: float) -> Any:
        nonlocal count
        count += 1
        losses = real(self, batch, progress)
        return losses | {"loss": losses["loss"] + value} if count in calls else losses

    monkeypatch.setattr(ClassifyTask, "losses", faulty)


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
