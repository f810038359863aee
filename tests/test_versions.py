"""Another version than the declared ones is named before any work, with the command that mends it."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from conftest import ROOT

from vitfw import versions


def test_the_installed_ones_are_right() -> None:
    versions.check_versions()
    assert {"torch", "timm", "lightning", "webdataset"} <= {requirement.name for requirement in versions.declared()}


def test_old_and_missing_packages_are_named_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "omegaconf":
            raise metadata.PackageNotFoundError(name)
        return {"timm": "1.0.10", "torch": "2.9.0+cpu"}.get(name) or metadata.version(name)

    monkeypatch.setattr(versions, "version", version)
    with pytest.raises(ImportError) as caught:
        versions.check_versions()
    text = str(caught.value)
    assert "timm>=1.0.31, found 1.0.10" in text and "torch>=2.14, found 2.9.0+cpu" in text
    assert "omegaconf>=2.4, which is not installed" in text and "lightning" not in text
    assert text.endswith("python -m pip install --upgrade 'omegaconf>=2.4' 'timm>=1.0.31' 'torch>=2.14'")


@pytest.mark.parametrize("found", ["2.14.1+cu130", "2.15.0", "3.0.0", "2.15.0.dev20270101"])
def test_newer_and_local_versions_are_taken(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(versions, "version", lambda name: found if name == "torch" else metadata.version(name))
    versions.check_versions()


def test_the_command_says_it_before_it_imports_the_package(tmp_path: Path) -> None:
    """P89: with an old timm beside it the command ends at once, with that message last and nothing written."""
    old = tmp_path / "timm-0.9.2.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: timm\nVersion: 0.9.2\n")
    (tmp_path / "timm.py").write_text("raise SystemExit('timm was imported')\n")
    done = subprocess.run(
        [sys.executable, "train.py", "recipe=digits", f"out={tmp_path / 'run'}"],
        cwd=ROOT, env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and not (tmp_path / "run").exists()
    assert "vitfw needs timm>=1.0.31, found 0.9.2" in done.stderr.splitlines()[-1]
