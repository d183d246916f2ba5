"""Where each tensor of a file belongs: at a module of the base, at the whole adapter, or nowhere.

A key is [base_model.model.]<module path>.<name of the tensor at its module>. PEFT leaves out the
adapter's own name ("lora_A.weight"); a raw state dict has it ("lora_A.default.weight"). What all
layers share stands at the whole adapter ("base_model.vera_A").
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scute_jax.errors import AdapterError
from scute_jax.peft.base import Base

PREFIX = "base_model.model."
# What may follow the name of a tensor, or of the adapter where a key has it.
SUFFIXES = ("weight", "bias", "X", "Xd", "Xu", "zeros", "vector_a", "vector_b", "module_logits")


@dataclass
class Names:
    """The keys of a file: by module path and tensor name, by shared tensor name, or unknown."""

    modules: dict[str, dict[str, str]] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)


def place(
    keys: Iterable[str], base: Base, path: Path, key_map: Mapping[str, str] | None = None
) -> Names:
    """Every key in its place.

    `key_map` (pattern -> replacement, the first that matches a key without its prefix) renames
    modules that another trainer called differently, as `key_mapping` of PEFT does.
    Raises: AdapterError if no key lies at a module of the base, or two keys mean the same tensor.
    """
    keys = list(keys)
    known = {p.module for p in base.projections} | set(base.others)
    prefixed = any(key.startswith("base_model.") for key in keys)
    names, placed = Names(), []
    for key in keys:
        bare = key.removeprefix(PREFIX) if prefixed else key
        if prefixed and bare == key:  # not under the model: shared, or not PEFT's
            shared = key.startswith("base_model.")
            module, name = "", key.removeprefix("base_model.") if shared else None
        else:
            module, name = _split(_renamed(bare, key_map), known)
        if name is None:
            names.unknown.append(key)
        else:
            placed.append((module, name, key))
    infix = _infix(name for _, name, _ in placed)
    for module, name, key in placed:
        name = _without(name, infix)
        home = names.modules.setdefault(module, {}) if module else names.shared
        if name in home:
            raise AdapterError(
                f"{path}: keys {home[name]!r} and {key!r} both mean the tensor {name!r} at "
                f"{module or 'the whole adapter'}; keep one of them."
            )
        home[name] = key
    if not names.modules and names.unknown:
        raise AdapterError(
            f"{path}: none of its {len(keys)} keys belongs to a module of this base. The file has "
            f"{some(names.unknown)}; the base has "
            f"{some(PREFIX + p.module for p in base.projections)}. Was the adapter made for "
            "another model, or do its modules have other names?"
        )
    return names


def some(names: Iterable[str], shown: int = 5) -> str:
    """The first few names and how many more there are."""
    names = list(names)
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(repr(name) for name in names[:shown]) + more


def _split(key: str, known: set[str]) -> tuple[str, str | None]:
    """The longest known module path in front and the rest; a single word is shared by all."""
    parts = key.split(".")
    for n in range(len(parts) - 1, 0, -1):
        if ".".join(parts[:n]) in known:
            return ".".join(parts[:n]), ".".join(parts[n:])
    return "", key if len(parts) == 1 else None


def _renamed(key: str, key_map: Mapping[str, str] | None) -> str:
    for pattern, replacement in (key_map or {}).items():
        renamed, count = re.subn(pattern, replacement, key)
        if count:
            return renamed
    return key


def _infix(names: Iterable[str]) -> str | None:
    """The adapter's name if every tensor of the adapter carries the same one."""
    found = set()
    for name in names:
        parts = _core(name)
        if parts and parts[0] != "base_layer":
            found.add(parts[1] if len(parts) == 2 else None)
    return found.pop() if len(found) == 1 else None


def _without(name: str, infix: str | None) -> str:
    parts = _core(name)
    if infix is None or len(parts) != 2 or parts[1] != infix or parts[0] == "base_layer":
        return name
    return ".".join([parts[0], *name.split(".")[2:]])


def _core(name: str) -> list[str]:
    """The parts of a name without a final "weight", "bias" or the like."""
    parts = name.split(".")
    return parts[:-1] if parts[-1] in SUFFIXES else parts
