"""h * s + b + (x A) B for the rows of many adapters: shrink and expand, all slices at once."""

from jaxtyping import Array, Float

from scute_jax.kernels.dispatch import Implementation, Op
from scute_jax.kernels.pools import LowRank, Vectors, at_tiles
from scute_jax.kernels.segmented_expand import pallas as expand_pallas
from scute_jax.kernels.segmented_expand import reference as expand_reference
from scute_jax.kernels.segmented_shrink import pallas_triton as shrink_triton
from scute_jax.kernels.segmented_shrink import reference as shrink_reference
from scute_jax.kernels.tiles import Tiles


def segmented_update(
    h: tuple[Float[Array, "t d_out"], ...],
    x: Float[Array, "t d_in"],
    factors: tuple[LowRank | None, ...],
    scale: tuple[Vectors | None, ...],
    shift: tuple[Vectors | None, ...],
    tiles: Tiles,
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "t d_out"], ...]:
    """For each slice of a fused layer: h * s + b + (x A) B of each row's adapter.

    A part that is None is the identity for everybody. Rows in no tile, and rows whose adapter has
    nothing at a slice, keep their h. See the references of shrink and expand for the definition.
    Pools may be `at_tiles` already. Differentiable in h, x and every pool.
    """
    if all(part is None for parts in (factors, scale, shift) for part in parts):
        return h
    parts = (tuple(at_tiles(p, tiles.slot) for p in own) for own in (factors, scale, shift))
    return _OP(h, x, *parts, tiles, implementation=implementation)


def _reference(h, x, factors, scale, shift, tiles):
    return tuple(
        _reference_slice(h_i, x, *parts, tiles)
        for h_i, *parts in zip(h, factors, scale, shift, strict=True)
    )


def _reference_slice(h, x, factors, scale, shift, tiles):
    if factors is None and scale is None and shift is None:
        return h
    low = None if factors is None else shrink_reference.segmented_shrink(x, factors, tiles)
    return expand_reference.segmented_expand(h, low, factors, scale, shift, tiles)


def _pallas(h, x, factors, scale, shift, tiles, interpret):
    low = shrink_triton.segmented_shrink(x, factors, tiles, interpret=interpret)
    return expand_pallas.segmented_expand(h, low, factors, scale, shift, tiles, interpret=interpret)


_OP = Op("segmented_update", _reference, _pallas)
