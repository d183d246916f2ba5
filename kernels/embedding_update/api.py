"""h * s + b + A[token] B for the rows of many adapters: the segmented update of an embedding."""

from jaxtyping import Array, Float, Int

from scute_jax.kernels.embedding_update import reference
from scute_jax.kernels.pools import LowRank, Vectors
from scute_jax.kernels.tiles import Tiles


def embedding_update(
    h: Float[Array, "t d"],
    token: Int[Array, "t"],
    factors: LowRank | None,
    scale: Vectors | None,
    shift: Vectors | None,
    tiles: Tiles,
) -> Float[Array, "t d"]:
    """h * s + b plus the sum of B over the ranks, weighted by the adapter's A of this token.

    One implementation: gathers and one small product, which XLA runs on any device.
    """
    if factors is None and scale is None and shift is None:
        return h
    return reference.embedding_update(h, token, factors, scale, shift, tiles)
