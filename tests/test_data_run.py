"""Awkward data in whole runs of two processes: they end, take equal steps, use every image once, and name what was bad."""

import json

from conftest import tiny, torchrun
from make_shards import make_shards


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
