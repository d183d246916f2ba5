"""The definition of the Kronecker update: x kron(left, right) for rows of many adapters."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from scute_jax.kernels.gather import gather_rows, scatter_rows
from scute_jax.kernels.pools import KroneckerFactors
from scute_jax.kernels.precision import einsum
from scute_jax.kernels.tiles import Tiles


def kronecker_update(
    h: Float[Array, "t d_out"],
    x: Float[Array, "t d_in"],
    factors: KroneckerFactors,
    tiles: Tiles,
) -> Float[Array, "t d_out"]:
    """h + left^T X right on rows whose adapter has such a product, h elsewhere; X = x as [a, b].

    Source: LoKr of LyCORIS (arXiv:2309.14859), whose w1 is left^T and whose w2 is right^T.
    Dtypes: products and sums in float32, X right rounded to the dtype of left between them; returns
    the dtype of h.
    """
    index, valid = tiles.row_index(x.shape[0])
    entry = factors.row[tiles.slot]  # [n, j]
    rows = gather_rows(h, index).astype(jnp.float32)
    a, b = factors.left.shape[1], factors.right.shape[1]
    X = jnp.reshape(gather_rows(x, index), (*index.shape, a, b))
    for j in range(entry.shape[1]):
        left, right = (_selected(part, entry[:, j]) for part in (factors.left, factors.right))
        low = einsum("nsab,nbd->nsad", X, right).astype(left.dtype)
        rows = rows + jnp.reshape(einsum("nsad,nac->nscd", low, left), rows.shape)
    has = jnp.any(entry >= 0, axis=1)
    return scatter_rows(h, index, valid & has[:, None], rows)


def _selected(part: Float[Array, "m p q"], entry: Int[Array, "n"]) -> Float[Array, "n p q"]:
    """The matrix of each tile, zeros where it has none: nothing of others reaches the result."""
    matrices = jnp.take(part, entry, axis=0, mode="clip")
    return jnp.where((entry >= 0)[:, None, None], matrices, 0)
