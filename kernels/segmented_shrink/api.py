"""x A for the rows of many adapters, all slices of a fused layer at once."""

from jaxtyping import Array, Float

from scute_jax.kernels.dispatch import Implementation, choose
from scute_jax.kernels.pools import LowRank
from scute_jax.kernels.segmented_shrink import reference
from scute_jax.kernels.tiles import Tiles


def segmented_shrink(
    x: Float[Array, "t d_in"],
    factors: tuple[LowRank | None, ...],
    tiles: Tiles,
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "splits n size r"] | None, ...]:
    """For each slice: low = x A of each row's adapter, in tiles; None where a slice has no factors.

    The result is meant for `segmented_expand`, which sums the splits (an implementation may split
    the sum over d_in). See reference.py for the definition.
    """
    return choose("segmented_shrink", _TWINS, implementation)(x, factors, tiles)


def _reference(x, factors, tiles):
    return tuple(None if f is None else reference.segmented_shrink(x, f, tiles) for f in factors)


_TWINS = {"reference": _reference}
