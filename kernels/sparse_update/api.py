"""x S for the rows of many adapters with sparse matrices."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from scute_jax.kernels.pools import SparseEntries
from scute_jax.kernels.sparse_update import reference
from scute_jax.kernels.tiles import Tiles

SLAB = 1 << 14  # entries at a time: a step holds rows * SLAB products


def sparse_update(
    h: Float[Array, "t d_out"],
    x: Float[Array, "t d_in"],
    sparse: SparseEntries,
    tiles: Tiles,
) -> Float[Array, "t d_out"]:
    """h plus x S of each row's adapter. See reference.py for the definition.

    One implementation, on a GPU as well: XLA gathers the columns of x that the entries name,
    multiplies, and adds the products to the columns of h by atomic additions, in an order that it
    does not promise; no Pallas kernel stands in for it. Matrices of many entries are taken a slab
    at a time. Every row pays for the largest matrix of the pool.

    Differentiable in h, x and the values.
    """
    count = sparse.values.shape[1]
    if count <= SLAB:
        return reference.sparse_update(h, x, sparse, tiles)
    missing = [(0, 0), (0, -count % SLAB)]
    rows = jnp.pad(sparse.rows, missing)
    cols = jnp.pad(sparse.cols, missing, constant_values=h.shape[1])
    values = jnp.pad(sparse.values, missing)

    def add(total: Array, slab: tuple[Array, ...]) -> tuple[Array, None]:
        part = SparseEntries(*slab, row=sparse.row)
        return reference.sparse_update(total, x, part, tiles), None

    slabs = tuple(map(_slabs, (rows, cols, values)))
    total, _ = jax.lax.scan(add, h.astype(jnp.float32), slabs)
    return total.astype(h.dtype)


def _slabs(part: Array) -> Array:
    """[n, z] as [z / SLAB, n, SLAB]."""
    return jnp.swapaxes(jnp.reshape(part, (part.shape[0], -1, SLAB)), 0, 1)
