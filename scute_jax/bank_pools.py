"""The arrays of a bank on the device: read as slots, written by entries.

A write goes to all arrays of one kind at one layer in one call, whatever it writes there, and what
is small of it in one transfer. Layers are alike: a kind has one compiled program, as a rule.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from scute_jax.bank_arrays import Key, all_slots
from scute_jax.slots import SiteSlots

# What is written to an array: (index of the entry, value) each. A value may be shorter than the
# entries of the array: the rest becomes zero.
Writes = dict[Key, list[tuple[int, Any]]]
Group = tuple[str, Any]  # kind and layer, of arrays that are written together
SMALL = 1 << 16  # bytes of an entry that travels together with others
WORD = np.dtype(np.int32)


@dataclass(frozen=True)
class View:
    """Some of the arrays in the structure of slots."""

    places: tuple[int, ...]
    structure: Any


class Pools:
    """Named arrays; a write replaces those of a group by new ones and donates the old."""

    def __init__(self, arrays: Iterable[tuple[Key, Array]], widths: Mapping[str, tuple[int, int]]):
        named = dict(arrays)
        self._arrays = list(named.values())
        self._place = {key: i for i, key in enumerate(named)}
        self._group = {key: _group(key) for key in named}
        groups: dict[Group, list[int]] = {}
        for key, i in self._place.items():
            if not key[1].startswith("order/"):  # those stay as they are
                groups.setdefault(self._group[key], []).append(i)
        self._groups = {
            group: (tuple(places), _Layout.of([self._arrays[i] for i in places]))
            for group, places in groups.items()
        }
        self._sites = all_slots(self._place, widths)  # slots with places in place of arrays

    def __contains__(self, key: Key) -> bool:
        return key in self._place

    def view(self, keep: Callable[[str, SiteSlots], SiteSlots]) -> View:
        """The view of what is kept of each site's slots; sites of which nothing is are left out."""
        kept = {site: keep(site, slots) for site, slots in self._sites.items()}
        kept = {site: slots for site, slots in kept.items() if jax.tree.leaves(slots)}
        places, structure = jax.tree.flatten(kept)
        return View(tuple(places), structure)

    def read(self, view: View) -> dict[str, SiteSlots]:
        """The slots of a view as they are now."""
        return view.structure.unflatten([self._arrays[i] for i in view.places])

    def shape(self, key: Key) -> tuple[int, ...]:
        """The shape of one entry of an array."""
        return self._arrays[self._place[key]].shape[1:]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays)

    @property
    def lost(self) -> bool:
        """Whether a write that failed took an array with it."""
        return any(array.is_deleted() for array in self._arrays)

    def warm_up(self) -> None:
        """Compiles the writes of every group."""
        for group in self._groups:
            self._put_group(group, {})

    def put(self, writes: Writes) -> None:
        """Carries out the writes: those of a group in as many calls as one array gets entries."""
        groups: dict[Group, list[dict[int, tuple[int, Any]]]] = {}
        for key, own in writes.items():
            rounds, place = groups.setdefault(self._group[key], []), self._place[key]
            rounds += [{} for _ in range(len(own) - len(rounds))]
            for write, entries in zip(own, rounds, strict=False):
                entries[place] = write
        for group, rounds in groups.items():
            for entries in rounds:
                self._put_group(group, entries)

    def _put_group(self, group: Group, writes: Mapping[int, tuple[int, Any]]) -> None:
        places, layout = self._groups[group]
        words, large = layout.values([writes.get(i) for i in places])
        written = _put_entries([self._arrays[i] for i in places], words, large)
        for i, array in zip(places, written, strict=True):
            self._arrays[i] = array


@dataclass(frozen=True)
class _Layout:
    """How one entry for each array of a group travels to the device.

    In words of 32 bits: the index of each entry, past the end where nothing is written, and then
    the small entries one after the other. Large ones are arrays of their own.
    """

    ends: np.ndarray  # entries of each array
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    starts: tuple[int | None, ...]  # the first word of each entry, None = a large one
    words: int

    @classmethod
    def of(cls, arrays: Sequence[Array]) -> "_Layout":
        words, starts = len(arrays), []
        for array in arrays:
            size = _bytes(array)
            starts.append(words if size <= SMALL else None)
            words += -(-size // WORD.itemsize) if size <= SMALL else 0
        return cls(
            ends=np.asarray([array.shape[0] for array in arrays], WORD),
            shapes=tuple(array.shape[1:] for array in arrays),
            dtypes=tuple(np.dtype(array.dtype) for array in arrays),
            starts=tuple(starts),
            words=words,
        )

    def values(
        self, writes: Sequence[tuple[int, Any] | None]
    ) -> tuple[np.ndarray, list[np.ndarray | Array]]:
        """The words and the large entries of some writes."""
        words, large = np.zeros(self.words, WORD), []
        words[: len(self.ends)] = self.ends
        for i, write in enumerate(writes):
            start, shape, dtype = self.starts[i], self.shapes[i], self.dtypes[i]
            if write is not None:
                words[i] = write[0]
            if start is None:
                large.append(_zeros(shape, dtype) if write is None else _as(write[1], shape, dtype))
            elif write is not None:
                size = math.prod(shape)
                end = start + -(-size * dtype.itemsize // WORD.itemsize)
                _fill(words[start:end].view(dtype)[:size].reshape(shape), write[1])
        return words, large


def _group(key: Key) -> Group:
    """("factors", "layers.3") of "layers.3.mlp.up_proj", "factors/A"."""
    place, name = key
    if isinstance(place, str):
        place = ".".join(place.split(".")[:2]) if place.startswith("layers.") else place
        return name.rpartition("/")[0], place
    return name.partition("/")[0], None  # of shared pairs, and the orders of rotations


def _as(value: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    value = np.asarray(value)
    if value.shape != shape:
        value, given = np.zeros(shape, dtype), value
        _fill(value, given)
    return np.ascontiguousarray(value, dtype)


def _fill(entry: np.ndarray, value: Any) -> None:
    value = np.asarray(value)
    if value.shape == entry.shape:
        entry[...] = value
    else:
        entry[tuple(map(slice, value.shape))] = value


def _bytes(array: Array) -> int:
    return math.prod(array.shape[1:]) * array.dtype.itemsize


@partial(jax.jit, donate_argnums=0)
def _put_entries(arrays: list[Array], words: Int[Array, "w"], large: list[Array]) -> list[Array]:
    """The arrays with one entry of each replaced, see _Layout."""
    layout, rest, written = _Layout.of(arrays), iter(large), []
    for i, (array, start) in enumerate(zip(arrays, layout.starts, strict=True)):
        if start is None:
            value = next(rest)
        else:
            size = math.prod(array.shape[1:])
            own = words[start : start + -(-_bytes(array) // WORD.itemsize)]
            own = jax.lax.bitcast_convert_type(own, array.dtype)
            value = jnp.reshape(jnp.reshape(own, (-1,))[:size], array.shape[1:])
        written.append(array.at[words[i]].set(value, mode="drop"))
    return written


_ZEROS: dict[tuple, Array] = {}


def _zeros(shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """The value of a write that writes nothing, kept on the device."""
    key = (shape, dtype)
    if key not in _ZEROS:
        _ZEROS[key] = jnp.zeros(shape, dtype)
    return _ZEROS[key]
