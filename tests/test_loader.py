"""Loaders: the same batches for any ranks and workers, exact resume after any death, bad images counted."""

import io
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from make_shards import make_folder, make_shards, noisy, picture, to_uint8, write_tar
from PIL import ImageFile

from vitfw.data.augment import AugmentConfig, train_transform
from vitfw.data.index import Samples, open_samples
from vitfw.data.ledger import BadDataError
from vitfw.data.loader import WorkerStart, build_eval_loader, build_train_loader
from vitfw.data.section import DataConfig, build_train_order, open_data, open_split

pytestmark = pytest.mark.filterwarnings("ignore:machine.workers=.*:UserWarning")  # these machines have few CPUs


def build(samples, *, batch=4, device=2, rank=0, world=1, workers=0, repeats=1, seed=0, folder=None, **data):
    config = DataConfig(window=2, **data)
    order = build_train_order(
        samples,
        data=config,
        seed=seed,
        global_batch=batch,
        images_per_device=device,
        rank=rank,
        world=world,
        repeats=repeats,
    )
    return build_train_loader(
        samples, noisy, data=config, order=order, workers=workers, image_size=8, folder=folder, report=lambda text: None
    )


def run(samples, *, world, device, workers, start=(0, 0), epochs=1, steps=None, batch=4, **options):
    """Steps of all ranks: [(images [B, ...], indexes [B])], in the order of the micro-batches g."""
    ranks = []
    for rank in range(world):
        loader = build(samples, batch=batch, device=device, rank=rank, world=world, workers=workers, **options)
        loader.seek(epoch=start[0], images=start[1])
        ranks.append([(b["image"].clone(), b["label"], b["index"].clone()) for _ in range(epochs) for b in loader])
    accumulation = batch // device // world
    found = []
    for step in range(len(ranks[0]) // accumulation):
        parts = [ranks[rank][step * accumulation + micro] for micro in range(accumulation) for rank in range(world)]
        found.append(tuple(torch.cat([part[place] for part in parts]) for place in range(3)))
    return found[:steps]


def test_layouts__p84_bit_equal_for_all_ranks_and_workers(tmp_path):
    samples = open_samples(make_shards(tmp_path, [7, 11, 2]))
    wanted = run(samples, world=1, device=4, workers=0, epochs=2)
    assert len(wanted) == 10
    for world, device, workers in [(1, 4, 1), (1, 2, 2), (2, 2, 0), (2, 1, 1), (1, 1, 3)]:
        found = run(samples, world=world, device=device, workers=workers, epochs=2)
        assert all(
            torch.equal(a, b)
            for mine, other in zip(found, wanted, strict=True)
            for a, b in zip(mine, other, strict=True)
        )
    by_epoch = [
        {
            int(i): image
            for images, _, index in wanted[e * 5 : e * 5 + 5]
            for i, image in zip(index, images, strict=True)
        }
        for e in (0, 1)
    ]
    assert sorted(by_epoch[0]) == sorted(by_epoch[1]) == list(range(20))
    assert not any(torch.equal(by_epoch[0][i], by_epoch[1][i]) for i in range(20))


@pytest.mark.parametrize("policy", ["deit", "mae"])
def test_layouts__real_policies_on_jpegs_are_bit_equal_in_workers(tmp_path, policy):
    members = [(f"{number}.jpg", picture(number, 90, "JPEG")) for number in range(12)]
    samples = open_samples(str(write_tar(tmp_path / "s.tar", members)))
    transform = train_transform(AugmentConfig(policy=policy), size=(32, 32))
    found = []
    for workers in (0, 2):
        data = DataConfig()
        order = build_train_order(samples, data=data, seed=0, global_batch=4, images_per_device=4)
        loader = build_train_loader(samples, transform, data=data, order=order, workers=workers, image_size=32)
        found.append(torch.cat([batch["image"].clone() for _ in range(2) for batch in loader]))
    assert torch.equal(*found)


def test_repeats__copies_have_different_pixels(tmp_path):
    samples = open_samples(make_folder(tmp_path, {"a": 6, "b": 3}))
    found = run(samples, world=2, device=1, workers=0, batch=4, repeats=3)
    images = torch.cat([images for images, _, _ in found])
    index = torch.cat([index for _, _, index in found])
    assert len(index) == 8 and len(index.unique()) == 3
    assert len({image.numpy().tobytes() for image in images}) == 8


@pytest.mark.parametrize(("first", "then"), [((2, 1, 0), (1, 2, 0)), ((1, 2, 0), (2, 1, 0))])
def test_resume__p01_p51_after_every_step_with_other_ranks(tmp_path, first, then):
    samples = open_samples(make_shards(tmp_path, [7, 11, 2]))
    uncut = run(samples, world=first[0], device=first[1], workers=first[2])
    for cut in range(1, 5):
        head = run(samples, world=first[0], device=first[1], workers=first[2], steps=cut)
        tail = run(samples, world=then[0], device=then[1], workers=then[2], start=(0, cut * 4))
        assert all(torch.equal(a[2], b[2]) and torch.equal(a[0], b[0]) for a, b in zip(head + tail, uncut, strict=True))


def test_resume__workers_two_to_none_and_back(tmp_path):
    samples = open_samples(make_shards(tmp_path, [7, 11, 2]))
    uncut = run(samples, world=1, device=4, workers=0)
    for before, after in ((2, 0), (0, 2)):
        head = run(samples, world=2, device=2, workers=before, steps=3)
        tail = run(samples, world=1, device=4, workers=after, start=(0, 12))
        assert all(torch.equal(a[0], b[0]) for a, b in zip(head + tail, uncut, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_iteration__left_early_then_next_epoch_then_seek(tmp_path, workers):
    loader = build(open_samples(make_shards(tmp_path, [20])), workers=workers, device=4)
    assert len(loader) == 5
    epochs = []
    for stop in (2, 5, 5):  # trainers leave an iterator before its end
        indexes = []
        for number, batch in enumerate(loader, start=1):
            indexes += batch["index"].tolist()
            if number == stop:
                break
        epochs.append(indexes)
    assert len(epochs[0]) == 8 and sorted(epochs[1]) == sorted(epochs[2]) == list(range(20)) and epochs[1] != epochs[2]
    loader.seek(epoch=0, images=8)
    rest = [row for batch in loader for row in batch["index"].tolist()]
    assert sorted(epochs[0] + rest) == list(range(20))


def taken(
    samples, folder: Path, *, workers: int, start: tuple[int, int], count: int, at_once: bool
) -> tuple[list, list]:
    """`count` micro-batches from a place on, in one run or epoch by epoch: their content, and the trace they leave."""
    folder.mkdir()
    loader = build(samples, workers=workers, folder=folder, trace=True)
    loader.seek(epoch=start[0], images=start[1])
    batches = list(loader.run(count)) if at_once else []
    while len(batches) < count:
        batches += list(loader)
    trace = folder / "trace-train-rank0.jsonl"
    lines = trace.read_text().splitlines() if trace.exists() else []
    return [(b["index"].tolist(), b["image"].numpy().tobytes()) for b in batches[:count]], lines[:count]


@pytest.mark.parametrize("workers", [0, 2])
def test_run__goes_over_epochs_as_one_after_the_other(tmp_path, workers):
    samples = open_samples(make_shards(tmp_path, [10, 11]))
    for number, (start, count) in enumerate([((0, 0), 1), ((0, 8), 25), ((2, 20), 10), ((1, 3), 10), ((0, 0), 0)]):
        found = [
            taken(samples, tmp_path / f"{number}-{at_once}", workers=workers, start=start, count=count, at_once=at_once)
            for at_once in (False, True)
        ]
        assert found[0] == found[1] and len(found[0][0]) == len(found[0][1]) == count


def test_run__the_limit_of_bad_images_counts_anew_in_each_epoch(tmp_path, monkeypatch):
    loader = build(open_samples(make_shards(tmp_path, [20])))  # 10 micro-batches an epoch
    loader.seek(epoch=0, images=8)
    begun, seen = [], []
    monkeypatch.setattr(loader.ledger, "start_epoch", lambda: begun.append(len(seen)))
    for batch in loader.run(28):
        seen.append(batch)
    assert begun == [0, 6, 16, 26]


def endless_rank(samples, rank: int, log: str) -> None:
    """One rank of a run that is killed: goes on after the last step in its log, and appends each step in one write."""
    lines = Path(log).read_text().splitlines() if Path(log).exists() else []
    epoch, step = divmod(len(lines), 10)
    loader = build(samples, rank=rank, world=2, device=2, workers=1)
    loader.seek(epoch=epoch, images=step * 4)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while epoch < 3:
        for batch in loader:
            time.sleep(0.004)
            os.write(descriptor, (json.dumps([epoch, batch["index"].tolist()]) + "\n").encode())
        epoch += 1


def test_resume__killed_twenty_times(tmp_path):
    """kill -9 of both ranks, each with a worker, at random moments: three epochs in the order of an uncut run."""
    samples = open_samples(make_shards(tmp_path, [13, 20, 7]))
    context = multiprocessing.get_context("fork")
    moments = random.Random(0)
    logs = [str(tmp_path / f"rank{rank}") for rank in range(2)]
    kills = 0
    while True:
        children = [context.Process(target=endless_rank, args=(samples, rank, logs[rank])) for rank in range(2)]
        for child in children:
            child.start()
        if kills < 20:
            time.sleep(moments.uniform(0.03, 0.13))
        for child in children:
            if kills < 20 and child.pid is not None:
                os.kill(child.pid, signal.SIGKILL)
            child.join()
        if kills >= 20:
            break
        kills += 1
    steps = [[json.loads(line) for line in Path(log).read_text().splitlines()] for log in logs]
    assert [len(lines) for lines in steps] == [30, 30]
    wanted = run(samples, world=1, device=4, workers=0, epochs=3)
    for number, (_, _, index) in enumerate(wanted):
        assert steps[0][number][1] + steps[1][number][1] == index.tolist()
        assert steps[0][number][0] == number // 10


def orphan(pipe) -> None:
    """Waits until its parent is gone, then starts as a worker does."""
    while multiprocessing.parent_process().pid == os.getppid():  # type: ignore[union-attr]
        time.sleep(0.01)
    WorkerStart()(0)
    pipe.send("still there")


def parent_of_orphan(pipe) -> None:
    child = multiprocessing.get_context("fork").Process(target=orphan, args=(pipe,), daemon=True)
    child.start()
    os.kill(os.getpid(), signal.SIGKILL)


def test_workers__one_whose_parent_was_killed_at_the_start_ends():
    receiver, sender = multiprocessing.Pipe(duplex=False)
    parent = multiprocessing.get_context("fork").Process(target=parent_of_orphan, args=(sender,))
    parent.start()
    parent.join()
    sender.close()
    with pytest.raises(EOFError):  # the last holder of the other end is gone
        receiver.recv()
    receiver.close()


def test_bad_images__p02_p30_uneven_shards_two_ranks(tmp_path):
    samples = open_samples(make_shards(tmp_path, [7, 11, 2], size=32, bad=(9,)))
    for workers in (0, 1):
        counts, ledgers = [], []
        for rank in range(2):
            folder = tmp_path / f"run{workers}"
            folder.mkdir(exist_ok=True)
            loader = build(
                samples, rank=rank, world=2, device=1, batch=2, workers=workers, folder=folder, on_bad_sample="skip"
            )
            batches = [batch for _ in range(2) for batch in loader]
            assert {tuple(batch) for batch in batches} == {("image", "label", "index")}
            assert all(batch["image"].shape == (1, 3, 8, 8) and batch["index"][0] != 9 for batch in batches)
            counts.append(len(batches))
            file = folder / f"bad-images-rank{rank}.jsonl"
            ledgers += [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        assert counts == [20, 20]
        assert 1 <= len(ledgers) <= 2 and {entry["row"] for entry in ledgers} == {9}  # once a rank
        assert "s01.tar: 009: OSError" in ledgers[0]["reason"]


def test_bad_images__p30_raise_limit_and_evaluation(tmp_path):
    pattern = make_shards(tmp_path, [20], size=32, bad=(3, 8))
    samples = open_samples(pattern)
    with pytest.raises(BadDataError, match=r"s00\.tar: 00[38]: OSError"):
        list(build(samples, on_bad_sample="raise"))
    with pytest.raises(BadDataError, match=r"2 bad images in this epoch on this rank, over data.bad_limit=0.05 \(1\)"):
        list(build(samples, on_bad_sample="skip", bad_limit=0.05))
    assert len(list(build(samples, on_bad_sample="skip", bad_limit=0.1))) == 10
    texts = []
    config = DataConfig(on_bad_sample="skip", bad_limit=0.2)
    loader = build_eval_loader(samples, to_uint8, data=config, batch=8, workers=0, image_size=32, report=texts.append)
    assert sum(int((batch["label"] >= 0).sum()) for batch in loader) == 18
    assert len(texts) == 2 and "s00.tar: 003" in texts[0]
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


@pytest.mark.parametrize("kind", ["folder", "shards"])
def test_evaluation__p15_each_sample_once(tmp_path, kind):
    samples = open_samples(
        make_folder(tmp_path, {"a": 20, "b": 1}) if kind == "folder" else make_shards(tmp_path, [4, 17])
    )
    for world, batch, workers in [(1, 4, 0), (2, 5, 0), (3, 4, 0), (2, 4, 1)]:
        seen, lengths = [], set()
        for rank in range(world):
            loader = build_eval_loader(
                samples, to_uint8, data=DataConfig(), batch=batch, rank=rank, world=world, workers=workers, image_size=8
            )
            batches = list(loader)
            assert len(batches) == len(loader)
            lengths.add(len(batches))
            for found in batches:
                assert len(found["label"]) == batch and torch.equal(found["label"] < 0, found["index"] < 0)
                seen += [row for row in found["index"].tolist() if row >= 0]
        assert sorted(seen) == list(range(21)) and len(lengths) == 1
    with pytest.raises(ValueError, match="nothing to seek"):
        loader.seek(epoch=0, images=0)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_length__p19_p32_p65_announced_is_real(tmp_path, workers):
    loader = build(open_samples(make_shards(tmp_path, [10])), workers=workers)
    for _ in range(2):
        assert len(list(loader)) == len(loader) == 4  # two steps of two micro-batches, two images dropped
    assert loader.order is not None and loader.order.dropped == 2


def test_streams__main_process_generator_is_not_touched(tmp_path):
    loader = build(open_samples(make_shards(tmp_path, [8])), workers=1)
    before = torch.get_rng_state()
    list(loader)
    assert torch.equal(before, torch.get_rng_state())


def test_trace__keys_of_each_batch(tmp_path):
    samples = open_samples(make_shards(tmp_path, [8]))
    loader = build(samples, folder=tmp_path, trace=True)
    loader.seek(epoch=3, images=4)
    wanted = [[samples.key(row) for row in batch["index"].tolist()] for batch in loader]
    records = [json.loads(line) for line in (tmp_path / "trace-train-rank0.jsonl").read_text().splitlines()]
    assert [record["keys"] for record in records] == wanted
    assert [(record["epoch"], record["images"], record["batch"]) for record in records] == [(3, 4, 0), (3, 4, 1)]
    with pytest.raises(ValueError, match=r"data.trace=true needs a run folder"):
        build(samples, trace=True)


def test_labels__multi_label_batches(tmp_path):
    members = []
    for number in range(4):
        members += [
            (f"{number}.png", picture(number)),
            (f"{number}.json", json.dumps({"labels": [number % 3, 2]}).encode()),
        ]
    samples = open_samples(str(write_tar(tmp_path / "m.tar", members)))
    batch = next(iter(build(samples)))
    assert (
        batch["label"].dtype == torch.float32
        and batch["label"].shape == (2, 3)
        and bool((batch["label"][:, 2] == 1).all())
    )
    padded = list(build_eval_loader(samples, to_uint8, data=DataConfig(), batch=3, workers=0, image_size=8))[-1]
    assert padded["label"][-1].tolist() == [-1, -1, -1]


def test_section__subsets_balance_and_weights(tmp_path):
    pattern = make_shards(tmp_path, [30], classes=3)
    assert len(open_split(DataConfig(train=pattern, fraction=0.2), "train")) == 6
    few = open_split(DataConfig(train=pattern, per_class=2), "train")
    assert np.bincount(few.labels).tolist() == [2, 2, 2]
    assert few.fingerprint() == open_split(DataConfig(train=pattern, per_class=2), "train").fingerprint()
    assert few.fingerprint() != open_split(DataConfig(train=pattern, per_class=2, subset_seed=1), "train").fingerprint()
    with pytest.raises(ValueError, match=r"data.per_class=11, but class 0 has 10 images"):
        open_split(DataConfig(train=pattern, per_class=11), "train")
    uneven = open_samples(make_folder(tmp_path, {"a": 27, "b": 3}))
    order = build_train_order(uneven, data=DataConfig(balance="class"), seed=0, global_batch=30, images_per_device=30)
    assert np.bincount(uneven.labels[[draw.index for draw in next(iter(order))]]).tolist() == [15, 15]
    two = DataConfig(train=f"{pattern}, {pattern}[:50%]", weights=(1.0, 3.0))
    order = build_train_order(open_split(two, "train"), data=two, seed=0, global_batch=40, images_per_device=40)
    assert sum(draw.index >= 30 for draw in next(iter(order))) == 30
    with pytest.raises(ValueError, match=r"data.weights=\(1.0,\) has 1 numbers, data.train 2 patterns"):
        wrong = DataConfig(train=two.train, weights=(1.0,))
        build_train_order(open_split(wrong, "train"), data=wrong, seed=0, global_batch=2, images_per_device=2)


def test_section__p31_broken_keys_stop_the_start_unless_told_to_skip(tmp_path):
    members = [
        ("0.png", picture(0)),
        ("1.png", picture(1)),
        ("0.cls", b"0"),
        ("1.cls", b"0"),
        ("2.png", picture(2)),
        ("2.cls", b"0"),
    ]
    pattern = str(write_tar(tmp_path / "s.tar", members))
    with pytest.raises(ValueError, match=r"(?s)s\.tar: the members of key '0'.*data.on_broken_key=skip"):
        open_data(DataConfig(train=pattern))
    with pytest.warns(UserWarning, match="2 problem"):
        assert len(open_data(DataConfig(train=pattern, on_broken_key="skip"))[0]) == 1


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"train": ""}, "data.train=: pattern '' has an empty part"),
        ({"train": "nosuch-*.tar"}, "data.train=nosuch-*.tar: pattern 'nosuch-*.tar' matches no file"),
        ({"train": "README.md"}, "data.train=README.md: README.md: not a tar header"),
        ({"train": "data/digits/train-00000.tar", "classes": "nosuch.txt"}, "data.classes=nosuch.txt: no such file"),
    ],
)
def test_section__errors_name_the_key(settings: dict, text: str) -> None:
    with pytest.raises((ValueError, OSError)) as caught:
        open_data(DataConfig(**settings))
    assert text in str(caught.value)


def test_section__open_data_compares_the_classes(tmp_path):
    train, val = make_folder(tmp_path / "t", {"a": 1, "b": 1}), make_folder(tmp_path / "v", {"a": 1, "c": 1})
    assert open_data(DataConfig(train=train))[1] is None
    with pytest.raises(ValueError, match=r"data.train has 2 classes \(a, ...\), data.val has 2 .* differ"):
        open_data(DataConfig(train=train, val=val))
    (tmp_path / "s").mkdir()
    (tmp_path / "l").mkdir()
    shards = make_shards(tmp_path / "s", [4], classes=2), make_shards(tmp_path / "l", [4], classes=4)
    with pytest.raises(ValueError, match=r"data.val has labels up to 3, data.train only up to 1"):
        open_data(DataConfig(train=shards[0], val=shards[1]))
    with pytest.raises(ValueError, match=r"data.train is not given; name shards"):
        open_data(DataConfig())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fraction": 0.0}, "data.fraction=0.0: must be over 0"),
        ({"per_class": 0}, "data.per_class=0"),
        ({"per_class": 1, "fraction": 0.5}, "give one of them"),
        ({"weights": (1.0, 0.0)}, "data.weights"),
        ({"weights": (1.0,), "balance": "class"}, "give one of them"),
        ({"window": -1}, "data.window=-1"),
        ({"bad_limit": 2.0}, "data.bad_limit=2.0"),
        ({"background": (0, 0, 256)}, "data.background"),
        ({"cache_gb": 0.0}, "data.cache_gb=0.0"),
    ],
)
def test_section__refused(options, words):
    with pytest.raises(ValueError, match=words):
        DataConfig(**options)


def test_layouts__p32_one_shard_many_workers(tmp_path):
    samples = open_samples(make_shards(tmp_path, [12]))
    for world, workers in ((1, 2), (2, 0), (2, 2)):
        loaders = [build(samples, rank=rank, world=world, device=2, workers=workers) for rank in range(world)]
        ranks = [[row for batch in loader for row in batch["index"].tolist()] for loader in loaders]
        assert (
            sorted(row for rows in ranks for row in rows) == list(range(12)) and len({len(rows) for rows in ranks}) == 1
        )


KEPT = []  # what a program still refers to when it ends


def preemptible_rank(samples) -> None:
    """A rank that answers SIGTERM by itself, is signalled with all its workers, goes on, and ends with loaders in use."""
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    loader = build(samples, workers=2)
    batches = iter(loader)
    KEPT.extend([loader, batches, next(batches)])
    for worker in loader.loader._iterator._workers:  # type: ignore[union-attr]
        os.kill(worker.pid, signal.SIGTERM)
    assert len(list(batches)) == len(loader) - 1


def test_signals__workers_outlive_a_preemption_and_end_with_their_rank(tmp_path):
    samples = open_samples(make_shards(tmp_path, [40]))
    rank = multiprocessing.get_context("fork").Process(target=preemptible_rank, args=(samples,))
    rank.start()
    rank.join(timeout=60)
    assert rank.exitcode == 0


PROGRAM = """
import signal, sys
sys.path.insert(0, "tests")
signal.signal(signal.SIGTERM, lambda number, frame: None)
from test_loader import build
from vitfw.data.index import open_samples
loader = build(open_samples(sys.argv[1]), workers=1)
batches = iter(loader)
next(batches)
"""


def test_signals__a_program_with_its_own_handler_ends(tmp_path):
    pattern = make_shards(tmp_path, [40])
    done = subprocess.run([sys.executable, "-c", PROGRAM, pattern], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == ""


def memory(pids: list[int], kind: str) -> int:
    """Bytes of one kind of memory (a line of smaps_rollup), summed over processes."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:"))
    return total * 1024


def test_memory__p86_flat_over_ten_epochs(tmp_path):
    """Main process and two workers together; benchmarks/data_memory.py does the same with 20,000 samples an epoch."""
    pixels = io.BytesIO()
    np.save(pixels, np.zeros((2, 2, 3), np.uint8))
    samples = open_samples(
        str(write_tar(tmp_path / "s.tar", [(f"{n:06d}.npy", pixels.getvalue()) for n in range(4000)]))
    )
    data = DataConfig()
    order = build_train_order(samples, data=data, seed=0, global_batch=500, images_per_device=500)
    loader = build_train_loader(samples, unchanged, data=data, order=order, workers=2, image_size=2)
    used = []
    for _ in range(10):
        assert sum(len(batch["index"]) for batch in loader) == 4000
        workers = loader.loader._iterator._workers  # type: ignore[union-attr]
        used.append(memory([os.getpid(), *(worker.pid for worker in workers)], "Anonymous"))
    assert max(used[2:]) - used[1] < 10e6, used


def unchanged(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def test_memory__workers_share_the_index(tmp_path):
    """An index of 130 MB is not copied into two workers, however many rows they look up."""
    pixels = io.BytesIO()
    np.save(pixels, np.zeros((2, 2, 3), np.uint8))
    one = open_samples(str(write_tar(tmp_path / "s.tar", [("0.npy", pixels.getvalue())]))).table
    count, key = 4_000_000, np.frombuffer(b"00000000", np.uint8)
    table = one._replace(
        offset=np.full(count, one.offset[0]),
        size=np.full(count, one.size[0]),
        key_end=np.arange(8, 8 * count + 8, 8),
        key_text=np.tile(key, count),
        label=np.zeros(count, np.int32),
    )
    samples = Samples([str(tmp_path / "s.tar")], np.array([0, count]), table)
    assert table.num_bytes > 120e6
    data = DataConfig()
    order = build_train_order(samples, data=data, seed=0, global_batch=200, images_per_device=200)
    loader = build_train_loader(samples, unchanged, data=data, order=order, workers=2, image_size=2)
    batches = iter(loader)
    for _ in range(20):
        samples.place(int(next(batches)["index"][0]))
    for worker in loader.loader._iterator._workers:  # type: ignore[union-attr]
        assert memory([worker.pid], "Private_Dirty") < 80e6
