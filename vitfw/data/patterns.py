"""Names of shards from what a user writes: braces, globs, comma lists, slices of a data set.

/data/train-{0000..1281}.tar        1,282 shards, each must exist
/data/train-*.tar, /more/*.tar      two sources
/data/train-*.tar[:99%]             99 % of the samples (a fixed random choice), [99%:] is the other 1 %
s3://bucket/train-{00..63}.tar      remote shards
/data/train                         a folder of class folders
"""

import re
from fractions import Fraction
from pathlib import Path

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "npy")

_BRACE = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_SLICE = re.compile(r"\[((?:\d+(?:\.\d+)?%|\d*)):((?:\d+(?:\.\d+)?%|\d*))\]$")
_LIKE_SLICE = re.compile(r"\[[^\[\]]*:[^\[\]]*\]$")


def is_remote(name: str) -> bool:
    """True for `s3://...`, `gs://...`, `http://...` and any other name with a scheme."""
    return "://" in name


def expand_braces(pattern: str) -> list[str]:
    """`a-{00..02}.tar` -> a-00.tar, a-01.tar, a-02.tar; `{x,y}.tar` -> x.tar, y.tar; several braces multiply."""
    found = _BRACE.search(pattern)
    if found is None:
        return [pattern]
    body = found.group(1)
    numbers = _RANGE.fullmatch(body)
    if numbers:
        first, last = numbers.groups()
        if int(first) > int(last):
            raise ValueError(f"pattern {pattern!r}: the range {{{body}}} is empty; write the smaller number first")
        options = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    elif "," in body:
        options = body.split(",")
    else:
        raise ValueError(f"pattern {pattern!r}: {{{body}}} is neither a range {{00..31}} nor a list {{a,b}}")
    head, tail = pattern[: found.start()], pattern[found.end() :]
    return [name for option in options for name in expand_braces(head + option + tail)]


def split_list(text: str) -> list[str]:
    """Splits at commas outside braces and brackets: `a-{x,y}.tar, b.tar` -> two patterns."""
    if text and Path(text).exists():  # whatever signs its name holds
        return [text]
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "{[") - (character in "}]")
        if character == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    parts.append(current.strip())
    if "" in parts:
        raise ValueError(f"pattern {text!r} has an empty part; write PATTERN or PATTERN, PATTERN")
    return parts


def split_slice(pattern: str) -> tuple[str, tuple[str, str] | None]:
    """`train.tar[:99%]` -> (train.tar, ("", "99%")); without a slice the second value is None."""
    found = None if Path(pattern).exists() else _SLICE.search(pattern)
    if found is None and (like := _LIKE_SLICE.search(pattern)) and not Path(pattern).exists():
        raise ValueError(
            f"pattern {pattern!r}: the slice {like[0]} is none; write [:99%], [99%:], [1000:] or [500:1000]"
        )
    return (pattern[: found.start()], (found.group(1), found.group(2))) if found else (pattern, None)


def slice_bounds(bounds: tuple[str, str], num_samples: int) -> tuple[int, int]:
    """First and last (excluded) place of a slice like ("", "99%") or ("1000", "") in num_samples samples."""
    places = []
    for text, default in zip(bounds, (0, num_samples), strict=True):
        if text == "":
            places.append(default)
        elif text.endswith("%"):
            share = Fraction(text[:-1])
            if share > 100:
                raise ValueError(f"slice [{bounds[0]}:{bounds[1]}]: {text} is over 100%")
            places.append(int(num_samples * share / 100))
        elif int(text) > num_samples:
            raise ValueError(f"slice [{bounds[0]}:{bounds[1]}]: the data set has {num_samples} samples only")
        else:
            places.append(int(text))
    if places[0] >= places[1]:
        raise ValueError(f"slice [{bounds[0]}:{bounds[1]}] of {num_samples} samples is empty")
    return places[0], places[1]


def expand(pattern: str) -> list[str]:
    """Names of one pattern (no commas, no slice), sorted for globs, in the order written for braces.

    Raises FileNotFoundError that names the missing file, or the pattern that matches nothing.
    """
    if not is_remote(pattern) and Path(pattern).exists():  # whatever signs its name holds
        return [str(Path(pattern))]
    names: list[str] = []
    for name in expand_braces(pattern):
        if is_remote(name):
            names += _expand_remote(name) if any(sign in name for sign in "*?[") else [name]
        elif Path(name).exists():
            names.append(str(Path(name)))
        elif any(sign in name for sign in "*?["):
            path = Path(name)
            matches = sorted(str(found) for found in Path(path.anchor or ".").glob(str(path.relative_to(path.anchor))))
            if not matches:
                raise FileNotFoundError(f"pattern {name!r} matches no file")
            names += matches
        else:
            raise FileNotFoundError(f"no such file or folder: {name!r} (from {pattern!r})")
    repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if repeated:
        raise ValueError(f"pattern {pattern!r} names {repeated[0]!r} more than once")
    return names


def _expand_remote(pattern: str) -> list[str]:
    import fsspec

    scheme = pattern.split("://")[0]
    file_system, path = fsspec.core.url_to_fs(pattern)
    matches = sorted(str(name) for name in file_system.glob(path))
    if not matches:
        raise FileNotFoundError(f"pattern {pattern!r} matches no file")
    return [name if "://" in name else f"{scheme}://{name}" for name in matches]
