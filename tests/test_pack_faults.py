"""What goes wrong between images and shards, and must not go unseen: numbers as class names, changed sources, lost shards."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from make_shards import make_folder, picture, write_tar
from test_pack import hashes, quiet

from vitfw.data.index import open_samples
from vitfw.data.pack import PackOptions, pack
from vitfw.data.verify import info, verify


def by_class(pattern: str) -> dict[bytes, str]:
    """Bytes of each image -> the name of its class."""
    samples = open_samples(pattern)
    names = samples.classes
    assert names is not None
    return {samples.read(row): names[int(samples.label(row))] for row in range(len(samples))}


# Class names that are numbers


@given(names=st.lists(st.sampled_from(["0", "1", "2", "3", "10", "11", "007", "cat", "1.0"]), min_size=2, unique=True))
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_class_keeps_its_images_whatever_it_is_called(tmp_path_factory: pytest.TempPathFactory, names: list[str]):
    """Folders 1, 2, 3, 10 are classes 0, 1, 3, 2 by name: the label in the shard must not be read as a name."""
    folder = tmp_path_factory.mktemp("numbers")
    expected = {}
    for number, name in enumerate(names):
        (folder / "photos" / name).mkdir(parents=True)
        (folder / "photos" / name / "x.png").write_bytes(picture(number))
        expected[picture(number)] = name
    quiet(str(folder / "photos"), folder / "out")
    assert by_class(f"{folder}/out/train-*.tar") == expected
    assert verify(f"{folder}/out/train-*.tar").sound
    quiet(f"{folder}/out/train-*.tar", folder / "again")
    assert by_class(f"{folder}/again/train-*.tar") == expected


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_plain_names_stay_plain_for_other_readers(tmp_path: Path) -> None:
    """Where nothing can be mistaken the label is `.cls`; else it is json, which other readers know as well."""
    cases = [("plain", "ab", "cls"), ("digits", "01", "cls"), ("odd", "12", "json")]
    for name, folders, member in cases:
        counts = dict.fromkeys(folders, 2)
        quiet(make_folder(tmp_path / name, counts), tmp_path / f"{name}-out")
        files = [str(path) for path in (tmp_path / f"{name}-out").glob("*.tar")]
        for sample in wds.WebDataset(files, shardshuffle=False, empty_check=False):
            assert member in sample


def test_a_text_that_may_be_number_or_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("1\n2\n10\n")
    shard = write_tar(
        tmp_path / "s.tar", [("a.png", picture(0)), ("a.cls", b"1"), ("b.png", picture(1)), ("b.cls", b"0")]
    )
    with pytest.raises(
        ValueError, match=r"the label '1' may be the class number 1, or the name of class 0; write it as json"
    ):
        open_samples(str(shard))
    members = [("a.png", picture(0)), ("a.json", b'{"label": 1}'), ("b.png", picture(1)), ("b.json", b'{"label": "1"}')]
    samples = open_samples(str(write_tar(tmp_path / "t.tar", members)))
    assert [samples.label(row) for row in range(2)] == [1, 0]


# Lists


def listed(tmp_path: Path, text: str, name: str = "list.csv", classes: str | None = None):
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(picture(number))
    (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    out = tmp_path / f"out{len(list(tmp_path.glob('out*')))}"
    quiet(str(tmp_path / name), out, classes=classes)
    samples = open_samples(f"{out}/train-*.tar")
    return {samples.key(row): int(samples.label(row)) for row in range(len(samples))}, samples.classes


@pytest.mark.parametrize("header", ["path,label", "path, label", "Path,Label", "\ufeffpath,label", "label,path"])
def test_a_header_is_read_whatever_its_spaces_and_capitals(tmp_path: Path, header: str) -> None:
    first = header.lower().strip("\ufeff").startswith("path")
    rows = [f"{n}.png,{n}" if first else f"{n},{n}.png" for n in range(3)]
    assert listed(tmp_path, "\r\n".join([header, *rows, ""])) == ({"0": 0, "1": 1, "2": 2}, None)


def test_numbers_with_a_point_are_numbers(tmp_path: Path) -> None:
    """As pandas writes a column of whole numbers that had a gap once."""
    assert listed(tmp_path, "path,label\n0.png,0.0\n1.png,10.0\n2.png,2.0\n") == ({"0": 0, "1": 10, "2": 2}, None)
    text = '{"path": "0.png", "label": 1.0}\n{"path": "1.png", "label": "1"}\n{"path": "2.png", "label": 0}'
    assert listed(tmp_path, text, "list.jsonl") == ({"0": 1, "1": 1, "2": 0}, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("path,class\n0.png,1\n", "no column is named label, but 'class' may be meant"),
        ("path,Category\n0.png,1\n", "'category' may be meant"),
        ("path,label\n0.png,-1\n", "line 2: the label '-1' is no class number"),
        ("path,label\n0.png,99999999999\n", "line 2: the label '99999999999' is no class number"),
        ("path,label\n0.png,1,2\n", "line 2: 3 fields for 2 columns"),
        ("path,label\n0.png,1\n1.png,\n", "line 3: no label, while others have one"),
        ("path;label\n0.png;1\n", "separate columns by commas"),
        ("path,label,label\n0.png,1,1\n", "names a column twice"),
        ("", "the first line must name the columns path and label"),
        ("path,label\n", "lists no image"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=rf"list\.csv.*{words}"):
        listed(tmp_path, text)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"path": 5, "label": 0}', "line 1: no path"),
        ('{"path": "0.png", "label": true}', "line 1: the label True is neither"),
        ('{"path": "0.png", "label": {"a": 1}}', "line 1: the label .* is neither"),
        ('{"path": "0.png", "label": 1.5}', "line 1: the label 1.5 is no class number"),
        ('{"path": "0.png", "category": 1}', "'category' may be meant"),
    ],
)
def test_a_line_that_does_not_fit_is_refused(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(ValueError, match=rf"list\.jsonl.*{words}"):
        listed(tmp_path, line, "list.jsonl")


def test_numbers_and_a_list_of_numeric_names(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("3\n1\n2\n")
    with pytest.raises(ValueError, match="the label '3' may be the class number 3, or the name of class 0"):
        listed(tmp_path, "path,label\n0.png,3\n1.png,2\n", classes=str(tmp_path / "names.txt"))
    (tmp_path / "names.txt").write_text("cat\ndog\n")
    assert listed(tmp_path, "path,label\n0.png,dog\n1.png,cat\n", classes=str(tmp_path / "names.txt"))[0] == {
        "0": 1,
        "1": 0,
    }


def test_other_files_and_encodings_are_named(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match=r"list\.json: a list of images is a \.csv"):
        quiet(str(tmp_path / "list.json"), tmp_path / "out")
    (tmp_path / "latin.csv").write_bytes("path,label\nä.png,1\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.csv: is not UTF-8 text"):
        quiet(str(tmp_path / "latin.csv"), tmp_path / "out")
    assert listed(tmp_path, "path,label\n0.png,1\n", "list.CSV")[0] == {"0": 1}
    for name in (f"torchvision:CIFAR10:train:{tmp_path}", f"torchvision:CelebA:all:{tmp_path}"):
        with pytest.raises(ValueError, match="torchvision cannot open it"):
            quiet(name, tmp_path / "out")
    with pytest.raises(ValueError, match="the split 'trian' is not one of train, test, val"):
        quiet(f"torchvision:CIFAR10:trian:{tmp_path}", tmp_path / "out")
    (tmp_path / "c.txt").write_text("a\n")
    with pytest.raises(ValueError, match="names its classes itself"):
        quiet("digits:train", tmp_path / "out", classes=str(tmp_path / "c.txt"))


def test_parquet_labels_and_images_that_are_none(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    image = pa.array([{"bytes": picture(n), "path": None} for n in range(2)])
    for labels, words in (
        ([0, None], "row 1: the label None"),
        ([0, -1], "row 1: the label -1"),
        ([0, 9], "row 1: the label 9"),
    ):
        about = {"info": {"features": {"label": {"names": ["a", "b"]}}}}
        table = pa.table({"image": image, "label": labels}).replace_schema_metadata({"huggingface": json.dumps(about)})
        parquet.write_table(table, tmp_path / "x.parquet")
        with pytest.raises(ValueError, match=words):
            quiet(str(tmp_path / "x.parquet"), tmp_path / "out")
    parquet.write_table(pa.table({"image": image, "category": [0, 1]}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="'category' may be meant"):
        quiet(str(tmp_path / "x.parquet"), tmp_path / "out")
    holes = pa.array([{"bytes": picture(0), "path": None}, None], type=image.type)
    parquet.write_table(pa.table({"image": holes}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="00000001: there is no image in this row"):
        quiet(str(tmp_path / "x.parquet"), tmp_path / "out")


# Restarts


def test_a_damaged_shard_is_not_made_official(tmp_path: Path) -> None:
    root, out = make_folder(tmp_path / "photos", {"a": 6, "b": 6}), tmp_path / "out"
    quiet(root, out, options=PackOptions(shard_size=4))
    whole, shard = hashes(out), out / "train-00001.tar"
    data = bytearray(shard.read_bytes())
    data[600] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ValueError, match=r"train-00001\.tar is no longer what was packed \(SHA-256\); remove it"):
        quiet(root, out, options=PackOptions(shard_size=4))
    shard.unlink()
    quiet(root, out, options=PackOptions(shard_size=4))
    assert hashes(out) == whole


def test_a_changed_source_is_not_mixed_with_what_was_packed_before(tmp_path: Path) -> None:
    """The same names with other images; another folder of the same name; the same images again."""
    root, out = Path(make_folder(tmp_path / "one" / "photos", {"a": 6})), tmp_path / "out"
    quiet(str(root), out, options=PackOptions(shard_size=4))
    quiet(str(root), out, options=PackOptions(shard_size=4))  # unchanged: nothing to do
    file = next(root.rglob("*.png"))
    file.write_bytes(picture(99, size=12))
    other = make_folder(tmp_path / "two" / "photos", {"a": 6}, size=9)
    for source in (str(root), other):
        with pytest.raises(ValueError, match=r"or the images have changed since; remove train\.json and the shards"):
            quiet(source, out, options=PackOptions(shard_size=4))


def test_a_shard_without_a_record_is_packed_again(tmp_path: Path) -> None:
    """Killed between a shard and its record: what lies there is not taken on trust."""
    root, out = make_folder(tmp_path / "photos", {"a": 6}), tmp_path / "out"
    quiet(root, out, options=PackOptions(shard_size=4))
    whole, manifest = hashes(out), json.loads((out / "train.json").read_text())
    manifest["shards"] = manifest["shards"][:1]
    (out / "train.json").write_text(json.dumps(manifest))
    (out / "train-00001.tar").write_bytes(b"half")
    quiet(root, out, options=PackOptions(shard_size=4))
    assert hashes(out) == whole


def test_a_refused_pack_leaves_nothing_that_refuses_the_next(tmp_path: Path) -> None:
    out = tmp_path / "out"
    quiet(make_folder(tmp_path / "a", {"x": 2, "y": 2}), out)
    wrong, right = make_folder(tmp_path / "b", {"x": 2}), make_folder(tmp_path / "c", {"x": 2, "y": 1})
    with pytest.raises(ValueError, match=r"classes\.txt holds other classes"):
        quiet(wrong, out, prefix="val")
    quiet(right, out, prefix="val")


def test_bad_images_can_be_left_out(tmp_path: Path) -> None:
    root = Path(make_folder(tmp_path / "photos", {"a": 5}))
    (root / "a" / "002.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"a/002: .*--on-bad-image skip"):
        quiet(str(root), tmp_path / "never")
    told: list[str] = []
    pack(str(root), tmp_path / "out", options=PackOptions(on_bad_image="skip", shard_size=2), report=told.append)
    assert len(open_samples(f"{tmp_path}/out/train-*.tar")) == 4
    assert told[0].startswith("left out: a/002: ") and told[-1].startswith("4 images of 1 classes in 3 shards")
    assert verify(f"{tmp_path}/out/train-*.tar").sound


# Shards that are not there, twice there, or hold more than they should


def test_lost_and_renamed_shards_are_named(tmp_path: Path) -> None:
    root, out = make_folder(tmp_path / "photos", {"a": 6, "b": 6}), tmp_path / "out"
    quiet(root, out, options=PackOptions(shard_size=3))
    assert verify(f"{out}/train-{{00000..00001}}.tar").sound  # a part of what is there is no fault
    (out / "train-00003.tar").unlink()
    (out / "train-00002.tar").rename(out / "train-00009.tar")
    found = verify(f"{out}/train-*.tar").describe()
    assert "train-00003.tar: listed in train.json, but not there: lost or renamed" in found
    assert "train-00009.tar: is not among the shards that train.json lists" in found
    with pytest.warns(UserWarning, match="the set is smaller than what was packed"):
        assert "warning: " in info(f"{out}/train-*.tar")
    with pytest.raises(ValueError, match="whole shards are verified; leave the slice away"):
        verify(f"{out}/train-00000.tar[:50%]")


def test_a_shard_named_twice_is_remarked_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    quiet(make_folder(tmp_path / "photos", {"a": 6}), out, options=PackOptions(shard_size=3))
    with pytest.warns(UserWarning, match=r"names .*train-00000\.tar in two of its parts: its samples come twice"):
        assert len(open_samples(f"{out}/train-*.tar, {out}/train-00000.tar")) == 9
    assert len(open_samples(f"{out}/train-*.tar[:50%], {out}/train-*.tar[50%:]")) == 6  # no warning


@pytest.mark.parametrize(
    "order", ["image mask", "mask image", "image mask label", "label mask image", "mask label image"]
)
def test_a_mask_beside_an_image_is_no_sample(tmp_path: Path, order: str) -> None:
    """In whatever order the members of a sample stand; webdataset itself ends a key at the first dot."""
    members = []
    for number in range(3):
        kinds = {"image": (f"{number}.png", picture(number)), "mask": (f"{number}.mask.png", picture(10 + number))}
        kinds["label"] = (f"{number}.cls", b"0")
        members += [kinds[kind] for kind in order.split()]
    shard = write_tar(tmp_path / "s.tar", members)
    with pytest.raises(ValueError, match=r"key '0\.mask' continues the key '0', as a mask of it would"):
        open_samples(str(shard))
    with pytest.warns(UserWarning, match="left out"):
        samples = open_samples(str(shard), on_problem="skip")
    assert sorted(samples.key(row) for row in range(len(samples))) == ["0", "1", "2"]


def test_folders_with_signs_of_patterns_in_their_names(tmp_path: Path) -> None:
    for number, name in enumerate(["a,b", "w{1,2}", "x[1]"]):
        root = make_folder(tmp_path / name, {"c": number + 1})
        assert len(open_samples(root)) == number + 1
    root = make_folder(tmp_path / "plain", {"c": 200})
    assert len(open_samples(f"{root}[:99.5%]")) == 199
    for bounds in ("[-10:]", "[:x]", "[::2]"):
        with pytest.raises(ValueError, match=r"the slice \[.*\] is none; write \[:99%\]"):
            open_samples(f"{root}{bounds}")


def test_a_message_names_no_object_of_python(tmp_path: Path) -> None:
    root = Path(make_folder(tmp_path / "photos", {"a": 2}))
    (root / "a" / "000.png").write_bytes(os.urandom(50))
    found = verify(str(root)).describe()
    assert "cannot be decoded: UnidentifiedImageError: cannot identify image file" in found and "0x" not in found


def test_what_is_packed_again_is_what_was_packed(tmp_path: Path) -> None:
    """Labels of several kinds survive a second pack, numbers without names too."""
    (tmp_path / "list.csv").write_text("path,label\n" + "".join(f"{n}.png,{3 * n}\n" for n in range(4)))
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(picture(number))
    told: list[str] = []
    pack(str(tmp_path / "list.csv"), tmp_path / "one", report=told.append)
    assert told[0].startswith("4 images of 10 classes (numbers without names, of which 4 have an image) in 1 shards")
    quiet(f"{tmp_path}/one/train-*.tar", tmp_path / "two")
    first, second = (open_samples(f"{tmp_path}/{name}/train-*.tar") for name in ("one", "two"))
    assert np.array_equal(np.sort(first.labels), [0, 3, 6, 9])
    assert {first.key(r): first.label(r) for r in range(4)} == {second.key(r): second.label(r) for r in range(4)}
