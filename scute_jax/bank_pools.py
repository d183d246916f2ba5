"""The arrays of a bank on the device: read as slots, written by entries.

A write goes to all arrays of one kind at one layer in one call, whatever it writes there, and what
is small of it in two transfers. Layers are alike: a kind has one compiled program, as a rule.
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
GroupKey = tuple[str, Any]  # kind and layer, of arrays that are written together
Write = tuple[int, Any]
SMALL = 1 << 16  # bytes of an entry that travels together with others
INT = np.dtype(np.int32)


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
        groups: dict[GroupKey, list[Key]] = {}
        for key in named:
            if not key[1].startswith("order/"):  # those stay as they are
                groups.setdefault(_group(key), []).append(key)
        self._groups = {
            group: _Group.of({self._place[key]: named[key] for key in keys})
            for group, keys in groups.items()
        }
        self._member = {
            key: (group, i) for group, keys in groups.items() for i, key in enumerate(keys)
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
        for group in self._groups.values():
            self._put_group(group, {})

    def put(self, writes: Writes) -> None:
        """Carries out the writes: those of a group in as many calls as one array gets entries."""
        calls: dict[tuple[GroupKey, int], dict[int, Write]] = {}
        for key, own in writes.items():
            group, i = self._member[key]
            for call, write in enumerate(own):
                calls.setdefault((group, call), {})[i] = write
        for (group, _), entries in calls.items():
            self._put_group(self._groups[group], entries)

    def _put_group(self, group: "_Group", writes: Mapping[int, Write]) -> None:
        values = group.values(writes)
        written = _put_entries([self._arrays[i] for i in group.places], *values)
        for i, array in zip(group.places, written, strict=True):
            self._arrays[i] = array


@dataclass(frozen=True)
class _Layout:
    """How one entry for each array of a group travels to the device.

    A vector of int32 has the index of each entry and behind them the small entries of integers; a
    second vector has the small entries of the other dtype. Large ones are arrays of their own, with
    an index past the end where nothing is written.
    """

    small: tuple[bool, ...]
    spans: tuple[slice, ...]  # where each small entry lies in its vector
    lengths: tuple[int, int]  # of the two vectors

    @classmethod
    def of(cls, arrays: Sequence[Array]) -> "_Layout":
        lengths, spans = [len(arrays), 0], []
        small = tuple(_size(array) * array.dtype.itemsize <= SMALL for array in arrays)
        for array, together in zip(arrays, small, strict=True):
            which, size = int(array.dtype != INT), _size(array) if together else 0
            spans.append(slice(lengths[which], lengths[which] + size))
            lengths[which] += size
        return cls(small, tuple(spans), (lengths[0], lengths[1]))


@dataclass
class _Group:
    """The arrays that are written together, and what the last call wrote.

    Small arrays get that again where a call has nothing for them: to leave one out on the device
    would cost a kernel for each.
    """

    places: tuple[int, ...]
    layout: _Layout
    entries: list[jax.ShapeDtypeStruct]  # of each array
    ints: np.ndarray
    others: np.ndarray
    nothing: dict[int, Array]  # what a large array gets then, kept on the device
    ends: dict[int, int]  # and the index, past its end

    @classmethod
    def of(cls, arrays: Mapping[int, Array]) -> "_Group":
        """The arrays by place, as they were made."""
        own = list(arrays.values())
        layout = _Layout.of(own)
        entries = [jax.ShapeDtypeStruct(a.shape[1:], np.dtype(a.dtype)) for a in own]
        dtype = next((entry.dtype for entry in entries if entry.dtype != INT), np.float32)
        ints, others = (np.zeros(n, d) for n, d in zip(layout.lengths, (INT, dtype), strict=True))
        for i, array in enumerate(own):
            if layout.small[i] and array.dtype == INT:  # pools are zero, tables have what is none
                ints[layout.spans[i]] = np.asarray(array)[0].reshape(-1)
        large = [i for i, small in enumerate(layout.small) if not small]
        nothing = {i: _zeros(entries[i].shape, entries[i].dtype) for i in large}
        ends = {i: own[i].shape[0] for i in large}
        return cls(tuple(arrays), layout, entries, ints, others, nothing, ends)

    def values(
        self, writes: Mapping[int, Write]
    ) -> tuple[np.ndarray, np.ndarray, list[np.ndarray | Array]]:
        """The two vectors and the large entries; `writes` by the place of the array in the group.

        The device may still read what earlier calls returned, which is never written to.
        """
        ints, others, large = self.ints.copy(), self.others.copy(), dict(self.nothing)
        for i, end in self.ends.items():
            ints[i] = end
        for i, (index, value) in writes.items():
            ints[i], entry = index, self.entries[i]
            if self.layout.small[i]:
                vector = ints if entry.dtype == INT else others
                _fill(vector[self.layout.spans[i]].reshape(entry.shape), value)
            else:
                large[i] = _as(value, entry)
        self.ints, self.others = ints, others
        return ints, others, list(large.values())


def _group(key: Key) -> GroupKey:
    """("factors", "layers.3") of "layers.3.mlp.up_proj", "factors/A"."""
    place, name = key
    if isinstance(place, str):
        place = ".".join(place.split(".")[:2]) if place.startswith("layers.") else place
        return name.rpartition("/")[0], place
    return name.partition("/")[0], None  # of shared pairs, and the orders of rotations


def _as(value: Any, entry: jax.ShapeDtypeStruct) -> np.ndarray:
    value = np.asarray(value)
    if value.shape != entry.shape:
        value, given = np.empty(entry.shape, entry.dtype), value
        _fill(value, given)
    return np.ascontiguousarray(value, entry.dtype)


def _fill(entry: np.ndarray, value: Any) -> None:
    """Fills an entry with a value; where that is shorter, the rest becomes zero."""
    value = np.asarray(value)
    if value.shape == entry.shape:
        entry[...] = value
    else:
        entry[...] = 0
        entry[tuple(map(slice, value.shape))] = value


def _size(array: Array) -> int:
    return math.prod(array.shape[1:])


@partial(jax.jit, donate_argnums=0)
def _put_entries(
    arrays: list[Array], ints: Int[Array, "i"], others: Array, large: list[Array]
) -> list[Array]:
    """The arrays with one entry of each replaced, see _Layout."""
    layout, rest, written = _Layout.of(arrays), iter(large), []
    for i, array in enumerate(arrays):
        if layout.small[i]:
            vector = ints if array.dtype == INT else others
            value = jnp.reshape(vector[layout.spans[i]], array.shape[1:])
            written.append(jax.lax.dynamic_update_index_in_dim(array, value, ints[i], 0))
        else:
            written.append(array.at[ints[i]].set(next(rest), mode="drop"))
    return written


_ZEROS: dict[tuple, Array] = {}


def _zeros(shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """The value of a write that writes nothing, kept on the device."""
    key = (shape, dtype)
    if key not in _ZEROS:
        _ZEROS[key] = jnp.zeros(shape, dtype)
    return _ZEROS[key]
