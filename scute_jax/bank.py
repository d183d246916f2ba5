"""The adapter bank: K adapters resident on the device, exchanged without recompiling.

The arrays are pools of fixed shapes (`bank.slots`, site -> SiteSlots) that compiled steps take as
an argument. The host keeps the books of which entries are free and writes whole entries; an adapter
that leaves is unnamed in every table, so that nothing of it can be read again.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from scute_jax.bank_arrays import TABLES, Key, all_slots, empty_arrays
from scute_jax.capacity import BankCapacity, form_use, pair_ranks
from scute_jax.entries import entries, kinds, size_of
from scute_jax.errors import AdapterError
from scute_jax.normal_form import Adapter, NormalForm
from scute_jax.slots import SiteSlots, check_form, filled

# A write is one entry of an array: (index, value).
Writes = dict[Key, list[tuple[int, np.ndarray | np.int32]]]


class BankFull(AdapterError):
    """The adapter does not fit beside those that are resident; clear one and insert again."""


@dataclass(frozen=True)
class Resident:
    """What the bank holds of one adapter: its entries in the pools of each site, and its pairs."""

    entries: Mapping[str, Mapping[str, tuple[int, ...]]]
    pairs: frozenset[str]


class AdapterBank:
    """K adapters on the device, one per slot 0 .. K-1.

    `slots` changes its arrays with every insert, replace and clear, never their shapes. The arrays
    handed out before are donated to the write: take `slots` anew for each step.
    """

    def __init__(
        self,
        widths: Mapping[str, tuple[int, int]],
        capacity: BankCapacity,
        dtype: jnp.dtype = jnp.float32,
    ):
        """An empty bank. `widths` gives (d_in, d_out) of the sites named in the capacity."""
        self.capacity, self.dtype = capacity, jnp.dtype(dtype)
        self._widths = {site: widths[site] for site in capacity.entries}
        self._arrays = dict(empty_arrays(self._widths, capacity, self.dtype))
        self._free = {
            site: {kind: list(range(count)) for kind, count in counts.items()}
            for site, counts in capacity.entries.items()
        }
        self._residents: list[Resident | None] = [None] * capacity.adapters
        self._pairs: list[str | None] = [None] * capacity.pairs
        self._pair_sides: list[set[Key]] = [set() for _ in self._pairs]

    @property
    def slots(self) -> dict[str, SiteSlots]:
        """The pools and tables of every site, as compiled steps take them."""
        return all_slots(self._arrays, self._widths)

    @property
    def free(self) -> list[int]:
        """The slots that hold no adapter."""
        return [k for k, resident in enumerate(self._residents) if resident is None]

    def insert(self, adapter: Adapter, slot: int | None = None) -> int:
        """Makes a folded adapter resident, in the first free slot or a given one; returns the slot.

        Raises: BankFull if no slot or no room is free; AdapterError if it can never fit.
        """
        if not self.free or slot not in (None, *self.free):
            raise BankFull(f"of {self.capacity.adapters} slots, only {self.free} are free.")
        adapter = _effective(adapter)
        self._check(adapter, None)
        slot = self.free[0] if slot is None else slot
        self._write(slot, adapter)
        return slot

    def replace(self, slot: int, adapter: Adapter) -> None:
        """Puts another adapter into a taken slot. Raises as `insert`; then the old one stays."""
        adapter = _effective(adapter)
        self._check(adapter, self._resident(slot))
        self._release(slot)
        self._write(slot, adapter)

    def clear(self, slot: int) -> None:
        """Frees a slot. Rows that name it from now on compute the base model."""
        self._resident(slot)
        self._release(slot)
        self._put(self._table_writes(slot, {}, {}))

    def warm_up(self) -> None:
        """Compiles all writes, so that adapters come and go without compiling anything."""
        for kind in dict.fromkeys(kind for _, kind in self._arrays):
            self._put_entry(kind, {})

    @property
    def lost(self) -> bool:
        """Whether a write that failed took an array with it; the bank is of no use then."""
        return any(array.is_deleted() for array in self._arrays.values())

    def _resident(self, slot: int) -> Resident:
        resident = self._residents[slot] if 0 <= slot < self.capacity.adapters else None
        if resident is None:
            raise ValueError(f"slot {slot} of the bank holds no adapter.")
        return resident

    def _check(self, adapter: Adapter, leaving: Resident | None) -> None:
        """Raises unless the adapter fits once `leaving` has gone. Changes nothing."""
        for site, form in adapter.sites.items():
            if site not in self._widths:
                raise AdapterError(f"{site}: the bank has no room at this site; grow the bank.")
            check_form(form, *self._widths[site], site)
            self._check_room(site, form, leaving)
        self._check_pairs(pair_ranks(adapter), leaving)

    def _check_room(self, site: str, form: NormalForm, leaving: Resident | None) -> None:
        have, largest = self.capacity.entries[site], self.capacity.sizes[site]
        back = {} if leaving is None else leaving.entries.get(site, {})
        found, page = entries(form), self.capacity.page
        for kind, count in form_use(form, page).items():
            size = size_of(kind, found[kind], page)
            needs_input = any("u" in entry for entry in found[kind])
            if (
                count > have.get(kind, 0)
                or size > largest[kind]
                or (needs_input and site not in self.capacity.inputs)
            ):
                raise AdapterError(
                    f"{site}: the adapter takes {count} entries of {kind} of size {size}, but the "
                    f"bank was made for {have.get(kind, 0)} of size {largest.get(kind, 0)}; "
                    "grow the bank."
                )
            free = len(self._free[site][kind]) + len(back.get(kind, ()))
            if count > free:
                raise BankFull(f"{site}: {count} entries of {kind} needed, {free} free.")

    def _check_pairs(self, ranks: Mapping[str, int], leaving: Resident | None) -> None:
        most = self.capacity.pair_pages * self.capacity.page
        if len(ranks) > self.capacity.pairs or max(ranks.values(), default=0) > most:
            raise AdapterError(
                f"the adapter uses {len(ranks)} shared pairs of rank {max(ranks.values())}, but "
                f"the bank was made for {self.capacity.pairs} of rank {most}; grow it."
            )
        used = self._used_pairs(leaving) | set(ranks)
        if len(used) > self.capacity.pairs:
            raise BankFull(f"{len(used)} shared pairs needed, room for {self.capacity.pairs}.")

    def _used_pairs(self, leaving: Resident | None = None) -> set[str]:
        staying = (r for r in self._residents if r is not None and r is not leaving)
        return {key for resident in staying for key in resident.pairs}

    def _release(self, slot: int) -> None:
        for site, own in self._resident(slot).entries.items():
            for kind, places in own.items():
                self._free[site][kind].extend(places)
        self._residents[slot] = None
        used = self._used_pairs()
        self._pairs = [key if key in used else None for key in self._pairs]

    def _write(self, slot: int, adapter: Adapter) -> None:
        held = {}
        for site, form in adapter.sites.items():
            free, counts = self._free[site], form_use(form, self.capacity.page)
            held[site] = {k: tuple(free[k].pop() for _ in range(n)) for k, n in counts.items()}
        self._residents[slot] = Resident(held, frozenset(pair_ranks(adapter)))
        self._put_pairs(adapter)
        self._put(self._entry_writes(adapter, held))
        self._put(self._table_writes(slot, adapter.sites, held))

    def _put_pairs(self, adapter: Adapter) -> None:
        """Brings what is missing of the adapter's pairs: A for each d_in, B for each d_out."""
        for key, rank in pair_ranks(adapter).items():
            if key not in self._pairs:
                p = self._pairs.index(None)
                self._pairs[p], self._pair_sides[p] = key, set()
                self._put({(0, "pair/rank"): [(p, np.int32(rank))]})
            p = self._pairs.index(key)
            first, sides = p * self.capacity.pair_pages, self._pair_sides[p]
            writes: Writes = {}
            for site, form in adapter.sites.items():
                d_in, d_out = self._widths[site]
                for term in (term for term in form.terms if term.pair == key):
                    for side, rows in ((d_in, "pair/A"), term.A.T), ((d_out, "pair/B"), term.B):
                        if side not in sides:
                            sides.add(side)
                            writes[side] = list(enumerate(self._paged(np.asarray(rows)), first))
            self._put(writes)

    def _entry_writes(self, adapter: Adapter, held: Mapping) -> Writes:
        """The numbers of an adapter at the entries that it holds."""
        writes: Writes = defaultdict(list)
        for site, form in adapter.sites.items():
            d_out = self._widths[site][1]
            for kind, own in entries(form).items():
                places, size = held[site][kind], self.capacity.sizes[site][kind]
                if kind == "factors":
                    for part, rows in own[0].items():
                        pages = self._paged(np.asarray(rows))
                        writes[site, f"{kind}/{part}"] = list(zip(places, pages, strict=True))
                    continue
                for place, entry in zip(places, own, strict=True):
                    ragged = kind in ("sparse", "tokens")
                    for part, array in (filled(entry, size, d_out) if ragged else entry).items():
                        key = (site, f"{kind}/{part}")
                        writes[key].append((place, self._fitting(key, np.asarray(array))))
                    if kind == "shared" and "u" not in entry and site in self.capacity.inputs:
                        ones = np.ones(self._widths[site][0], self.dtype)
                        writes[site, "shared/u"].append((place, ones))
        return writes

    def _fitting(self, key: Key, array: np.ndarray) -> np.ndarray:
        """An entry in the dtype of its pool, filled up with zeros where the pool is longer."""
        pool = self._arrays[key]
        missing = [(0, have - got) for have, got in zip(pool.shape[1:], array.shape, strict=True)]
        return np.pad(array, missing).astype(pool.dtype)

    def _table_writes(self, slot: int, sites: Mapping[str, NormalForm], held: Mapping) -> Writes:
        """Row `slot` of every table of every site; what the adapter does not have reads 'none'."""
        writes: Writes = {}
        for key, array in self._arrays.items():
            site, (kind, _, part) = key[0], key[1].rpartition("/")
            if site in self._widths and part in TABLES:
                places, form = held.get(site, {}).get(kind, ()), sites.get(site, NormalForm())
                writes[key] = [(slot, self._table_row(kind, part, array.shape[1:], places, form))]
        return writes

    def _table_row(self, kind: str, part: str, shape: tuple, places: tuple, form: NormalForm):
        if part == "rank":
            return np.int32(form.rank)
        if part == "table":
            return _filled_row(shape, 0, places)
        if part == "pair":
            pairs = [self._pairs.index(term.pair) for term in form.terms if term.pair is not None]
            return _filled_row(shape, 0, pairs)
        return _filled_row(shape, -1, places) if shape else np.int32(next(iter(places), -1))

    def _paged(self, rows: np.ndarray) -> np.ndarray:
        page = self.capacity.page
        rows = np.pad(rows, ((0, -len(rows) % page), (0, 0))).astype(self.dtype)
        return rows.reshape(-1, page, rows.shape[1])

    def _put(self, writes: Writes) -> None:
        """Carries out the writes, all arrays of one kind in one call, entry by entry."""
        named = defaultdict(list)
        for key in writes:
            named[key[1]].append(key)
        for kind, keys in named.items():
            for i in range(max(len(writes[key]) for key in keys)):
                self._put_entry(kind, {k: writes[k][i] for k in keys if i < len(writes[k])})

    def _put_entry(
        self, kind: str, writes: Mapping[Key, tuple[int, np.ndarray | np.int32]]
    ) -> None:
        """Writes one entry of some of the arrays of a kind."""
        keys = [key for key in self._arrays if key[1] == kind]
        arrays = [self._arrays[key] for key in keys]
        index = [
            writes[k][0] if k in writes else a.shape[0] for k, a in zip(keys, arrays, strict=True)
        ]
        values = [
            writes[k][1] if k in writes else _zeros(a.shape[1:], a.dtype)
            for k, a in zip(keys, arrays, strict=True)
        ]
        written = _put_entries(arrays, np.asarray(index, np.int32), values)
        self._arrays.update(zip(keys, written, strict=True))


def _effective(adapter: Adapter) -> Adapter:
    """The adapter without the sites at which it does nothing: those need no room."""
    sites = {site: form for site, form in adapter.sites.items() if kinds(form)}
    return replace(adapter, sites=sites)


@partial(jax.jit, donate_argnums=0)
def _put_entries(arrays: list[Array], index: Array, values: list[Array]) -> list[Array]:
    """arrays[i] with entry index[i] replaced by values[i]; an index past the end writes nothing."""
    pairs = enumerate(zip(arrays, values, strict=True))
    return [array.at[index[i]].set(value, mode="drop") for i, (array, value) in pairs]


_ZEROS: dict[tuple, Array] = {}


def _zeros(shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """The value of a write that writes nothing, kept on the device."""
    key = (shape, jnp.dtype(dtype))
    if key not in _ZEROS:
        _ZEROS[key] = jnp.zeros(shape, dtype)
    return _ZEROS[key]


def _filled_row(shape: tuple[int, ...], rest: int, values) -> np.ndarray:
    row = np.full(shape, rest, np.int32)
    row[: len(values)] = values
    return row
