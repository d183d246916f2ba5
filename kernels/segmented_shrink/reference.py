"""The definition of the segmented shrink: x A for rows of many adapters."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from scute_jax.kernels.gather import gather_pages, gather_rows
from scute_jax.kernels.pools import LowRank
from scute_jax.kernels.precision import einsum
from scute_jax.kernels.tiles import Tiles


def segmented_shrink(
    x: Float[Array, "t d_in"], factors: LowRank, tiles: Tiles
) -> Float[Array, "1 n size r"]:
    """low[0, i, j] = x[row j of tile i] @ A of the adapter of tile i; `factors` are at tiles.

    Source: the shrink of Punica's SGMV (arXiv:2310.18547), with ragged ranks in pages.
    Dtypes: accumulates and returns float32.
    Undefined: rows that the tile does not have, ranks that the adapter does not have.
    """
    index, _ = tiles.row_index(x.shape[0])
    A = gather_pages(factors.A, factors, jnp.arange(tiles.slot.shape[0]))
    return einsum("nsd,nrd->nsr", gather_rows(x, index), A)[jnp.newaxis]
