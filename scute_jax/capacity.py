"""How much room adapters take in a bank, counted in entries of each pool of each site."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from scute_jax.normal_form import Adapter, NormalForm
from scute_jax.slots import PAGE


@dataclass(frozen=True)
class SiteUse:
    """What one adapter takes, or what a bank has, at one site."""

    pages: int = 0  # pages of owned ranks
    scales: int = 0
    shifts: int = 0
    input_scales: int = 0
    rotations: Mapping[int, int] = field(default_factory=dict)  # block size -> entries
    shared_terms: int = 0

    def entries(self) -> dict[str, int]:
        """The counts that are not zero, by the kind of entry."""
        counts = {
            "pages": self.pages,
            "scale": self.scales,
            "shift": self.shifts,
            "input": self.input_scales,
            "shared": self.shared_terms,
        }
        counts |= {f"rotation{m}": count for m, count in self.rotations.items()}
        return {kind: count for kind, count in counts.items() if count}

    def union(self, other: "SiteUse") -> "SiteUse":
        """Room for either."""
        blocks = sorted({*self.rotations, *other.rotations})
        most = {m: max(self.rotations.get(m, 0), other.rotations.get(m, 0)) for m in blocks}
        counts = ("pages", "scales", "shifts", "input_scales", "shared_terms")
        larger = {name: max(getattr(self, name), getattr(other, name)) for name in counts}
        return SiteUse(rotations=most, **larger)

    def fits(self, room: "SiteUse") -> bool:
        """Whether what this counts is there in `room`."""
        have = room.entries()
        return all(count <= have.get(kind, 0) for kind, count in self.entries().items())


@dataclass(frozen=True)
class BankCapacity:
    """The fixed sizes of a bank. Compiled steps depend on them and on nothing else of a bank."""

    adapters: int  # K
    sites: Mapping[str, SiteUse]
    width: Mapping[str, int]  # pages that one adapter may have, by site
    terms: int = 0  # shared terms that one adapter may have at one site
    pairs: int = 0  # shared pairs resident at a time
    pair_pages: int = 0  # pages of one pair
    page: int = PAGE  # ranks in a page

    def covers(self, other: "BankCapacity") -> bool:
        """Whether whatever fits into `other` fits into this, as far as room goes."""
        return self.union(other) == replace(self, adapters=max(self.adapters, other.adapters))

    def union(self, other: "BankCapacity") -> "BankCapacity":
        """The least capacity that covers both."""
        names = dict.fromkeys([*self.sites, *other.sites])
        nothing = SiteUse()
        return BankCapacity(
            adapters=max(self.adapters, other.adapters),
            sites={
                name: self.sites.get(name, nothing).union(other.sites.get(name, nothing))
                for name in names
            },
            width={name: max(self.width.get(name, 0), other.width.get(name, 0)) for name in names},
            terms=max(self.terms, other.terms),
            pairs=max(self.pairs, other.pairs),
            pair_pages=max(self.pair_pages, other.pair_pages),
            page=self.page,
        )


def site_use(form: NormalForm, page: int = PAGE) -> SiteUse:
    """What a folded form takes."""
    m = None if form.R is None else form.R.shape[-1]
    return SiteUse(
        pages=-(-form.rank // page),
        scales=int(form.s is not None),
        shifts=int(form.b is not None),
        input_scales=int(m == 1),
        rotations={} if m in (None, 1) else {m: 1},
        shared_terms=sum(term.pair is not None for term in form.terms),
    )


def pair_ranks(adapter: Adapter) -> dict[str, int]:
    """The rank of each shared pair that an adapter uses."""
    terms = (term for form in adapter.sites.values() for term in form.terms)
    return {term.pair: term.rank for term in terms if term.pair is not None}


def capacity_for(adapters: Iterable[Adapter], residents: int, page: int = PAGE) -> BankCapacity:
    """The least capacity in which any `residents` of these folded adapters fit together."""
    adapters = list(adapters)
    names = list(dict.fromkeys(site for adapter in adapters for site in adapter.sites))
    sites, width = {}, {}
    for name in names:
        uses = [site_use(a.sites[name], page) for a in adapters if name in a.sites]
        blocks = sorted({m for use in uses for m in use.rotations})
        sites[name] = SiteUse(
            pages=_largest(residents, (use.pages for use in uses)),
            scales=_largest(residents, (use.scales for use in uses)),
            shifts=_largest(residents, (use.shifts for use in uses)),
            input_scales=_largest(residents, (use.input_scales for use in uses)),
            rotations={
                m: _largest(residents, (u.rotations.get(m, 0) for u in uses)) for m in blocks
            },
            shared_terms=_largest(residents, (use.shared_terms for use in uses)),
        )
        width[name] = max(use.pages for use in uses)
    shared = [pair_ranks(adapter) for adapter in adapters]
    ranks = {key: rank for pairs in shared for key, rank in pairs.items()}
    forms = [form for adapter in adapters for form in adapter.sites.values()]
    return BankCapacity(
        adapters=residents,
        sites=sites,
        width=width,
        terms=max((site_use(form, page).shared_terms for form in forms), default=0),
        pairs=min(len(ranks), _largest(residents, (len(pairs) for pairs in shared))),
        pair_pages=max((-(-rank // page) for rank in ranks.values()), default=0),
        page=page,
    )


def _largest(count: int, values: Iterable[int]) -> int:
    """The sum of the `count` largest values."""
    return sum(sorted(values, reverse=True)[:count])
