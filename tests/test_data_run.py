"""Awkward data in whole runs of two processes: they end, take equal steps, use every image once, and name what was bad."""

import io
import json
import re
import warnings
from pathlib import Path

import pytest
from conftest import tiny, torchrun
from make_shards import make_shards, write_tar
from PIL import Image

from vitfw.data.index import Samples
from vitfw.train import main


def test_run__p02_p30_uneven_shards_and_a_bad_image_on_two_ranks(tmp_path):
    (tmp_path / "data").mkdir()
    pattern = make_shards(tmp_path / "data", [7, 11, 2], size=32, bad=(9,))
    out = tmp_path / "run"
    words = tiny(
        f"data.train={pattern}",
        f"data.val={pattern}",
        "data.fraction=1.0",
        "data.bad_limit=0.1",
        "train.global_batch=4",
        "train.epochs=2",
        "machine.images_per_device=2",
        "machine.workers=1",
        f"out={out}",
    )
    finished = torchrun(2, words, timeout=200)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    ranks = [
        [json.loads(line) for line in (out / f"trace-train-rank{rank}.jsonl").read_text().splitlines()]
        for rank in range(2)
    ]
    assert [len(records) for records in ranks] == [10, 10]
    for epoch in range(2):
        keys = [key for records in ranks for record in records if record["epoch"] == epoch for key in record["keys"]]
        assert len(keys) == 20 and set(keys) == {f"{number:03d}" for number in range(20)} - {"009"}
    ledgers = "".join(file.read_text() for file in out.glob("bad-images-rank*.jsonl"))
    assert "s01.tar: 009: OSError" in ledgers
    counted = [
        key
        for rank in range(2)
        for line in (out / f"trace-val-rank{rank}.jsonl").read_text().splitlines()
        for key in json.loads(line)["keys"]
    ]
    evaluations = len(counted) // 19
    assert sorted(set(counted)) == sorted(set(keys)) and all(counted.count(key) == evaluations for key in set(counted))


def shards(folder: Path, good: int, bad: int) -> str:
    """Grey images of 8 x 8, of which the last few are none."""
    Image.new("L", (8, 8)).save(image := io.BytesIO(), "PNG")
    images = [image.getvalue()] * good + [b"no image"] * bad
    members = [
        (f"{n:02d}.{kind}", part)
        for n, data in enumerate(images)
        for kind, part in (("png", data), ("cls", b"%d" % (n % 3)))
    ]
    return str(write_tar(folder / f"{good}-{bad}.tar", members))


@pytest.mark.parametrize(("fault", "workers"), [("raise", 0), ("raise", 1), ("limit", 0), ("gone", 0)])
def test_faults_of_the_data_end_in_a_sentence(
    fault: str, workers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 1, no traceback, from loader processes as from the run's own; in log.txt too."""
    words = [
        f"data.train={shards(tmp_path, 32, 8)}",
        "data.val=null",
        "data.fraction=1.0",
        f"machine.workers={workers}",
    ]
    words += [f"out={tmp_path / 'run'}", *(["data.on_bad_sample=raise"] if fault == "raise" else [])]
    told = {
        "raise": r"32-8.tar: \d\d: UnidentifiedImageError",
        "limit": "bad images in this epoch on this rank, over data.bad_limit",
        "gone": r"\[Errno \d+\] Not a directory: '.*32-8.tar'",
    }
    if fault == "gone":  # once the run has begun
        monkeypatch.setattr(Samples, "read", lambda self, row: Path(f"{self.names[0]}/gone/32-8.tar").read_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of too many workers
        assert main(tiny(*words, "train.global_batch=32", "task.num_classes=0")) == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said and "DataLoader worker" not in said
    lines = [line for line in said.splitlines() if line.startswith("vitfw: ")]
    assert len(lines) == 1 and re.search(
        told.get(fault, "0 of .* bytes at .*: the shard changed while in use"), lines[0]
    )
    assert lines[0] in (tmp_path / "run" / "log.txt").read_text()


def test_an_evaluation_without_any_image_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"data.train={shards(tmp_path, 32, 0)}", f"data.val={shards(tmp_path, 0, 1)}", "data.fraction=1.0"]
    assert main(tiny(*words, "task.num_classes=0", "train.epochs=2", f"out={tmp_path / 'run'}")) == 0
    assert "note: no image of this set can be read: its scores mean nothing" in capsys.readouterr().out
