"""Classes of weights and of data: matched by name or refused; heads with more outputs, or none; faults that end in a sentence."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import tiny
from make_shards import write_tar
from PIL import Image

from vitfw import cli
from vitfw.data.index import open_samples
from vitfw.evaluate_command import evaluate_place
from vitfw.models.build import build_model
from vitfw.models.export import export
from vitfw.models.model_config import ModelConfig
from vitfw.models.preprocess import Preprocessing
from vitfw.models.reading import read
from vitfw.probe_command import probe_place
from vitfw.train import main as train_main

DATA = "data/digits"
QUICK = ["machine.workers=0", "machine.threads=1"]


def weights(folder: Path, *, classes: int = 10, names: tuple[str, ...] = ()) -> str:
    torch.manual_seed(0)
    config = ModelConfig(variant="vit_ti2", image_size=8, in_channels=1, width=24, depth=1, heads=2)
    prepared = Preprocessing(size=(8, 8), mean=(0.5,), std=(0.5,), crop=1.0, class_names=names)
    export(build_model(config, num_classes=classes), folder, preprocessing=prepared)
    return str(folder)


def shards(folder: Path, split: str, order: list[int], *, bad: int = 0) -> str:
    """The digits of a split with their classes numbered by `order`, whose names are the digits; `bad`: broken images."""
    samples, members = open_samples(f"{DATA}/{split}-00000.tar"), []
    folder.mkdir()
    for row in range(len(samples)):
        digit = samples.label(row)
        if digit in order:
            content = b"trash" if row < bad else samples.read(row)
            members += [
                (f"{row:04d}.png", content),
                (f"{row:04d}.json", json.dumps({"label": order.index(int(digit))}).encode()),
            ]
    write_tar(folder / "a.tar", members)
    (folder / "classes.txt").write_text("".join(f"{digit}\n" for digit in order))
    return f"{folder}/a.tar"


TEN = tuple(str(digit) for digit in range(10))


def test_eval__classes_are_matched_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = weights(tmp_path / "w", names=TEN)
    straight = evaluate_place(place, [*QUICK, f"data.val={DATA}/val-00000.tar"])
    assert "matched by name" not in capsys.readouterr().out
    turned = shards(tmp_path / "turned", "val", list(range(9, -1, -1)))
    found = evaluate_place(place, [*QUICK, f"data.val={turned}"])
    assert found["scores"] == straight["scores"] and found["confusion"] == straight["confusion"]
    assert "data.val lists its 10 classes otherwise than the weights" in capsys.readouterr().out
    part = evaluate_place(place, [*QUICK, f"data.val={shards(tmp_path / 'part', 'val', [7, 3])}"])
    assert [row["images"] for row in part["classes"]] == [
        row["images"] if row["name"] in "73" else 0 for row in straight["classes"]
    ]
    other = weights(tmp_path / "other", names=tuple("abcdefghij"))
    with pytest.raises(ValueError, match=r"data.val: 10 of its 10 classes are unknown to the weights at .*: 0, 1, 2;"):
        evaluate_place(other, [*QUICK, f"data.val={DATA}/val-*.tar"])
    with pytest.raises(ValueError, match=r"2 of the set's 10 classes are unknown to the model: 8, 9"):
        eight = weights(tmp_path / "eight", classes=8, names=TEN[:8])
        evaluate_place(eight, [*QUICK, f"data.val={tmp_path / 'part' / 'a.tar'}", f"robustness.v2={DATA}/val-*.tar"])


def test_eval__a_head_with_more_outputs_and_one_with_none(tmp_path: Path) -> None:
    for number, names in enumerate(((), TEN)):
        wide = weights(tmp_path / f"wide{number}", classes=20, names=names)
        file = tmp_path / f"{number}.csv"
        found = evaluate_place(wide, [*QUICK, f"data.val={DATA}/val-00000.tar", f"predictions={file}"])
        assert [row["name"] for row in found["classes"]] == [str(output) for output in range(20)]
        assert len(found["confusion"]) == 20 and "logit_19" in file.read_text().splitlines()[0]
    narrow = weights(tmp_path / "narrow", classes=4)
    with pytest.raises(ValueError, match=r"data.val has labels up to 9, the network at .* has 4 outputs"):
        evaluate_place(narrow, [*QUICK, f"data.val={DATA}/val-00000.tar"])
    encoder = weights(tmp_path / "encoder", classes=0)
    with pytest.raises(ValueError, match=r"the network has no head with classes, so there is no answer to score"):
        evaluate_place(encoder, [*QUICK, f"data.val={DATA}/val-00000.tar"])


def test_probe__classes_of_both_sets_are_matched_by_name(tmp_path: Path) -> None:
    place = weights(tmp_path / "w", classes=0)
    words = [*QUICK, f"data.train={DATA}/train-00000.tar", f"features.folder={tmp_path / 'f'}"]
    words += ["methods=[knn]", "knn.neighbours=[5]"]
    straight = probe_place(place, [*words, f"data.val={DATA}/val-00000.tar"])
    turned = probe_place(place, [*words, f"data.val={shards(tmp_path / 'turned', 'val', list(range(9, -1, -1)))}"])
    assert turned["knn_5"]["scores"] == straight["knn_5"]["scores"]
    few = shards(tmp_path / "few", "train", [0, 1, 2])
    with pytest.raises(ValueError, match=r"data.val: 7 of its 10 classes are unknown to data.train: 3, 4, 5"):
        probe_place(place, [*words[:2], f"data.train={few}", *words[3:], f"data.val={DATA}/val-00000.tar"])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_which__of_a_finished_run_reads_the_checkpoint_of_that_kind(tmp_path: Path) -> None:
    run = tmp_path / "a=b" / "run"
    assert train_main(tiny(f"out={run}", "data.trace=false")) == 0
    raw, averaged, auto = read(run, which="raw"), read(run, which="ema"), read(run)
    assert Path(raw.place).name == "best.ckpt" and raw.entry == "model"
    assert Path(averaged.place).name == "best_ema.ckpt" and averaged.entry == "ema"
    assert Path(auto.place).name == "export"
    found = [evaluate_place(str(run), [*QUICK, f"data.val={DATA}/val-00000.tar", f"which={w}"]) for w in ("raw", "ema")]
    assert found[0]["scores"] != found[1]["scores"] and [one["entry"] for one in found] == ["model", "ema"]
    inside = [str(run / "checkpoints"), f"data.val={DATA}/val-00000.tar", *QUICK]
    assert cli.main(["eval", *inside]) == 0  # and a place may have = in its path
    (run / "checkpoints").rename(run / "gone")
    with pytest.raises(ValueError, match=r"raw weights are read from the run's checkpoints, and there is neither best"):
        read(run, which="raw")
    (run / "export").rename(run / "gone2")
    assert cli.main(["eval", *inside]) == 2


def test_bad_images__end_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = weights(tmp_path / "w", names=TEN)
    broken = shards(tmp_path / "broken", "val", list(range(10)), bad=20)
    assert cli.main(["eval", place, f"data.val={broken}", *QUICK]) == 2
    assert "over data.bad_limit=0.01" in capsys.readouterr().err
    files = [str(tmp_path / name) for name in ("one.png", "bad.png", "two.png")]
    for file in files[::2]:
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(file)
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64), np.uint8)).save(buffer, "png")
    Path(files[1]).write_bytes(buffer.getvalue()[:600])
    assert cli.main(["predict", place, *files]) == 1
    said = capsys.readouterr()
    assert [line.split("\t")[0] for line in said.out.splitlines()] == files[::2]
    assert f"vitfw: {files[1]}: " in said.err
