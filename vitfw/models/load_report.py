"""How weights are loaded (the section) and what became of them (the report)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vitfw.models.preprocess import Preprocessing
from vitfw.models.reading import Which

# Facts that change what a network computes without changing a tensor's shape.
BEHAVIOUR = (
    *("heads", "norm", "norm_eps", "activation", "mlp", "rope", "rope_temperature", "rope_layout", "rope_reference"),
    *("window", "global_blocks", "pre_norm", "parallel"),
)
# The same of a masked autoencoder's decoder.
DECODER_BEHAVIOUR = ("decoder_heads", "normalise_target")


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """How weights are put into a model; the place itself is given beside it."""

    head: Literal["auto", "keep", "drop"] = field(
        default="auto", metadata={"help": "auto: kept if it has as many classes, else made new; keep, drop"}
    )
    head_rows: tuple[int, ...] | None = field(
        default=None, metadata={"help": "row of the file's head for each class of this model (a remapped head)"}
    )
    which: Which = field(
        default="auto", metadata={"help": "raw or averaged weights; auto: averaged where a file has both"}
    )
    prefix: str | None = field(
        default=None, metadata={"help": "where in the names the network lies, e.g. teacher.backbone."}
    )
    grid: tuple[int, ...] | None = field(
        default=None, metadata={"help": "rows, columns of the file's positions, where they are not square"}
    )
    final_norm: Literal["same", "move", "fresh"] = field(
        default="same",
        metadata={
            "help": "file norms tokens, model norms the pooled vector, or vice versa: move the norm, or start it fresh"
        },
    )
    fresh: tuple[str, ...] = field(
        default=(), metadata={"help": "names (regular expressions) that may be missing in the file"}
    )
    ignore: tuple[str, ...] = field(
        default=(), metadata={"help": "names (regular expressions) of the file to leave out"}
    )
    differ: tuple[str, ...] = field(
        default=(), metadata={"help": "facts such as norm_eps that may differ from the file's"}
    )
    trust: bool = field(default=False, metadata={"help": "run code that a pickled file holds"})

    def __post_init__(self) -> None:
        if self.grid is not None and (len(self.grid) != 2 or min(self.grid) < 1):
            raise ValueError(f"load.grid={self.grid}: two numbers, rows and columns of patches")
        known = (*BEHAVIOUR, *DECODER_BEHAVIOUR)
        unknown = set(self.differ) - set(known)
        if unknown:
            raise ValueError(f"load.differ: {', '.join(sorted(unknown))} is not compared; known: {', '.join(known)}")
        if self.head_rows is not None and self.head == "drop":
            raise ValueError("load.head_rows remaps the head, load.head=drop throws it away; give one of them")


@dataclass(frozen=True)
class LoadReport:
    """What became of each name. coverage: share of the backbone's parameters that came from the file."""

    place: str
    entry: str
    prefix: str
    dialect: str
    loaded: tuple[str, ...]
    resized: Mapping[str, str]
    fresh: tuple[str, ...]
    dropped: tuple[str, ...]
    outside: tuple[str, ...]
    coverage: float
    preprocessing: Preprocessing | None = None
    decoder: tuple[str, ...] = ()  # of a masked autoencoder: what became of it

    def text(self) -> str:
        """A few lines for the log."""
        lines = [
            f"weights from {self.place} (entry {self.entry}, prefix {self.prefix!r}, names of {self.dialect}): "
            f"{len(self.loaded)} tensors, {100 * self.coverage:.2f} % of the backbone"
        ]
        lines += [f"  resized {name}: {what}" for name, what in self.resized.items()]
        for title, names in (
            ("made new", self.fresh),
            ("left out", self.dropped),
            ("outside the network", self.outside),
        ):
            if names:
                lines.append(f"  {title}: {some(names, 6)}")
        lines += [f"  decoder: {word}" for word in self.decoder]
        return "\n".join(lines)


def some(names: Sequence[str], count: int) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")
