"""The words of a ladder: which stage they reach, what is refused before the first stage starts."""

from pathlib import Path

import pytest
from ladder_words import RUNGS, SMALL, run, weights

from vitfw.config import ConfigError, load
from vitfw.ladder import is_ladder, ladder_names, read_plan
from vitfw.ladder_plan import unread


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
    assert "optim.lr=0.01" in plan.of("last_block") and "model.width=64" in plan.of("full")
    assert "optim.lr=0.5" in read_plan(["recipe=ladder_digits", "optim.lr=0.5"]).of("full")  # words stand over both


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["ladder.seeds=0"], r"ladder.seeds=0: must be 1 or more"),
        (["ladder.sedes=2"], r"sedes"),
        (["ladder.rungs=[probe,top]"], r"ladder.rungs: the recipe has no top; it has probe, last_block, full"),
        (["ladder.rungs=[full]", "probe.optim.lr=1"], r"probe.optim.lr: probe is not among ladder.rungs=\['full'\]"),
        (["probe.out=x"], r"probe.out: the ladder sets it for every rung"),
        (["seeds"], r"seeds: not of the form key=value"),
        (["ladder.probe=both"], r"ladder.probe=both: .*grid.*train"),
        (["grid.rates=[0]"], r"grid.rates=\(0.0,\): one or more numbers above 0"),
        (["grid.pools=[cls]"], r"grid.pools"),
        (["grid.holdout=1"], r"grid.holdout=1.0: must lie between 0 and 1"),
        (["pretrain.train.epochs=3"], r"pretrain.train.epochs: recipe ladder has no pretraining"),
        (["full.dry_run=true"], r"full.dry_run: write dry_run=true, it is one plan of all stages"),
    ],
)
def test_words__mistakes_are_named(words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read_plan(["recipe=ladder", *words])


def test_is_ladder__only_for_a_ladders_recipe(tmp_path: Path) -> None:
    assert is_ladder(["recipe=ladder"]) and set(ladder_names()) == {
        "ladder",
        "ladder_digits",
        "mae_b_stages",
        "mae_digits_stages",
    }
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


@pytest.mark.parametrize(
    "word", ["optim.lr=3e-3", "train.epochs=5", "stop_after=2", "augment.mixup=0.8", "task.smoothing=0.1"]
)
def test_a_word_that_the_grid_would_not_read_is_refused(word: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"probe.{word}: the rung probe chooses its head on stored features .* "
        r"set grid.KEY \(rates, epochs, batch, ...\), or train it as a run with ladder.probe=train",
    ):
        run([*SMALL, f"probe.{word}"])


def test_words_for_all_rungs__the_grid_reads_images_and_network_and_no_training() -> None:
    read = ["model.width=24", "data.per_class=6", "task.num_classes=10", "augment.eval_crop=0.9", "load.prefix=x."]
    read += ["augment.policy=digits", "machine.workers=0", "freeze.rung=probe", "weights=w", "train.seed=3"]
    left = ["optim.lr=1", "train.epochs=2", "ema.decay=0.9", "guard.patience=3", "eval.every_epochs=1", "stop_after=9"]
    left += ["augment.mixup=0.8", "task.class_weights=balanced", "data.balance=class"]
    assert unread(dict(word.split("=") for word in read + left)) == left


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["recipe=ladder", "full.model.pool=gap"], r"the head of probe .* model.pool=cls, and full has model.pool=gap"),
        (["recipe=mae_b_stages"], r"the head of probe .* model.pool=cls, and full has model.pool=gap; make them equal"),
        (
            ["recipe=ladder", "model.pool=gap", "full.model.final_norm=pooled"],
            r"model.final_norm=tokens, and full has model.final_norm=pooled",
        ),
    ],
)
def test_a_head_is_not_carried_to_where_it_would_read_something_else(words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        run([*words, "dry_run=true", "ladder.carry_head=true"])


# Stages


def test_pretraining__gets_the_words_that_say_where_and_its_own() -> None:
    plan = read_plan(
        [
            "recipe=mae_digits_stages",
            "out=x",
            "machine=cpu",
            "data.val=v.tar",
            "data.per_class=10",
            "train.epochs=3",
            "log.every=7",
            "pretrain.train.epochs=9",
            "pretrain.optim.lr=0.5",
        ]
    )
    own, full = plan.of("pretrain"), plan.of("full", 0)
    assert {"recipe=mae_digits", "machine=cpu", "data.val=v.tar", "log.every=7", "train.epochs=9"} <= set(own)
    assert "optim.lr=0.5" in own and "out=x/pretrain" in own
    assert not [word for word in own if word.startswith(("data.per_class", "weights", "train.seed"))]
    assert {"data.per_class=10", "train.epochs=3", "weights=x/pretrain/checkpoints/last.ckpt"} <= set(full)


def test_stages_of_the_paper__are_its_three_recipes() -> None:
    plan = read_plan(["recipe=mae_b_stages", "data.train=t", "data.val=v"])
    pretrain, probe, full = (load(plan.of(stage)) for stage in ("pretrain", *plan.ladder.rungs))
    assert (pretrain.recipe, probe.recipe, full.recipe) == ("mae_b", "mae_b_probe", "mae_b_finetune")
    assert (pretrain.train.epochs, probe.train.epochs, full.train.epochs) == (800, 90, 100)
    assert pretrain.weights is None and probe.weights == full.weights == str(plan.weights)
    assert not plan.is_grid(probe) and probe.task.name == "mae_probe" and full.load.final_norm == "fresh"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["weights=w"], r"weights=w: this ladder makes its own weights; .* pretrain.weights=, .* recipe=ladder"),
        (["pretrain.out=x"], r"pretrain.out: the ladder sets it for every stage"),
        (["pretrain.recipe=mae_s"], r"pretrain.recipe: the ladder sets it"),
    ],
)
def test_stages__mistakes_are_named(words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read_plan(["recipe=mae_digits_stages", *words])


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("model.width=48", r"model.width|heads|shape|64|48"),
        ("pretrain.model.width=48", r"48"),
        ("full.optim.lr=-1", r"optim.lr"),
        ("pretrain.task.mask_ratio=2", r"mask_ratio"),
    ],
)
def test_stages__what_would_not_fit_after_pretraining_is_refused_before_it(
    word: str, text: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=text):
        run(["recipe=mae_digits_stages", "machine.workers=0", "machine.threads=1", word, f"out={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("recipe", ["ladder", "mae_digits_stages", "mae_b_stages"])
def test_dry_run__plans_every_stage_once_and_writes_nothing(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([f"recipe={recipe}", "dry_run=true", f"out={tmp_path / 'out'}"]) == 0
    shown = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("#### ")]
    plan = read_plan([f"recipe={recipe}"])
    assert shown == ["pretrain"] * plan.pretrains + list(plan.ladder.rungs) and not (tmp_path / "out").exists()
