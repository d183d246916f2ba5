"""GraLoRA:  F(x) = x W + bias + c (x A) B + c (x A') B',   c = alpha / (r + hybrid_r).

Source: GraLoRA eq. 6 (arXiv:2505.20355); peft/tuners/gralora/layer.py. W is cut into a grid of k
by k blocks, each with a LoRA of rank r / k of its own: block (n, j) takes part n of x to part j of
y. So A and B have rank k r and are zero outside the blocks. Tensors: gralora_A [k, d_in / k, r],
at n the columns of all j side by side, gralora_B [k, r, d_out / k], at j the rows of all n below
each other; with hybrid_r a plain LoRA gralora_A_general.weight [hybrid_r, d_in],
gralora_B_general.weight.
"""

import numpy as np

from scute_jax.normal_form import NormalForm, Term
from scute_jax.peft.factors import narrow
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site


@register("GRALORA", inert=("gralora_dropout", "fan_in_fan_out", "init_weights"))
def gralora(site: Site) -> NormalForm:
    """x W + c (x A) B, A and B of k by k blocks"""
    r, k = (site.option(name, kind=int, required=True) for name in ("r", "gralora_k"))
    hybrid = site.option("hybrid_r", 0, kind=int)
    if k < 1 or r < 1 or r % k or site.d_in % k or site.d_out % k:
        site.refuse_field(
            "gralora_k",
            f"it has to divide r ({r}) and the widths of {site.module} ({site.d_in}, {site.d_out})",
        )
    if hybrid < 0:
        site.refuse_field("hybrid_r", "needed 0 or more")
    i, o, t = site.d_in // k, site.d_out // k, r // k
    columns = site.tensor("gralora_A", (k, i, r)).reshape(k, i, k, t)  # n, i, j, t
    rows = site.tensor("gralora_B", (k, r, o)).reshape(k, k, t, o)  # j, n, t, o
    A, B = np.zeros((k, i, k, k, t), np.float32), np.zeros((k, k, t, k, o), np.float32)
    for part in range(k):
        A[part, :, part] = columns[part]
        B[:, part, :, part] = rows[part]
    A, B = A.reshape(site.d_in, k * r), B.reshape(k * r, site.d_out)
    if hybrid:
        A = np.hstack([A, site.tensor("gralora_A_general.weight", (hybrid, site.d_in)).T])
        B = np.vstack([B, site.tensor("gralora_B_general.weight", (site.d_out, hybrid)).T])
    alpha = site.option("alpha", kind=float, required=True)
    return NormalForm(terms=(Term(*narrow(A, B), c=alpha / (r + hybrid)),))
