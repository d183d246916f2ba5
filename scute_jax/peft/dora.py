"""DoRA:  F(x) = (x W) * s + bias + c ((x A) B) * s,   s = m / norm(W + c A B) per output column.

Source: DoRA eq. 5 (arXiv:2402.09353). Tensors: those of LoRA and lora_magnitude_vector m [d_out],
in files of some versions lora_magnitude_vector.weight. s stands next to the frozen W and stays
live; in the term it is e, which folds into B. The base's own bias is not scaled: b = bias (1 - s).
"""

import numpy as np
from jaxtyping import Float

from scute_jax.normal_form import NormalForm, Term
from scute_jax.peft.lora import INERT, lora
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site

COLUMNS = 1024  # output columns of W + c A B that are formed at a time
LARGEST = np.sqrt(np.finfo(np.float32).max)  # of a norm whose square float32 holds
MAGNITUDE = "lora_magnitude_vector"


@register("LORA", variant="use_dora", name="DORA", live="sb", inert=INERT)
def dora(site: Site) -> NormalForm:
    """(x W + c (x A) B) * s, s = m / norm(W + c A B)"""
    if site.option("lora_bias", False, kind=bool):
        site.refuse_field("lora_bias", "DoRA has no such bias in PEFT")
    form = lora(site)
    spelt = f"{MAGNITUDE}.weight"
    m = site.tensor(spelt if site.shape(spelt) else MAGNITUDE, (site.d_out,))
    W = site.weight("DoRA divides by the norm of each column of W + c A B")
    norm = column_norms(W, form.terms)
    if not norm.all() or not norm.max() < LARGEST:
        site.refuse(
            f"the norms of the columns of W + c A B reach from {norm.min():.2g} to "
            f"{norm.max():.2g}; in float32, in which PEFT divides by them, DoRA has no value there."
        )
    s = (m / norm).astype(np.float32)
    bias = site.bias("DoRA leaves it unscaled")
    site.keep("magnitudes", m)
    return NormalForm(
        s=s,
        b=None if bias is None else bias * (1 - s),
        terms=tuple(term.replace(e=s) for term in form.terms),
    )


def column_norms(
    W: Float[np.ndarray, "d_in d_out"], terms: tuple[Term, ...]
) -> Float[np.ndarray, "d_out"]:
    """norm(W + sum_k c_k A_k B_k) of every output column, float64.

    Dtypes: W and A B in the dtype of W, squares summed in float64.
    """
    norms = np.empty(W.shape[1])
    for j in range(0, W.shape[1], COLUMNS):
        columns = W[:, j : j + COLUMNS]
        for term in terms:
            factor = np.asarray(term.B[:, j : j + COLUMNS] * term.c, W.dtype)
            columns = columns + np.asarray(term.A, W.dtype) @ factor
        norms[j : j + COLUMNS] = np.sqrt(np.sum(np.square(columns, dtype=np.float64), axis=0))
    return norms
