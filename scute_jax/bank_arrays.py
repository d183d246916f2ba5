"""The arrays of a bank: which there are, what an adapter writes into them, how kernels see them.

An array is named by where it belongs and what it holds: ("layers.0.mlp.up_proj", "A"), or for
shared pairs (their width, "pair_A").
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from scute_jax.capacity import BankCapacity
from scute_jax.kernels import LowRank, Rotation, Shared, Vectors
from scute_jax.normal_form import NormalForm
from scute_jax.slots import (
    SiteSlots,
    input_vector,
    owned_factors,
    rotation_offset,
    shared_vectors,
)

Key = tuple[Any, str]


def empty_arrays(
    widths: Mapping[str, tuple[int, int]], capacity: BankCapacity, dtype: jnp.dtype
) -> Iterator[tuple[Key, Array]]:
    """The arrays of an empty bank: pools of zeros, and tables in which nobody has anything."""
    K, page = capacity.adapters, capacity.page

    def table(*shape: int, fill: int = 0) -> Array:
        return jnp.full(shape, fill, jnp.int32)

    for site, (d_in, d_out) in widths.items():
        use = capacity.sites[site]
        if use.pages:
            yield (site, "A"), jnp.zeros((use.pages, page, d_in), dtype)
            yield (site, "B"), jnp.zeros((use.pages, page, d_out), dtype)
            yield (site, "table"), table(K, capacity.width[site])
            yield (site, "rank"), table(K)
        widths_of = {"scale": (d_out,), "shift": (d_out,), "input": (d_in,)}
        widths_of |= {f"rotation{m}": (d_in // m, m, m) for m in use.rotations}
        for kind, count in use.entries().items():
            if kind in widths_of:
                yield (site, kind), jnp.zeros((count, *widths_of[kind]), dtype)
                yield (site, f"{kind}_row"), table(K, fill=-1)
        if use.shared_terms:
            rank = capacity.pair_pages * page
            yield (site, "d"), jnp.zeros((use.shared_terms, rank), dtype)
            yield (site, "e"), jnp.zeros((use.shared_terms, d_out), dtype)
            yield (site, "shared_row"), table(K, capacity.terms, fill=-1)
            yield (site, "shared_pair"), table(K, capacity.terms)
    sharing = [widths[site] for site, use in capacity.sites.items() if use.shared_terms]
    pages = capacity.pairs * capacity.pair_pages
    for d_in in dict.fromkeys(d_in for d_in, _ in sharing):
        yield (d_in, "pair_A"), jnp.zeros((pages, page, d_in), dtype)
    for d_out in dict.fromkeys(d_out for _, d_out in sharing):
        yield (d_out, "pair_B"), jnp.zeros((pages, page, d_out), dtype)
    if sharing:
        yield (0, "pair_table"), jnp.arange(pages, dtype=jnp.int32).reshape(capacity.pairs, -1)
        yield (0, "pair_rank"), table(capacity.pairs)


def site_slots(arrays: Mapping[Key, Array], site: str, widths: tuple[int, int]) -> SiteSlots:
    """The arrays of one site as the kernels read them."""

    def vectors(kind: str) -> Vectors | None:
        values = arrays.get((site, kind))
        return None if values is None else Vectors(values, arrays[site, f"{kind}_row"])

    rotations = sorted(
        (
            key[1]
            for key in arrays
            if key[0] == site and key[1].startswith("rotation") and not key[1].endswith("_row")
        ),
        key=lambda kind: int(kind.removeprefix("rotation")),
    )
    factors = shared = None
    if (site, "A") in arrays:
        factors = LowRank(*(arrays[site, kind] for kind in ("A", "B", "table", "rank")))
    if (site, "d") in arrays:
        sides = arrays[widths[0], "pair_A"], arrays[widths[1], "pair_B"]
        pairs = LowRank(*sides, arrays[0, "pair_table"], arrays[0, "pair_rank"])
        shared = Shared(pairs, *(arrays[site, k] for k in ("d", "e", "shared_row", "shared_pair")))
    return SiteSlots(
        factors=factors,
        scale=vectors("scale"),
        shift=vectors("shift"),
        input_scale=vectors("input"),
        rotations=tuple(
            Rotation(arrays[site, kind], arrays[site, f"{kind}_row"]) for kind in rotations
        ),
        shared=shared,
    )


def entry_values(form: NormalForm, d_out: int) -> dict[str, Any]:
    """The numbers of each entry that a folded form takes, by kind."""
    owned = owned_factors(form)
    shared = [term for term in form.terms if term.pair is not None]
    vectors = {
        "scale": None if form.s is None else np.asarray(form.s) - 1,
        "shift": form.b,
        "input": input_vector(form),
    }
    R = rotation_offset(form)
    if R is not None:
        vectors[f"rotation{R.shape[-1]}"] = R
    entries: dict[str, Any] = {k: np.asarray(v) for k, v in vectors.items() if v is not None}
    if owned is not None:
        entries["pages"] = tuple(map(np.asarray, owned))
    if shared:
        both = [shared_vectors(term, d_out) for term in shared]
        entries["shared"] = [(np.asarray(d), np.asarray(e)) for d, e in both]
    return entries
