"""What a method sees of a checkpoint at one site: tensors, options, the base's weights.

Whatever it asks for is ticked off and checked (shape, dtype, finite); what nobody asked for is
refused afterwards.
"""

import math
import re
from collections.abc import Callable, Hashable
from typing import Any, Literal, NoReturn, TypeVar, overload

import ml_dtypes
import numpy as np

from scute_jax.errors import AdapterError
from scute_jax.peft.base import Base, Projection
from scute_jax.peft.names import Names
from scute_jax.peft.options import KINDS, Options, is_of
from scute_jax.peft.safetensors_file import SafetensorsFile
from scute_jax.peft.targets import match, matches
from scute_jax.peft.torch_file import TorchFile
from scute_jax.peft.weights import BaseWeights, as_float32

FLOATS = tuple(map(np.dtype, (np.float32, np.float16, ml_dtypes.bfloat16, np.float64)))
LARGE = 1 << 22  # elements; no stand-in of this size is made for a missing tensor
Shape = tuple[int, ...]
T = TypeVar("T")


class Reading:
    """One checkpoint while it is read: its parts, and what has been used of them."""

    def __init__(
        self,
        options: Options,
        tensors: SafetensorsFile | TorchFile,
        names: Names,
        base: Base,
        weights: BaseWeights,
        targets: tuple[Projection, ...],
    ):
        self.options, self.tensors, self.names = options, tensors, names
        self.base, self.weights, self.targets = base, weights, targets
        self.used: set[str] = set()  # keys of the file
        self.missing: list[str] = []  # tensors that were asked for and are not there
        self.notes: dict[str, None] = {}  # remarks for the reader of the adapter, in order
        self.kept: dict[str, dict[str, np.ndarray]] = {}  # what an export needs beyond the forms
        self.memory: dict[Hashable, Any] = {}

    def tensor(
        self, key: str | None, wanted: str, shapes: tuple[Shape, ...], optional: bool, integer: bool
    ) -> np.ndarray | None:
        """The tensor under a key, as float32 (or int64), or zeros noted as missing."""
        if key is None:
            return None if optional else self._missing(wanted, shapes[0], integer)
        self.used.add(key)
        path, had = self.tensors.path, self.tensors.shapes[key]
        if had not in shapes:
            needed = " or ".join(str(list(shape)) for shape in shapes)
            raise AdapterError(
                f"{path}: tensor {key!r} has shape {list(had)}, but this base and this "
                f"adapter_config.json need {needed}; was the adapter made for another model?"
            )
        array = self.tensors.read(key)
        if integer and array.dtype.kind in "iu":
            return array.astype(np.int64)
        if integer or array.dtype not in FLOATS:
            needed = "integers" if integer else ", ".join(d.name for d in FLOATS)
            raise AdapterError(
                f"{path}: tensor {key!r} has dtype {array.dtype.name}, needed {needed}; "
                "save it again in one of these."
            )
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
        if not np.isfinite(array).all():
            raise AdapterError(
                f"{path}: tensor {key!r} holds NaN, infinity or a number beyond float32; the "
                "training diverged or the file is damaged."
            )
        return array

    def _missing(self, wanted: str, shape: Shape, integer: bool) -> np.ndarray:
        self.missing.append(wanted)
        if math.prod(shape) > LARGE:
            raise AdapterError(f"{self.tensors.path}: tensor {wanted!r} of {shape} is missing.")
        return np.zeros(shape, np.int64 if integer else np.float32)


class Site:
    """The checkpoint at one adapted projection of the base."""

    def __init__(self, reading: Reading, projection: Projection):
        self._reading, self._projection = reading, projection
        self.base: Base = reading.base
        self.name, self.module = projection.site, projection.module
        self.d_in, self.d_out = projection.d_in, projection.d_out

    @property
    def targets(self) -> tuple[Projection, ...]:
        """All adapted projections, in the order of the base's modules."""
        return self._reading.targets

    @overload
    def tensor(
        self, name: str, *shapes: Shape, optional: Literal[False] = False, integer: bool = False
    ) -> np.ndarray: ...

    @overload
    def tensor(
        self, name: str, *shapes: Shape, optional: bool, integer: bool = False
    ) -> np.ndarray | None: ...

    def tensor(
        self, name: str, *shapes: Shape, optional: bool = False, integer: bool = False
    ) -> np.ndarray | None:
        """The tensor at this module ("lora_A.weight"), a float32 copy (int64 with `integer`).

        It has to have one of the shapes. A missing one is noted, and zeros stand in until all that
        is missing is known; with `optional` it is None.
        Raises: AdapterError naming the key for another shape, no number of the kind, NaN.
        """
        key = self._names().get(name)
        wanted = f"base_model.model.{self.module}.{name}"
        return self._reading.tensor(key, wanted, shapes, optional, integer)

    @overload
    def shared(
        self, name: str, *shapes: Shape, optional: Literal[False] = False, integer: bool = False
    ) -> np.ndarray: ...

    @overload
    def shared(
        self, name: str, *shapes: Shape, optional: bool, integer: bool = False
    ) -> np.ndarray | None: ...

    def shared(
        self, name: str, *shapes: Shape, optional: bool = False, integer: bool = False
    ) -> np.ndarray | None:
        """The same for a tensor of the whole adapter ("vera_A")."""
        key = self._reading.names.shared.get(name)
        return self._reading.tensor(key, f"base_model.{name}", shapes, optional, integer)

    def shape(self, name: str, shared: bool = False) -> Shape | None:
        """The shape of a tensor in the file, or None if it is not there. Does not count as use."""
        key = (self._reading.names.shared if shared else self._names()).get(name)
        return None if key is None else self._reading.tensors.shapes[key]

    def is_integer(self, name: str) -> bool:
        """Whether a tensor at this module holds integers, True if there is none. Not a use."""
        key = self._names().get(name)
        return key is None or self._reading.tensors.read(key).dtype.kind in "iu"

    def ignore(self, *names: str) -> None:
        """Ticks off tensors at this module that change nothing, unread."""
        held = self._names()
        self._reading.used.update(held[name] for name in names if name in held)

    def option(self, name: str, default: Any = None, **checks: Any) -> Any:
        """A field of the config; `checks` are kind, choices, required of `Options.get`."""
        return self._reading.options.get(name, default, **checks)

    def matching(self, field: str, default: Any, kind: type) -> Any:
        """The value that a field like rank_pattern gives this module, or the default.

        Keys are patterns for the end of the module's path; the first that matches counts.
        Source: get_pattern_key of peft/utils/other.py.
        """
        options = self._reading.options
        for pattern, value in options.get(field, {}, kind=dict).items():
            if match(options, field, re.match, rf"(.*\.)?({pattern})$", self.module):
                if not is_of(kind, value):
                    options.refuse(field, f"the value of {pattern!r} has to be {KINDS[kind]}")
                return value
        return default

    def names(self, field: str) -> str | tuple[str, ...] | None:
        """A field that holds a string or a list of strings."""
        return self._reading.options.names(field)

    def is_named(self, field: str, names: str | tuple[str, ...]) -> bool:
        """Whether names that stand in a field name this module, by the rule of target_modules."""
        return matches(self._reading.options, field, names, self.module)

    def weight(self, why: str, as_held: bool = False) -> Any:
        """The base's W [d_in, d_out], numpy float32; or the array of params itself (`as_held`).

        Raises: AdapterError with `why` if params was not given.
        """
        W = self._reading.weights.weight(self._projection, why)
        return W if as_held else as_float32(W)

    def norm_weight(self, why: str) -> np.ndarray:
        """The base's weight [d_in] of this norm, float32. Raises as `weight`."""
        found = self._reading.weights.module_weight(self.module, why)
        if found is None:
            self.refuse("params lacks the weight of this norm; pass those of the whole base.")
        return found

    def bias(self, why: str) -> np.ndarray | None:
        """The base's bias [d_out], float32; None if this projection has none."""
        return self._reading.weights.bias(self._projection, why)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, made at the first site that asks for `key` and kept for all."""
        memory = self._reading.memory
        if key not in memory:
            memory[key] = make()
        return memory[key]

    def note(self, text: str) -> None:
        """A remark that the adapter carries in its metadata."""
        self._reading.notes[text] = None

    def keep(self, name: str, array: np.ndarray) -> None:
        """An array that `save_peft` needs and that the normal form does not hold."""
        self._reading.kept.setdefault(name, {})[self.name] = array

    def refuse(self, reason: str) -> NoReturn:
        """Raises AdapterError with the file and this module in front of the reason."""
        raise AdapterError(f"{self._reading.tensors.path}: {self.module}: {reason}")

    def refuse_field(self, field: str, needed: str) -> NoReturn:
        """Raises AdapterError naming the field of the config, its value and what was needed."""
        self._reading.options.refuse(field, needed)

    def _names(self) -> dict[str, str]:
        return self._reading.names.modules.get(self.module, {})
