"""The ladder as a command: its words, its refusals, and a stop in every rung."""

from pathlib import Path

import pytest
import torch

from vitfw import checkpoint
from vitfw.config import ConfigError
from vitfw.ladder import is_ladder, ladder_names, read_plan, read_results, run_ladder
from vitfw.models.build import build_model
from vitfw.models.export import export
from vitfw.models.model_config import ModelConfig
from vitfw.models.preprocess import Preprocessing
from vitfw.train import train

RUNGS = ("probe", "last_block", "full")
SMALL = [
    "recipe=ladder_digits",
    "data.per_class=6",
    "train.epochs=2",
    "train.global_batch=20",
    "last_block.optim.warmup_epochs=0",
    "full.optim.warmup_epochs=0",
    "machine.workers=0",
    "machine.threads=1",
    "model.depth=2",
    "model.width=24",
    "model.heads=2",
    "model.position=learned",
    "log.progress=off",
]


def weights(folder: Path) -> str:
    torch.manual_seed(0)
    config = ModelConfig(
        variant="vit_ti2", image_size=8, in_channels=1, width=24, depth=2, heads=2, mlp_ratio=2.0, pool="gap",
        class_token=False,
    )  # fmt: skip
    prepared = Preprocessing(size=(8, 8), mean=(0.5,), std=(0.5,), crop=1.0)
    export(build_model(config, num_classes=10), folder, preprocessing=prepared)
    return str(folder)


def run(words: list[str]) -> int:
    return run_ladder(words, train)


# Words


def test_words__go_to_every_rung_or_to_the_one_they_name() -> None:
    plan = read_plan(
        [
            "recipe=ladder",
            "weights=w.ckpt",
            "optim.weight_decay=0.1",
            "probe.optim.lr=3e-3",
            "ladder.seeds=2",
            "load.prefix=x.",
        ]
    )
    assert plan.ladder.rungs == RUNGS and plan.ladder.seeds == 2 and plan.out == Path("runs/ladder")
    probe, full = plan.of("probe", 4), plan.of("full", 4)
    assert {"recipe=probe", "optim.lr=3e-3", "optim.weight_decay=0.1", "weights=w.ckpt", "train.seed=4"} <= set(probe)
    assert "recipe=finetune" in full and "optim.lr=3e-3" not in full and "out=runs/ladder/full-seed4" in full
    carried = plan.of("full", 4, carried=Path("head.ckpt"))
    assert "load.prefix=x." in full and "load.prefix=x." not in carried  # that was said of the other file
    assert {"weights=head.ckpt", "load.head=keep"} <= set(carried) and "weights=w.ckpt" not in carried


def test_words__one_rungs_own_setting_stands_over_that_of_all_in_the_recipe() -> None:
    plan = read_plan(["recipe=ladder_digits"])
    assert "optim.lr=0.01" in plan.of("probe") and "model.width=64" in plan.of("full")
    assert "optim.lr=0.5" in read_plan(["recipe=ladder_digits", "optim.lr=0.5"]).of("probe")  # words stand over both


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["ladder.seeds=0"], r"ladder.seeds=0: must be 1 or more"),
        (["ladder.sedes=2"], r"sedes"),
        (["ladder.rungs=[probe,top]"], r"ladder.rungs: the recipe has no top; it has probe, last_block, full"),
        (["ladder.rungs=[full]", "probe.optim.lr=1"], r"probe.optim.lr: probe is not among ladder.rungs=\['full'\]"),
        (["probe.out=x"], r"probe.out: the ladder sets it for every rung"),
        (["seeds"], r"seeds: not of the form key=value"),
    ],
)
def test_words__mistakes_are_named(words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read_plan(["recipe=ladder", *words])


def test_is_ladder__only_for_a_ladders_recipe(tmp_path: Path) -> None:
    assert is_ladder(["recipe=ladder"]) and set(ladder_names()) == {"ladder", "ladder_digits"}
    assert not is_ladder(["recipe=digits"]) and not is_ladder(["recipe=nowhere"]) and not is_ladder([])
    own = tmp_path / "own.yaml"
    own.write_text("ladder: {rungs: [a]}\na: {recipe: probe}\n")
    assert is_ladder([f"recipe={own}"]) and "recipe=probe" in read_plan([f"recipe={own}"]).of("a")


def test_a_mistake_in_a_later_rung_stops_before_the_first(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"freeze.blocks=2: the network has only 2"):
        run([*SMALL, "last_block.freeze.blocks=2", f"out={tmp_path / 'ladder'}", f"weights={weights(tmp_path / 'w')}"])
    assert not (tmp_path / "ladder").exists()


def test_a_ladder_without_what_it_compares_by_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.val is not given: a ladder compares its rungs on it"):
        run(["recipe=ladder", "data.train=data/digits/train-*.tar"])
    with pytest.raises(ConfigError, match=r"task.name=mae: a ladder compares top-1 accuracies"):
        run(["recipe=ladder", "data.val=data/digits/val-*.tar", "task.name=mae", "ladder.rungs=[probe]"])


# Runs


@pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning remarks that frozen modules are in evaluation mode
def test_a_ladder_stopped_in_every_rung_gives_the_table_of_the_uncut_one(tmp_path: Path) -> None:
    words = [*SMALL, f"weights={weights(tmp_path / 'weights')}"]
    assert run([*words, f"out={tmp_path / 'whole'}"]) == 0
    for rung in RUNGS:
        assert run([*words, f"out={tmp_path / 'cut'}", f"{rung}.stop_after=2"]) == 75
        assert not (tmp_path / "cut" / "ladder.json").exists()
    assert run([*words, f"out={tmp_path / 'cut'}"]) == 0
    whole, cut = read_results(tmp_path / "whole"), read_results(tmp_path / "cut")
    assert [result.rung for result in whole] == list(RUNGS) and len(cut) == 3
    assert all(a.same_outcome(b) for a, b in zip(whole, cut, strict=True))
    assert whole[0].trainable == 25 * 10 and whole[1].trainable < whole[2].trainable == whole[2].parameters
    assert (tmp_path / "whole" / "ladder.png").stat().st_size > 1_000
    text = (tmp_path / "whole" / "ladder.md").read_text()
    assert text.count("\n| ") == 4 and "Use " in text
    frozen_is_bit_equal(tmp_path)
    again = [(tmp_path / "whole" / "probe-seed0" / "rung.json").stat().st_mtime_ns]
    assert run([*words, f"out={tmp_path / 'whole'}"]) == 0  # a finished ladder only shows its table again
    assert again == [(tmp_path / "whole" / "probe-seed0" / "rung.json").stat().st_mtime_ns]


def frozen_is_bit_equal(folder: Path) -> None:
    """The frozen part of each rung's last checkpoint against the weights it began with."""
    from safetensors.torch import load_file

    before = load_file(folder / "weights" / "model.safetensors")
    for rung, free in (("probe", ("head.",)), ("last_block", ("blocks.1.", "norm.", "fc_norm.", "head."))):
        state = checkpoint.load(folder / "whole" / f"{rung}-seed0" / "checkpoints" / "last.ckpt")["model"]
        for name, value in before.items():
            found = state[next(key for key in state if key.endswith(f".{name}"))]
            assert torch.equal(found, value) == (not name.startswith(free)), (rung, name)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_carried_head__the_upper_rung_starts_from_the_probes(tmp_path: Path) -> None:
    words = [
        *(word for word in SMALL if not word.startswith("full.")),
        f"weights={weights(tmp_path / 'weights')}",
        "ladder.carry_head=true",
        "ladder.rungs=[probe,last_block]",
    ]
    out = tmp_path / "ladder"
    assert run([*words, "last_block.optim.lr=1e-12", f"out={out}"]) == 0
    heads = [
        checkpoint.load(out / f"{rung}-seed0" / "checkpoints" / "last.ckpt")["model"]
        for rung in ("probe", "last_block")
    ]
    name = next(key for key in heads[0] if key.endswith("head.weight"))
    torch.testing.assert_close(heads[0][name], heads[1][name])
