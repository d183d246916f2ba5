"""DeLoRA:  F(x) = x W + bias + (((x * w) A) * d) B,  d_j = lambda / (r norm(A_j) norm(B_j)).

Source: DeLoRA eq. 6 (arXiv:2503.18225); peft/tuners/delora/layer.py. Tensors: delora_A [r, d_in],
delora_B [d_out, r], delora_lambda [1] and delora_w_norm [d_in] = w, the norms of the rows of W
when the adapter was made, which PEFT saves. Norms of A and B below 1e-4 count as 1e-4.
"""

import numpy as np

from scute_jax.normal_form import NormalForm, Term
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site

LEAST = 1e-4  # of the norms
MOST = 1e18  # of the norms, whose squares are numbers of float32
INERT = (
    "module_dropout",
    "init_weights",
    "delora_lambda",  # lambda is in the file
    "lambda_pattern",
)


@register("DELORA", inert=INERT)
def delora(site: Site) -> NormalForm:
    """x W + (((x * w) A) * d) B, d = lambda / (r norm(A_j) norm(B_j))"""
    r = site.matching("rank_pattern", site.option("r", kind=int, required=True), int)
    if r < 1:
        site.refuse_field("r", f"with rank_pattern it gives {site.module} rank {r}, not 1 or more")
    A = site.tensor("delora_A", (r, site.d_in)).T.astype(np.float64)
    B = site.tensor("delora_B", (site.d_out, r)).T.astype(np.float64)
    bound = site.tensor("delora_lambda", (1,)).astype(np.float64)
    w = site.tensor("delora_w_norm", (site.d_in,))
    norms = np.linalg.norm(A, axis=0).clip(LEAST), np.linalg.norm(B, axis=1).clip(LEAST)
    if np.max(norms) > MOST:
        site.refuse(f"delora_A or delora_B has a norm above {MOST:g}, which float32 cannot square.")
    return NormalForm(terms=(Term(w[:, None] * A, B, d=bound / r / (norms[0] * norms[1])),))
