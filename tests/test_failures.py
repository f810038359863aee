"""docs/failures.md and the tests it names: every entry has tests that exist, and what tests name is on the page."""

import re
from pathlib import Path

from conftest import ROOT

PAGE = (ROOT / "docs" / "failures.md").read_text()
ROWS = {match[1]: match[2] for match in re.finditer(r"^\| (P\d\d) \|(.*)$", PAGE, re.MULTILINE)}


def names_in(path: Path) -> set[str]:
    return set(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE))


def test_every_entry_is_shown_by_tests_that_exist() -> None:
    assert len(ROWS) == len(re.findall(r"^\| P", PAGE, re.MULTILINE)) == 64
    for name, row in ROWS.items():
        named = re.findall(r"`([\w/]+)::(test_\w+)`", row)
        assert named, name
        for file, test in named:
            assert test in names_in(ROOT / "tests" / f"{file}.py"), f"{name}: {file}::{test}"


def test_every_name_in_a_test_stands_on_the_page() -> None:
    for path in (ROOT / "tests").rglob("test_*.py"):
        named = {f"P{number}" for number in re.findall(r"(?<![A-Za-z0-9])[Pp](\d\d)(?!\w*[=(]?\d)", path.read_text())}
        assert named <= ROWS.keys() or path.name == "test_failures.py", (path.name, named - ROWS.keys())
