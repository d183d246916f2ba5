"""x R for the rows of many adapters: one pass over x before the base product."""

from functools import partial

from jaxtyping import Array, Float, Int

from scute_jax.kernels.block_rotate import pallas, pallas_triton, reference
from scute_jax.kernels.dispatch import Implementation, Op
from scute_jax.kernels.pools import Rotation, Vectors
from scute_jax.kernels.tiles import Tiles


def block_rotate(
    x: tuple[Float[Array, "t d_in"], ...],
    rotation: tuple[Rotation | None, ...],
    tiles: Tiles,
    slot: Int[Array, "t"],
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "t d_in"], ...]:
    """For each slice: x R on rows whose adapter has an R in the slice's pool, x elsewhere.

    The pools have one block size; a slice without one keeps its x. `slot` is the adapter of each
    row, -1 for none, as the tiles have it. Differentiable in x and R.
    """
    return _of_slices(_ROTATE, x, rotation, tiles, slot, implementation)


def scale_input(
    x: tuple[Float[Array, "t d_in"], ...],
    scale: tuple[Vectors | None, ...],
    tiles: Tiles,
    slot: Int[Array, "t"],
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "t d_in"], ...]:
    """For each slice: x * u on rows whose adapter scales its input, x elsewhere.

    That is an R of 1x1 blocks. A slice without a pool keeps its x. Differentiable in x and u.
    """
    return _of_slices(_SCALE, x, scale, tiles, slot, implementation)


def _of_slices(op, x, pools, tiles, slot, implementation):
    live = [s for s, pool in enumerate(pools) if pool is not None]
    if not live:
        return x
    own = tuple(x[s] for s in live), tuple(pools[s] for s in live)
    new = dict(zip(live, op(*own, tiles, slot, implementation=implementation), strict=True))
    return tuple(new.get(s, x_s) for s, x_s in enumerate(x))


def _rotate_reference(x, rotation, tiles, slot):
    del slot  # the tiles say it
    return tuple(map(partial(reference.block_rotate, tiles=tiles), x, rotation))


def _scale_reference(x, scale, tiles, slot):
    del slot
    return tuple(map(partial(reference.scale_input, tiles=tiles), x, scale))


_ROTATE = Op("block_rotate", _rotate_reference, pallas.block_rotate)
_SCALE = Op("scale_input", _scale_reference, pallas_triton.scale_input)
