"""The definition of the sparse update: x S for rows of many adapters."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from scute_jax.kernels.gather import gather_rows, scatter_rows
from scute_jax.kernels.pools import SparseEntries
from scute_jax.kernels.tiles import Tiles

SLAB = 1 << 14  # entries at a time: a step holds rows * SLAB products


def sparse_update(
    h: Float[Array, "t d_out"],
    x: Float[Array, "t d_in"],
    sparse: SparseEntries,
    tiles: Tiles,
) -> Float[Array, "t d_out"]:
    """h + x S on rows whose adapter has a sparse matrix S, h elsewhere.

    Matrices of many entries are taken a slab at a time.
    Dtypes: products and sums in float32; returns the dtype of h.
    """
    index, valid = tiles.row_index(x.shape[0])
    entry = sparse.row[tiles.slot]
    starts, rows, values = (
        jnp.take(part, entry, axis=0, mode="clip")
        for part in (sparse.starts, sparse.rows, sparse.values)
    )
    x_tiles, total = (gather_rows(part, index).astype(jnp.float32) for part in (x, h))

    def add(total: Array, slab: tuple[Array, ...]) -> tuple[Array, None]:
        return jax.vmap(_add_products)(total, x_tiles, *slab), None

    columns = jax.vmap(_columns, in_axes=(0, None))(starts, rows.shape[1])
    values = jnp.where(columns < h.shape[1], values.astype(jnp.float32), 0)
    slab = (rows, columns, values)
    if rows.shape[1] <= SLAB:
        total, _ = add(total, slab)
    else:
        total, _ = jax.lax.scan(add, total, tuple(map(_slabs, slab, (0, h.shape[1], 0))))
    return scatter_rows(h, index, valid & (entry >= 0)[:, None], total)


def _columns(starts: Int[Array, "d_out+1"], count: int) -> Int[Array, "z"]:
    """The column of each of `count` entries, d_out past the last."""
    place = jnp.arange(count, dtype=starts.dtype)
    return jnp.searchsorted(starts, place, side="right") - 1


def _add_products(
    h: Float[Array, "size d_out"],
    x: Float[Array, "size d_in"],
    rows: Int[Array, "z"],
    columns: Int[Array, "z"],
    values: Float[Array, "z"],
) -> Float[Array, "size d_out"]:
    products = jnp.take(x, rows, axis=1, mode="clip") * values[None, :]
    return h.at[:, columns].add(products, mode="drop")


def _slabs(part: Array, rest: int) -> Array:
    """[n, z] as [z / SLAB, n, SLAB], filled up with `rest`."""
    part = jnp.pad(part, [(0, 0), (0, -part.shape[1] % SLAB)], constant_values=rest)
    return jnp.swapaxes(jnp.reshape(part, (part.shape[0], -1, SLAB)), 0, 1)
