"""The versions of other packages that vitfw declares, compared with those installed, before any of them is imported."""

import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement


def check_versions() -> None:
    """Raises ImportError that names every package which is missing or too old, and the command that mends it."""
    wanted = [requirement for requirement in declared() if requirement.marker is None]
    wrong = [(requirement, _installed(requirement.name)) for requirement in wanted]
    wrong = [(wish, found) for wish, found in wrong if found is None or not wish.specifier.contains(found, True)]
    if wrong:
        told = "; ".join(f"{wish}, {'found ' + found if found else 'which is not installed'}" for wish, found in wrong)
        command = " ".join(f"'{wish}'" for wish, _ in wrong)
        raise ImportError(f"vitfw needs {told}. To mend it: python -m pip install --upgrade {command}")


def declared() -> list[Requirement]:
    """What pyproject.toml names: of a clone from the file itself, else as the installed package carries it."""
    file = Path(__file__).parent.parent / "pyproject.toml"
    if file.is_file():
        lines = tomllib.loads(file.read_text(encoding="utf-8"))["project"]["dependencies"]
    else:
        lines = requires("vitfw") or []
    return [Requirement(line) for line in lines]


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
