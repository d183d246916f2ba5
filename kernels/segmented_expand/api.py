"""h * s + b + low B for the rows of many adapters, all slices of a fused layer at once."""

from jaxtyping import Array, Float

from scute_jax.kernels.dispatch import Implementation, choose
from scute_jax.kernels.pools import LowRank, Vectors
from scute_jax.kernels.segmented_expand import reference
from scute_jax.kernels.tiles import Tiles


def segmented_expand(
    h: tuple[Float[Array, "t d_out"], ...],
    low: tuple[Float[Array, "splits n size r"] | None, ...],
    factors: tuple[LowRank | None, ...],
    scale: tuple[Vectors | None, ...],
    shift: tuple[Vectors | None, ...],
    tiles: Tiles,
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "t d_out"], ...]:
    """For each slice: h with s, b and low B of each row's adapter; rows in no tile stay as is.

    See reference.py for the definition.
    """
    expand = choose("segmented_expand", _TWINS, implementation)
    return expand(h, low, factors, scale, shift, tiles)


def _reference(h, low, factors, scale, shift, tiles):
    slices = zip(h, low, factors, scale, shift, strict=True)
    return tuple(
        h_i
        if all(part is None for part in parts)
        else reference.segmented_expand(h_i, *parts, tiles)
        for h_i, *parts in slices
    )


_TWINS = {"reference": _reference}
