"""The arrays of all adapters resident at one site, as the kernels read them.

A pool holds the numbers, a table maps an adapter (a *slot*, 0 .. K-1) to its place in the pool;
-1 or rank 0 says that the adapter has none. Nothing of a pool that no table names is ever read.
Scales and rotations are stored as the difference from the identity, so that rounding them to the
dtype of the activations is an error relative to what the adapter does, not to 1.

Axes: K = slots, n = entries of a pool, page = ranks in one page, w = pages an adapter may have.
"""

from flax import struct
from jaxtyping import Array, Float, Int


@struct.dataclass
class LowRank:
    """Factors A and B of K adapters in pages of ranks: an adapter has the ranks of its own pages.

    Row q of page table[k, p] holds rank p * page + q of adapter k, of A and of B.
    Invariants: rank[k] <= w * page; ranks from rank[k] on are undefined and never used.
    """

    A: Float[Array, "n page d_in"]
    B: Float[Array, "n page d_out"]
    table: Int[Array, "K w"]
    rank: Int[Array, "K"]


@struct.dataclass
class Vectors:
    """One vector for each adapter that has one: values[row[k]], or none where row[k] == -1."""

    values: Float[Array, "n d"]
    row: Int[Array, "K"]


@struct.dataclass
class Rotation:
    """R - I in blocks of m for each adapter that rotates its input in blocks of that size."""

    values: Float[Array, "n d_in/m m m"]
    row: Int[Array, "K"]


@struct.dataclass
class Shared:
    """Terms on factors that several adapters share, with the adapter's own vectors.

    Adapter k adds ((x A) * d[row]) B * e[row] for each j with row = row[k, j] >= 0, where A, B are
    the factors of pair[k, j] in `pairs`. d is zero from the rank of its pair on.
    """

    pairs: LowRank
    d: Float[Array, "n r"]
    e: Float[Array, "n d_out"]
    row: Int[Array, "K j"]
    pair: Int[Array, "K j"]
