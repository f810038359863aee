"""The import table of docs/architecture.md, kept by reading the syntax trees: who may import whom, and no cycles."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted([*(ROOT / "vitfw").rglob("*.py"), ROOT / "train.py"])
LIGHTNING_IN = {"vitfw.module", "vitfw.trainer", "vitfw.after_step", "vitfw.checkpoint", "vitfw.preempt", "train"}
LIGHTNING_UNDER = ("vitfw.report.",)


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> set[str]:
    """All modules that a file imports anywhere in it, functions included; relative imports are not used in vitfw."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


MODULES = {name_of(path): path for path in FILES}


def own_imports(name: str) -> set[str]:
    found = {target for target in imports_of(MODULES[name]) if target in MODULES and target != name}
    # `from vitfw.data.index import X` names the package vitfw.data too only in the resolver's eyes; an empty package is no tie
    return {
        target
        for target in found
        if target not in ("vitfw", "vitfw.models", "vitfw.data", "vitfw.evaluate", "vitfw.report")
    }


def layer_of(name: str) -> int:
    exact = {
        "vitfw.versions": -1, "vitfw": 0, "vitfw.schedules": 0, "vitfw.seeding": 0, "vitfw.words": 0, "vitfw.machine": 0,
        "vitfw.startup": 0, "vitfw.models.cost": 0,
        "vitfw.ema": 1, "vitfw.parallel": 1, "vitfw.guard": 1, "vitfw.launch": 1,
        "vitfw.checkpoint_files": 1, "vitfw.sharded": 1,
        "vitfw.optim": 2, "vitfw.checkpoint": 2, "vitfw.tasks.task": 2,
        "vitfw.tasks": 4,
        "vitfw.module": 5,
        "vitfw.trainer": 6, "vitfw.after_step": 6, "vitfw.saver": 6, "vitfw.run": 6, "vitfw.folder_lock": 6, "vitfw.preempt": 6,
        "vitfw.config": 7,
        "train": 9,
    }  # fmt: skip
    if name in exact:
        return exact[name]
    by_folder = {"vitfw.models": 1, "vitfw.data": 1, "vitfw.tasks": 3, "vitfw.evaluate": 4, "vitfw.report": 6}
    folder = next(
        (layer for folder, layer in by_folder.items() if name == folder or name.startswith(f"{folder}.")), None
    )
    return 8 if folder is None else folder


SAME_LAYER_ALLOWED = {
    1,
    4,
    6,
    8,
}  # neighbours in models/, data/, evaluate/, report/ and the commands may use each other


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_down(name: str) -> None:
    for target in own_imports(name):
        mine, theirs = layer_of(name), layer_of(target)
        if name == "vitfw.config" or mine > theirs:
            continue
        same = mine == theirs and mine in SAME_LAYER_ALLOWED
        assert same, f"{name} (layer {mine}) imports {target} (layer {theirs})"


def test_a_task_never_imports_another_task() -> None:
    for name in MODULES:
        if name.startswith("vitfw.tasks.") and name != "vitfw.tasks.task":
            others = {t for t in own_imports(name) if t.startswith("vitfw.tasks.") and t != "vitfw.tasks.task"}
            assert not others, f"{name} imports {others}"


def test_no_import_cycles() -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"import cycle: {' -> '.join((*path[path.index(name) :], name))}"
        if name not in done:
            for target in sorted(own_imports(name)):
                visit(target, (*path, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


@pytest.mark.parametrize("name", sorted(MODULES))
def test_lightning_only_where_allowed(name: str) -> None:
    uses = {t for t in imports_of(MODULES[name]) if t.split(".")[0] in ("lightning", "pytorch_lightning")}
    assert not uses or name in LIGHTNING_IN or name.startswith(LIGHTNING_UNDER), f"{name} imports {sorted(uses)}"


def test_no_private_names_of_libraries() -> None:
    for name, path in MODULES.items():
        for target in imports_of(path):
            if target.split(".")[0] in ("torch", "timm", "lightning", "torchvision"):
                private = [part for part in target.split(".") if part.startswith("_") and part != "__future__"]
                assert not private, f"{name} imports the private {target}"


def test_no_subclass_of_a_subclass() -> None:
    """A class is abstract or final: whatever derives from a class of vitfw derives from one that has no vitfw base itself."""
    bases: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
    for name, parents in bases.items():
        for parent in parents:
            grand = [g for g in bases.get(parent, []) if g in bases]
            assert not grand, f"{name} derives from {parent}, which derives from {grand[0]}"


def test_no_drains() -> None:
    assert not [path for path in FILES if path.stem in ("utils", "helpers", "common", "misc")]
