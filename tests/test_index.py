"""Patterns, tars, folders and the index: what is found, and what is refused with which words."""

import gc
import io
import os
import pickle
import tarfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_shards import make_folder, make_shards, picture, write_tar

from vitfw.data import index, stored
from vitfw.data import table as tables
from vitfw.data.folder import index_folder
from vitfw.data.index import Samples, open_samples
from vitfw.data.patterns import expand, expand_braces, slice_bounds, split_list, split_slice
from vitfw.data.shard import index_shard
from vitfw.data.shuffle import shuffled_rows
from vitfw.data.tar import DamagedTarError, read_members


def by_key(samples):
    return {samples.key(row): samples.label(row) for row in range(len(samples))}


def test_patterns__braces_lists_slices():
    assert expand_braces("a-{08..10}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar"]
    assert expand_braces("{x,y}/{0..1}") == ["x/0", "x/1", "y/0", "y/1"]
    assert split_list("a-{x,y}.tar, b.tar") == ["a-{x,y}.tar", "b.tar"]
    assert split_slice("a-*.tar[:99%]") == ("a-*.tar", ("", "99%"))
    assert split_slice("a[0-9].tar") == ("a[0-9].tar", None)
    assert slice_bounds(("", "99%"), 1000) == (0, 990)
    assert slice_bounds(("10", ""), 100) == (10, 100)


@pytest.mark.parametrize(
    ("text", "words"),
    [("a-{5..3}.tar", "range {5..3} is empty"), ("a-{x}.tar", "neither a range"), ("a,,b", "empty part")],
)
def test_patterns__refused(text, words):
    with pytest.raises(ValueError, match=words):
        [name for part in split_list(text) for name in expand_braces(part)]


def test_patterns__missing_and_repeated_files(tmp_path):
    make_shards(tmp_path, [1, 1, 1])
    assert len(expand(f"{tmp_path}/s*.tar")) == 3
    with pytest.raises(FileNotFoundError, match=r"s03\.tar"):
        expand(f"{tmp_path}/s{{00..03}}.tar")
    with pytest.raises(FileNotFoundError, match="matches no file"):
        expand(f"{tmp_path}/t*.tar")
    with pytest.raises(ValueError, match="more than once"):
        expand(f"{tmp_path}/s{{00,00}}.tar")
    with pytest.raises(ValueError, match=r"slice \[:0%\] of 3 samples is empty"):
        open_samples(f"{tmp_path}/s*.tar[:0%]")
    with pytest.raises(ValueError, match="has 3 samples only"):
        open_samples(f"{tmp_path}/s*.tar[5:]")


@settings(deadline=None, max_examples=40)
@given(
    names=st.lists(st.text("abcXYZ09._ /é", min_size=1, max_size=140), min_size=1, max_size=8, unique=True),
    sizes=st.lists(st.integers(0, 2000), min_size=8, max_size=8),
    tar_format=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_tar__same_members_as_tarfile(tmp_path_factory, names, sizes, tar_format):
    path = tmp_path_factory.mktemp("tar") / "x.tar"
    with tarfile.open(path, "w", format=tar_format) as archive:
        for name, size in zip(names, sizes, strict=False):
            member = tarfile.TarInfo(f"f{name}f")
            member.size = size
            archive.addfile(member, io.BytesIO(os.urandom(size)))
    data = path.read_bytes()
    with tarfile.open(path) as archive:
        wanted = [(m.name, archive.extractfile(m).read()) for m in archive.getmembers()]  # type: ignore[union-attr]
    assert [(m.name, data[m.offset : m.offset + m.size]) for m in read_members(path)] == wanted


def test_tar__damage_is_named(tmp_path):
    whole = write_tar(tmp_path / "a.tar", [(f"{n}.png", picture(n)) for n in range(4)]).read_bytes()
    path = tmp_path / "b.tar"
    members = list(read_members(tmp_path / "a.tar"))
    cases = {
        "truncated: '2.png' ends at byte": whole[: members[2].offset + 5],
        "truncated: no end mark": whole[: members[3].offset - 512],
        f"not a tar header at byte {members[2].offset - 512}": whole[: members[2].offset - 500]
        + b"x" * 100
        + whole[members[2].offset - 400 :],
        "with data behind it": whole[: members[2].offset - 512] + bytes(512) + whole[members[2].offset :],
        "compressed with gzip": b"\x1f\x8b" + whole[2:],
    }
    for words, content in cases.items():
        path.write_bytes(content)
        with pytest.raises(DamagedTarError, match=f"b.tar: .*{words}"):
            list(read_members(path))
    path.write_bytes(whole + whole)
    with pytest.raises(DamagedTarError, match="data behind it"):
        list(read_members(path))


def test_samples__read_label_key(tmp_path):
    samples = open_samples(make_shards(tmp_path, [3, 2]))
    assert len(samples) == 5 and samples.num_classes == 3 and list(samples.shard_sizes) == [3, 2]
    assert [samples.key(row) for row in range(5)] == ["000", "001", "002", "003", "004"]
    assert [samples.label(row) for row in range(5)] == [0, 1, 2, 0, 1]
    assert [samples.read(row) for row in range(5)] == [picture(number) for number in range(5)]
    assert samples.describe() == "5 images in 2 shards, 0.00 MB, 3 classes"
    assert pickle.loads(pickle.dumps(samples)).read(4) == picture(4)


def test_names__p64_dots_capitals_folders(tmp_path):
    members = []
    for number, name in enumerate(["a.b 1.0.png", "X.JPG", "v1.0/y.png", "c.jpeg", "d.1.png", "d.2.png"]):
        members += [(name, picture(number)), (f"{name.rpartition('.')[0]}.cls", str(number).encode())]
    members += [("._hidden.png", b"x"), (".DS_Store", b"x"), ("d.2.txt", b"a caption")]
    path = write_tar(tmp_path / "s.tar", members)
    assert by_key(open_samples(str(path))) == {"a.b 1.0": 0, "X": 1, "v1.0/y": 2, "c": 3, "d.1": 4, "d.2": 5}


def test_members__p31_split_samples_are_refused_or_left_out(tmp_path):
    image = picture(0)
    split = [("0.png", image), ("1.png", image), ("0.cls", b"0"), ("1.cls", b"0"), ("2.png", image), ("2.cls", b"1")]
    path = str(write_tar(tmp_path / "split.tar", split))
    with pytest.raises(
        ValueError, match=r"2 problem.*\n.*split\.tar: the members of key '0' do not stand next to.*sort=name"
    ):
        open_samples(path)
    with pytest.warns(UserWarning, match="2 problem"):
        assert by_key(open_samples(path, on_problem="skip")) == {"2": 1}
    with pytest.warns(UserWarning, match="2 problem"):  # the same from the kept index
        assert len(open_samples(path, on_problem="skip")) == 1


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([("0.png", b"x"), ("0.cls", b"0"), ("0.png", b"x"), ("0.cls", b"0")], "key '0' has two images"),
        ([("0.png", b"x"), ("0.jpg", b"x"), ("0.cls", b"0")], "key '0' has two images"),
        ([("0.png", b"x"), ("0.cls", b"0"), ("1.png", b"x")], "key '1' has an image but no label"),
        ([("0.png", b"x"), ("0.cls", b"0"), ("1.cls", b"1")], "key '1' has a label but no image"),
        ([("0.png", b"x"), ("0.cls", b"-1")], "label -1 is negative"),
        ([("0.png", b"x"), ("0.cls", b"cat")], "the label 'cat' is not a number.*no class list"),
        ([("0.png", b"x"), ("0.json", b"[1]")], "json is a list"),
        ([("0.png", b"x"), ("0.json", b'{"label": true}')], "True is neither"),
        ([("0.png", b"x"), ("0.json", b"{")], "key '0'"),
    ],
)
def test_members__problems_name_shard_and_key(tmp_path, members, words):
    with pytest.raises(ValueError, match=rf"s\.tar: .*{words}"):
        open_samples(str(write_tar(tmp_path / "s.tar", members)))


def test_labels__json_names_multi_and_none(tmp_path):
    image = picture(0)
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\n")
    one = write_tar(
        tmp_path / "one.tar",
        [("a.png", image), ("a.json", b'{"label": 2, "text": "x"}'), ("b.png", image), ("b.cls", b"bee")],
    )
    samples = open_samples(str(one))
    assert by_key(samples) == {"a": 2, "b": 1} and samples.classes == ("ant", "bee", "cat")
    many = write_tar(
        tmp_path / "many.tar",
        [("a.png", image), ("a.json", b'{"labels": [0, "cat"]}'), ("b.png", image), ("b.json", b'{"labels": []}')],
    )
    samples = open_samples(f"{many}, {one}")
    assert samples.multi_label
    assert np.array_equal(
        np.stack([samples.label(row) for row in range(4)]), [[1, 0, 1], [0, 0, 0], [0, 0, 1], [0, 1, 0]]
    )
    assert np.array_equal(samples.select(np.array([2, 0])).label(1), [0, 0, 1])
    bare = write_tar(tmp_path / "bare.tar", [("a.png", image)])
    assert open_samples(str(bare)).label(0) == -1 and not open_samples(str(bare)).labelled
    with pytest.raises(ValueError, match="labels and others have none"):
        open_samples(f"{one}, {bare}")
    with pytest.raises(ValueError, match=r"one\.tar: a has label 2.*labels 0\.\.1"):
        open_samples(str(one), classes=["x", "bee"])


def test_folder__p78_empty_classes_and_hidden_files(tmp_path):
    root = make_folder(tmp_path / "data", {"a": 2, "c": 1})
    (tmp_path / "data/b").mkdir()
    for name in ("c/._x.jpg", "c/.DS_Store", "c/Thumbs.db", ".hidden.png"):
        (tmp_path / "data" / name).write_bytes(b"x")
    with pytest.warns(UserWarning, match="class folder 'b' has no image"):
        samples = open_samples(root)
    assert samples.classes == ("a", "b", "c") and samples.num_classes == 3 and len(samples) == 3
    assert by_key(samples) == {"a/000.png": 0, "a/001.png": 0, "c/002.png": 2}
    assert samples.read(2) == picture(2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty: no image found; accepted extensions: jpg, jpeg, png"):
        open_samples(str(tmp_path / "empty"))


def test_folder__flat_nested_rings_and_mixtures(tmp_path):
    make_folder(tmp_path / "data", {"a/deep": 1, "b": 1})
    (tmp_path / "data/a/ring").symlink_to(tmp_path / "data/a")
    assert by_key(open_samples(str(tmp_path / "data"))) == {"a/deep/000.png": 0, "b/001.png": 1}
    flat = make_folder(tmp_path, {"flat": 2})
    assert by_key(open_samples(f"{flat}/flat")) == {"000.png": -1, "001.png": -1}
    (tmp_path / "data/x.png").write_bytes(picture(0))
    with pytest.raises(ValueError, match=r"'x\.png' lies beside the class folders"):
        open_samples(str(tmp_path / "data"))
    make_shards(tmp_path / "flat", [1])
    for file in (tmp_path / "flat").glob("*.png"):
        file.unlink()
    with pytest.raises(ValueError, match=r"no image, but shards; name them"):
        open_samples(f"{flat}/flat")
    with pytest.raises(ValueError, match="folder 'b' is not among the 1 classes"):
        (tmp_path / "data/x.png").unlink()
        index_folder(tmp_path / "data", ["a"])


def test_index__kept_and_rebuilt_when_the_shard_changes(tmp_path):
    pattern = make_shards(tmp_path, [3])
    open_samples(pattern)
    kept = (tmp_path / "s00.tar.idx").stat().st_mtime_ns
    assert len(open_samples(pattern)) == 3 and (tmp_path / "s00.tar.idx").stat().st_mtime_ns == kept
    time.sleep(0.02)
    make_shards(tmp_path, [4])
    assert len(open_samples(pattern)) == 4
    (tmp_path / "s00.tar.idx").write_bytes(b"PK damaged")
    assert len(open_samples(pattern)) == 4
    (tmp_path / "s00.tar.idx").unlink()
    (tmp_path / "s00.tar.idx").mkdir()  # stands for a place that cannot be written
    open_samples(pattern, cache=str(tmp_path / "cache"))
    assert len(list((tmp_path / "cache/index").glob("*.idx"))) == 1


def test_read__says_when_the_shard_changed_in_use(tmp_path):
    samples = open_samples(make_shards(tmp_path, [3]))
    os.truncate(tmp_path / "s00.tar", 600)
    with pytest.raises(OSError, match=r"s00\.tar: 002: .* the shard changed while in use"):
        samples.read(2)


def test_slices__disjoint_and_deterministic(tmp_path):
    pattern = make_shards(tmp_path, [7, 11, 2])
    train, minival = open_samples(f"{pattern}[:80%]"), open_samples(f"{pattern}[80%:]")
    keys = [{samples.key(row) for row in range(len(samples))} for samples in (train, minival)]
    assert len(keys[0]) == 16 and len(keys[1]) == 4 and not keys[0] & keys[1]
    assert train.num_classes == minival.num_classes == 3  # a subset without some class still has its number
    assert all(minival.read(row) == picture(int(minival.key(row))) for row in range(4))
    assert train.fingerprint() == open_samples(f"{pattern}[:80%]").fingerprint() != minival.fingerprint()


def test_shuffled_rows__sorted_by_splitmix64():
    mask = (1 << 64) - 1

    def mixed(row: int, seed: int) -> int:
        value = (row * 0x9E3779B97F4A7C15 + seed) & mask
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        return value ^ (value >> 31)

    assert list(shuffled_rows(200, 5)) == sorted(range(200), key=lambda row: mixed(row, 5))
    assert list(shuffled_rows(8, 1)) == [0, 5, 4, 1, 2, 6, 7, 3]
    rows = shuffled_rows(10_000, 123)
    assert abs(np.corrcoef(rows, np.arange(10_000))[0, 1]) < 0.03
    assert (rows == shuffled_rows(10_000, 124)).sum() < 10


def big_table(count: int) -> tables.Table:
    numbers = np.arange(count, dtype=np.int64)
    text = np.full(count * 8, ord("0"), np.uint8)
    return tables.Table(
        offset=numbers * 1024,
        size=np.full(count, 500, np.uint32),
        key_end=(numbers + 1) * 8,
        key_text=text,
        label=(numbers % 1000).astype(np.int32),
        label_end=np.zeros(0, np.int64),
        label_value=np.zeros(0, np.int32),
    )


def test_index__p86_no_python_object_a_sample():
    samples = Samples(["x.tar"], np.array([0, 100_000]), big_table(100_000))
    gc.collect()
    assert len(gc.get_referents(samples)) < 50
    assert len(pickle.dumps(samples)) < 20e6


def test_index__ten_million_samples(tmp_path):
    """Loads in seconds, and takes under 60 bytes a sample beyond its key (here 24)."""
    table = big_table(10_000_000)
    tables.save(tmp_path / "x.idx", table, {})
    begin = time.perf_counter()
    found = tables.load(tmp_path / "x.idx")
    assert found is not None
    samples = Samples(["x.tar"], np.array([0, 10_000_000]), found[0])
    assert time.perf_counter() - begin < 10
    assert samples.label(9_999_999) == 999
    assert (samples.table.num_bytes - len(samples.table.key_text)) / len(samples) < 60


def test_warnings__none_for_sound_data(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_samples(make_shards(tmp_path, [2]))


def test_index__ranks_that_start_together_build_once(tmp_path, monkeypatch):
    pattern = make_shards(tmp_path, [5])
    built = []

    def slow(path, classes, **options):
        built.append(path)
        time.sleep(0.1)
        return index_shard(path, classes, **options)

    monkeypatch.setattr(stored, "index_shard", slow)
    with ThreadPoolExecutor(4) as ranks:
        found = list(ranks.map(lambda rank: len(open_samples(pattern, cache=str(tmp_path / "cache"))), range(4)))
    assert found == [5] * 4 and len(built) == 1


def test_index__large_ones_are_mapped_once_a_node(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "SHARED_ABOVE", 10)
    pattern = make_shards(tmp_path, [5, 3])
    for _ in range(2):
        samples = open_samples(pattern, cache=str(tmp_path / "cache"))
        assert len(samples) == 8 and [samples.key(row) for row in (0, 7)] == ["000", "007"]
        assert isinstance(samples.table.offset.base, np.memmap)
        assert samples.read(7) == picture(7) and samples.label(7) == 1
    assert len(list((tmp_path / "cache/joined").iterdir())) == 1
    table = big_table(10)
    (tmp_path / "file").write_text("not a folder")
    assert tables.shared(table, tmp_path / "file") is table
