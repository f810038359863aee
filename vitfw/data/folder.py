"""A folder of class folders, or of images without labels, as rows of an index.

root/cat/1.jpg  root/cat/more/2.png  root/dog/3.webp     classes cat, dog in sorted order
root/1.jpg      root/2.jpg                               no class folder: no labels
"""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from vitfw.data.patterns import IMAGE_EXTENSIONS
from vitfw.data.table import Label, Table, make_table


def is_image_name(name: str) -> bool:
    """True for `x.JPG`, false for hidden files (`._x.jpg`, `.DS_Store`) and for other extensions."""
    return not name.startswith(".") and name.rpartition(".")[2].lower() in IMAGE_EXTENSIONS and "." in name


def _images_below(folder: str, prefix: str, seen: frozenset[str] = frozenset()) -> list[str]:
    """Relative names of the images below a folder, sorted; links to folders are followed, but not in a ring."""
    real = os.path.realpath(folder)
    if real in seen:
        return []
    names = []
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                names += _images_below(entry.path, f"{prefix}{entry.name}/", seen | {real})
            elif is_image_name(entry.name):
                names.append(prefix + entry.name)
    return names


def class_folders(root: Path) -> list[str]:
    """Names of the class folders, sorted; hidden ones do not count."""
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def index_folder(root: Path, classes: Sequence[str] | None) -> tuple[Table, tuple[str, ...] | None]:
    """Rows (key: the path below root) and the classes; labels follow `classes` if given, else the sorted folder names.

    An empty class keeps its number, with a warning. Raises ValueError where there is no image at all, where a class
    folder is not in `classes`, or where images lie beside class folders (they would have no label).
    """
    folders = class_folders(root)
    beside = [entry.name for entry in root.iterdir() if entry.is_file() and is_image_name(entry.name)]
    if beside and folders:
        raise ValueError(f"{root}: {beside[0]!r} lies beside the class folders ({folders[0]!r}, ...); move it into one")
    labels: list[Label]
    if not folders:
        keys, names = sorted(beside), None
        labels = [None for _ in keys]
    else:
        names = tuple(classes) if classes is not None else tuple(folders)
        unknown = [folder for folder in folders if folder not in set(names)]
        if unknown:
            raise ValueError(f"{root}: the folder {unknown[0]!r} is not among the {len(names)} classes {names[:3]}...")
        number = {name: place for place, name in enumerate(names)}
        keys, labels = [], []
        for folder in folders:
            found = _images_below(str(root / folder), f"{folder}/")
            if not found:
                warnings.warn(f"{root}: the class folder {folder!r} has no image; it keeps its number", stacklevel=2)
            keys += found
            labels += [number[folder]] * len(found)
    if not keys:
        if any(root.glob("*.tar")):
            raise ValueError(f"{root}: no image, but shards; name them: {root}/*.tar")
        raise ValueError(f"{root}: no image found; accepted extensions: {', '.join(IMAGE_EXTENSIONS)}")
    return make_table([-1] * len(keys), [0] * len(keys), keys, labels), names
