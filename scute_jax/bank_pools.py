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
Group = tuple[str, Any]  # kind and layer, of arrays that are written together
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
        # What small arrays were last given. They get it again where a call has nothing for them:
        # to leave one out on the device would cost a kernel for each.
        self._last: list[Write] = [(0, _first(array)) for array in self._arrays]

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
        groups: dict[Group, list[dict[int, Write]]] = {}
        for key, own in writes.items():
            rounds, place = groups.setdefault(self._group[key], []), self._place[key]
            rounds += [{} for _ in range(len(own) - len(rounds))]
            for write, entries in zip(own, rounds, strict=False):
                entries[place] = write
        for group, rounds in groups.items():
            for entries in rounds:
                self._put_group(group, entries)

    def _put_group(self, group: Group, writes: Mapping[int, Write]) -> None:
        places, layout = self._groups[group]
        last = [self._last[i] for i in places]
        values = layout.values([writes.get(i) for i in places], last)
        written = _put_entries([self._arrays[i] for i in places], *values)
        for i, array in zip(places, written, strict=True):
            self._arrays[i] = array
        for i, small in zip(places, layout.small, strict=True):
            if small and i in writes:  # a copy: the array may be the caller's own
                self._last[i] = writes[i][0], np.array(writes[i][1])


@dataclass(frozen=True)
class _Layout:
    """How one entry for each array of a group travels to the device.

    A vector of int32 has the index of each entry and behind them the small entries of integers; a
    second vector has the small entries of the other dtype. Large ones are arrays of their own, with
    an index past the end where nothing is written.
    """

    ends: tuple[int, ...]  # entries of each array
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    small: tuple[bool, ...]
    spans: tuple[slice, ...]  # where each small entry lies in its vector
    lengths: tuple[int, int]  # of the two vectors
    dtype: np.dtype  # of the second

    @classmethod
    def of(cls, arrays: Sequence[Array]) -> "_Layout":
        lengths, spans = [len(arrays), 0], []
        small = tuple(_size(array) * array.dtype.itemsize <= SMALL for array in arrays)
        for array, together in zip(arrays, small, strict=True):
            which, size = int(array.dtype != INT), _size(array) if together else 0
            spans.append(slice(lengths[which], lengths[which] + size))
            lengths[which] += size
        others = [np.dtype(array.dtype) for array in arrays if array.dtype != INT]
        return cls(
            ends=tuple(array.shape[0] for array in arrays),
            shapes=tuple(array.shape[1:] for array in arrays),
            dtypes=tuple(INT if a.dtype == INT else np.dtype(a.dtype) for a in arrays),
            small=small,
            spans=tuple(spans),
            lengths=(lengths[0], lengths[1]),
            dtype=others[0] if others else np.dtype(np.float32),
        )

    def values(
        self, writes: Sequence[Write | None], last: Sequence[Write]
    ) -> tuple[np.ndarray, np.ndarray, list[np.ndarray | Array]]:
        """The two vectors and the large entries; `last` stands in for small ones not written."""
        ints, others = np.zeros(self.lengths[0], INT), np.zeros(self.lengths[1], self.dtype)
        index, large = list(self.ends), []
        for i, write in enumerate(writes):
            if self.small[i]:
                index[i], value = last[i] if write is None else write
                vector = ints if self.dtypes[i] is INT else others
                _fill(vector[self.spans[i]].reshape(self.shapes[i]), value)
            elif write is None:
                large.append(_zeros(self.shapes[i], self.dtypes[i]))
            else:
                index[i] = write[0]
                large.append(_as(write[1], self.shapes[i], self.dtypes[i]))
        ints[: len(index)] = index
        return ints, others, large


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
    if value.shape == entry.shape or not value.shape:
        entry[...] = value
    else:
        entry[tuple(map(slice, value.shape))] = value


def _size(array: Array) -> int:
    return math.prod(array.shape[1:])


def _first(array: Array) -> Any:
    """The first entry of an array that is as it was made: pools are zero, tables are small."""
    small = _size(array) * INT.itemsize <= SMALL
    return np.asarray(array)[0] if array.dtype == INT and small else 0


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
