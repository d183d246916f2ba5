"""DEFT:  F(x) = x W + bias + (x (c R - W P')) Q,   P' [d_out, r], R [d_in, r], Q [r, d_out].

Source: peft/tuners/deft/layer.py, W' = (I - P_proj) W + Q_P R in torch's layout. Tensors: deft_P
[d_out, r] and, unless `para` is set, deft_R [r, d_in]; r is the configured rank or d_out if that
is less. decomposition_method "relu": Q = P^T and P' = relu(P). "qr": P' = Q^T is the orthogonal
factor of P, with the signs of LAPACK's QR. c = alpha / r, or 1 where alpha is null. The part of W
that is taken out and the one that is put in share Q, so they are one term of rank r, made from W
at load.
"""

import numpy as np
from jaxtyping import Float

from scute_jax.normal_form import NormalForm, Term
from scute_jax.peft.factors import weight_product
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site

LEAST = 1e-4  # share of a column of P that has to be orthogonal to those before it
INERT = (
    "init_scale",
    "fan_in_fan_out",
    "deft_dropout",
    "init_weights",
    "alpha",  # with para
)


@register("DEFT", inert=INERT)
def deft(site: Site) -> NormalForm:
    """x W + (x (c R - W P')) Q"""
    r = min(site.option("r", kind=int, required=True), site.d_out)
    if r < 1:
        site.refuse_field("r", "needed at least 1")
    method = site.option("decomposition_method", "relu", kind=str, choices=("relu", "qr"))
    P = site.tensor("deft_P", (site.d_out, r)).astype(np.float64)
    if site.shape("deft_P") is None:
        return NormalForm()
    Q, right = (P, P.clip(0)) if method == "relu" else (_orthogonal(site, P),) * 2
    A = -weight_product(site.weight("DEFT takes a part of it out"), right)
    if not site.option("para", False, kind=bool):
        alpha = site.option("alpha", kind=float)
        A += (alpha / r if alpha else 1.0) * site.tensor("deft_R", (r, site.d_in)).T
    return NormalForm(terms=(Term(A, Q.T),))


def _orthogonal(site: Site, P: Float[np.ndarray, "d_out r"]) -> Float[np.ndarray, "d_out r"]:
    """The orthogonal factor of P. Numpy and torch both call LAPACK, whose signs these are."""
    Q, R = np.linalg.qr(P)
    if (np.abs(np.diag(R)) <= LEAST * np.linalg.norm(R, axis=0)).any():
        site.refuse(
            "the columns of deft_P depend on each other, so what PEFT makes of them in float32 "
            "with decomposition_method='qr' is rounding; train again with a smaller r."
        )
    return Q
