"""x S for the rows of many adapters with sparse matrices."""

from jaxtyping import Array, Float

from scute_jax.kernels.pools import SparseEntries
from scute_jax.kernels.sparse_update import reference
from scute_jax.kernels.tiles import Tiles


def sparse_update(
    h: Float[Array, "t d_out"],
    x: Float[Array, "t d_in"],
    sparse: SparseEntries,
    tiles: Tiles,
) -> Float[Array, "t d_out"]:
    """h plus x S of each row's adapter. See reference.py for the definition.

    One implementation: a gather and a scatter, which XLA runs on any device.
    """
    return reference.sparse_update(h, x, sparse, tiles)
