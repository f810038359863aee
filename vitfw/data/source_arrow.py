"""Image data sets of Hugging Face: parquet files, or a folder written by `save_to_disk` (arrow files). Needs pyarrow.

The image column is a struct of bytes and path, the label column a number; class names stand in the schema.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from vitfw.data.patterns import expand
from vitfw.data.source import Source
from vitfw.data.source_list import refuse_other_names
from vitfw.data.table import MAX_LABEL, Label


def from_arrow(name: str) -> Source:
    """Parquet files by pattern or folder, or a saved data set. Raises ValueError that names columns that do not fit."""
    table = _saved(Path(name)) if (Path(name) / "dataset_info.json").exists() else _parquet(name)
    images, label_column = _columns(name, table)
    column = table.column(images)
    labels: list[Label] = [None] * table.num_rows
    names = _class_names(table, label_column)
    if label_column is None:
        refuse_other_names(name, set(table.column_names))
    else:
        for place, value in enumerate(table.column(label_column).to_pylist()):
            labels[place] = _label(f"{name}, row {place}", value, len(names) if names else MAX_LABEL + 1)

    def load(place: int) -> bytes:
        image = column[place].as_py()
        if image is None or (image["bytes"] is None and image["path"] is None):
            raise ValueError("there is no image in this row")
        return image["bytes"] if image["bytes"] is not None else Path(image["path"]).read_bytes()

    keys = [f"{place:08d}" for place in range(table.num_rows)]
    return Source(keys, labels, names, load)


def _label(where: str, value: Any, classes: int) -> Label:
    """Raises ValueError for what is no number of a class."""
    for item in value if isinstance(value, list) else [value]:
        if item is None or not 0 <= item < classes:
            raise ValueError(f"{where}: the label {item} is not one of the {classes:,} class numbers 0..{classes - 1}")
    return tuple(value) if isinstance(value, list) else value


def _saved(folder: Path) -> Any:
    import pyarrow as pa

    files = sorted(folder.glob("*.arrow"))
    if not files:
        raise ValueError(f"{folder} has a dataset_info.json, but no *.arrow; for a DatasetDict name one of its splits")
    return pa.concat_tables([pa.ipc.open_stream(pa.memory_map(str(file))).read_all() for file in files])


def _parquet(name: str) -> Any:
    """The rows of parquet files as a memory-mapped table: packing reads them in random order, which parquet cannot."""
    import pyarrow as pa
    from pyarrow import parquet

    files = sorted(str(file) for file in Path(name).glob("*.parquet")) if Path(name).is_dir() else expand(name)
    with tempfile.NamedTemporaryFile(suffix=".arrow") as unpacked:  # the mapping stays when the name goes
        first = parquet.read_schema(files[0])
        with pa.OSFile(unpacked.name, "wb") as sink, pa.ipc.new_stream(sink, first) as writer:
            for file in files:
                for batch in parquet.ParquetFile(file).iter_batches(batch_size=256):
                    writer.write_batch(batch.cast(first))
        return pa.ipc.open_stream(pa.memory_map(unpacked.name)).read_all()


def _columns(name: str, table: Any) -> tuple[str, str | None]:
    import pyarrow as pa

    images = [
        field.name
        for field in table.schema
        if pa.types.is_struct(field.type) and {"bytes", "path"} <= {part.name for part in field.type}
    ]
    if len(images) != 1:
        raise ValueError(f"{name}: {len(images)} image columns (struct of bytes and path) among {table.column_names}")
    labels = [column for column in ("label", "labels", "fine_label") if column in table.column_names]
    label = labels[0] if labels else None
    if label is not None:
        kind = table.schema.field(label).type
        kind = kind.value_type if pa.types.is_list(kind) else kind
        if not pa.types.is_integer(kind):
            raise ValueError(f"{name}: the column {label!r} holds {kind}, not class numbers")
    return images[0], label


def _class_names(table: Any, label: str | None) -> tuple[str, ...] | None:
    about = (table.schema.metadata or {}).get(b"huggingface")
    if about is None or label is None:
        return None
    feature = json.loads(about)["info"]["features"].get(label, {})
    names = feature.get("names") or feature.get("feature", {}).get("names")
    return tuple(names) if names else None
