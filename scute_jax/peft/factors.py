"""Exact factorisations of deltas, and products with W, on the host: numpy in, numpy out."""

from typing import Any

import numpy as np
from jaxtyping import Float

ROWS = 512  # rows of W that are in float64 at a time


def narrow(
    A: Float[np.ndarray, "d_in r"], B: Float[np.ndarray, "r d_out"]
) -> tuple[Float[np.ndarray, "d_in k"], Float[np.ndarray, "k d_out"]]:
    """Factors of A B of rank k = min(r, d_in, d_out): multiplied out where r is the largest."""
    if A.shape[1] <= min(A.shape[0], B.shape[1]):
        return A, B
    return whole(A.astype(np.float64) @ B.astype(np.float64))


def whole(
    delta: Float[np.ndarray, "d_in d_out"],
) -> tuple[Float[np.ndarray, "d_in k"], Float[np.ndarray, "k d_out"]]:
    """Factors of a delta of full rank k = min(d_in, d_out): itself and an identity."""
    d_in, d_out = delta.shape
    return (np.eye(d_in), delta) if d_in <= d_out else (delta, np.eye(d_out))


def weight_product(
    W: Float[Any, "n m"], right: Float[np.ndarray, "m r"]
) -> Float[np.ndarray, "n r"]:
    """W right in float64, a slab of rows at a time. W may be the transpose of a weight."""
    right = right.astype(np.float64)
    slabs = range(0, W.shape[0], ROWS)
    return np.concatenate([np.float64(W[i : i + ROWS]) @ right for i in slabs])
