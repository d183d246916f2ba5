"""Orthogonal blocks made from skew-symmetric ones, as the methods of the OFT family have them."""

import numpy as np
from jaxtyping import Float

from scute_jax.peft.site import Site

Blocks = Float[np.ndarray, "n k k"]


def cayley(Q: Blocks) -> Blocks:
    """(I - Q) (I + Q)^-1, orthogonal for skew-symmetric Q."""
    eye = np.eye(Q.shape[-1])
    # X (I + Q) = I - Q, transposed; I + Q is never singular, its eigenvalues are 1 + i t.
    return np.swapaxes(
        np.linalg.solve(np.swapaxes(eye + Q, 1, 2), np.swapaxes(eye - Q, 1, 2)), 1, 2
    )


def projected(blocks: Blocks, radius: float) -> Blocks:
    """Each block scaled down to Frobenius norm `radius`, if its norm is larger: constrained OFT."""
    norms = np.sqrt(np.sum(np.square(blocks), axis=(1, 2), keepdims=True))
    return np.where(norms <= radius, blocks, radius * blocks / np.where(norms > 0, norms, 1))


def eps_of(site: Site) -> float:
    eps = site.option("eps", 6e-5, kind=float)
    if eps < 0:
        site.refuse_field("eps", "needed a radius, at least 0")
    return eps


def repeated(blocks: Blocks, d_in: int) -> Float[np.ndarray, "d_in/k k k"]:
    """All blocks of R; one that all share is held once, as a view that repeats it."""
    k = blocks.shape[-1]
    return np.broadcast_to(np.asarray(blocks, np.float32), (d_in // k, k, k))
