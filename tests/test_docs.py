"""What the documents name exists: verbs, keys, recipes, files, tests."""

import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

from vitfw import cli
from vitfw.config import Config, keys, names_of
from vitfw.ladder import LadderConfig, ladder_names

DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "launch/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
SECTIONS = [field.name for field in dataclasses.fields(Config)]
KEYS = {name for name, *_ in keys()} | {f"ladder.{field.name}" for field in dataclasses.fields(LadderConfig)}


def code(document: Path) -> str:
    """Only what stands in backticks: fenced blocks and inline."""
    return "\n".join(found.strip("`") for found in re.findall(r"```.*?```|`[^`\n]+`", document.read_text(), re.DOTALL))


def commands(document: Path) -> Iterator[list[str]]:
    """The words of each `vitfw ...` in a document, lines that go on joined."""
    for line in code(document).replace("\\\n", " ").splitlines():
        if match := re.match(r"(?:\$ )?(?:\.venv/bin/)?vitfw (\S.*)", line.strip()):
            yield shlex.split(match[1], comments=True)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_verb_exists(document: Path) -> None:
    for words in commands(document):
        assert words[0] in cli.VERBS or not words[0].islower(), words


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_says_how_it_is_used(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`vitfw VERB --help` ends with 0 and a text, and the list of verbs has its first line."""
    try:
        status = cli.main([verb, "--help"])
    except SystemExit as left:
        status = int(left.code or 0)
    shown = capsys.readouterr().out
    assert status == 0 and len(shown) > 40
    assert cli.main(["--help"]) == 0
    assert f"  {verb} " in capsys.readouterr().out


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_key_exists(document: Path) -> None:
    """`section.key` and `section.key=value`; a rung's own words carry its name before the section."""
    named = set(
        re.findall(rf"(?<![\w./-])((?:{'|'.join([*SECTIONS, 'ladder'])})\.[a-z_0-9]+)(?![\w.(/])", code(document))
    )
    modules = {f"{path.parent.name}.{path.stem}" for path in (ROOT / "vitfw").rglob("*.py")}
    files = {name for name in named if name.endswith((".yaml", ".json", ".md", ".png", ".ckpt", ".py", ".txt"))}
    if document.name == "architecture.md":  # speaks of functions; everything with a value is a key there too
        named = {name for name in named if f"{name}=" in code(document)}
    assert not named - KEYS - modules - files


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_recipe_and_file_exists(document: Path) -> None:
    text = document.read_text()
    recipes = set(re.findall(r"(?<!\w)recipe=([a-z]\w*)(?![\w./])", code(document)))
    assert not recipes - {*names_of("recipes"), *ladder_names()}
    for link in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", text):
        assert (document.parent / link).exists(), link
    for path in re.findall(r"(?<![\w/.-])((?:benchmarks|tests|docs|launch|configs|recipes|vitfw)/[\w/.-]+\.\w+)", text):
        assert (ROOT / path).exists(), path
