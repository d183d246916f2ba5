"""The definition of the sparse update: x S for rows of many adapters."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from scute_jax.kernels.gather import gather_rows, scatter_rows
from scute_jax.kernels.pools import SparseEntries
from scute_jax.kernels.tiles import Tiles


def sparse_update(
    h: Float[Array, "t d_out"],
    x: Float[Array, "t d_in"],
    sparse: SparseEntries,
    tiles: Tiles,
) -> Float[Array, "t d_out"]:
    """h + x S on rows whose adapter has a sparse matrix S, h elsewhere.

    Dtypes: products and sums in float32; returns the dtype of h.
    """
    index, valid = tiles.row_index(x.shape[0])
    entry = sparse.row[tiles.slot]
    rows, cols, values = (
        jnp.take(part, entry, axis=0, mode="clip")
        for part in (sparse.rows, sparse.cols, sparse.values)
    )  # [n, z]

    def add(
        h: Float[Array, "size d_out"],
        x: Float[Array, "size d_in"],
        rows: Int[Array, "z"],
        cols: Int[Array, "z"],
        values: Float[Array, "z"],
    ) -> Float[Array, "size d_out"]:
        products = jnp.take(x, rows, axis=1, mode="clip") * values[None, :]
        return h.at[:, cols].add(products, mode="drop")

    x_tiles, h_tiles = (gather_rows(part, index).astype(jnp.float32) for part in (x, h))
    added = jax.vmap(add)(h_tiles, x_tiles, rows, cols, values.astype(jnp.float32))
    return scatter_rows(h, index, valid & (entry >= 0)[:, None], added)
