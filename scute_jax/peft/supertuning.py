"""Super-Tuning:  F(x) = x (W + S) + bias + c (x A) B,   S sparse.

Source: Super-Tuning (arXiv:2607.09287); Linear.forward of peft/tuners/supertuning/layer.py.
Tensors: supertuning_values [n], the entries of S; supertuning_indices [n], their places in the
weight as torch stores it, output o and input i at o d_in + i; and, where r is set (Supra),
supertuning_lora_A.weight [r, d_in] and supertuning_lora_B.weight [d_out, r] with c = lora_alpha /
r. n = d_in d_out (1 - sparsity). Files without indices (save_precomputed_indices) leave them to the
largest entries of the weight that the training had: in its dtype, and in the order of torch's
topk, which does not say how it breaks ties.
"""

import numpy as np

from scute_jax.normal_form import NormalForm, Sparse, Term
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site
from scute_jax.peft.sparse import indices

INERT = ("select_top", "lora_dropout", "init_weights", "save_precomputed_indices")


@register("SUPERTUNING", live="S", inert=INERT, replaces_bias=False)
def supertuning(site: Site) -> NormalForm:
    """x (W + S) + c (x A) B, S sparse"""
    size = site.d_in * site.d_out
    sparsity = site.option("sparsity", 0.99, kind=float)
    n = int(size * (1 - sparsity))
    if not 0 < n <= size:
        site.refuse_field("sparsity", f"it leaves {n} of the {size} entries of {site.module}")
    if site.shape("supertuning_indices") is None and site.shape("supertuning_values") is not None:
        site.refuse(
            "the file lacks supertuning_indices, and which entries of the weight were largest "
            "depends on the dtype of the base and on ties. Where it was trained, set "
            "save_precomputed_indices to true in this config, load the adapter with PEFT and save "
            "it again."
        )
    values = site.tensor("supertuning_values", (n,))
    places = indices(site, "supertuning_indices", (n,), (size,))
    cols, rows = (index.astype(np.int32) for index in np.divmod(places, site.d_in))
    return NormalForm(S=Sparse(rows, cols, values), terms=_terms(site))


def _terms(site: Site) -> tuple[Term, ...]:
    r, alpha = site.option("r", kind=int), site.option("lora_alpha", kind=float)
    if r is None:
        return ()
    if r < 1:
        site.refuse_field("r", "needed at least 1, or null")
    A = site.tensor("supertuning_lora_A.weight", (r, site.d_in)).T
    B = site.tensor("supertuning_lora_B.weight", (site.d_out, r)).T
    return (Term(A, B, c=2.0 if alpha is None else alpha / r),)
