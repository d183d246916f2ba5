"""x R for the rows of many adapters: one pass over x before the base product."""

from jaxtyping import Array, Float, Int

from scute_jax.kernels.block_rotate import pallas_triton, reference
from scute_jax.kernels.dispatch import Implementation, Op
from scute_jax.kernels.pools import Rotation, Vectors
from scute_jax.kernels.tiles import Tiles


def block_rotate(
    x: Float[Array, "t d_in"],
    rotation: Rotation,
    tiles: Tiles,
    slot: Int[Array, "t"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "t d_in"]:
    """x R on rows whose adapter has an R of the pool's block size, x elsewhere.

    `slot` is the adapter of each row, -1 for none, as the tiles have it. Differentiable in x and R.
    """
    return _ROTATE(x, rotation, tiles, slot, implementation=implementation)


def scale_input(
    x: Float[Array, "t d_in"],
    scale: Vectors,
    tiles: Tiles,
    slot: Int[Array, "t"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "t d_in"]:
    """x * u on rows whose adapter scales its input, x elsewhere: an R of 1x1 blocks.

    Differentiable in x and u.
    """
    return _SCALE(x, scale, tiles, slot, implementation=implementation)


def _rotate_reference(x, rotation, tiles, slot):
    del slot  # the tiles say it
    return reference.block_rotate(x, rotation, tiles)


def _scale_reference(x, scale, tiles, slot):
    del slot
    return reference.scale_input(x, scale, tiles)


_ROTATE = Op("block_rotate", _rotate_reference, pallas_triton.block_rotate)
_SCALE = Op("scale_input", _scale_reference, pallas_triton.scale_input)
