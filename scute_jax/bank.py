"""The adapter bank: K adapters resident on the device, exchanged without recompiling.

The arrays are pools of fixed shapes (`bank.slots`, site -> SiteSlots) that compiled steps take as
an argument. The host keeps the books of which entries are free and writes whole entries; an adapter
that leaves is unnamed in every table, so that nothing of it can be read again.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from scute_jax.bank_arrays import Key, empty_arrays, entry_values, site_slots
from scute_jax.capacity import BankCapacity, pair_ranks, site_use
from scute_jax.errors import AdapterError
from scute_jax.normal_form import Adapter, NormalForm
from scute_jax.slots import SiteSlots, check_form

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
        self._widths = {site: widths[site] for site in capacity.sites}
        self._arrays = dict(empty_arrays(self._widths, capacity, self.dtype))
        self._free = {site: _all_entries(use) for site, use in capacity.sites.items()}
        self._residents: list[Resident | None] = [None] * capacity.adapters
        self._pairs: list[str | None] = [None] * capacity.pairs
        self._pair_sides: list[set[Key]] = [set() for _ in self._pairs]

    @property
    def slots(self) -> dict[str, SiteSlots]:
        """The pools and tables of every site, as compiled steps take them."""
        return {site: site_slots(self._arrays, site, self._widths[site]) for site in self._widths}

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
        self._check(adapter, None)
        slot = self.free[0] if slot is None else slot
        self._write(slot, adapter)
        return slot

    def replace(self, slot: int, adapter: Adapter) -> None:
        """Puts another adapter into a taken slot. Raises as `insert`; then the old one stays."""
        self._check(adapter, self._resident(slot))
        self._release(slot)
        self._write(slot, adapter)

    def clear(self, slot: int) -> None:
        """Frees a slot. Rows that name it from now on compute the base model."""
        self._resident(slot)
        self._release(slot)
        self._put(self._table_writes(slot, {}, {}))

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
            use, total = site_use(form, self.capacity.page), self.capacity.sites[site]
            most = (self.capacity.width[site], self.capacity.terms)
            if not use.fits(total) or use.pages > most[0] or use.shared_terms > most[1]:
                raise AdapterError(
                    f"{site}: the adapter takes {use}, but the bank was made for {total} in all, "
                    f"and for {most[0]} pages and {most[1]} shared terms of one adapter; grow it."
                )
            back = {} if leaving is None else leaving.entries.get(site, {})
            for kind, count in use.entries().items():
                free = len(self._free[site][kind]) + len(back.get(kind, ()))
                if count > free:
                    raise BankFull(f"{site}: {count} entries of {kind} needed, {free} free.")
        self._check_pairs(pair_ranks(adapter), leaving)

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
        for site, kinds in self._resident(slot).entries.items():
            for kind, entries in kinds.items():
                self._free[site][kind].extend(entries)
        self._residents[slot] = None
        used = self._used_pairs()
        self._pairs = [key if key in used else None for key in self._pairs]

    def _write(self, slot: int, adapter: Adapter) -> None:
        entries = {}
        for site, form in adapter.sites.items():
            counts, free = site_use(form, self.capacity.page).entries(), self._free[site]
            entries[site] = {
                kind: tuple(free[kind].pop() for _ in range(n)) for kind, n in counts.items()
            }
        self._residents[slot] = Resident(entries, frozenset(pair_ranks(adapter)))
        self._put_pairs(adapter)
        self._put(self._entry_writes(adapter, entries))
        self._put(self._table_writes(slot, adapter.sites, entries))

    def _put_pairs(self, adapter: Adapter) -> None:
        """Brings what is missing of the adapter's pairs: A for each d_in, B for each d_out."""
        for key, rank in pair_ranks(adapter).items():
            if key not in self._pairs:
                p = self._pairs.index(None)
                self._pairs[p], self._pair_sides[p] = key, set()
                self._put({(0, "pair_rank"): [(p, np.int32(rank))]})
            p = self._pairs.index(key)
            first, sides = p * self.capacity.pair_pages, self._pair_sides[p]
            writes: Writes = {}
            for site, form in adapter.sites.items():
                d_in, d_out = self._widths[site]
                for term in (term for term in form.terms if term.pair == key):
                    for side, rows in ((d_in, "pair_A"), term.A.T), ((d_out, "pair_B"), term.B):
                        if side not in sides:
                            sides.add(side)
                            writes[side] = list(enumerate(self._paged(np.asarray(rows)), first))
            self._put(writes)

    def _entry_writes(self, adapter: Adapter, entries: Mapping) -> Writes:
        writes: Writes = defaultdict(list)
        for site, form in adapter.sites.items():
            for kind, values in entry_values(form, self._widths[site][1]).items():
                if kind == "pages":
                    for side, rows in zip("AB", values, strict=True):
                        pages = self._paged(rows)
                        writes[site, side] = list(zip(entries[site][kind], pages, strict=True))
                elif kind == "shared":
                    width = self.capacity.pair_pages * self.capacity.page
                    for place, (d, e) in zip(entries[site][kind], values, strict=True):
                        d = np.pad(d, (0, width - len(d)))
                        writes[site, "d"].append((place, d.astype(self.dtype)))
                        writes[site, "e"].append((place, e.astype(self.dtype)))
                else:
                    writes[site, kind] = [(entries[site][kind][0], values.astype(self.dtype))]
        return writes

    def _table_writes(self, slot: int, sites: Mapping[str, NormalForm], entries: Mapping) -> Writes:
        """Row `slot` of every table of every site; what the adapter does not have reads 'none'."""
        writes: Writes = {}
        for site in self._widths:
            held, form = entries.get(site, {}), sites.get(site, NormalForm())
            for key in (key for key in self._arrays if key[0] == site):
                row = self._table_row(key[1], self._arrays[key].shape[1:], held, form)
                if row is not None:
                    writes[key] = [(slot, row)]
        return writes

    def _table_row(self, kind: str, shape: tuple, held: Mapping, form: NormalForm):
        if kind == "rank":
            return np.int32(form.rank)
        if kind == "table":
            return _filled(shape, 0, held.get("pages", ()))
        if kind == "shared_row":
            return _filled(shape, -1, held.get("shared", ()))
        if kind == "shared_pair":
            pairs = [self._pairs.index(term.pair) for term in form.terms if term.pair is not None]
            return _filled(shape, 0, pairs)
        if kind.endswith("_row"):
            return np.int32(next(iter(held.get(kind.removesuffix("_row"), ())), -1))
        return None

    def _paged(self, rows: np.ndarray) -> np.ndarray:
        page = self.capacity.page
        rows = np.pad(rows, ((0, -len(rows) % page), (0, 0))).astype(self.dtype)
        return rows.reshape(-1, page, rows.shape[1])

    def _put(self, writes: Writes) -> None:
        """Carries out the writes, all arrays of one kind in one call, entry by entry."""
        kinds = defaultdict(list)
        for key in writes:
            kinds[key[1]].append(key)
        for kind in kinds:
            keys = [key for key in self._arrays if key[1] == kind]
            rounds = max(len(writes.get(key, ())) for key in keys)
            for i in range(rounds):
                now = [writes[k][i] if i < len(writes.get(k, ())) else None for k in keys]
                arrays = [self._arrays[key] for key in keys]
                index = [
                    a.shape[0] if w is None else w[0] for a, w in zip(arrays, now, strict=True)
                ]
                values = [
                    _zeros(a.shape[1:], a.dtype) if w is None else w[1]
                    for a, w in zip(arrays, now, strict=True)
                ]
                written = _put_entries(arrays, np.asarray(index, np.int32), values)
                self._arrays.update(zip(keys, written, strict=True))


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


def _filled(shape: tuple[int, ...], rest: int, values) -> np.ndarray:
    row = np.full(shape, rest, np.int32)
    row[: len(values)] = values
    return row


def _all_entries(use) -> dict[str, list[int]]:
    return {kind: list(range(count)) for kind, count in use.entries().items()}
