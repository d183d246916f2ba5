"""The definition of the sparse update: x S for rows of many adapters."""

import jax.numpy as jnp
from jaxtyping import Array, Float

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
        jnp.take(part, entry, axis=0, mode="clip")[:, None, :]
        for part in (sparse.rows, sparse.cols, sparse.values)
    )  # [n, 1, z]
    x_tiles = gather_rows(x, index).astype(jnp.float32)
    h_tiles = gather_rows(h, index).astype(jnp.float32)
    shape = (*x_tiles.shape[:2], rows.shape[-1])
    taken = jnp.take_along_axis(x_tiles, jnp.broadcast_to(rows, shape), axis=-1)
    n, size, _ = shape
    place = (jnp.arange(n)[:, None, None], jnp.arange(size)[None, :, None], cols)
    added = h_tiles.at[place].add(taken * values.astype(jnp.float32), mode="drop")
    return scatter_rows(h, index, valid & (entry >= 0)[:, None], added)
