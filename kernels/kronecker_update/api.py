"""x kron(left, right) for the rows of many adapters with Kronecker products of one shape."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from scute_jax.kernels.kronecker_update import reference
from scute_jax.kernels.pools import KroneckerFactors
from scute_jax.kernels.tiles import Tiles

NUMBERS = 1 << 25  # of the factors that stand beside their tiles at a time


def kronecker_update(
    h: Float[Array, "t d_out"],
    x: Float[Array, "t d_in"],
    factors: KroneckerFactors,
    tiles: Tiles,
) -> Float[Array, "t d_out"]:
    """h plus left^T X right of each row's adapter. See reference.py for the definition.

    One implementation, on a GPU as well: two products of small matrices, batched over the tiles,
    which XLA hands to its library of matrix products; no Pallas kernel stands in for it. Where the
    factors are large, some tiles are taken after the others.

    Differentiable in h, x and both factors.
    """
    own = sum(part.shape[1] * part.shape[2] for part in (factors.left, factors.right))
    count, together = tiles.slot.shape[0], max(NUMBERS // own, 1)
    if count <= together:
        return reference.kronecker_update(h, x, factors, tiles)

    def slabs(part: Array) -> Array:
        return jnp.reshape(jnp.pad(part, (0, -count % together)), (-1, together))

    def add(total: Array, slab: tuple[Array, ...]) -> tuple[Array, None]:
        return reference.kronecker_update(total, x, factors, Tiles(*slab, size=tiles.size)), None

    parts = tuple(map(slabs, (tiles.slot, tiles.start, tiles.rows)))
    return jax.lax.scan(add, h, parts)[0]
