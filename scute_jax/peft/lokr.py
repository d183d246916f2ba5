"""LoKr:  F(x) = x W + bias + c x kron(w1, w2)^T,   c = alpha / r.

Source: LyCORIS (arXiv:2309.14859); peft/tuners/lokr/layer.py. d_out = a b and d_in = m n are split
by decompose_factor. Tensors: lokr_w1 [a, m] and lokr_w2 [b, n], each of them as a product
lokr_w2_a [b, r], lokr_w2_b [r, n] where r is small (w1 with decompose_both only).

The product stays one, K = kron(w1, w2)^T = kron(w1^T, w2^T), unless a low-rank term takes fewer
bytes: kron(P1 Q1, P2 Q2) = kron(P1, P2) kron(Q1, Q2), so its rank is the product of the ranks of w1
and w2, which is the least there is: r or the shorter side of each.
"""

import math

import numpy as np

from scute_jax.normal_form import Kronecker, NormalForm, Term
from scute_jax.peft.factors import narrow
from scute_jax.peft.loha import INERT, rank_and_scale
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site


@register("LOKR", live="K", inert=(*INERT, "rank_dropout_scale"), replaces_bias=False)
def lokr(site: Site) -> NormalForm:
    """x W + c x kron(w1, w2)^T"""
    r, c = rank_and_scale(site)
    factor = site.option("decompose_factor", -1, kind=int)
    (a, b), (m, n) = split(site.d_out, factor), split(site.d_in, factor)
    both = site.option("decompose_both", False, kind=bool)
    P1, Q1 = _product(site, "lokr_w1", (a, m), r if both and r < max(a, m) / 2 else None)
    P2, Q2 = _product(site, "lokr_w2", (b, n), r if r < max(b, n) / 2 else None)
    if Q1.shape[0] * Q2.shape[0] * (site.d_in + site.d_out) <= a * m + b * n:
        return NormalForm(terms=(Term(np.kron(Q1, Q2).T, np.kron(P1, P2).T, c=c),))
    w1, w2 = (P.astype(np.float64) @ Q for P, Q in ((P1, Q1), (P2, Q2)))
    return NormalForm(K=(Kronecker(c * w1.T, w2.T),))


def split(width: int, factor: int) -> tuple[int, int]:
    """Two numbers whose product is width: factor and the rest if it divides, else the largest
    divisor up to factor (-1: any) that is at most the rest. Source: factorization of lokr/layer.py.
    """
    if factor > 0 and width % factor == 0:
        return factor, width // factor
    most = math.isqrt(width) if factor == -1 else min(math.isqrt(width), max(factor, 1))
    first = next(k for k in range(most, 0, -1) if width % k == 0)
    return first, width // first


def _product(site: Site, name: str, shape: tuple[int, int], r: int | None):
    """P [rows, k] and Q [k, columns] of one Kronecker factor, k as small as the shapes allow."""
    rows, columns = shape
    if r is None:
        return narrow(site.tensor(name, shape), np.eye(columns, dtype=np.float32))
    return narrow(site.tensor(f"{name}_a", (rows, r)), site.tensor(f"{name}_b", (r, columns)))
