"""How much room adapters take in a bank, counted in entries of each kind at each site."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from scute_jax.entries import Entry, entries, size_of, turns
from scute_jax.normal_form import Adapter
from scute_jax.slots import PAGE

Counts = Mapping[str, int]  # kind -> how many (of factors: pages)


@dataclass(frozen=True)
class BankCapacity:
    """The fixed sizes of a bank. Compiled steps depend on them and on nothing else of a bank."""

    adapters: int  # K
    entries: Mapping[str, Counts]  # site -> kind -> entries of all adapters together
    sizes: Mapping[str, Counts]  # site -> kind -> the largest of one adapter (entries.size_of)
    inputs: frozenset[str] = frozenset()  # sites where a shared term has a vector u
    pairs: int = 0  # shared pairs resident at a time
    pair_pages: int = 0  # pages of one pair
    page: int = PAGE  # ranks in a page
    orders: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False)  # of rotations

    def covers(self, other: "BankCapacity") -> bool:
        """Whether whatever fits into `other` fits into this, as far as room goes."""
        return (
            _covers(self.entries, other.entries)
            and _covers(self.sizes, other.sizes)
            and self.inputs >= other.inputs
            and self.pairs >= other.pairs
            and self.pair_pages >= other.pair_pages
        )

    def union(self, other: "BankCapacity") -> "BankCapacity":
        """The least capacity that covers both."""
        return BankCapacity(
            adapters=max(self.adapters, other.adapters),
            entries=_larger(self.entries, other.entries),
            sizes=_larger(self.sizes, other.sizes),
            inputs=self.inputs | other.inputs,
            pairs=max(self.pairs, other.pairs),
            pair_pages=max(self.pair_pages, other.pair_pages),
            page=self.page,
            orders={**self.orders, **other.orders},
        )


def taken(found: Mapping[str, list[Entry]], page: int = PAGE) -> dict[str, int]:
    """What the entries of a folded form take of each kind."""
    pages = {"factors": size_of("factors", found["factors"], page)} if "factors" in found else {}
    return {kind: len(own) for kind, own in found.items()} | pages


def pair_ranks(adapter: Adapter) -> dict[str, int]:
    """The rank of each shared pair that an adapter uses."""
    terms = (term for form in adapter.sites.values() for term in form.terms)
    return {term.pair: term.rank for term in terms if term.pair is not None}


def capacity_for(adapters: Iterable[Adapter], residents: int, page: int = PAGE) -> BankCapacity:
    """The least capacity in which any `residents` of these folded adapters fit together."""
    adapters = list(adapters)
    uses: dict[str, dict[str, list[int]]] = {}
    sizes: dict[str, dict[str, int]] = {}
    inputs, orders = set(), {}
    for adapter in adapters:
        for site, form in adapter.sites.items():
            found, largest = entries(form), sizes.setdefault(site, {})
            for kind, count in taken(found, page).items():
                uses.setdefault(site, {}).setdefault(kind, []).append(count)
                size = size_of(kind, found[kind], page)
                largest[kind] = max(largest.get(kind, 0), size)
            inputs |= {site} if any("u" in entry for entry in found.get("shared", ())) else set()
            orders |= {b.key: b.order for _, b in turns(form) if b.key is not None}
    shared = [pair_ranks(adapter) for adapter in adapters]
    ranks = {key: rank for pairs in shared for key, rank in pairs.items()}
    return BankCapacity(
        adapters=residents,
        entries={
            site: {kind: _largest(residents, counts) for kind, counts in kinds.items()}
            for site, kinds in uses.items()
        },
        sizes=sizes,
        inputs=frozenset(inputs),
        pairs=min(len(ranks), _largest(residents, (len(pairs) for pairs in shared))),
        pair_pages=max((-(-rank // page) for rank in ranks.values()), default=0),
        page=page,
        orders=orders,
    )


def _largest(count: int, values: Iterable[int]) -> int:
    """The sum of the `count` largest values."""
    return sum(sorted(values, reverse=True)[:count])


def _covers(have: Mapping[str, Counts], need: Mapping[str, Counts]) -> bool:
    nothing: Counts = {}
    return all(
        have.get(site, nothing).get(kind, 0) >= count
        for site, kinds in need.items()
        for kind, count in kinds.items()
    )


def _larger(left: Mapping[str, Counts], right: Mapping[str, Counts]) -> dict[str, dict[str, int]]:
    return {
        site: {
            kind: max(left.get(site, {}).get(kind, 0), right.get(site, {}).get(kind, 0))
            for kind in {**left.get(site, {}), **right.get(site, {})}
        }
        for site in {**left, **right}
    }
