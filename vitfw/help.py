"""`train.py --help` and `vitfw explain KEY`: every key with its type, default, unit and meaning."""

from vitfw.config import keys, names_of

USAGE = """\
usage: train.py recipe=NAME [machine=NAME] [key=value ...]
       torchrun --standalone --nproc-per-node N train.py recipe=NAME ...

recipes:  {recipes}
machines: {machines}
A recipe or machine may also be a YAML file. The same command again goes on where the run stopped.
"""


def help_text() -> str:
    """The usage and all keys by section."""
    lines = [USAGE.format(recipes=", ".join(names_of("recipes")), machines=", ".join(names_of("configs")))]
    section = None
    for key, kind, default, text in sorted(keys(), key=lambda row: row[0].partition(".")[0] if "." in row[0] else ""):
        head = key.partition(".")[0] if "." in key else "run"
        if head != section:
            section = head
            lines.append(f"{head}:")
        lines.append(f"  {key}={_shown(default)}  ({kind})\n      {text}")
    return "\n".join(lines)


def explain(name: str) -> str:
    """What is known about one key, or about a whole section. Raises KeyError when there is no such key."""
    from vitfw.ladder_plan import ladder_keys  # what the commands of a ladder need is not loaded for a run's help

    rows = [row for row in (*keys(), *ladder_keys()) if row[0] == name or row[0].startswith(f"{name}.")]
    if not rows:
        raise KeyError(name)
    return "\n".join(f"{key}={_shown(default)}  ({kind})\n    {text}" for key, kind, default, text in rows)


def _shown(default: object) -> str:
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return f"[{','.join(map(str, default))}]"
    return str(default)
