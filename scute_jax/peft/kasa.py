"""KaSA:  F(x) = x (W - W0) + bias + c ((x A) * d) B,   W0 the r smallest singular triplets of W.

Source: KaSA eq. 7 (arXiv:2412.06071); KasaLinearVariant of peft/tuners/lora/variants.py. Tensors:
those of LoRA and lora_diag [r] = d. PEFT takes W0 out of the base when the adapter is loaded; here
it is a second term of rank r, made from W at load: with U the singular vectors of one side, W0 = U
(U^T W), and only the space that they span matters, not their signs.
"""

from dataclasses import replace

import numpy as np
from jaxtyping import Float

from scute_jax.normal_form import NormalForm, Term
from scute_jax.peft.base import HEAD
from scute_jax.peft.factors import weight_product
from scute_jax.peft.lora import INERT, lora
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site

REGULARIZERS = {"beta", "gamma"}  # of the training loss


@register("LORA", variant="kasa_config", name="KASA", inert=INERT)
def kasa(site: Site) -> NormalForm:
    """x (W - W0) + c ((x A) * d) B, W0 the r smallest singular triplets of W"""
    if not site.option("kasa_config", kind=dict).keys() <= REGULARIZERS:
        site.refuse_field("kasa_config", f"known are {', '.join(sorted(REGULARIZERS))}")
    form = lora(site)
    term, *others = form.terms
    if others:
        site.refuse_field("init_lora_weights", "KaSA takes its own part out of the base")
    if site.module == HEAD and site.base.tied:
        site.refuse("KaSA on a head that is tied to the embedding changes the embedding, too.")
    if term.rank >= min(site.d_in, site.d_out):
        site.refuse_field("r", f"needed less than the shorter side of {site.module}")
    d = site.tensor("lora_diag", (term.rank,))
    W = site.weight("KaSA takes its smallest singular triplets out of it")
    return replace(form, terms=(replace(term, d=d), Term(*smallest_part(W, term.rank), c=-1.0)))


def smallest_part(
    W: Float[np.ndarray, "d_in d_out"], r: int
) -> tuple[Float[np.ndarray, "d_in r"], Float[np.ndarray, "r d_out"]]:
    """Factors of the r smallest singular triplets of W.

    The singular vectors of the shorter side are the eigenvectors of its Gram matrix, in float64:
    cheaper than an SVD, and closer than one in float32.
    """
    if W.shape[0] <= W.shape[1]:
        U = np.linalg.eigh(_gram(W))[1][:, :r]
        return U, weight_product(W.T, U).T
    V = np.linalg.eigh(_gram(W.T))[1][:, :r]
    return weight_product(W, V), V.T


def _gram(W: Float[np.ndarray, "n m"]) -> Float[np.ndarray, "n n"]:
    W = W.astype(np.float64)
    return W @ W.T
