"""Checkpoint files: whole or not there, the newest good one found, what should stay stays, and only that."""

import dataclasses
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from torch import nn

from vitfw import checkpoint
from vitfw.checkpoint import CheckpointError, Keep, Progress
from vitfw.checkpoint_files import Writer
from vitfw.ema import Ema, EmaConfig
from vitfw.optim import OptimConfig, build_optimizer, parameter_groups
from vitfw.schedules import Length, TrainConfig, resolve_length


def state_of(value: float = 0.0) -> dict[str, Any]:
    return {"model": {"weight": torch.full((64, 64), value)}, "optimizer": {}, "ema": None}


def write(folder: Path, step: int, **options: Any) -> Path:
    return checkpoint.save(
        folder, state_of(step), Progress(step=step), config="seed: 0\n", versions={"torch": "x"}, **options
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_plain_containers_under_two_names(tmp_path: Path) -> None:
    path = write(tmp_path, 7, best_of=["val", "val_ema"])
    assert names(tmp_path) == ["best.ckpt", "best_ema.ckpt", "last.ckpt", "step-000000007.ckpt"]
    state = torch.load(path, weights_only=True)
    assert state.keys() == {"format", "progress", "model", "optimizer", "ema", "config", "versions"}
    assert Progress(**state["progress"]) == Progress(step=7)


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (Keep(), [5, 6]),
        (Keep(last=1), [6]),
        (Keep(last=3), [4, 5, 6]),
        (Keep(last=1, every=2), [2, 4, 6]),
        (Keep(last=1, steps=(1, 3)), [1, 3, 6]),
    ],
)
def test_what_is_kept(tmp_path: Path, keep: Keep, expected: list[int]) -> None:
    for step in range(1, 7):
        write(tmp_path, step, keep=keep)
    assert sorted(step for step, _ in checkpoint.step_files(tmp_path)) == expected
    assert checkpoint.load(tmp_path / "last.ckpt")["progress"]["step"] == 6


def test_the_best_stays_when_its_step_is_gone(tmp_path: Path) -> None:
    write(tmp_path, 1, best_of=["val"])
    for step in (2, 3, 4):
        write(tmp_path, step)
    assert [step for step, _ in checkpoint.step_files(tmp_path)] == [4, 3]
    assert checkpoint.load(tmp_path / "best.ckpt")["progress"]["step"] == 1


def test_only_files_of_this_kind_are_ever_removed(tmp_path: Path) -> None:
    """P62."""
    for name in ("step-1.ckpt", "mine.ckpt", "step-000000001.ckpt.bak"):
        (tmp_path / name).write_text("mine")
    for step in range(1, 5):
        write(tmp_path, step, keep=Keep(last=1))
    assert set(names(tmp_path)) >= {"step-1.ckpt", "mine.ckpt", "step-000000001.ckpt.bak"}


def test_a_full_disk_leaves_the_one_before(tmp_path: Path) -> None:
    write(tmp_path, 1)
    script = f"""
        import resource, signal, sys
        from pathlib import Path
        import torch
        sys.path.insert(0, "tests")
        from test_checkpoint import write
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # the disk takes 4 kB more
        try:
            write(Path({str(tmp_path)!r}), 2)
        except OSError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, cwd=ROOT)
    assert "step-000000002.ckpt could not be written, the ones before it still stand: [Errno 27] File" in done.stdout
    assert names(tmp_path) == ["last.ckpt", "step-000000001.ckpt"]
    found = checkpoint.newest(tmp_path)
    assert found is not None and found[1].step == 1 and found[2] == []


@pytest.mark.parametrize("error", [OSError("quota"), RuntimeError("PytorchStreamWriter failed")])
def test_a_writer_that_raises_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    write(tmp_path, 1)

    def fail(content: Any, file: Any) -> None:
        file.write(b"half")
        raise error

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match=str(error)):
        write(tmp_path, 2)
    assert names(tmp_path) == ["last.ckpt", "step-000000001.ckpt"]


def test_what_does_not_read_back_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)
    real = torch.save

    def flip(content: Any, file: Any) -> None:
        real(content, file)
        file.seek(file.tell() // 2)
        file.write(b"\xff\x00\xff")

    monkeypatch.setattr(torch, "save", flip)
    with pytest.raises(OSError, match=r"is damaged|cannot be read"):
        write(tmp_path, 2)
    assert names(tmp_path) == ["last.ckpt", "step-000000001.ckpt"]


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "flipped":
        middle = len(data) // 2
        data = data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]
    path.unlink()  # `last.ckpt` may be the same file
    path.write_bytes({"cut": data[: len(data) // 2], "empty": b"", "flipped": data, "text": b"not a zip"}[how])


@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "text"])
def test_a_damaged_file_is_passed_over_with_a_word(tmp_path: Path, how: str) -> None:
    write(tmp_path, 1)
    damage(write(tmp_path, 2), how)
    (tmp_path / "last.ckpt").unlink()
    found = checkpoint.newest(tmp_path)
    assert found is not None
    path, progress, words = found
    assert (path.name, progress.step) == ("step-000000001.ckpt", 1)
    assert len(words) == 1 and "step-000000002.ckpt" in words[0]


def test_no_readable_file_is_an_error_and_no_file_is_a_new_run(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None
    assert checkpoint.newest(tmp_path / "absent") is None
    damage(write(tmp_path, 1), "cut")
    (tmp_path / "last.ckpt").unlink()
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .* can be read .*step-000000001.* choose another out="
    ):
        checkpoint.newest(tmp_path)


def test_a_last_file_by_itself_is_taken(tmp_path: Path) -> None:
    write(tmp_path, 3).unlink()
    found = checkpoint.newest(tmp_path)
    assert found is not None and (found[0].name, found[1].step) == ("last.ckpt", 3)


def test_foreign_and_newer_files_are_named(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    with pytest.raises(CheckpointError, match="is not a vitfw checkpoint; to start from foreign weights use weights="):
        checkpoint.load(tmp_path / "foreign.ckpt")
    content = {"format": checkpoint.FORMAT + 1, "progress": dataclasses.asdict(Progress()), **state_of()}
    torch.save(content, tmp_path / "newer.ckpt")
    with pytest.raises(CheckpointError, match="update vitfw"):
        checkpoint.load(tmp_path / "newer.ckpt")


def test_kill_9_in_the_middle_of_writing(tmp_path: Path) -> None:
    """A process that does nothing but save is killed: always a whole newest file, and no litter later."""
    script = f"""
        import itertools, sys
        from pathlib import Path
        sys.path.insert(0, "tests")
        from test_checkpoint import write
        for step in itertools.count(int(sys.argv[1])):
            write(Path({str(tmp_path)!r}), step)
            print(step, flush=True)
    """
    step = 1
    for delay in (0.02, 0.05, 0.11):
        command = [sys.executable, "-c", textwrap.dedent(script), str(step)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout is not None
            done = int(process.stdout.readline())
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
            done = max([done, *map(int, process.stdout.read().split("\n")[:-1])])
        found = checkpoint.newest(tmp_path)
        assert found is not None and found[2] == []
        assert found[1].step in (done, done + 1)
        assert torch.equal(checkpoint.load(found[0])["model"]["weight"], torch.full((64, 64), float(found[1].step)))
        step = found[1].step + 1
    write(tmp_path, step)
    assert not [name for name in names(tmp_path) if name.endswith(".tmp")]


def test_the_writer_has_one_pending_write_and_shows_its_error(tmp_path: Path) -> None:
    order: list[str] = []

    def slow(name: str) -> None:
        time.sleep(0.05)
        order.append(name)

    writer = Writer()
    writer.start(lambda: slow("first"))
    assert order == []  # beside us
    writer.start(lambda: slow("second"))
    assert order == ["first"]
    writer.wait()
    assert order == ["first", "second"]

    def fail() -> None:
        raise OSError("disk full")

    writer.start(fail)
    deadline = time.monotonic() + 5
    while not writer.failed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert writer.failed
    with pytest.raises(OSError, match="disk full"):
        writer.start(lambda: slow("third"))
    assert not writer.failed


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, width), nn.Linear(width, 2)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("count", torch.zeros(1))


def length() -> Length:
    return resolve_length(TrainConfig(epochs=1, global_batch=4), 16)


def trained(name: str, seed: int) -> tuple[Net, torch.optim.Optimizer, Ema]:
    torch.manual_seed(seed)
    net = Net()
    layers = {key: 0 if key.startswith("first") else 1 for key, _ in net.named_parameters()}
    config = OptimConfig(name=name, lr=0.01, weight_decay=0.1, no_decay="all_tokens")  # type: ignore[arg-type]
    optimizer = build_optimizer(parameter_groups(net.named_parameters(), layers, config, 4), config)
    ema = Ema(net.named_parameters(), EmaConfig(decay=0.9), length())
    return net, optimizer, ema


def train(net: Net, optimizer: torch.optim.Optimizer, ema: Ema, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        loss = (net.second(net.first(torch.randn(5, 3, generator=generator)).tanh()) * net.scale).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(4 * (step + 1))


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "lars", "lion", "muon"])
def test_collect_and_restore_continue_every_optimiser_bit_for_bit(tmp_path: Path, name: str) -> None:
    """P03: moments, counters and averages, those that an optimiser keeps for a whole group too."""
    one = trained(name, 0)
    train(*one, steps=3)
    state = checkpoint.collect(*one)
    path = checkpoint.save(tmp_path, state, Progress(step=3), config="", versions={})
    train(*one, steps=2, start=3)
    other = trained(name, 1)
    checkpoint.restore(checkpoint.load(path), *other)
    train(*other, steps=2, start=3)
    for (key, value), theirs in zip(one[0].state_dict().items(), other[0].state_dict().values(), strict=True):
        torch.testing.assert_close(value, theirs, rtol=0, atol=0, msg=lambda text, k=key: f"{k}: {text}")
    for key, value in one[2].state_dict().items():
        torch.testing.assert_close(value, other[2].state_dict()[key], rtol=0, atol=0)


def test_collected_tensors_are_copies(tmp_path: Path) -> None:
    """Training goes on while they are written."""
    one = trained("adamw", 0)
    train(*one, steps=1)
    state = checkpoint.collect(*one)
    before = {name: value.clone() for name, value in state["model"].items()}
    average = state["ema"]["first.weight"].clone()
    train(*one, steps=1, start=1)
    assert all(torch.equal(before[name], value) for name, value in state["model"].items())
    assert torch.equal(average, state["ema"]["first.weight"])
    assert checkpoint.collect(*one, keep=False) == {}


def test_what_does_not_fit_is_listed_and_changes_nothing() -> None:
    one = trained("adamw", 0)
    train(*one, steps=1)
    state = checkpoint.collect(*one)
    other = trained("adamw", 1)
    before = {name: value.clone() for name, value in other[0].state_dict().items()}
    wrong = {**state, "model": {**state["model"], "first.weight": torch.zeros(9, 3)}}
    with pytest.raises(CheckpointError, match=r"first.weight is \(9, 3\) in the file and \(4, 3\) here"):
        checkpoint.restore(wrong, *other)
    missing = {**state, "optimizer": {k: v for k, v in state["optimizer"].items() if k != "scale"}}
    with pytest.raises(CheckpointError, match="no optimiser state for scale, which this run trains"):
        checkpoint.restore(missing, *other)
    extra = {**state, "optimizer": {**state["optimizer"], "gone": {}}}
    with pytest.raises(CheckpointError, match="optimiser state for gone, which this run does not train"):
        checkpoint.restore(extra, *other)
    with pytest.raises(CheckpointError, match=r"ema.decay was changed"):
        checkpoint.restore({**state, "ema": None}, *other)
    assert all(torch.equal(before[name], value) for name, value in other[0].state_dict().items())
