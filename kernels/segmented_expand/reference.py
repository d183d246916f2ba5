"""The definition of the segmented expand: what an adapter does to the output of its site."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from scute_jax.kernels.gather import gather_pages, gather_rows, gather_vectors, scatter_rows
from scute_jax.kernels.pools import LowRank, Vectors
from scute_jax.kernels.precision import einsum
from scute_jax.kernels.tiles import Tiles


def segmented_expand(
    h: Float[Array, "t d_out"],
    low: Float[Array, "splits n size r"] | None,
    factors: LowRank | None,
    scale: Vectors | None,
    shift: Vectors | None,
    tiles: Tiles,
) -> Float[Array, "t d_out"]:
    """h * s + b + low B on the rows of tiles, h elsewhere; a slot without s, b or rank has none.

    `low` is the result of the segmented shrink; its splits are summed. All pools are at tiles.
    Dtypes: computes in float32, low is rounded to the dtype of B before the product; returns
    the dtype of h.
    """
    index, valid = tiles.row_index(h.shape[0])
    rows = gather_rows(h, index).astype(jnp.float32)
    tile = jnp.arange(tiles.slot.shape[0])
    if scale is not None:
        s, has = gather_vectors(scale, tile)
        rows = jnp.where(has[:, :, None], rows + rows * s[:, None, :].astype(jnp.float32), rows)
    if shift is not None:
        b, has = gather_vectors(shift, tile)
        rows = jnp.where(has[:, :, None], rows + b[:, None, :].astype(jnp.float32), rows)
    if factors is not None and low is not None:
        B = gather_pages(factors.B, factors, tile)
        own = jnp.arange(low.shape[-1])[None, :] < factors.rank[:, None]
        low = jnp.where(own[:, None, :], jnp.sum(low, axis=0), 0).astype(B.dtype)
        rows = rows + einsum("nsr,nrd->nsd", low, B)
    return scatter_rows(h, index, valid, rows)
