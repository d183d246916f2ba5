"""The input transform on the backend of Pallas that its tile names: Triton or Mosaic GPU."""

from jaxtyping import Array, Float, Int

from scute_jax.kernels.block_rotate import pallas_triton
from scute_jax.kernels.block_rotate.tile import RotateTile
from scute_jax.kernels.pools import Rotation
from scute_jax.kernels.tiles import Tiles
from scute_jax.kernels.tuning import tuned


def block_rotate(
    x: tuple[Float[Array, "t d_in"], ...],
    rotation: tuple[Rotation, ...],
    tiles: Tiles,
    slot: Int[Array, "t"],
    tile: RotateTile | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "t d_in"], ...]:
    """As the reference. Without a tile, that of the table of tiles."""
    tile = tile or tuned(RotateTile, rows=x[0].shape[0], block=rotation[0].values.shape[-1])
    backend = pallas_triton
    if tile.mosaic:
        # Imported where it is asked for only: of all that Pallas has, this changes most.
        from scute_jax.kernels.block_rotate import pallas_mosaic

        if pallas_mosaic.supports(x, rotation, tiles, interpret):
            backend = pallas_mosaic
    return backend.block_rotate(x, rotation, tiles, slot, tile, interpret)
