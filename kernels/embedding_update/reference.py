"""The definition of the embedding update: a segmented update whose x is the one-hot row of a token.

So the shrink is a look-up in A instead of a product.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from scute_jax.kernels.pools import LowRank, Vectors, at_tiles
from scute_jax.kernels.segmented_expand import reference as expand
from scute_jax.kernels.tiles import Tiles


def embedding_update(
    h: Float[Array, "t d"],
    token: Int[Array, "t"],
    factors: LowRank | None,
    scale: Vectors | None,
    shift: Vectors | None,
    tiles: Tiles,
) -> Float[Array, "t d"]:
    """h * s + b + A[token] B on the rows of tiles, h elsewhere; A has no row past its own.

    Dtypes: as those of the segmented expand.
    """
    factors = at_tiles(factors, tiles.slot)
    scale, shift = at_tiles(scale, tiles.slot), at_tiles(shift, tiles.slot)
    low = None
    if factors is not None:
        index, _ = tiles.row_index(h.shape[0])
        tokens = jnp.take(token, index, mode="clip")[:, :, None, None]  # [n, size, 1, 1]
        page, vocab = factors.A.shape[1:]
        table = factors.table[:, None, :, None]  # [n, 1, w, 1]
        rank = jnp.arange(page, dtype=jnp.int32)[None, None, None, :]
        low = factors.A[table, rank, jnp.minimum(tokens, vocab - 1)]
        low = jnp.where(tokens < vocab, low, 0).astype(jnp.float32)
        low = jnp.reshape(low, (1, *low.shape[:2], -1))
    return expand.segmented_expand(h, low, factors, scale, shift, tiles)
