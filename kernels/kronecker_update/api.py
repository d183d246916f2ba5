"""x kron(left, right) for the rows of many adapters with Kronecker products of one shape."""

from jaxtyping import Array, Float

from scute_jax.kernels.kronecker_update import reference
from scute_jax.kernels.pools import KroneckerFactors
from scute_jax.kernels.tiles import Tiles


def kronecker_update(
    h: Float[Array, "t d_out"],
    x: Float[Array, "t d_in"],
    factors: KroneckerFactors,
    tiles: Tiles,
) -> Float[Array, "t d_out"]:
    """h plus left^T X right of each row's adapter. See reference.py for the definition.

    One implementation, on a GPU as well: two products of small matrices, batched over the tiles,
    which XLA hands to its library of matrix products; no Pallas kernel stands in for it.

    Differentiable in h, x and both factors.
    """
    return reference.kronecker_update(h, x, factors, tiles)
