"""Values from words and recipe files into a typed tree; every mistake is a ConfigError naming key, value and what is right."""

import difflib
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException


class ConfigError(ValueError):
    """A mistake in the words, a recipe or a machine file; the text is one line for the user."""


class Word(str):
    """A value as it stood on the command line, not yet read as YAML."""


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def set_leaf(schema: Any, source: str, key: str, value: Any) -> None:
    """Sets one leaf, or raises ConfigError naming the source, the key, the value and what would be right."""
    node, path = schema, key.split(".")
    for depth, part in enumerate(path):
        if not OmegaConf.is_dict(node) or part not in node:
            raise ConfigError(
                f"{key}={value}: no such key{_where(source)}; did you mean {_suggest(schema, path, depth)}?"
            )
        if depth < len(path) - 1:
            node = node[part]
    if OmegaConf.is_dict(node[path[-1]]):
        inside = ", ".join(f"{key}.{name}" for name in list(node[path[-1]])[:3])
        raise ConfigError(f"{key}={value}: {key} is a section{_where(source)}; set its keys, such as {inside}")
    declared = typing.get_type_hints(OmegaConf.get_type(node))[path[-1]]
    try:
        read = _read_word(value, declared) if isinstance(value, Word) else value
        _check_finite(key, read, shown=str(value))
        OmegaConf.update(schema, key, read)
    except ConfigError:
        raise
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigError(f"{key}={value}: must be {type_text(declared)}{_where(source)}") from error


def _check_finite(key: str, value: Any, *, shown: str) -> None:
    """No key means anything as NaN, infinity or 1e99: it would only fail later, or not even that."""
    for number in value if isinstance(value, list | tuple) else [value]:
        unread = isinstance(value, list) and str(number).lower().strip("+-.") in (
            "nan",
            "inf",
        )  # YAML reads these as text
        if unread or (isinstance(number, float) and not math.isfinite(number)):
            raise ConfigError(f"{key}={shown}: must be a finite number")
        if isinstance(number, int | float) and abs(number) > 2**53:
            raise ConfigError(f"{key}={shown}: is larger than any meaningful number here")


def _where(source: str) -> str:
    return "" if source == "the command line" else f" (in {source})"


def _read_word(word: str, declared: Any) -> Any:
    """A command-line value in its declared type: text stays text, 1e3 is an integer where one is wanted."""
    options = _options(declared)
    named = [name for option in options if typing.get_origin(option) is Literal for name in typing.get_args(option)]
    if type(None) in options and word in ("null", "none", "None") and word not in named:
        return None
    if str in options or named:
        return str(word)
    value = yaml.safe_load(word)
    if isinstance(value, str) and (int in options or float in options):
        value = float(value)  # YAML reads 1e-3 (no dot) as text
    if int in options and float not in options and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _suggest(schema: Any, path: list[str], depth: int) -> str:
    sections = [name for name in schema if OmegaConf.is_dict(schema[name])]
    names = [f"{section}.{key}" for section in sections for key in schema[section]]
    names += [name for name in schema if name not in sections and name != "machine_name"]
    if depth > 0 and path[0] in sections:  # the section is right: stay in it
        inside = [str(key) for key in schema[path[0]]]
        return " or ".join(f"{path[0]}.{name}" for name in nearest(path[-1], inside))
    return " or ".join(nearest(".".join(path), names))


def nearest(name: str, valid: list[str]) -> list[str]:
    near = difflib.get_close_matches(name, valid, n=2, cutoff=0.6)
    leaf = [key for key in valid if key.rsplit(".", 1)[-1] == name]  # `lr` -> optim.lr
    return list(dict.fromkeys([*leaf, *near]))[:2] or difflib.get_close_matches(name, valid, n=1, cutoff=0.0)


def _options(declared: Any) -> tuple[Any, ...]:
    """Members of a union, in either of Python's two forms; else the type itself."""
    return typing.get_args(declared) if typing.get_origin(declared) in (types.UnionType, typing.Union) else (declared,)


def type_text(declared: Any) -> str:
    if len(_options(declared)) > 1:
        return " or ".join(type_text(option) for option in _options(declared))
    if typing.get_origin(declared) is Literal:
        return "|".join(map(str, typing.get_args(declared)))
    if typing.get_origin(declared) is tuple:
        kinds = {int: "integers", float: "numbers", str: "texts"}
        of, *rest = typing.get_args(declared)
        return f"a list of {kinds[of]}" if rest[-1] is ... else f"a list of {len(rest) + 1} {kinds[of]}"
    names = {int: "an integer", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    return names.get(declared) or str(declared).replace("typing.", "")


def first_line(error: BaseException) -> str:
    """The message in one line, without OmegaConf's list of places."""
    return str(error).split("\n    full_key")[0].replace("\n", " ") if str(error) else type(error).__name__
