"""Checkpoints in parts: what was cut in any way is put together, or cut in any other way; all of it there, or noticed."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from vitfw import checkpoint, checkpoint_command, checkpoint_files, sharded
from vitfw.checkpoint import CheckpointError, Keep, Progress
from vitfw.sharded import Team
from vitfw.train import main

Mesh = tuple[int, ...]  # (shards,) or (copies, shards)


@contextlib.contextmanager
def rank_of(mesh: Mesh, rank: int) -> Iterator[Any]:
    """This process as one rank of a world that nobody else is in: enough to cut tensors."""
    world = int(torch.tensor(mesh).prod())
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield init_device_mesh("cpu", mesh)
    finally:
        dist.destroy_process_group()


def cut(value: Tensor, mesh: Any, dim: int) -> DTensor:
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(dim)]
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


def world_of(mesh: Mesh) -> int:
    return int(torch.tensor(mesh).prod())


def write_cut(folder: Path, tensors: dict[str, tuple[Tensor, int | None]], mesh: Mesh) -> None:
    """Writes as all ranks of a mesh in turn; a tensor is cut along its dimension, or whole on every rank (None)."""
    parts, progress = {}, {"step": 3, "attempt": 1}
    for rank in range(world_of(mesh)):
        with rank_of(mesh, rank) as here:
            taken = {
                name: sharded.piece_of(value if dim is None else cut(value, here, dim), keep=rank == 0)
                for name, (value, dim) in tensors.items()
            }
        content = {"format": 1, "progress": progress, "model": taken, "optimizer": {}, "ema": None}
        if (part := sharded.write_part(folder, content, rank)) is not None:
            parts[part[0]] = part[1]
    sharded.write_index(folder, parts, progress)


meshes = st.one_of(st.tuples(st.integers(1, 5)), st.tuples(st.integers(1, 3), st.integers(1, 3)))
shapes = st.lists(st.integers(0, 7), min_size=0, max_size=3).map(tuple)


@st.composite
def named_tensors(draw: Any) -> dict[str, tuple[Tensor, int | None]]:
    found: dict[str, tuple[Tensor, int | None]] = {}
    for number, shape in enumerate(draw(st.lists(shapes, min_size=1, max_size=4))):
        kind = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
        value = torch.arange(torch.Size(shape).numel()).reshape(shape).to(kind)
        dims = [None] if not shape else [None, *range(len(shape))]
        found[f"net.{number}.weight"] = value, draw(st.sampled_from(dims))
    return found


@settings(max_examples=40, deadline=None)
@given(tensors=named_tensors(), saved=meshes, loaded=meshes, dim=st.integers(0, 2))
def test_what_was_cut_for_one_world_is_cut_for_any_other(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: dict[str, tuple[Tensor, int | None]],
    saved: Mesh,
    loaded: Mesh,
    dim: int,
) -> None:
    """Any shapes (none, empty, fewer rows than processes), types, meshes and cuts; torch's own cut is the reference."""
    folder = tmp_path_factory.mktemp("any") / "step-000000003.ckpt"
    write_cut(folder, tensors, saved)
    checkpoint.verify(folder)
    whole, pieces = checkpoint.load(folder)["model"], checkpoint.load(folder, pieces=True)["model"]
    assert list(whole) == list(tensors)
    for name, (value, _) in tensors.items():
        assert torch.equal(whole[name], value) and whole[name].dtype == value.dtype
    assert len(list(folder.glob("part-*"))) <= saved[-1]  # of several copies the first one
    for rank in range(world_of(loaded)):
        with rank_of(loaded, rank) as here:
            for name, (value, _) in tensors.items():
                target = cut(value, here, dim % value.ndim) if value.ndim else value
                for stored in (pieces[name], value):  # from a folder and from a file
                    found = checkpoint._like(stored, target)
                    assert type(found) is type(target) and found.shape == target.shape
                    mine, theirs = (t.to_local() if isinstance(t, DTensor) else t for t in (found, target))
                    assert torch.equal(mine, theirs)


def test_only_the_bytes_that_a_rank_needs_are_read() -> None:
    """One piece that covers what is asked for is handed out as it lies on disk."""
    value = torch.arange(12.0).reshape(6, 2)
    halves = sharded.Scattered(value.shape, [((0, 0), value[:3]), ((3, 0), value[3:])])
    assert halves.box([4, 0], [2, 2]).data_ptr() == value[4:].data_ptr()
    assert torch.equal(halves.box([2, 1], [2, 1]), value[2:4, 1:])
    with pytest.raises(CheckpointError, match=r"of 12 values of a tensor \(6, 2\) only 6 are there"):
        sharded.Scattered(value.shape, [((0, 0), value[:3])]).whole()


# A folder as two processes write it


def state_of(value: float) -> dict[str, Any]:
    """Rows 0 to 3 of a tensor of 8, of rank 0."""
    piece = ((8, 4), (0, 0), torch.full((4, 4), value))
    return {"model": {"weight": piece}, "optimizer": {"weight": {"exp_avg": piece}}, "ema": None}


class Alone(Team):
    """A rank of two whose fellow writes its part from the same process, or fails to."""

    def gather(self, word: Any) -> list[Any]:
        return [word, other(self)]  # type: ignore[arg-type]


def other(team: Any) -> Any:
    content = {"format": 1, "progress": {"step": team.group["step"], "attempt": 0}, **state_of(team.group["step"])}
    for tree in (content["model"], content["optimizer"]["weight"]):
        for name, (shape, _, piece) in tree.items():
            tree[name] = (shape, (4, 0), piece + 1)
    if team.group.get("fault"):
        return None, team.group["fault"]
    return sharded.write_part(team.group["folder"] / f".step-{team.group['step']:09d}.ckpt.0.tmp", content, 1), None


def write(folder: Path, step: int, *, fault: str | None = None, **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    team = Alone(0, 2, {"folder": folder, "step": step, "fault": fault})
    progress = Progress(step=step)
    return checkpoint.save(folder, state_of(step), progress, config="", versions={}, team=team, **options)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_holds_the_parts_and_their_index_and_has_the_names_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, 7, best_of=["val", "val_ema"])
    assert names(tmp_path) == ["best.ckpt", "best_ema.ckpt", "last.ckpt", "step-000000007.ckpt"]
    assert names(path) == ["index.json", "part-00000.ckpt", "part-00001.ckpt"]
    for name in names(tmp_path):
        state = checkpoint.load(tmp_path / name)
        assert state["model"]["weight"].tolist() == [[7.0] * 4] * 4 + [[8.0] * 4] * 4
        assert state["optimizer"]["weight"]["exp_avg"].sum() == 240
        assert state["progress"]["step"] == 7 and state["ema"] is None
    shutil.move(tmp_path, tmp_path.with_name("moved"))  # links are relative
    assert checkpoint.load(tmp_path.with_name("moved") / "last.ckpt")["progress"]["step"] == 7
    shutil.move(tmp_path.with_name("moved"), tmp_path)


def test_pruning_leaves_what_a_name_points_to(tmp_path: Path) -> None:
    write(tmp_path, 1, best_of=["val"])
    for step in (2, 3, 4):
        write(tmp_path, step)
    assert [step for step, _ in checkpoint.step_files(tmp_path)] == [4, 3, 1]
    assert checkpoint.load(tmp_path / "best.ckpt")["progress"]["step"] == 1
    write(tmp_path, 5, best_of=["val"], keep=Keep(last=1))
    assert names(tmp_path) == ["best.ckpt", "last.ckpt", "step-000000005.ckpt"]


def test_files_and_folders_take_each_others_places(tmp_path: Path) -> None:
    """A run that is taken on by one process writes files, and may come by a step that is there as a folder."""
    plain = {"model": {"weight": torch.ones(2)}, "optimizer": {}, "ema": None}

    def write_plain(folder: Path, step: int) -> None:
        checkpoint.save(folder, plain, Progress(step=step), config="", versions={}, best_of=["val"])

    for step in (1, 2):
        for one, then in ((write, write_plain), (write_plain, write), (write, write)):
            one(tmp_path, step)
            assert checkpoint.load(tmp_path / "last.ckpt")["progress"]["step"] == step
            then(tmp_path, step)
            found = checkpoint.newest(tmp_path)
            assert found is not None and found[1].step == step and found[2] == []
            assert not [name for name in names(tmp_path) if "before" in name or "tmp" in name]
    assert (tmp_path / "last.ckpt").samefile(tmp_path / "step-000000002.ckpt")


def test_where_links_are_not_to_be_had_the_names_are_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "symlink_to", lambda self, target: (_ for _ in ()).throw(PermissionError("no links")))
    for step in (1, 2, 3, 4):
        write(tmp_path, step, keep=Keep(last=1), best_of=["val"] if step == 1 else [])
    assert names(tmp_path) == ["best.ckpt", "last.ckpt", "step-000000004.ckpt"]
    assert [checkpoint.load(tmp_path / name)["progress"]["step"] for name in ("best.ckpt", "last.ckpt")] == [1, 4]


def test_a_kill_while_a_folder_takes_anothers_place_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step has been saved before, by an attempt that was stopped in its evaluation."""
    write(tmp_path, 1)
    real = Path.replace

    def killed(self: Path, target: Any) -> Path:
        if self.name.startswith(".step-"):
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 1)
    monkeypatch.undo()
    found = checkpoint.newest(tmp_path)
    assert found is not None and (found[0].name, found[1].step) == ("step-000000001.before.ckpt", 1)
    write(tmp_path, 1)
    assert names(tmp_path) == ["last.ckpt", "step-000000001.before.ckpt", "step-000000001.ckpt"]
    found = checkpoint.newest(tmp_path)
    assert found is not None and found[0].name == "step-000000001.ckpt"
    write(tmp_path, 2, keep=Keep(last=1))
    assert names(tmp_path) == ["last.ckpt", "step-000000002.ckpt"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def from_another_save(folder: Path) -> None:
    shutil.copyfile(folder.parent / "step-000000001.ckpt" / "part-00001.ckpt", folder / "part-00001.ckpt")


def from_another_run(folder: Path) -> None:
    """The same step of the same attempt of a run with another seed: the same names, shapes and sizes."""
    path = folder / "part-00001.ckpt"
    part = torch.load(path, weights_only=True)
    torch.save({**part, "run": "other-1234abcd"}, path)
    index = json.loads((folder / "index.json").read_text())
    index["parts"][path.name] = path.stat().st_size
    (folder / "index.json").write_text(json.dumps(index))


def without_a_piece(folder: Path) -> None:
    """A whole index over too few parts."""
    index = json.loads((folder / "index.json").read_text())
    del index["parts"]["part-00001.ckpt"]
    (folder / "index.json").write_text(json.dumps(index))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a part is missing": (lambda folder: (folder / "part-00001.ckpt").unlink(), "part-00001.ckpt: is missing"),
    "a part is cut off": (lambda folder: os.truncate(folder / "part-00001.ckpt", 700), "has 700 bytes, not"),
    "a bit is flipped": (lambda folder: flip(folder / "part-00001.ckpt"), "is damaged|cannot be read"),
    "a part is of another save": (from_another_save, "is not a part of the checkpoint that index.json describes"),
    "a part is of another run": (from_another_run, "is not a part of the checkpoint that index.json describes"),
    "the index is missing": (lambda folder: (folder / "index.json").unlink(), "index.json cannot be read"),
    "the index is empty": (lambda folder: (folder / "index.json").write_text(""), "index.json cannot be read"),
    "the index is foreign": (
        lambda folder: (folder / "index.json").write_text('{"a": 1}'),
        "index.json cannot be read",
    ),
    "the index lacks a part": (without_a_piece, r"pieces of a tensor \(8, 4\) of model are missing"),
    "nothing is there": (lambda folder: [file.unlink() for file in folder.iterdir()], "index.json cannot be read"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_folder_is_passed_over_with_a_word(tmp_path: Path, what: str) -> None:
    damage, word = DAMAGES[what]
    write(tmp_path, 1)
    path = write(tmp_path, 2)
    damage(path)
    with pytest.raises(CheckpointError, match=word):
        checkpoint.verify(path)
    found = checkpoint.newest(tmp_path)
    assert found is not None and found[1].step == 1
    assert len(found[2]) == 1 and "step-000000002.ckpt" in found[2][0]


def test_a_part_by_itself_is_refused_with_its_folder(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    with pytest.raises(CheckpointError, match=rf"is one part of a checkpoint; name its folder {path}"):
        checkpoint.load(path / "part-00000.ckpt")


@pytest.mark.parametrize("who", ["own", "other", "index"])
def test_a_part_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    write(tmp_path, 1)
    if who == "own":
        real = sharded.write_file

        def fail(path: Path, content: Any) -> None:
            if path.name == "part-00000.ckpt":
                raise RuntimeError("writer failed")
            real(path, content)

        monkeypatch.setattr(sharded, "write_file", fail)
    if who == "index":
        monkeypatch.setattr(json, "dump", lambda *_, **__: (_ for _ in ()).throw(OSError("no space left on device")))
    word = {"own": "rank 0: writer failed", "other": "rank 1: disk full", "index": "no space left"}[who]
    with pytest.raises(OSError, match=rf"step-000000002.ckpt could not be written, the ones before it .*{word}"):
        write(tmp_path, 2, fault="rank 1: disk full" if who == "other" else None)
    assert names(tmp_path) == ["last.ckpt", "step-000000001.ckpt"]
    checkpoint.verify(tmp_path / "last.ckpt")


def test_kill_9_in_the_middle_of_writing_parts(tmp_path: Path) -> None:
    """A process that does nothing but save is killed, many times: always a whole newest folder, and no litter later."""
    script = f"""
        import itertools, os, random, signal, sys, time
        from pathlib import Path
        sys.path.insert(0, "tests")
        from test_sharded import write
        from vitfw import checkpoint
        folder = Path({str(tmp_path)!r})
        log = os.open(folder / "done", os.O_CREAT | os.O_APPEND | os.O_RDWR)
        random.seed(0)
        saves = 0
        for kill in range(25):
            if (child := os.fork()) == 0:
                for number in itertools.count(saves + 1):
                    write(folder / "run", number // 2 + 1)  # each step twice
                    os.write(log, b"%d " % number)
            time.sleep(0.03 + 0.1 * random.random())
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            saves = max(map(int, (folder / "done").read_text().split()), default=0)
            found = checkpoint.newest(folder / "run")
            if found is None:
                assert saves == 0
                continue
            assert found[2] == [], found
            assert found[1].step in (saves // 2 + 1, (saves + 1) // 2 + 1, (saves + 2) // 2 + 1), (found, saves)
            assert checkpoint.load(found[0])["model"]["weight"].sum() == 32 * found[1].step + 16
        assert saves >= 5, saves
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    write(tmp_path / "run", 10**6, keep=Keep(last=1))
    assert names(tmp_path / "run") == ["last.ckpt", "step-001000000.ckpt"]


# Readers


def in_parts(path: Path, folder: Path, parts: int = 3) -> Path:
    """A checkpoint in one file, as `parts` processes would have written it."""
    state = checkpoint.load(path)

    def share(value: Any, rank: int) -> Any:
        if isinstance(value, dict):
            return {name: share(entry, rank) for name, entry in value.items()}
        if not isinstance(value, Tensor) or not value.ndim:
            return (tuple(value.shape), (), value) if isinstance(value, Tensor) and rank == 0 else value
        rows = -(-len(value) // parts)
        begin = min(rank * rows, len(value))
        return tuple(value.shape), (begin, *[0] * (value.ndim - 1)), value[begin : begin + rows].clone()

    sizes = {}
    for rank in range(parts):
        shares = {tree: share(state[tree], rank) for tree in sharded.TREES}
        name, size = sharded.write_part(folder, {**state, **shares}, rank) or ("", 0)
        sizes[name] = size
    sharded.write_index(folder, sizes, state["progress"])
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, with `parts.ckpt` beside its `last.ckpt`."""
    out = tmp_path_factory.mktemp("run") / "run"
    assert main(tiny("train.epochs=1", "optim.warmup_epochs=0", f"out={out}")) == 0
    in_parts(out / "checkpoints" / "last.ckpt", out / "checkpoints" / "parts.ckpt")
    return out


def same_state(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in mine.items())


def test_every_reader_takes_the_folder_for_the_file(run: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from vitfw.launch import Launch, MachineConfig
    from vitfw.models.export import export_checkpoint
    from vitfw.models.teacher import load_teacher
    from vitfw.opened import open_network

    file, folder = run / "checkpoints" / "last.ckpt", run / "checkpoints" / "parts.ckpt"
    assert checkpoint_command.diff_text(file, folder) == "  equal bit for bit"
    info, told = checkpoint_command.info(folder).splitlines(), checkpoint_command.info(file).splitlines()
    assert info[1:] == told[1:] and "parts.ckpt" in info[0] and "checksums right" in info[0]
    for which in ("raw", "ema"):
        places = {place: tmp_path / f"{which} {place.stem}" for place in (file, folder)}
        one, other = (
            load_file(export_checkpoint(place, out, which=which).folder / "model.safetensors")  # type: ignore[arg-type]
            for place, out in places.items()
        )
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    opened = [open_network(str(place), Launch("python"), MachineConfig(device="cpu")) for place in (file, folder)]
    assert same_state(opened[0].network, opened[1].network)
    teachers = [load_teacher(str(place)) for place in (file, folder)]
    assert same_state(teachers[0].net, teachers[1].net)
    weights = [checkpoint_command.average([place, place], tmp_path / f"{place.stem}.ckpt") for place in (file, folder)]
    assert checkpoint_command.differences(*weights) == []


def test_consolidate_makes_the_one_file_from_which_a_run_goes_on(run: Path, tmp_path: Path) -> None:
    folder = run / "checkpoints" / "parts.ckpt"
    assert (
        checkpoint_command.main(["consolidate", str(folder), "--which", "all", "--out", str(tmp_path / "one.ckpt")])
        == 0
    )
    one, other = (
        torch.load(tmp_path / "one.ckpt", weights_only=True),
        checkpoint.load(run / "checkpoints" / "last.ckpt"),
    )
    assert one.keys() == other.keys() and all(one[key] == other[key] for key in ("progress", "guard", "config"))
    assert checkpoint_command.differences(tmp_path / "one.ckpt", run / "checkpoints" / "last.ckpt") == []
    alone = checkpoint_command.consolidate(folder, tmp_path / "weights.ckpt", which="ema")
    assert checkpoint.load(alone)["optimizer"] == {}


def test_a_run_starts_from_and_goes_on_from_a_folder(run: Path, tmp_path: Path) -> None:
    for place in ("last.ckpt", "parts.ckpt"):
        words = [f"weights={run / 'checkpoints' / place}", "train.epochs=1", "optim.warmup_epochs=0"]
        words += [f"out={tmp_path / place}"]
        assert main(tiny(*words, "machine.checkpoint_format=sharded")) == 0
        assert checkpoint_files.step_files(tmp_path / place / "checkpoints")[0][1].is_dir()
    assert checkpoint_command.differences(*(tmp_path / place for place in ("last.ckpt", "parts.ckpt"))) == []


def test_weights_of_which_a_part_is_missing_are_refused_by_the_name_of_the_key(run: Path, tmp_path: Path) -> None:
    from vitfw.models.reading import read

    folder = shutil.copytree(run / "checkpoints" / "parts.ckpt", tmp_path / "parts.ckpt")
    (folder / "part-00002.ckpt").unlink()
    with pytest.raises(ValueError, match=rf"weights={folder}/part-00002.ckpt: is missing"):
        read(folder)


def test_the_format_is_asked_for_by_name() -> None:
    from vitfw.config import load

    with pytest.raises(ValueError, match=r"machine.checkpoint_format=zip"):
        load(tiny("machine.checkpoint_format=zip"))


def test_cut_means_spread_over_several_processes() -> None:
    for mesh, expected in (((1,), False), ((2,), True), ((2, 1), False), ((1, 2), True)):
        with rank_of(mesh, 0) as here:
            assert sharded.is_cut([torch.ones(2), cut(torch.ones(4), here, 0)]) is expected, mesh
    assert not sharded.is_cut([torch.ones(2)])
