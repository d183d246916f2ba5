"""The arrays of all adapters resident at one site, as the kernels read them.

A pool holds the numbers, a table maps an adapter (a *slot*, 0 .. K-1) to its place in the pool;
-1 or rank 0 says that the adapter has none. Nothing of a pool that no table names is ever read.
Scales and rotations are stored as the difference from the identity, so that rounding them to the
dtype of the activations is an error relative to what the adapter does, not to 1.

Axes: K = slots, n = entries of a pool, page = ranks in one page, w = pages an adapter may have.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int


@struct.dataclass
class LowRank:
    """Factors A and B of K adapters in pages of ranks: an adapter has the ranks of its own pages.

    Row q of page table[k, p] holds rank p * page + q of adapter k, of A and of B.
    Invariants: rank[k] <= w * page; ranks from rank[k] on are undefined and never used.
    With `places`, K counts the tiles of a batch: the tables are looked up, see `at_tiles`;
    places[k, r] is the row of rank r counted through all pages, -1 = none.
    """

    A: Float[Array, "n page d_in"]
    B: Float[Array, "n page d_out"]
    table: Int[Array, "K w"]
    rank: Int[Array, "K"]
    places: Int[Array, "K r"] | None = None

    @property
    def by_tile(self) -> bool:
        return self.places is not None


def most_ranks(factors: Sequence[LowRank | None]) -> int:
    """The most ranks that an adapter has room for in any of the factors."""
    return max((f.table.shape[1] * f.A.shape[1] for f in factors if f is not None), default=0)


@struct.dataclass
class Vectors:
    """One vector for each adapter that has one: values[row[k]], or none where row[k] == -1."""

    values: Float[Array, "n d"]
    row: Int[Array, "K"]
    by_tile: bool = struct.field(pytree_node=False, default=False)  # K counts tiles, as in LowRank


Pool = TypeVar("Pool", LowRank, Vectors)


def at_tiles(pool: Pool | None, slot: Int[Array, "n"]) -> Pool | None:
    """The pool with tables for the tiles of a batch, which belong to these slots.

    A kernel that looks up the tile's slot first, then its entry, waits for memory twice; and what
    is looked up holds for all steps of the same batch.
    Raises: ValueError for a pool that was looked up for another number of tiles.
    """
    if pool is None:
        return None
    tables = ("table", "rank") if isinstance(pool, LowRank) else ("row",)
    if pool.by_tile:
        count = getattr(pool, tables[0]).shape[0]
        if count != slot.shape[0]:
            raise ValueError(f"a pool looked up for {count} tiles, but there are {slot.shape[0]}.")
        return pool
    found = {name: jnp.take(getattr(pool, name), slot, axis=0, mode="clip") for name in tables}
    if isinstance(pool, LowRank):
        return replace(pool, places=_places(**found, page=pool.A.shape[1]), **found)
    return replace(pool, by_tile=True, **found)


def _places(table: Int[Array, "K w"], rank: Int[Array, "K"], page: int) -> Int[Array, "K w*page"]:
    r = jnp.arange(table.shape[1] * page)
    held = r[None, :] < rank[:, None]
    return jnp.where(held, table[:, r // page] * page + (r % page)[None, :], -1)


@struct.dataclass
class Rotation:
    """Block-diagonal matrices minus I, in blocks of m, for adapters that rotate in such blocks.

    With an `order`, the blocks act on the coordinates in that order (a permutation of 0 .. d-1).
    """

    values: Float[Array, "n d/m m m"]
    row: Int[Array, "K"]
    order: Int[Array, "d"] | None = None
    kind: str = struct.field(pytree_node=False, default="")  # which pass this is, for the caller


@struct.dataclass
class Shared:
    """Terms on factors that several adapters share, with the adapter's own vectors.

    Adapter k adds ((((x * u[row]) A) * d[row]) B) * e[row] for each j with row = row[k, j] >= 0,
    where A, B are the factors of pair[k, j] in `pairs`. d is zero from the rank of its pair on; u
    is None where no adapter has one.
    """

    pairs: LowRank
    d: Float[Array, "n r"]
    e: Float[Array, "n d_out"]
    u: Float[Array, "n d_in"] | None
    row: Int[Array, "K j"]
    pair: Int[Array, "K j"]


@struct.dataclass
class SparseEntries:
    """Sparse matrices by columns: y[c] = sum of x[rows[z]] values[z], starts[c] <= z < starts[c+1].

    Invariants: starts[:, 0] == 0, and starts do not decrease. Places from starts[:, d_out] on are
    undefined and never used.
    """

    starts: Int[Array, "n d_out+1"]
    rows: Int[Array, "n z"]
    values: Float[Array, "n z"]
    row: Int[Array, "K"]


@struct.dataclass
class KroneckerFactors:
    """Kronecker products of one shape: adapter k adds x kron(left[row], right[row]).

    For each j with row = row[k, j] >= 0; x has d_in = a_in b_in columns, y has d_out = a_out b_out.
    """

    left: Float[Array, "n a_in a_out"]
    right: Float[Array, "n b_in b_out"]
    row: Int[Array, "K j"]
    kind: str = struct.field(pytree_node=False, default="")  # which shape this is, for the caller


@struct.dataclass
class TokenTable:
    """Tokens whose rows an adapter replaces, ids[row[k]]; places not filled hold -1."""

    ids: Int[Array, "n k"]
    rows: Float[Array, "n k d"]
    row: Int[Array, "K"]
