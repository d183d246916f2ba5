"""Products of permuted block-diagonal matrices and plain ones."""

import numpy as np
from jaxtyping import Array, Float

from scute_jax.namespace import namespace
from scute_jax.normal_form import Blocks


def blocks_times(blocks: Blocks, A: Float[Array, "d r"]) -> Float[Array, "d r"]:
    """The product of the blocks, as a matrix that x is multiplied with from the right, and A."""
    n, m, _ = blocks.values.shape
    xp = namespace(blocks.values, A)
    ordered = A if blocks.order is None else A[blocks.order]
    product = xp.einsum("npq,nqr->npr", blocks.values, xp.reshape(ordered, (n, m, -1)))
    product = xp.reshape(product, A.shape).astype(A.dtype)
    return product if blocks.order is None else product[np.argsort(blocks.order)]


def times_blocks(B: Float[Array, "r d"], blocks: Blocks) -> Float[Array, "r d"]:
    """The product of B and the blocks."""
    n, m, _ = blocks.values.shape
    xp = namespace(blocks.values, B)
    ordered = B if blocks.order is None else B[:, blocks.order]
    product = xp.einsum("rnp,npq->rnq", xp.reshape(ordered, (-1, n, m)), blocks.values)
    product = xp.reshape(product, B.shape).astype(B.dtype)
    return product if blocks.order is None else product[:, np.argsort(blocks.order)]
