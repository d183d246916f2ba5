"""Adapters exactly as they are, every slot in its own dtype, as an Orbax checkpoint.

For what the PEFT library has no format for: stacks over rotations, forms that were trained in JAX.
A checkpoint has two items: `slots`, the arrays by number, and `form`, JSON that says where each is.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from scute_jax.errors import AdapterError
from scute_jax.normal_form import (
    Adapter,
    Blocks,
    Kronecker,
    NormalForm,
    Sparse,
    Term,
    TokenRows,
)

TYPES = {t.__name__: t for t in (Adapter, NormalForm, Term, Blocks, Kronecker, Sparse, TokenRows)}


def save_adapter(adapter: Adapter, path: str | Path) -> None:
    """Writes an adapter into the folder `path`, which must not exist.

    Raises: AdapterError if something is there already.
    """
    path = Path(path).absolute()
    if path.exists():
        raise AdapterError(f"{path}: there is something already; give a folder of its own.")
    arrays: list[np.ndarray] = []
    form = _described(adapter, arrays)
    slots = {str(at): array for at, array in enumerate([*arrays, np.int32(len(arrays))])}
    items = ocp.args.Composite(slots=ocp.args.PyTreeSave(slots), form=ocp.args.JsonSave(form))
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, items)


def restore_adapter(path: str | Path) -> Adapter:
    """The adapter that `save_adapter` wrote, bit for bit, in host memory.

    Raises: AdapterError if the folder holds none.
    """
    path = Path(path).absolute()
    if not (path / "slots").is_dir() or not (path / "form").is_dir():
        raise AdapterError(f"{path}: holds no adapter of save_adapter (no `slots` and `form`).")
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        form = checkpointer.restore(path, ocp.args.Composite(form=ocp.args.JsonRestore())).form
        numbers = range(_count(form) + 1)  # the last is their count: Orbax saves no empty item
        as_numpy = {str(at): ocp.RestoreArgs(restore_type=np.ndarray) for at in numbers}
        slots = ocp.args.PyTreeRestore(item=as_numpy, restore_args=as_numpy)
        arrays = checkpointer.restore(path, ocp.args.Composite(slots=slots)).slots
    return _rebuilt(form, arrays)


def _described(value: Any, arrays: list[np.ndarray]) -> dict:
    """JSON for a value; its arrays go into the list."""
    if type(value).__name__ in TYPES:
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        own = {name: _described(field, arrays) for name, field in fields.items()}
        return {"type": type(value).__name__, "fields": own}
    if isinstance(value, Mapping):
        return {"map": {key: _described(item, arrays) for key, item in value.items()}}
    if isinstance(value, tuple | list):
        return {"tuple": [_described(item, arrays) for item in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    arrays.append(np.asarray(value))
    return {"array": len(arrays) - 1}


def _rebuilt(form: dict, arrays: Mapping[str, np.ndarray]) -> Any:
    """The inverse of `_described`."""
    ((kind, value),) = ((k, v) for k, v in form.items() if k != "fields")
    if kind == "type":
        own = {name: _rebuilt(field, arrays) for name, field in form["fields"].items()}
        return TYPES[value](**own)
    if kind == "map":
        return {key: _rebuilt(item, arrays) for key, item in value.items()}
    if kind == "tuple":
        return tuple(_rebuilt(item, arrays) for item in value)
    return value if kind == "value" else np.asarray(arrays[str(value)])


def _count(form: Any) -> int:
    """How many arrays a description names."""
    if isinstance(form, dict):
        return int("array" in form) + sum(map(_count, form.values()))
    return sum(map(_count, form)) if isinstance(form, list) else 0
