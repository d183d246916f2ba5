"""Kronecker products as plain low-rank terms, for where their structure is lost or not known.

    kron(A1 B1, A2 B2) = kron(A1, A2) kron(B1, B2)

so the rank is the product of the ranks of left and right, which is the least there is.
"""

from dataclasses import replace

import numpy as np
from jaxtyping import Array, Float

from scute_jax.namespace import namespace
from scute_jax.normal_form import Kronecker, NormalForm, Term

ROUNDING = 2.0**-22  # share of the largest singular value that float32 numbers do not hold


def expanded(form: NormalForm) -> NormalForm:
    """The same function with a term in place of each Kronecker product."""
    return replace(form, terms=form.terms + tuple(map(as_term, form.K)), K=())


def as_term(product: Kronecker) -> Term:
    """The product as a term of the least rank."""
    (A1, B1), (A2, B2) = _factors(product.left), _factors(product.right)
    xp = namespace(A1, B1, A2, B2)
    return Term(xp.kron(A1, A2), xp.kron(B1, B2))


def _factors(M: Float[Array, "n m"]) -> tuple[Float[Array, "n r"], Float[Array, "r m"]]:
    """Factors of M of its rank; of traced arrays, whose rank is not known, of the shorter side."""
    (n, m), xp = M.shape, namespace(M)
    if xp is np:
        U, s, Vt = np.linalg.svd(np.asarray(M, np.float64), full_matrices=False)
        r = max(1, int((s > ROUNDING * s[0]).sum()))
        if r < min(n, m):
            return xp.asarray(U[:, :r] * s[:r], M.dtype), xp.asarray(Vt[:r], M.dtype)
    eye = xp.eye(min(n, m), dtype=M.dtype)
    return (eye, M) if n <= m else (M, eye)
