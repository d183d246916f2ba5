"""The adapter bank: K adapters resident on the device, exchanged without recompiling.

The arrays are pools of fixed shapes (`bank.slots`, site -> SiteSlots) that compiled steps take as
an argument. The host keeps the books of which entries are free and writes whole entries; an adapter
that leaves is unnamed in every table, so that nothing of it can be read again.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from scute_jax.bank_arrays import TABLES, Key, empty_arrays
from scute_jax.bank_pools import Pools, View, Writes
from scute_jax.capacity import BankCapacity, pair_ranks, taken
from scute_jax.entries import Entry, entries, size_of
from scute_jax.errors import AdapterError
from scute_jax.normal_form import Adapter, NormalForm
from scute_jax.slots import SiteSlots, check_form, filled

Found = Mapping[str, Mapping[str, list[Entry]]]  # site -> kind -> entries


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
        self._pools = Pools(empty_arrays(self._widths, capacity, self.dtype), self._widths)
        self._whole = self._pools.view(lambda site, slots: slots)
        self._tables: dict[tuple[str, str], list[tuple[Key, str, tuple[int, ...]]]] = {
            (site, kind): [
                (key, part, self._pools.shape(key))
                for part in TABLES
                if (key := (site, f"{kind}/{part}")) in self._pools
            ]
            for site, counts in capacity.entries.items()
            for kind in counts
        }
        self._free = {
            site: {kind: list(range(count)) for kind, count in counts.items()}
            for site, counts in capacity.entries.items()
        }
        self._residents: list[Resident | None] = [None] * capacity.adapters
        self._pairs: list[str | None] = [None] * capacity.pairs
        self._pair_sides: list[set[Key]] = [set() for _ in self._pairs]
        self._torn = False  # a write began and did not end: books and tables may differ

    @property
    def slots(self) -> dict[str, SiteSlots]:
        """The pools and tables of every site, as compiled steps take them."""
        return self._pools.read(self._whole)

    def view(self, keep: Callable[[str, SiteSlots], SiteSlots]) -> View:
        """What is kept of the slots of each site, for `read`."""
        return self._pools.view(keep)

    def read(self, view: View) -> dict[str, SiteSlots]:
        """The slots of a view as they are now; sites of which nothing is kept are not there."""
        return self._pools.read(view)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays; they stay the same."""
        return self._pools.nbytes

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
        adapter, found = _effective(adapter)
        self._check(adapter, found, None)
        slot = self.free[0] if slot is None else slot
        with self._writing():
            self._write(slot, adapter, found, {})
        return slot

    def replace(self, slot: int, adapter: Adapter) -> None:
        """Puts another adapter into a taken slot. Raises as `insert`; then the old one stays."""
        leaving = self._resident(slot)
        adapter, found = _effective(adapter)
        self._check(adapter, found, leaving)
        with self._writing():
            self._release(slot)
            self._write(slot, adapter, found, leaving.entries)

    def clear(self, slot: int) -> None:
        """Frees a slot. Rows that name it from now on compute the base model."""
        leaving = self._resident(slot)
        with self._writing():
            self._release(slot)
            self._pools.put(self._table_writes(slot, {}, {}, leaving.entries))

    def warm_up(self) -> None:
        """Compiles all writes, so that adapters come and go without compiling anything."""
        self._pools.warm_up()

    @property
    def lost(self) -> bool:
        """Whether a write failed halfway, or took an array with it; the bank is of no use then."""
        return self._torn or self._pools.lost

    @contextmanager
    def _writing(self) -> Iterator[None]:
        before, self._torn = self._torn, True
        yield
        self._torn = before

    def _resident(self, slot: int) -> Resident:
        resident = self._residents[slot] if 0 <= slot < self.capacity.adapters else None
        if resident is None:
            raise ValueError(f"slot {slot} of the bank holds no adapter.")
        return resident

    def _check(self, adapter: Adapter, found: Found, leaving: Resident | None) -> None:
        """Raises unless the adapter fits once `leaving` has gone. Changes nothing."""
        for site, form in adapter.sites.items():
            if site not in self._widths:
                raise AdapterError(f"{site}: the bank has no room at this site; grow the bank.")
            check_form(form, *self._widths[site], site)
            self._check_room(site, found[site], leaving)
        self._check_pairs(pair_ranks(adapter), leaving)

    def _check_room(
        self, site: str, found: Mapping[str, list[Entry]], leaving: Resident | None
    ) -> None:
        have, largest = self.capacity.entries[site], self.capacity.sizes[site]
        back = {} if leaving is None else leaving.entries.get(site, {})
        page = self.capacity.page
        for kind, count in taken(found, page).items():
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

    def _write(
        self, slot: int, adapter: Adapter, found: Found, before: Mapping[str, Mapping]
    ) -> None:
        """Makes an adapter resident in a slot where the entries `before` have been released."""
        held = {}
        for site, own in found.items():
            free, counts = self._free[site], taken(own, self.capacity.page)
            held[site] = {k: tuple(free[k].pop() for _ in range(n)) for k, n in counts.items()}
        self._residents[slot] = Resident(held, frozenset(pair_ranks(adapter)))
        self._pools.put(self._pair_writes(adapter))
        writes = self._entry_writes(found, held)
        self._pools.put(writes | self._table_writes(slot, adapter.sites, held, before))

    def _pair_writes(self, adapter: Adapter) -> Writes:
        """What is missing of the adapter's pairs: A for each d_in, B for each d_out."""
        writes: Writes = defaultdict(list)
        for key, rank in pair_ranks(adapter).items():
            if key not in self._pairs:
                p = self._pairs.index(None)
                self._pairs[p], self._pair_sides[p] = key, set()
                writes[0, "pair/rank"].append((p, rank))
            p = self._pairs.index(key)
            first, sides = p * self.capacity.pair_pages, self._pair_sides[p]
            for site, form in adapter.sites.items():
                d_in, d_out = self._widths[site]
                for term in (term for term in form.terms if term.pair == key):
                    for side in ((d_in, "pair/A"), (d_out, "pair/B")):
                        if side not in sides:
                            sides.add(side)
                            rows = term.A.T if side[1] == "pair/A" else term.B
                            writes[side] += enumerate(self._pages(rows), first)
        return writes

    def _entry_writes(self, found: Found, held: Mapping) -> Writes:
        """The numbers of an adapter at the entries that it holds."""
        writes: Writes = defaultdict(list)
        for site, kinds in found.items():
            d_in, d_out = self._widths[site]
            for kind, own in kinds.items():
                places, size = held[site][kind], self.capacity.sizes[site][kind]
                if kind == "factors":
                    for part, rows in own[0].items():
                        pages = self._pages(rows)
                        writes[site, f"{kind}/{part}"] = list(zip(places, pages, strict=True))
                    continue
                for place, entry in zip(places, own, strict=True):
                    ragged = kind in ("sparse", "tokens")
                    for part, array in (filled(entry, size, d_out) if ragged else entry).items():
                        writes[site, f"{kind}/{part}"].append((place, array))
                    if kind == "shared" and "u" not in entry and site in self.capacity.inputs:
                        writes[site, "shared/u"].append((place, np.ones(d_in, self.dtype)))
        return writes

    def _table_writes(
        self, slot: int, sites: Mapping[str, NormalForm], held: Mapping, before: Mapping
    ) -> Writes:
        """Row `slot` of the tables of every kind that the slot has, or had; what the adapter does
        not have reads 'none'."""
        writes: Writes = {}
        for site in {**before, **held}:
            form, own = sites.get(site, NormalForm()), held.get(site, {})
            for kind in {**before.get(site, {}), **own}:
                for key, part, shape in self._tables[site, kind]:
                    row = self._table_row(kind, part, shape, own, form)
                    writes[key] = [(slot, row)]
        return writes

    def _table_row(self, kind: str, part: str, shape: tuple, held: Mapping, form: NormalForm):
        places = held.get(kind, ())
        if part == "rank":
            return form.rank
        if part == "table":
            return _filled_row(shape, 0, places)
        if part == "pair":
            pairs = [self._pairs.index(term.pair) for term in form.terms if term.pair is not None]
            return _filled_row(shape, 0, pairs)
        return _filled_row(shape, -1, places) if shape else next(iter(places), -1)

    def _pages(self, rows: Array) -> np.ndarray:
        """The rows of a factor in pages; the last one is filled up with zeros."""
        factor, page = np.asarray(rows), self.capacity.page
        if missing := -len(factor) % page:
            factor = np.pad(factor, ((0, missing), (0, 0)))
        return factor.reshape(-1, page, factor.shape[1])


def _effective(adapter: Adapter) -> tuple[Adapter, Found]:
    """The adapter without the sites at which it does nothing, and the entries of the others."""
    found = {site: entries(form) for site, form in adapter.sites.items()}
    found = {site: own for site, own in found.items() if own}
    return replace(adapter, sites={site: adapter.sites[site] for site in found}), found


def _filled_row(shape: tuple[int, ...], rest: int, values: Sequence[int]) -> list[int]:
    return [*values, *[rest] * (shape[0] - len(values))]
