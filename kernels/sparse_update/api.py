"""x S for the rows of many adapters with sparse matrices."""

from jaxtyping import Array, Float

from scute_jax.kernels.dispatch import Implementation, Op
from scute_jax.kernels.pools import SparseEntries
from scute_jax.kernels.sparse_update import pallas_triton, reference
from scute_jax.kernels.tiles import Tiles


def sparse_update(
    h: Float[Array, "t d_out"],
    x: Float[Array, "t d_in"],
    sparse: SparseEntries,
    tiles: Tiles,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "t d_out"]:
    """h plus x S of each row's adapter. See reference.py for the definition.

    Differentiable in h, x and the values.
    """
    return _OP(h, x, sparse, tiles, implementation=implementation)


_OP = Op("sparse_update", reference.sparse_update, pallas_triton.sparse_update)
