"""How large the bank has to be, kept up to date adapter by adapter at a cost that does not grow."""

import heapq
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from scute_jax.capacity import BankCapacity, Counts
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

        What has to grow doubles at least, up to what is needed if all were as large as the
        largest: a bank that grows adapter by adapter changes its shapes, and with them the
        compiled steps, a few times only.
        """
        new = old.union(self.needed())
        sizes = {
            site: {k: _doubled(size, _get(old.sizes, site, k)) for k, size in kinds.items()}
            for site, kinds in new.sizes.items()
        }
        entries = {
            site: {
                kind: self._more(
                    count, _get(old.entries, site, kind), site, kind, sizes[site][kind]
                )
                for kind, count in kinds.items()
            }
            for site, kinds in new.entries.items()
        }
        pairs = min(self._pair_counts.most * self._residents, _doubled(new.pairs, old.pairs))
        return replace(
            new,
            entries=entries,
            sizes=sizes,
            pairs=max(new.pairs, pairs),
            pair_pages=_doubled(new.pair_pages, old.pair_pages),
        )

    def _more(self, count: int, before: int, site: str, kind: str, size: int) -> int:
        if (site, kind) not in self._counts:
            return count
        each = size if kind == "factors" else self._counts[site, kind].most
        return max(count, min(each * self._residents, _doubled(count, before)))


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


def _doubled(new: int, old: int) -> int:
    """`new`, and at least twice the old number if it is a growth."""
    return max(new, 2 * old) if new > old else new


def _get(counts: Mapping[str, Counts], site: str, kind: str) -> int:
    return counts.get(site, {}).get(kind, 0)


def _nested(flat: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    nested: dict[str, dict[str, int]] = {}
    for (site, kind), number in flat.items():
        nested.setdefault(site, {})[kind] = number
    return nested
