"""What every reference does first: bring the numbers of a tile's adapter beside its rows."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from scute_jax.kernels.pools import LowRank, Vectors


def gather_rows(x: Float[Array, "t d"], index: Int[Array, "n size"]) -> Float[Array, "n size d"]:
    """The rows of x that the tiles hold."""
    return jnp.take(x, index, axis=0, mode="clip")


def gather_pages(
    pool: Float[Array, "p page d"], factors: LowRank, slot: Int[Array, "n"]
) -> Float[Array, "n r d"]:
    """The factor of each slot with one row per rank, zero from the slot's own rank on.

    Selects: nothing that lies in pages or ranks of others reaches the result.
    """
    table = factors.table[slot]
    rows = jnp.take(pool, table, axis=0, mode="clip")
    rows = jnp.reshape(rows, (table.shape[0], -1, pool.shape[-1]))
    own = jnp.arange(rows.shape[1])[None, :] < factors.rank[slot][:, None]
    return jnp.where(own[:, :, None], rows, 0)


def gather_vectors(
    vectors: Vectors, slot: Int[Array, "n"]
) -> tuple[Float[Array, "n d"], Bool[Array, "n 1"]]:
    """The vector of each slot and whether the slot has one; if not, the vector is undefined."""
    row = vectors.row[slot]
    return jnp.take(vectors.values, row, axis=0, mode="clip"), row[:, None] >= 0


def scatter_rows(
    h: Float[Array, "t d"],
    index: Int[Array, "n size"],
    valid: Bool[Array, "n size"],
    rows: Float[Array, "n size d"],
) -> Float[Array, "t d"]:
    """h with the valid rows of the tiles in place of its own."""
    target = jnp.where(valid, index, h.shape[0])  # out of range: dropped
    return h.at[target].set(rows.astype(h.dtype), mode="drop")
