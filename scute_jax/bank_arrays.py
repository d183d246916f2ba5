"""The arrays of a bank: which there are, and how the kernels see them.

An array is named by where it belongs and what it holds: ("layers.0.mlp.up_proj", "factors/A"), or
for shared pairs (their width, "pair/A"). Tables (row, table, rank, pair) have a row for each slot.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from scute_jax.capacity import BankCapacity
from scute_jax.entries import EMBEDDING, factors_of, pass_of
from scute_jax.kernels import (
    KroneckerFactors,
    LowRank,
    Rotation,
    Shared,
    SparseEntries,
    TokenTable,
    Vectors,
)
from scute_jax.slots import SiteSlots, assemble

Key = tuple[Any, str]
TABLES = ("row", "table", "rank", "pair")  # parts with a row for each slot


def empty_arrays(
    widths: Mapping[str, tuple[int, int]], capacity: BankCapacity, dtype: jnp.dtype
) -> Iterator[tuple[Key, Array]]:
    """The arrays of an empty bank: pools of zeros, and tables in which nobody has anything."""
    K = capacity.adapters
    for site, kinds in capacity.entries.items():
        for kind, count in kinds.items():
            for part, shape in _pool_shapes(kind, site, widths[site], capacity).items():
                ints = part in ("starts", "rows", "ids") and len(shape) == 1
                yield (
                    (site, f"{kind}/{part}"),
                    jnp.zeros((count, *shape), jnp.int32 if ints else dtype),
                )
            for part, (shape, rest) in _tables(kind, capacity.sizes[site][kind]).items():
                yield (site, f"{kind}/{part}"), jnp.full((K, *shape), rest, jnp.int32)
    sharing = [widths[site] for site, kinds in capacity.entries.items() if "shared" in kinds]
    pages = capacity.pairs * capacity.pair_pages
    for d_in in dict.fromkeys(d_in for d_in, _ in sharing):
        yield (d_in, "pair/A"), jnp.zeros((pages, capacity.page, d_in), dtype)
    for d_out in dict.fromkeys(d_out for _, d_out in sharing):
        yield (d_out, "pair/B"), jnp.zeros((pages, capacity.page, d_out), dtype)
    if sharing:
        table = jnp.arange(pages, dtype=jnp.int32).reshape(capacity.pairs, -1)
        yield (0, "pair/table"), table
        yield (0, "pair/rank"), jnp.zeros((capacity.pairs,), jnp.int32)
    for key, order in capacity.orders.items():
        yield (0, f"order/{key}"), jnp.asarray(order, jnp.int32)


def bank_bytes(
    widths: Mapping[str, tuple[int, int]], capacity: BankCapacity, dtype: jnp.dtype
) -> int:
    """Bytes of all arrays of a bank, without making one."""
    named = {site: widths[site] for site in capacity.entries}
    arrays = jax.eval_shape(lambda: [array for _, array in empty_arrays(named, capacity, dtype)])
    return sum(array.size * array.dtype.itemsize for array in arrays)


def all_slots(
    arrays: Mapping[Key, Array], widths: Mapping[str, tuple[int, int]]
) -> dict[str, SiteSlots]:
    """The arrays of every site as the kernels read them."""
    grouped: dict[Any, dict[str, dict[str, Array]]] = {}
    for (place, name), array in arrays.items():
        kind, _, part = name.rpartition("/")
        grouped.setdefault(place, {}).setdefault(kind, {})[part] = array
    return {
        site: assemble(
            {kind: _pool(kind, own, arrays, *width) for kind, own in grouped.get(site, {}).items()}
        )
        for site, width in widths.items()
    }


def _pool(
    kind: str, own: Mapping[str, Array], arrays: Mapping[Key, Array], d_in: int, d_out: int
) -> Any:
    if kind == "factors":
        return LowRank(**own)
    if kind == "shared":
        tables = arrays[0, "pair/table"], arrays[0, "pair/rank"]
        pairs = LowRank(arrays[d_in, "pair/A"], arrays[d_out, "pair/B"], *tables)
        return Shared(pairs=pairs, **{"u": None, **own})
    if kind in ("sparse", "tokens"):
        return SparseEntries(**own) if kind == "sparse" else TokenTable(**own)
    if factors_of(kind) is not None:
        return KroneckerFactors(kind=kind, **own)
    place = pass_of(kind)
    if place is None:
        return Vectors(**own)
    order = arrays[0, f"order/{place[3]}"] if place[3] else None
    return Rotation(order=order, kind=kind, **own)


def _pool_shapes(
    kind: str, site: str, widths: tuple[int, int], capacity: BankCapacity
) -> dict[str, tuple[int, ...]]:
    """The shape of one entry of each pool of a kind."""
    (d_in, d_out), size = widths, capacity.sizes[site][kind]
    if kind == "factors":
        return {"A": (capacity.page, d_in), "B": (capacity.page, d_out)}
    if kind == "shared":
        shapes = {"d": (capacity.pair_pages * capacity.page,), "e": (d_out,)}
        return shapes | ({"u": (d_in,)} if site in capacity.inputs else {})
    if kind == "sparse":
        return {"starts": (d_out + 1,), "rows": (size,), "values": (size,)}
    if kind == "tokens":
        return {"ids": (size,), "rows": (size, d_out if site == EMBEDDING else d_in)}
    if factors := factors_of(kind):
        return dict(zip(("left", "right"), factors, strict=True))
    place = pass_of(kind)
    if place is None:
        return {"values": (d_in if kind == "input" else d_out,)}
    side, _, m, _ = place
    return {"values": ((d_in if side == "in" else d_out) // m, m, m)}


def _tables(kind: str, size: int) -> dict[str, tuple[tuple[int, ...], int]]:
    """The shape of one row of each table of a kind, and what an absent entry reads."""
    if kind == "factors":
        return {"table": ((size,), 0), "rank": ((), 0)}
    if kind == "shared":
        return {"row": ((size,), -1), "pair": ((size,), 0)}
    return {"row": ((size,) if factors_of(kind) else (), -1)}
