"""HRA:  F(x) = x H W + bias,   H = H_r ... H_1 with the reflections H_i = I - 2 u_i u_i^T.

Source: HRA eq. 4 (arXiv:2405.17484); peft/tuners/hra/layer.py. Tensor: hra_u [d_in, r], the u_i
before they are scaled to length 1. The product of r reflections is I + U M U^T with M [r, r]
triangular (the compact WY form), so F(x) = x W + bias + (x U) (M U^T W): a low-rank term, made
from W at load. With apply_GS the u_i are made orthogonal by Gram and Schmidt's rule first, and M =
-2 I.
"""

import numpy as np
from jaxtyping import Float

from scute_jax.normal_form import NormalForm, Term
from scute_jax.peft.factors import weight_product
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site

LEAST = 1e-4  # share of a vector that has to be orthogonal to those before it
LENGTHS = 1e-18, 1e18  # whose squares are numbers of float32


@register("HRA", inert=("init_weights",))
def hra(site: Site) -> NormalForm:
    """x W + (x U) (M U^T W), I + U M U^T a product of r reflections"""
    r = site.option("r", kind=int, required=True)
    if r < 1:
        site.refuse_field("r", "needed at least 1")
    U = site.tensor("hra_u", (site.d_in, r)).astype(np.float64)
    lengths = np.linalg.norm(U, axis=0)
    if site.shape("hra_u") is None:
        return NormalForm()
    if lengths.min() < LENGTHS[0] or lengths.max() > LENGTHS[1]:
        site.refuse(
            "a column of hra_u is zero or so large that PEFT, in float32, finds no direction in it."
        )
    U /= lengths
    if site.option("apply_GS", False, kind=bool):
        U, M = _orthogonal(site, U), -2 * np.eye(r)
    else:
        M = reflections(U)
    W = site.weight("HRA reflects the input of W")
    return NormalForm(terms=(Term(U, M @ weight_product(W.T, U).T),))


def reflections(U: Float[np.ndarray, "d_in r"]) -> Float[np.ndarray, "r r"]:
    """M with I + U M U^T = H_r ... H_1: each reflection adds a row to M."""
    r = U.shape[1]
    M = np.zeros((r, r))
    for i in range(r):
        M[i, :i] = -2 * (U[:, i] @ U[:, :i]) @ M[:i, :i]
        M[i, i] = -2
    return M


def _orthogonal(site: Site, U: Float[np.ndarray, "d_in r"]) -> Float[np.ndarray, "d_in r"]:
    """The columns made orthogonal to those before them, one after the other."""
    U = U.copy()
    for i in range(U.shape[1]):
        for j in range(i):
            U[:, i] -= (U[:, j] @ U[:, i]) * U[:, j]
        length = np.linalg.norm(U[:, i])
        if length < LEAST:
            site.refuse(
                f"column {i} of hra_u lies in the span of those before it, so with apply_GS "
                "what PEFT computes in float32 is rounding; train again with a smaller r."
            )
        U[:, i] /= length
    return U
