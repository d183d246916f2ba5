"""The fields of an adapter_config.json, read by type and ticked off as they are used.

A field changes the function of the adapter, or it does not (*inert*), or nobody here knows. Methods
read the first kind through `get`, which ticks it off; what is left over, is not inert and is not
switched off (null, false, empty) is refused by name, so that nothing is dropped silently.
"""

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from scute_jax.errors import AdapterError

# Fields of every PEFT configuration that say nothing about the function. `peft_version` does for
# methods whose formula changed between versions; they read it.
INERT = frozenset(
    "peft_type task_type auto_mapping base_model_name_or_path revision inference_mode "
    "peft_version runtime_config".split()
)

KINDS = {
    int: "an integer",
    float: "a finite number",
    bool: "true or false",
    str: "a string",
    dict: "an object",
}


class Options:
    """The fields of one adapter_config.json."""

    def __init__(self, fields: Mapping[str, Any], path: Path, given: Collection[str] = ()):
        self.fields, self.path = MappingProxyType(dict(fields)), path
        self._used: set[str] = set()
        self._given = tuple(given)  # names of fields that the caller stated, not the file

    @classmethod
    def read(cls, path: Path) -> "Options":
        """Raises: AdapterError if the file is missing, is not a JSON object or names no method."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise AdapterError(
                f"{path}: cannot be read ({error.strerror}); an adapter folder holds "
                "adapter_config.json beside its tensors, as save_pretrained writes them."
            ) from None
        except (ValueError, RecursionError) as error:
            raise AdapterError(f"{path}: not JSON ({error}); save the adapter again.") from None
        if not isinstance(fields, dict):
            raise AdapterError(f"{path}: holds a {type(fields).__name__}, needed a JSON object.")
        if not isinstance(fields.get("peft_type"), str):
            raise AdapterError(
                f"{path}: not a PEFT adapter: peft_type is {fields.get('peft_type')!r}, needed the "
                'name of a method such as "LORA".'
            )
        return cls(fields, path)

    def completed(self, given: Mapping[str, Any]) -> "Options":
        """The same with fields that the file does not state.

        Raises: AdapterError for one that the file states in another way.
        """
        for name, value in given.items():
            if self.fields.get(name) not in (None, value):
                self.refuse(name, f"options= states it as {value!r:.100}; leave it to the file")
        return Options({**self.fields, **given}, self.path, given=tuple(given))

    def get(
        self,
        name: str,
        default: Any = None,
        kind: type | None = None,
        choices: Collection[Any] | None = None,
        required: bool = False,
    ) -> Any:
        """The value of a field, ticked off; an absent one is the default.

        `kind` is int, float (any finite number), bool, str or dict. null is what PEFT makes of it:
        None where that is the default, else false for a bool, and an error for any other kind.
        Raises: AdapterError if the value is of another kind, none of the choices, or required and
        not there.
        """
        self._used.add(name)
        value = self.fields.get(name)
        if value is None:
            if required:
                self.refuse(name, "the function of the adapter depends on it; state it")
            if name not in self.fields or default is None or kind is None:
                return default
            value = False if kind is bool else None
        if kind is not None and not is_of(kind, value):
            self.refuse(name, f"needed {KINDS[kind]}")
        if choices is not None and value not in choices:
            self.refuse(name, f"known are {', '.join(map(repr, choices))}")
        return value

    def names(self, name: str) -> str | tuple[str, ...] | None:
        """A field that holds one string or a list of strings, ticked off; null stays None."""
        value = self.get(name)
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            self.refuse(name, "needed a string or a list of strings")
        return tuple(value)

    def unexplained(self, inert: Collection[str]) -> list[str]:
        """The fields that nobody read, that are not inert and not switched off."""
        off = (None, False, "", [], {})
        return [
            name
            for name, value in self.fields.items()
            if name not in self._used
            and name not in INERT
            and name not in inert
            and not any(type(value) is type(o) and value == o for o in off)
        ]

    def idle(self) -> list[str]:
        """The fields that the caller stated and nobody read."""
        return [name for name in self._given if name not in self._used]

    def refuse(self, name: str, needed: str) -> NoReturn:
        """Raises AdapterError naming the file, the field, its value and what was needed."""
        value = f"is {self.fields[name]!r:.100}" if name in self.fields else "is missing"
        raise AdapterError(f"{self.path}: field {name!r} {value}; {needed}.")


def is_of(kind: type, value: Any) -> bool:
    """Whether a JSON value is of a kind; true and false are no numbers."""
    if kind is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and _is_finite(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False
