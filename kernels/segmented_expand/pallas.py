"""The segmented expand on the backend of Pallas that its tile names: Triton or Mosaic GPU."""

from jaxtyping import Array, Float

from scute_jax.kernels.pools import LowRank, Vectors, most_ranks
from scute_jax.kernels.segmented_expand import pallas_triton
from scute_jax.kernels.segmented_expand.tile import ExpandTile
from scute_jax.kernels.tiles import Tiles
from scute_jax.kernels.tuning import tuned


def segmented_expand(
    h: tuple[Float[Array, "t d_out"], ...],
    low: tuple[Float[Array, "splits n size r"] | None, ...],
    factors: tuple[LowRank | None, ...],
    scale: tuple[Vectors | None, ...],
    shift: tuple[Vectors | None, ...],
    tiles: Tiles,
    tile: ExpandTile | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "t d_out"], ...]:
    """As the reference. Without a tile, that of the table of tiles."""
    tile = tile or tuned(ExpandTile, rows=h[0].shape[0], rank=most_ranks(factors))
    backend = pallas_triton
    if tile.mosaic:
        # Imported where it is asked for only: of all that Pallas has, this changes most.
        from scute_jax.kernels.segmented_expand import pallas_mosaic

        if pallas_mosaic.supports(h, factors, scale, shift, tiles, interpret):
            backend = pallas_mosaic
    return backend.segmented_expand(h, low, factors, scale, shift, tiles, tile, interpret)
