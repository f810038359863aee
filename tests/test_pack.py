"""Packing from every source, restarting, and what verify and info find."""

import csv
import io
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds
from make_shards import make_folder, make_shards, picture, write_tar
from PIL import Image

from vitfw.data.index import open_samples
from vitfw.data.mixing import shard_mixing
from vitfw.data.pack import PackOptions, pack
from vitfw.data.section import DataConfig, build_train_order
from vitfw.data.verify import info, verify

DIGITS = Path(__file__).parent.parent / "data/digits"


def quiet(*arguments, **options):
    return pack(*arguments, report=lambda text: None, **options)


def hashes(folder: Path) -> dict[str, str]:
    return {
        file.name: sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.glob("*[!x]"))
        if file.suffix != ".idx"
    }


def test_digits__made_again_byte_for_byte(tmp_path):
    for out in ("one", "two"):
        quiet("digits:train", tmp_path / out, options=PackOptions(shard_size=360))
        quiet("digits:val", tmp_path / out, prefix="val", options=PackOptions(shard_size=180))
    assert hashes(tmp_path / "one") == hashes(tmp_path / "two")
    for split, count in (("train", 1438), ("val", 359)):
        shipped = open_samples(str(DIGITS / f"{split}-*.tar"), cache=str(tmp_path))
        made = open_samples(str(tmp_path / f"one/{split}-*.tar"))
        assert len(shipped) == len(made) == count and shipped.num_classes == 10
        assert [shipped.key(row) for row in range(count)] == [made.key(row) for row in range(count)]
        assert np.array_equal(shipped.labels, made.labels)
        for row in range(0, count, 40):
            pixels = [np.asarray(Image.open(io.BytesIO(samples.read(row)))) for samples in (shipped, made)]
            assert np.array_equal(*pixels)
    train, val = (open_samples(str(DIGITS / f"{split}-*.tar"), cache=str(tmp_path)) for split in ("train", "val"))
    assert not {train.key(row) for row in range(1438)} & {val.key(row) for row in range(359)}
    assert np.abs(np.bincount(val.labels) / np.bincount(np.concatenate([train.labels, val.labels])) - 0.2).max() < 0.01


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_pack__folder_shuffled_and_read_by_webdataset(tmp_path):
    root = make_folder(tmp_path / "photos", {"ant": 30, "bee.x": 30, "cat": 30})
    shards = quiet(root, tmp_path / "out", options=PackOptions(shard_size=40))
    assert [path.name for path in shards] == [f"train-0000{number}.tar" for number in range(3)]
    assert (tmp_path / "out/classes.txt").read_text() == "ant\nbee.x\ncat\n"
    samples = open_samples(f"{tmp_path}/out/train-*.tar")
    assert len(samples) == 90 and samples.classes == ("ant", "bee.x", "cat")
    assert shard_mixing(samples) > 0.9  # P85
    manifest = json.loads((tmp_path / "out/train.json").read_text())
    assert [entry["samples"] for entry in manifest["shards"]] == [40, 40, 10]
    assert manifest["shards"][0]["sha256"] == sha256(shards[0].read_bytes()).hexdigest()
    original = {
        f"{folder}/{number:03d}": picture(number)
        for number in range(90)
        for folder in [("ant", "bee_x", "cat")[number // 30]]
    }
    assert {samples.key(row): samples.read(row) for row in range(90)} == original
    stock = wds.WebDataset([str(path) for path in shards], shardshuffle=False, empty_check=False)
    assert {sample["__key__"]: (sample["png"], int(sample["cls"])) for sample in stock} == {
        samples.key(row): (samples.read(row), samples.label(row)) for row in range(90)
    }


def test_pack__resized_and_encoded(tmp_path):
    (tmp_path / "photos/a").mkdir(parents=True)
    Image.new("RGBA", (90, 60), (10, 20, 30, 0)).save(tmp_path / "photos/a/wide.png")
    Image.new("L", (20, 30), 7).save(tmp_path / "photos/a/small.png")
    quiet(str(tmp_path / "photos"), tmp_path / "out", options=PackOptions(short_side=30, encode="jpeg", quality=90))
    samples = open_samples(f"{tmp_path}/out/train-*.tar")
    images = {samples.key(row): Image.open(io.BytesIO(samples.read(row))) for row in range(2)}
    assert images["a/wide"].size == (45, 30) and images["a/wide"].format == "JPEG"
    assert images["a/wide"].convert("RGB").getpixel((0, 0)) == (255, 255, 255)
    assert images["a/small"].size == (20, 30)  # never enlarged
    for options, words in (
        ({"short_side": 30}, "resized images need encode=jpeg"),
        ({"quality": 0}, "quality=0"),
        ({"shard_size": 0}, "shard_size=0"),
    ):
        with pytest.raises(ValueError, match=words):
            PackOptions(**options)
    (tmp_path / "photos/a/bad.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"a/bad: .*mend it, or leave such images out"):
        quiet(str(tmp_path / "photos"), tmp_path / "again", options=PackOptions(encode="png"))
    with pytest.raises(ValueError, match=r"a/bad: bytes .* begin no accepted image format"):
        quiet(str(tmp_path / "photos"), tmp_path / "third")


def test_pack__keys_are_sanitised_and_unique(tmp_path):
    (tmp_path / "p/a").mkdir(parents=True)
    for number, name in enumerate(["v 1.0", "v_1.0", "v-1"]):
        (tmp_path / f"p/a/{name}.png").write_bytes(picture(number))
    quiet(str(tmp_path / "p"), tmp_path / "out")
    samples = open_samples(f"{tmp_path}/out/train-*.tar")
    assert {samples.key(row) for row in range(3)} == {"a/v_1_0", "a/v_1_0_2", "a/v-1"}


def test_pack__csv_and_jsonl(tmp_path):
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(picture(number))
    with (tmp_path / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["path", "label"], *([f"{n}.png", ["dog", "cat"][n % 2]] for n in range(4))])
    quiet(str(tmp_path / "list.csv"), tmp_path / "csv")
    samples = open_samples(f"{tmp_path}/csv/train-*.tar")
    assert samples.classes == ("cat", "dog") and {samples.key(r): samples.label(r) for r in range(4)} == {
        "0": 1,
        "1": 0,
        "2": 1,
        "3": 0,
    }
    lines = [{"path": f"{n}.png", "labels": [0, n]} for n in range(4)]
    (tmp_path / "list.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    quiet(str(tmp_path / "list.jsonl"), tmp_path / "jsonl")
    samples = open_samples(f"{tmp_path}/jsonl/train-*.tar")
    assert samples.multi_label and samples.num_classes == 4 and samples.classes is None
    for text, words in (
        ('{"path": "9.png", "label": 0}', "line 1: no such file: .*9.png"),
        ('{"label": 0}', "line 1: no path"),
        ('{"path": "0.png", "label": 0}\n{"path": "1.png"}', "line 2: no label, while others have one"),
        ("[1]", "line 1: not an object"),
        ("{", "line 1: "),
    ):
        (tmp_path / "bad.jsonl").write_text(text)
        with pytest.raises(ValueError, match=rf"bad\.jsonl.*{words}"):
            quiet(str(tmp_path / "bad.jsonl"), tmp_path / "never")
    (tmp_path / "bad.csv").write_text("file,label\n0.png,1\n")
    with pytest.raises(ValueError, match="must name the columns path and label"):
        quiet(str(tmp_path / "bad.csv"), tmp_path / "never")


def test_pack__torchvision_arrays_and_files(tmp_path):
    raw = tmp_path / "MNIST/raw"
    raw.mkdir(parents=True)
    digits = np.arange(3 * 28 * 28, dtype=np.uint8).reshape(3, 28, 28)
    for prefix in ("train", "t10k"):
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 0x803, 3, 28, 28) + digits.tobytes())
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, 3) + bytes([5, 0, 4]))
    quiet(f"torchvision:MNIST:train:{tmp_path}", tmp_path / "mnist")
    samples = open_samples(f"{tmp_path}/mnist/train-*.tar")
    assert samples.num_classes == 10
    found = {samples.label(row): np.asarray(Image.open(io.BytesIO(samples.read(row)))) for row in range(3)}
    assert np.array_equal(found[5], digits[0]) and np.array_equal(found[4], digits[2])
    make_folder(tmp_path / "country211/train", {"AD": 2, "AE": 1})
    quiet(f"torchvision:Country211:train:{tmp_path}", tmp_path / "country")
    samples = open_samples(f"{tmp_path}/country/train-*.tar")
    assert {samples.key(row): samples.read(row) for row in range(3)}["AE/002"] == picture(2)  # the file's own bytes
    for name, words in (
        ("Nope:train:x", "no such data set"),
        ("CIFAR10", "write torchvision:NAME:SPLIT:ROOT"),
        (f"ImageFolder:train:{tmp_path}", "has no splits"),
    ):
        with pytest.raises(ValueError, match=words):
            quiet(f"torchvision:{name}", tmp_path / "never")


def test_pack__hugging_face_parquet_and_saved(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    image_type = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    about = {"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
    schema = pa.schema([("image", image_type), ("label", pa.int64())], metadata={"huggingface": json.dumps(about)})
    rows = {"image": [{"bytes": picture(n), "path": None} for n in range(6)], "label": [n % 2 for n in range(6)]}
    table = pa.table(rows, schema=schema)
    (tmp_path / "hf").mkdir()
    parquet.write_table(table.slice(0, 4), tmp_path / "hf/train-0.parquet", row_group_size=2)
    parquet.write_table(table.slice(4), tmp_path / "hf/train-1.parquet")
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "dataset_info.json").write_text("{}")
    with pa.OSFile(str(saved / "data-00000-of-00001.arrow"), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        writer.write_table(table)
    for number, source in enumerate((f"{tmp_path}/hf/train-*.parquet", f"{tmp_path}/hf", str(saved))):
        quiet(source, tmp_path / f"out{number}")
        samples = open_samples(f"{tmp_path}/out{number}/train-*.tar")
        assert samples.classes == ("cat", "dog")
        assert {samples.read(r): samples.label(r) for r in range(6)} == {picture(n): n % 2 for n in range(6)}
    parquet.write_table(pa.table({"text": ["x"]}), tmp_path / "text.parquet")
    with pytest.raises(ValueError, match=r"0 image columns .* among \['text'\]"):
        quiet(f"{tmp_path}/text.parquet", tmp_path / "never")


def test_pack__shards_again_and_multi_label(tmp_path):
    members = [
        (f"{n}.png", picture(n)) if kind else (f"{n}.json", json.dumps({"labels": [n]}).encode())
        for n in range(3)
        for kind in (1, 0)
    ]
    quiet(str(write_tar(tmp_path / "m.tar", members)), tmp_path / "out")
    samples = open_samples(f"{tmp_path}/out/train-*.tar")
    assert samples.multi_label and {samples.key(r): int(np.flatnonzero(samples.label(r))[0]) for r in range(3)} == {
        "0": 0,
        "1": 1,
        "2": 2,
    }


def test_pack__restart_keeps_finished_shards_and_refuses_another_plan(tmp_path):
    root = make_folder(tmp_path / "photos", {"a": 9, "b": 9})
    out = tmp_path / "out"
    quiet(root, out, options=PackOptions(shard_size=6))
    whole = hashes(out)
    (out / "train-00001.tar").unlink()
    kept = (out / "train-00000.tar").stat().st_mtime_ns
    quiet(root, out, options=PackOptions(shard_size=6))
    assert hashes(out) == whole and (out / "train-00000.tar").stat().st_mtime_ns == kept
    with pytest.raises(ValueError, match=r"or other options, or the images have changed since; remove train\.json"):
        quiet(root, out, options=PackOptions(shard_size=7))
    quiet(root, out, prefix="val", options=PackOptions(shard_size=7))
    with pytest.raises(ValueError, match=r"classes.txt holds other classes"):
        quiet(make_folder(tmp_path / "other", {"x": 1}), out, prefix="more")
    (out / "train.json").unlink()
    with pytest.raises(ValueError, match=r"but no train.json"):
        quiet(root, out)


KILLED = """
import sys, time
import vitfw.data.pack as pack
true = pack._encoded
def slow(*arguments):
    time.sleep(0.02)
    return true(*arguments)
pack._encoded = slow
print("ready", flush=True)
pack.pack(sys.argv[1], sys.argv[2], options=pack.PackOptions(shard_size=10), threads=2)
"""


def test_pack__killed_leaves_no_half_shard(tmp_path):
    root = make_folder(tmp_path / "photos", {"a": 60})
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", KILLED, root, str(out)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    time.sleep(0.35)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    for shard in out.glob("train-*.tar"):
        assert len(open_samples(str(shard))) == 10
    assert len(list(out.glob("train-*.tar"))) < 6
    quiet(root, out, options=PackOptions(shard_size=10))
    assert len(open_samples(f"{out}/train-{{00000..00005}}.tar")) == 60


def test_verify__sound_set(tmp_path):
    root = make_folder(tmp_path / "photos", {"a": 9, "b": 3})
    quiet(root, tmp_path / "out", options=PackOptions(shard_size=5))
    for pattern in (root, f"{tmp_path}/out/train-*.tar"):
        found = verify(pattern)
        assert found.sound and found.images == 12 and found.sizes == {8: 12} and found.labels == {0: 9, 1: 3}
        assert found.describe().splitlines() == [
            "12 images decoded, 0 duplicates, 0 problems",
            "short side: 8 px: 12",
            "2 labels, 3 to 9 images each",
        ]
    text = info(f"{tmp_path}/out/train-*.tar")
    assert "12 images in 3 shards" in text and "shards: 3, 2 to 5 samples each" in text and "classes: a, b" in text
    assert "3 to 9 images a class" in text and "fingerprint: " in text


def test_verify__everything_that_is_wrong_is_named(tmp_path):
    make_shards(tmp_path, [6, 6], size=32, bad=(1,))
    write_tar(
        tmp_path / "s02.tar",
        [("000.png", picture(0, 32)), ("000.cls", b"2"), ("x.png", picture(50)), ("y.png", b""), ("y.cls", b"0")],
    )
    whole = (tmp_path / "s01.tar").read_bytes()
    (tmp_path / "s03.tar").write_bytes(whole[: len(whole) // 2])
    found = verify(f"{tmp_path}/s*.tar")
    assert not found.sound and found.duplicates == 1
    text = found.describe()
    for words in (
        "s00.tar: 001: cannot be decoded",
        "s02.tar: 000: this key is also in",
        "the same image as " + f"{tmp_path}/s00.tar: 000, with label 2 here and 0 there",
        "s02.tar: key 'x' has an image but no label",
        "s02.tar: y: cannot be decoded",
        "s03.tar: truncated",
    ):
        assert words in text, text
    quiet(make_folder(tmp_path / "p", {"a": 4}), tmp_path / "out")
    shard = tmp_path / "out/train-00000.tar"
    data = bytearray(shard.read_bytes())
    data[600] ^= 1
    shard.write_bytes(data)
    assert any("SHA-256 is not the one in train.json" in problem for problem in verify(str(shard)).problems)


def test_verify__equal_images_in_train_and_val(tmp_path):
    train, val = make_folder(tmp_path / "t", {"a": 3}), make_folder(tmp_path / "v", {"a": 2})
    assert verify(f"{train}, {val}").duplicates == 2


def test_mixing__p85_class_sorted_shards_warn(tmp_path):
    for label in range(4):
        members = [
            (f"{n}.png", picture(n)) if kind else (f"{n}.cls", str(label).encode()) for n in range(5) for kind in (1, 0)
        ]
        write_tar(tmp_path / f"s{label}.tar", members)
    samples = open_samples(f"{tmp_path}/s*.tar")
    assert shard_mixing(samples) == 0.0
    with pytest.warns(UserWarning, match=r"few classes each \(mixing 0.00 of 1\).*set data.window=0"):
        build_train_order(samples, data=DataConfig(window=2), seed=0, global_batch=4, images_per_device=4)
    build_train_order(samples, data=DataConfig(), seed=0, global_batch=4, images_per_device=4)
    assert Counter(samples.labels.tolist()) == {0: 5, 1: 5, 2: 5, 3: 5}
