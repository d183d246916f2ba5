"""The definition of the input transform: x R with a block-diagonal R for each adapter."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from scute_jax.kernels.gather import gather_rows, scatter_rows
from scute_jax.kernels.pools import Rotation, Vectors
from scute_jax.kernels.precision import einsum
from scute_jax.kernels.tiles import Tiles


def block_rotate(
    x: Float[Array, "t d_in"], rotation: Rotation, tiles: Tiles
) -> Float[Array, "t d_in"]:
    """x + x (R - I) on rows whose adapter has an R in this pool, x elsewhere.

    With an order, the blocks act on the coordinates in that order and leave them in their places.

    Source: OFT (arXiv:2306.07280), the rotation applied to the input.
    Dtypes: accumulates in float32; returns the dtype of x.
    """
    index, valid = tiles.row_index(x.shape[0])
    row = rotation.row[tiles.slot]
    R = jnp.take(rotation.values, row, axis=0, mode="clip")  # [n, blocks, m, m]
    rows = gather_rows(x, index)
    ordered = rows if rotation.order is None else jnp.take(rows, rotation.order, axis=-1)
    blocks = jnp.reshape(ordered, (*rows.shape[:2], *R.shape[1:3]))
    turned = jnp.reshape(einsum("nsjp,njpq->nsjq", blocks, R), rows.shape)
    if rotation.order is not None:
        turned = jnp.take(turned, jnp.argsort(rotation.order), axis=-1)
    return scatter_rows(x, index, valid & (row >= 0)[:, None], rows.astype(jnp.float32) + turned)


def scale_input(x: Float[Array, "t d_in"], scale: Vectors, tiles: Tiles) -> Float[Array, "t d_in"]:
    """x + x * (u - 1) on rows whose adapter scales its input by a vector u: an R of 1x1 blocks."""
    index, valid = tiles.row_index(x.shape[0])
    row = scale.row[tiles.slot]
    u = jnp.take(scale.values, row, axis=0, mode="clip")[:, None, :].astype(jnp.float32)
    rows = gather_rows(x, index).astype(jnp.float32)
    return scatter_rows(x, index, valid & (row >= 0)[:, None], rows + rows * u)
