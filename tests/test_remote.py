"""Remote shards over a real S3 server (moto) and a real HTTP server, both on loopback."""

import http.server
import multiprocessing
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import tiny
from make_shards import make_shards, noisy, picture

from vitfw.data import remote
from vitfw.data.index import open_samples
from vitfw.data.loader import build_train_loader
from vitfw.data.pack import PackOptions, pack
from vitfw.data.remote import RemoteCache, Version
from vitfw.data.section import DataConfig, build_train_order, open_data, open_split
from vitfw.train import main


class Store(http.server.SimpleHTTPRequestHandler):
    """Files of a folder; counts whole downloads, and fails as often as it is told to."""

    downloads: dict[str, int]
    failures = 0
    cut = 0
    slow = 0.0

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        name = self.path.rpartition("/")[2]
        type(self).downloads[name] = type(self).downloads.get(name, 0) + 1
        if name.endswith(".tar") and type(self).failures > 0:
            type(self).failures -= 1
            self.send_error(503)
            return
        time.sleep(type(self).slow)
        if name.endswith(".tar") and type(self).cut > 0:
            type(self).cut -= 1
            data = Path(self.translate_path(self.path)).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
            return
        super().do_GET()


@pytest.fixture
def web(tmp_path, monkeypatch):
    """A folder, its address, and the handler class of the server that serves it."""
    folder = tmp_path / "web"
    folder.mkdir()
    handler = type("Handler", (Store,), {"downloads": {}})
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.01)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *a, **k: handler(*a, directory=str(folder), **k))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_address[1]}", handler
    server.shutdown()
    server.server_close()
    thread.join()


def copies(cache: Path) -> list[str]:
    return sorted(file.name[25:] for file in (cache / "shards").glob("*.tar"))


def test_http__same_samples_as_local_one_download_and_kept_index(web, tmp_path):
    folder, address, handler = web
    pattern = make_shards(folder, [3, 2])
    (folder / "classes.txt").write_text("x\ny\nz\n")
    local = open_samples(pattern, cache=str(tmp_path / "unused"))
    (folder / "s00.tar.idx").unlink()
    (folder / "s01.tar.idx").unlink()
    for _ in range(2):
        samples = open_samples(f"{address}/s{{00..01}}.tar", cache=str(tmp_path / "cache"))
        assert samples.classes == ("x", "y", "z")
        assert [samples.read(row) for row in range(5)] == [local.read(row) for row in range(5)]
        assert [samples.key(row) for row in range(5)] == [local.key(row) for row in range(5)]
    assert handler.downloads["s00.tar"] == handler.downloads["s01.tar"] == 1
    assert copies(tmp_path / "cache") == ["s00.tar", "s01.tar"]
    assert not list((tmp_path / "cache/shards").glob(".*.part"))


def test_http__index_beside_the_shards_needs_no_download(web, tmp_path):
    folder, address, handler = web
    make_shards(tmp_path, [6])
    pack(f"{tmp_path}/s00.tar", folder, options=PackOptions(shard_size=3), report=lambda text: None)
    samples = open_samples(f"{address}/train-{{00000..00001}}.tar", cache=str(tmp_path / "cache"))
    assert len(samples) == 6 and "train-00000.tar" not in handler.downloads
    samples.read(0)
    assert handler.downloads["train-00000.tar"] == 1 and "train-00001.tar" not in handler.downloads
    data = bytearray((folder / "train-00001.tar").read_bytes())
    data[600] ^= 1  # same size, other bytes than the index was made of
    (folder / "train-00001.tar").write_bytes(data)
    with pytest.raises(ValueError, match=r"train-00001\.tar: its SHA-256 is .* replaced or damaged"):
        samples.read(5)


def test_http__retries_then_a_clear_end(web, tmp_path):
    folder, address, handler = web
    make_shards(folder, [2])
    handler.failures, handler.cut = 2, 2
    samples = open_samples(f"{address}/s00.tar", cache=str(tmp_path / "cache"))
    assert samples.read(1) == picture(1) and handler.downloads["s00.tar"] == 5
    handler.failures = 1000
    with pytest.raises(
        OSError, match=rf"{address}/s00\.tar: gave up after 5 tries; the last: ClientResponseError: 503"
    ):
        open_samples(f"{address}/s00.tar", cache=str(tmp_path / "other"))
    assert not list((tmp_path / "other/shards").glob("*.tar"))
    with pytest.raises(FileNotFoundError, match=rf"{address}/none\.tar"):
        open_samples(f"{address}/none.tar", cache=str(tmp_path / "cache"))


def test_http__a_changed_shard_is_indexed_and_fetched_again(web, tmp_path):
    folder, address, _ = web
    make_shards(folder, [2])
    assert len(open_samples(f"{address}/s00.tar", cache=str(tmp_path / "cache"))) == 2
    make_shards(folder, [5])
    samples = open_samples(f"{address}/s00.tar", cache=str(tmp_path / "cache"))
    assert len(samples) == 5 and samples.read(4) == picture(4)


def fetch_all(cache: RemoteCache, urls: list[str], found) -> None:
    found.put([len(os.pread(cache.open(url), 100, 0)) for url in urls])


def test_cache__several_ranks_download_once(web, tmp_path):
    folder, address, handler = web
    make_shards(folder, [4, 4])
    handler.slow = 0.2
    urls = [f"{address}/s00.tar", f"{address}/s01.tar"]
    versions = {url: remote.version(url) for url in urls}
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    ranks = [
        context.Process(
            target=fetch_all, args=(RemoteCache(folder=tmp_path, limit=10**7, versions=versions), urls, found)
        )
        for _ in range(3)
    ]
    for rank in ranks:
        rank.start()
    assert [found.get(timeout=20) for _ in ranks] == [[100, 100]] * 3
    for rank in ranks:
        rank.join()
    assert handler.downloads == {"s00.tar": 1, "s01.tar": 1}


def test_cache__bounded_and_least_recently_used_goes(web, tmp_path):
    folder, address, _ = web
    make_shards(folder, [2, 2, 2, 2])
    size = (folder / "s00.tar").stat().st_size
    urls = [f"{address}/s{number:02d}.tar" for number in range(4)]
    cache = RemoteCache(
        folder=tmp_path / "c", limit=2 * size + 100, versions={url: remote.version(url) for url in urls}
    )
    held = cache.open(urls[0])
    for place in (1, 0, 2):  # 0 is used again, so 1 makes room for 2
        time.sleep(0.02)
        os.close(cache.open(urls[place]))
        assert sum(file.stat().st_size for file in (tmp_path / "c/shards").glob("*.tar")) <= cache.limit
    assert copies(tmp_path / "c") == ["s00.tar", "s02.tar"]
    os.close(cache.open(urls[3]))
    assert len(os.pread(held, 10**7, 0)) == size  # a removed copy can still be read by whoever has it open
    stale = tmp_path / "c/shards" / f".{'0' * 24}-dead.tar.{size}.part"  # what a killed download leaves
    stale.write_bytes(bytes(size))
    os.close(cache.open(urls[1]))
    assert not stale.exists()
    small = RemoteCache(folder=tmp_path / "d", limit=100, versions=dict(cache.versions))
    with pytest.raises(ValueError, match=r"more than data.cache_gb=1e-07 holds; raise it"):
        small.open(urls[0])
    os.close(held)


def test_loader__refuses_a_cache_smaller_than_the_window(web, tmp_path):
    folder, address, _ = web
    make_shards(folder, [4, 4, 4])
    size = (folder / "s00.tar").stat().st_size
    data = DataConfig(train=f"{address}/s{{00..02}}.tar", cache=str(tmp_path), cache_gb=1.5 * size / 1e9, window=2)
    samples = open_split(data, "train")
    with pytest.raises(ValueError, match=r"data.window=2 shards .* data.cache_gb=.*; raise it, or lower data.window"):
        build_train_order(samples, data=data, seed=0, global_batch=4, images_per_device=4)
    with pytest.raises(
        ValueError, match=r"data.val has a shard of .* GB, more than the cache .*data.cache_gb=.*raise it"
    ):
        open_data(replace(data, val=data.train, cache_gb=0.5 * size / 1e9))


def test_a_run_is_refused_before_its_folder_exists(web, tmp_path, capsys):
    folder, address, _ = web
    make_shards(folder, [20, 20])
    words = [
        f"data.train={address}/s{{00..01}}.tar",
        "data.val=null",
        f"data.cache={tmp_path / 'c'}",
        f"data.cache_gb={1.5 * (folder / 's00.tar').stat().st_size / 1e9}",
    ]
    words = tiny(*words, "task.num_classes=0", "data.fraction=1.0", f"out={tmp_path / 'run'}")
    for dry_run in ("false", "true"):
        assert main([*words, f"dry_run={dry_run}"]) == 2
        assert "raise it, or lower data.window (0 is all shards)" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()


def test_loader__workers_fetch_through_a_small_cache(web, tmp_path):
    folder, address, _ = web
    pattern = make_shards(folder, [4, 4, 4, 4])
    size = (folder / "s00.tar").stat().st_size
    data = DataConfig(
        train=f"{address}/s{{00..03}}.tar", cache=str(tmp_path / "c"), cache_gb=2.2 * size / 1e9, window=1
    )
    found = {}
    for name, section in (("remote", data), ("local", DataConfig(train=pattern, window=1))):
        samples = open_split(section, "train")
        order = build_train_order(samples, data=section, seed=0, global_batch=4, images_per_device=4)
        loader = build_train_loader(samples, noisy, data=section, order=order, workers=1, image_size=8)
        found[name] = [batch["image"].clone() for _ in range(2) for batch in loader]
    assert len(found["remote"]) == 8
    assert all(bool((a == b).all()) for a, b in zip(found["remote"], found["local"], strict=True))
    assert len(copies(tmp_path / "c")) <= 2


def test_index__a_copy_that_was_evicted_before_it_was_read_is_fetched_again(web, tmp_path, monkeypatch):
    folder, address, _ = web
    make_shards(folder, [4])
    fetch, calls = RemoteCache.fetch, []

    def evicted_once(self, url):
        path = fetch(self, url)
        calls.append(url)
        if len(calls) == 1:
            path.unlink()
        return path

    monkeypatch.setattr(RemoteCache, "fetch", evicted_once)
    samples = open_samples(f"{address}/s00.tar", cache=str(tmp_path / "c"))
    assert len(samples) == 4 and len(calls) == 2


@pytest.fixture(scope="module")
def bucket():
    """An S3 server on loopback with one bucket, and boto3's client for it."""
    pytest.importorskip("s3fs")
    server_module = pytest.importorskip("moto.server")
    import boto3

    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    variables = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        client = boto3.client("s3", endpoint_url=endpoint)
        client.create_bucket(Bucket="shards")
        yield client
    server.stop()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_s3__glob_braces_read_and_train(bucket, tmp_path):
    pattern = make_shards(tmp_path, [5, 3])
    for file in tmp_path.glob("*.tar"):
        bucket.upload_file(str(file), "shards", f"set/{file.name}")
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    bucket.upload_file(str(tmp_path / "classes.txt"), "shards", "set/classes.txt")
    local = open_samples(pattern)
    for name in ("s3://shards/set/s*.tar", "s3://shards/set/s{00..01}.tar"):
        samples = open_samples(name, cache=str(tmp_path / "cache"))
        assert len(samples) == 8 and samples.classes == ("a", "b", "c")
        assert [samples.read(row) for row in range(8)] == [local.read(row) for row in range(8)]
    data = DataConfig(train="s3://shards/set/s{00..01}.tar", cache=str(tmp_path / "fresh"))
    samples = open_split(data, "train")
    for file in (tmp_path / "fresh/shards").glob("*.tar"):
        file.unlink()  # so that the worker has to fetch after a fork from a process that used the store
    order = build_train_order(samples, data=data, seed=0, global_batch=4, images_per_device=4)
    loader = build_train_loader(samples, noisy, data=data, order=order, workers=1, image_size=8)
    assert sorted(row for batch in loader for row in batch["index"].tolist()) == list(range(8))
    with pytest.raises(FileNotFoundError, match="matches no file"):
        open_samples("s3://shards/none/*.tar", cache=str(tmp_path / "cache"))
    with pytest.raises(FileNotFoundError, match=r"s3://shards/none/x\.tar"):
        open_samples("s3://shards/none/x.tar", cache=str(tmp_path / "cache"))


def test_version__names_the_file(tmp_path):
    assert Version(3, "x") == (3, "x")
    with pytest.raises(ValueError, match=r"nope://x/y\.tar: Protocol not known: nope"):
        remote.version("nope://x/y.tar")
