"""How large the bank has to be, kept up to date adapter by adapter at a cost that does not grow."""

import heapq
from collections.abc import Mapping

import numpy as np

from scute_jax.capacity import BankCapacity
from scute_jax.serving.registry import Tenant


class Room:
    """The capacity in which any `residents` of the tenants seen so far fit together.

    While fewer were seen, the others are taken to be as large as the largest, kind by kind: an
    adapter of the size of one before needs no more room.
    """

    def __init__(self, residents: int):
        self._residents = residents
        self._counts: dict[tuple[str, str], _Largest] = {}
        self._sizes: dict[tuple[str, str], int] = {}
        self._inputs: set[str] = set()
        self._orders: dict[str, np.ndarray] = {}
        self._pair_ranks: dict[str, int] = {}
        self._pair_counts = _Largest(residents)
        self._pair_pages = 0
        self.routes: frozenset[str] = frozenset()

    def add(self, tenant: Tenant) -> None:
        """Takes a tenant into account, for good."""
        need = tenant.need
        self.routes |= tenant.routes
        for site, kinds in need.entries.items():
            for kind, count in kinds.items():
                key, size = (site, kind), need.sizes[site][kind]
                self._counts.setdefault(key, _Largest(self._residents)).add(count)
                self._sizes[key] = max(self._sizes.get(key, 0), size)
        self._inputs |= need.inputs
        self._orders |= need.orders
        self._pair_ranks |= tenant.pairs
        self._pair_counts.add(len(tenant.pairs))
        self._pair_pages = max(self._pair_pages, need.pair_pages)

    def needed(self) -> BankCapacity:
        """The least capacity that keeps the promise."""
        return BankCapacity(
            adapters=self._residents,
            entries=_nested({key: largest.total() for key, largest in self._counts.items()}),
            sizes=_nested(self._sizes),
            inputs=frozenset(self._inputs),
            pairs=min(len(self._pair_ranks), self._pair_counts.total()),
            pair_pages=self._pair_pages,
            orders=dict(self._orders),
        )

    def grown(self, old: BankCapacity) -> BankCapacity:
        """A capacity that covers the old one and what is needed.

        What has to grow grows by half at least (the size of one adapter by a factor of two), up to
        what is needed if all were as large as the largest: a bank that grows adapter by adapter
        changes its shapes, and with them the compiled steps, a few times only.
        """
        new = old.union(self.needed())
        entries = {
            site: {kind: self._more(old, site, kind, count) for kind, count in kinds.items()}
            for site, kinds in new.entries.items()
        }
        sizes = {
            site: {
                kind: _at_least(size, old.sizes.get(site, {}).get(kind, 0), 2.0)
                for kind, size in kinds.items()
            }
            for site, kinds in new.sizes.items()
        }
        most = self._pair_counts.most * self._residents
        return BankCapacity(
            adapters=new.adapters,
            entries=entries,
            sizes=sizes,
            inputs=new.inputs,
            pairs=max(new.pairs, min(most, _at_least(new.pairs, old.pairs, 1.5))),
            pair_pages=_at_least(new.pair_pages, old.pair_pages, 2.0),
            page=new.page,
            orders=new.orders,
        )

    def _more(self, old: BankCapacity, site: str, kind: str, count: int) -> int:
        largest = self._counts.get((site, kind))
        most = 0 if largest is None else largest.most * self._residents
        before = old.entries.get(site, {}).get(kind, 0)
        return max(count, min(most, _at_least(count, before, 1.5)))


class _Largest:
    """The `limit` largest of the numbers added."""

    def __init__(self, limit: int):
        self._limit, self._heap = limit, []
        self.most = 0

    def add(self, number: int) -> None:
        self.most = max(self.most, number)
        push = heapq.heappush if len(self._heap) < self._limit else heapq.heappushpop
        push(self._heap, number)

    def total(self) -> int:
        """Their sum; numbers that are missing are taken to be the largest."""
        return sum(self._heap) + (self._limit - len(self._heap)) * self.most


def _at_least(new: int, old: int, factor: float) -> int:
    """`new`, or more if it is a growth by less than the factor."""
    return max(new, int(old * factor)) if old and new > old else new


def _nested(flat: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    nested: dict[str, dict[str, int]] = {}
    for (site, kind), number in flat.items():
        nested.setdefault(site, {})[kind] = number
    return nested
