"""LoHa:  F(x) = x W + bias + c x ((A1 B1) * (A2 B2)),   c = alpha / r.

Source: FedPara eq. 4 (arXiv:2108.06098); HadaWeight of peft/tuners/loha/layer.py. Tensors:
hada_w1_a [d_out, r], hada_w1_b [r, d_in] and the same for w2. The product of two matrices of rank
r entry by entry is A B of rank r^2: a column of A is a column of A1 times one of A2, a row of B a
row of B1 times one of B2. Where r^2 exceeds a side of W, one factor is the identity of that side.
"""

import numpy as np

from scute_jax.normal_form import NormalForm, Term
from scute_jax.peft.factors import whole
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site

INERT = (
    "init_weights",
    "rank_dropout",
    "module_dropout",
    "use_effective_conv2d",  # of convolutions alone
)


def rank_and_scale(site: Site) -> tuple[int, float]:
    """r and c = alpha / r of this module, by rank_pattern and alpha_pattern."""
    r = site.matching("rank_pattern", site.option("r", kind=int, required=True), int)
    alpha = site.option("alpha", kind=float, required=True)
    if r < 1:
        site.refuse_field("r", f"with rank_pattern it gives {site.module} rank {r}, not 1 or more")
    return r, site.matching("alpha_pattern", alpha, float) / r


@register("LOHA", inert=INERT, replaces_bias=False)
def loha(site: Site) -> NormalForm:
    """x W + c x ((A1 B1) * (A2 B2))"""
    r, c = rank_and_scale(site)
    B1, B2 = (site.tensor(f"hada_w{k}_a", (site.d_out, r)).T for k in (1, 2))
    A1, A2 = (site.tensor(f"hada_w{k}_b", (r, site.d_in)).T for k in (1, 2))
    if r * r > min(site.d_in, site.d_out):
        delta = np.float64(A1 @ B1) * (A2 @ B2)
        return NormalForm(terms=(Term(*whole(delta), c=c),))
    A = (A1[:, :, None] * A2[:, None, :]).reshape(site.d_in, r * r)
    B = (B1[:, None, :] * B2[None, :, :]).reshape(r * r, site.d_out)
    return NormalForm(terms=(Term(A, B, c=c),))
