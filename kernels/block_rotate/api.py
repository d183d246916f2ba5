"""x R for the rows of many adapters: one pass over x before the base product."""

from jaxtyping import Array, Float

from scute_jax.kernels.block_rotate import reference
from scute_jax.kernels.dispatch import Implementation, choose
from scute_jax.kernels.pools import Rotation, Vectors
from scute_jax.kernels.tiles import Tiles


def block_rotate(
    x: Float[Array, "t d_in"],
    rotation: Rotation,
    tiles: Tiles,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "t d_in"]:
    """x R on rows whose adapter has an R of the pool's block size, x elsewhere."""
    return choose("block_rotate", _ROTATE, implementation)(x, rotation, tiles)


def scale_input(
    x: Float[Array, "t d_in"],
    scale: Vectors,
    tiles: Tiles,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "t d_in"]:
    """x * u on rows whose adapter scales its input, x elsewhere: an R of 1x1 blocks."""
    return choose("scale_input", _SCALE, implementation)(x, scale, tiles)


_ROTATE = {"reference": reference.block_rotate}
_SCALE = {"reference": reference.scale_input}
