"""Words to Config: every mistake is one line that names the key, the value and what would be right; valid words still work."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from vitfw.config import RECIPE_SECTIONS, Config, ConfigError, keys, load, names_of
from vitfw.train import main

ROOT = Path(__file__).parent.parent

REFUSALS = [
    ("optim.lrr=1", "optim.lrr=1: no such key; did you mean optim.lr"),
    ("optm.lr=1", "optm.lr=1: no such key; did you mean optim.lr"),
    ("lr=1", "lr=1: no such key; did you mean optim.lr"),
    ("data.balence=sqrt", "data.balence=sqrt: no such key; did you mean data.balance"),
    ("optim.lr.x=1", "optim.lr.x=1: no such key"),
    ("optim=5", "optim=5: optim is a section; set its keys, such as optim."),
    ("task=classify", "task=classify: task is a section; set its keys, such as task.name"),
    ("optim.lr=abc", "optim.lr=abc: must be a number or null"),
    ("train.global_batch=3.7", "train.global_batch=3.7: must be an integer"),
    ("log.wandb=perhaps", "log.wandb=perhaps: must be true or false"),
    ("machine.precision=int8", "machine.precision=int8: must be fp32|bf16|fp16"),
    ("lr", "lr: not of the form key=value; did you mean optim.lr=..."),
    ("--optim.lr=1", "--optim.lr=1: options are words without dashes; write optim.lr=1"),
    ("recipe=digitz", "recipe=digitz: no such recipe; did you mean digits"),
    ("machine=gpu88", "machine=gpu88: no such machine; did you mean gpu8"),
    ("task.name=clasify", "task.name=clasify: no such task; did you mean classify"),
    ("train.epochs=-1", "train.epochs=-1"),
    ("optim.lr=nan", "optim.lr=nan: must be a finite number"),
    ("optim.lr=inf", "optim.lr=inf: must be a finite number"),
    ("augment.mean=[nan]", "augment.mean=[nan]: must be a finite number"),
    ("train.epochs=1e99", "train.epochs"),
    ("task.num_classes=1e99", "task.num_classes=1e99: is larger than any meaningful number here"),
    ("optim.lr=[", "optim.lr=[: must be a number or null"),
    ("optim.lr=!!python/object:os.system", "optim.lr=!!python/object:os.system: must be a number or null"),
    ("machine_name=cpu", "machine_name=cpu: write machine=cpu"),
    ("stop_after=0", "stop_after=0: must be at least 1 step"),
    ("machine.workers=-2", "machine.workers=-2: must be -1 (automatic) or more"),
]


@pytest.mark.parametrize(("word", "text"), REFUSALS)
def test_refusals(word: str, text: str) -> None:
    """P18."""
    words = [word] if word.startswith("recipe=") else ["recipe=digits", word]
    with pytest.raises(ConfigError) as caught:
        load(words)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_refuses_the_same_key_twice_with_different_values() -> None:
    with pytest.raises(ConfigError, match=r"optim\.lr is given twice with different values: 1 and 2"):
        load(["recipe=digits", "optim.lr=1", "optim.lr=2"])
    assert load(["recipe=digits", "optim.lr=1", "optim.lr=1"]).optim.lr == 1


def test_a_missing_recipe_lists_the_recipes() -> None:
    with pytest.raises(ConfigError, match=r"recipe=NAME is missing; recipes: .*digits"):
        load(["optim.lr=1"])


BAD_WORDS = [["optim.lrr=1"], ["optm.lr=1"], ["optim=5"], ["lr"], ["recipe=none_such"], ["machine=none_such"]]


@pytest.mark.parametrize("words", BAD_WORDS)
def test_a_refusal_is_one_line_and_makes_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    given = words if words[0].startswith("recipe=") else ["recipe=digits", *words]
    assert main([*given, f"out={tmp_path / 'run'}"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and words[0].partition("=")[0] in lines[0]
    assert not (tmp_path / "run").exists()


def test_the_command_itself_ends_with_status_2(tmp_path: Path) -> None:
    command = [sys.executable, "train.py", "recipe=digits", "optim.lrr=1", f"out={tmp_path / 'run'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "vitfw: optim.lrr=1: no such key; did you mean optim.lr?\n"
    assert not (tmp_path / "run").exists()


def test_a_word_takes_the_declared_type() -> None:
    config = load(
        [
            "recipe=digits",
            "train.global_batch=1e2",
            "optim.lr=1e-3",
            "optim.betas=[0.9,0.95]",
            "data.train=a-{0..3}.tar",
        ]
    )
    assert config.train.global_batch == 100 and isinstance(config.train.global_batch, int)
    assert config.optim.lr == 1e-3
    assert config.optim.betas == (0.9, 0.95)
    assert config.data.train == "a-{0..3}.tar"


def test_words_win_over_machine_and_recipe(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text("machine: {images_per_device: 7}\nlog: {every: 3}\n")
    (tmp_path / "r.yaml").write_text("extends: digits\ntrain: {epochs: 2}\n")
    config = load([f"recipe={tmp_path / 'r.yaml'}", f"machine={tmp_path / 'm.yaml'}", "log.every=4"])
    assert (config.machine.images_per_device, config.log.every, config.train.epochs) == (7, 4, 2)
    assert config.model == load(["recipe=digits"]).model


def test_a_machine_file_names_no_hyperparameter_and_a_recipe_no_machine(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text("optim: {lr: 1.0}\n")
    with pytest.raises(ConfigError, match=r"optim\.lr may change the result and belongs in a recipe"):
        load(["recipe=digits", f"machine={tmp_path / 'm.yaml'}"])
    (tmp_path / "r.yaml").write_text("machine: {workers: 1}\n")
    with pytest.raises(ConfigError, match="machine does not belong in a recipe"):
        load([f"recipe={tmp_path / 'r.yaml'}"])


def test_a_misspelt_key_in_a_recipe_names_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("optim: {lrr: 1.0}\n")
    with pytest.raises(
        ConfigError, match=r"optim\.lrr=1\.0: no such key \(in recipe .*r\.yaml\); did you mean optim\.lr"
    ):
        load([f"recipe={tmp_path / 'r.yaml'}"])
    (tmp_path / "r.yaml").write_text("optim: {lr: 1.0}\noptim: {lr: 2.0}\n")
    with pytest.raises(ConfigError, match=r"r\.yaml"):
        load([f"recipe={tmp_path / 'r.yaml'}"])


@pytest.mark.parametrize("content", [b"\xff\xfe", b"- a\n- b\n", b"", b"optim: {lr: 1\n", b"\t\n"])
def test_a_recipe_that_is_none_is_refused_by_its_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "r.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load([f"recipe={tmp_path / 'r.yaml'}"])
    assert "r.yaml" in str(caught.value) and "\n" not in str(caught.value)


def test_a_parent_that_is_none_is_refused_by_its_name(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("extends: deit_bb\noptim: {lr: 1.0e-3}\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml: extends: deit_bb: no such recipe; did you mean deit_b"):
        load([f"recipe={recipe}"])


def test_types_are_told_in_words() -> None:
    """No key's type shows Python's own spelling of it."""
    for name, kind, *_ in keys():
        assert not {"Optional", "Literal", "Union", "typing", "tuple", "None"} & set(re.findall(r"\w+", kind)), (
            name,
            kind,
        )
    told = {name: kind for name, kind, *_ in keys()}
    assert told["optim.betas"] == "a list of 2 numbers or null"
    assert told["load.fresh"] == "a list of texts"
    assert load(["recipe=digits", "model.position=none"]).model.position == "none"  # a value of its own
    assert load(["recipe=digits", "model.position=null"]).model.position is None
    assert load(["recipe=digits", "model.pool=none"]).model.pool is None  # else none, None and null are the same


def test_extends_is_one_level(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: digits\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(ConfigError, match="one level only"):
        load([f"recipe={tmp_path / 'b.yaml'}"])


def test_config_is_frozen() -> None:
    config = load(["recipe=digits"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.epochs = 3  # type: ignore[misc]


def test_the_recipe_part_can_be_given_back_as_a_recipe(tmp_path: Path) -> None:
    config = load(["recipe=digits", "optim.lr=0.5", "model.drop_path=0.2"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.recipe_part()))
    again = load([f"recipe={tmp_path / 'config.yaml'}"])
    assert again.recipe_part() == config.recipe_part()


@pytest.mark.parametrize("name", names_of("recipes"))
def test_every_recipe_loads(name: str) -> None:
    config = load([f"recipe={name}"])
    assert isinstance(config, Config)


@pytest.mark.parametrize("name", names_of("configs"))
def test_every_machine_loads(name: str) -> None:
    assert load(["recipe=digits", f"machine={name}"]).machine_name == name


def test_every_key_has_a_help_text() -> None:
    rows = list(keys())
    assert {key.partition(".")[0] for key, *_ in rows} >= set(RECIPE_SECTIONS)
    assert not [key for key, _, _, text in rows if not text]
