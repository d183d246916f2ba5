"""Which tile a kernel takes: a small table per GPU, by kind of tile and bucket of the shape.

    {"NVIDIA H200": {"ExpandTile": {"rows<=64, rank<=16": {"block_n": 512, "num_warps": 8}}}}

Fields that an entry leaves out, buckets without an entry and GPUs without a table get the defaults
of the dataclass. The table is tuning.json beside this file, or the file that the environment
variable SCUTE_TUNING names; `scute bench kernels --tune` writes it.
"""

import json
import os
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TypeVar

import jax

PACKAGED = Path(__file__).with_name("tuning.json")
VARIABLE = "SCUTE_TUNING"
EDGES = (0, 16, 64, 256, 1024, 4096, 16384)

Tile = TypeVar("Tile")
Entry = dict[str, int]
Table = dict[str, dict[str, dict[str, Entry]]]  # device -> kind of tile -> bucket -> fields


def tuned(kind: type[Tile], **shape: int) -> Tile:
    """The tile of this kind for arrays of this shape on this machine. Static: call it in a trace.

    Raises: ValueError naming the file and the field where the table holds what the kind has not.
    """
    path, device = table_path(), jax.devices()[0].device_kind
    entry = read_table(path).get(device, {}).get(kind.__name__, {}).get(bucket(**shape), {})
    return tile_of(kind, entry, f"{path}: {device}, {kind.__name__}, {bucket(**shape)}")


def bucket(**shape: int) -> str:
    """The shapes that share an entry: each number up to the next of `EDGES`."""
    return ", ".join(f"{name}{_range(size)}" for name, size in shape.items())


def table_path() -> Path:
    return Path(os.environ.get(VARIABLE) or PACKAGED)


def read_table(path: Path) -> Table:
    """The table of a file. Raises: ValueError if it is none, OSError if it cannot be read."""
    return _parsed(path, path.read_bytes())


def tile_of(kind: type[Tile], entry: Entry, where: str) -> Tile:
    """The tile with the fields of an entry."""
    known = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
    for name, value in entry.items():
        if name not in known:
            raise ValueError(
                f"{where}: there is no field {name!r}, only {', '.join(known)}; remove it, or "
                "write the table anew with `scute bench kernels --tune`."
            )
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"{where}: {name} is {value!r}; it has to be a whole number.")
    return kind(**entry)


def _range(size: int) -> str:
    return next((f"<={edge}" for edge in EDGES if size <= edge), f">{EDGES[-1]}")


@cache
def _parsed(path: Path, text: bytes) -> Table:
    try:
        table = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: this is no JSON: {error}.") from None
    levels = [table]
    for what in ("devices", "kinds of tile", "buckets", "fields"):
        if not all(isinstance(level, dict) for level in levels):
            raise ValueError(f"{path}: {what} have to be the keys of an object, see tuning.py.")
        levels = [below for level in levels for below in level.values()]
    return table
