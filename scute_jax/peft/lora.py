"""LoRA:  F(x) = x W + bias + c (x A) B,   A [d_in, r], B [r, d_out], c = alpha / r.

Source: LoRA eq. 3 (arXiv:2106.09685); rsLoRA (arXiv:2312.03732) has c = alpha / sqrt(r).
Tensors: lora_A.weight [r, d_in], lora_B.weight [d_out, r], with lora_bias also lora_B.bias [d_out],
which is scaled by c like the rest. rank_pattern and alpha_pattern give r and alpha per module. The
token embedding (d_in is the vocabulary) has lora_embedding_A and lora_embedding_B instead.

PiSSA (arXiv:2404.02948) and OLoRA (arXiv:2406.01775) start from factors A0, B0 of W itself and take
them out of the base: F(x) = x (W - c A0 B0) + bias + c (x A) B. A file that was not converted holds
A and B only, so A0 B0 is computed from W as the training did and becomes a second term.
"""

import math

import numpy as np
from jaxtyping import Float

from scute_jax.normal_form import NormalForm, Term
from scute_jax.peft.base import EMBEDDING, HEAD
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site

# Values of init_lora_weights after which the file holds a plain LoRA of the unchanged base.
PLAIN = (True, False, "gaussian", "eva", "orthogonal", "mica")
CONVERT = (
    "Convert it where it was trained: save_pretrained(..., "
    "path_initial_model_for_weight_conversion=...) writes a plain LoRA"
)
NOT_PLAIN = {
    "corda": f"CorDA changed the base with statistics that are not in the file. {CONVERT}",
    "lora_ga": f"LoRA-GA changed the base with gradients that are not in the file. {CONVERT}",
    "loftq": "LoftQ belongs to a base quantised in its own way. Serve it over that base, with "
    "init_lora_weights=true",
}
INERT = (
    "lora_dropout",
    "fan_in_fan_out",  # PEFT corrects it to what the module is; factors are stored the same way
    "megatron_core",
    "qalora_group_size",
    "eva_config",  # how A and B were initialised
    "corda_config",
    "lora_ga_config",
    "loftq_config",
)


@register("LORA", inert=INERT, also=["embedding"])
def lora(site: Site) -> NormalForm:
    """x W + c (x A) B"""
    r, c = rank_and_scale(site)
    names = ("lora_A.weight", "lora_B.weight")
    if site.module == EMBEDDING:
        names = ("lora_embedding_A", "lora_embedding_B")
    A = site.tensor(names[0], (r, site.d_in)).T
    B = site.tensor(names[1], (site.d_out, r)).T
    terms = (Term(A, B, c=c), *taken_out(site, r, c))
    if not site.option("lora_bias", False, kind=bool):
        return NormalForm(terms=terms)
    if len(terms) > 1:
        site.refuse_field("lora_bias", "PEFT has it only where the base is left unchanged")
    if site.module == EMBEDDING:
        site.refuse_field("lora_bias", "PEFT has none on an embedding")
    b = site.tensor("lora_B.bias", (site.d_out,)) * np.float32(c)
    return NormalForm(b=b, terms=terms)


def rank_and_scale(site: Site) -> tuple[int, float]:
    """r and c = alpha / r of this module, or alpha / sqrt(r) with use_rslora."""
    r = site.matching("rank_pattern", site.option("r", kind=int, required=True), int)
    alpha = site.option("lora_alpha", kind=float, required=True)
    alpha = site.matching("alpha_pattern", alpha, float)
    if r < 1:
        site.refuse_field("r", f"with rank_pattern it gives {site.module} rank {r}, not 1 or more")
    return r, alpha / (math.sqrt(r) if site.option("use_rslora", False, kind=bool) else r)


def taken_out(site: Site, r: int, c: float) -> tuple[Term, ...]:
    """The term -A0 B0 that an unconverted PiSSA or OLoRA takes out of the base; else none."""
    init = site.option("init_lora_weights", True)
    if not isinstance(init, bool | str):
        site.refuse_field("init_lora_weights", "no initialisation of this name is known")
    name = init.lower() if isinstance(init, str) else init
    if any(name is plain or (isinstance(name, str) and name == plain) for plain in PLAIN):
        return ()
    if name in NOT_PLAIN:
        site.refuse_field("init_lora_weights", NOT_PLAIN[name])
    if site.module == EMBEDDING:  # PEFT starts it as a plain LoRA
        return ()
    if init == "pissa":
        principal = principal_part
    elif name == "olora":
        principal = leading_part
    elif isinstance(init, str) and init.startswith("pissa_niter_"):
        site.refuse_field("init_lora_weights", f"its SVD was randomised. {CONVERT}")
    else:
        site.refuse_field("init_lora_weights", "no initialisation of this name is known")
    if site.module == HEAD and site.base.tied:
        site.refuse(
            f"init_lora_weights={init!r} on a head that is tied to the embedding changes the "
            f"embedding, too. {CONVERT}."
        )
    W = site.weight(f"init_lora_weights is {init!r}, which took a part of it out of the base")
    A0, B0 = principal(W.astype(np.float64), r)
    return (Term(A0, B0, c=-c if name == "olora" else -1.0),)


def principal_part(
    W: Float[np.ndarray, "d_in d_out"], r: int
) -> tuple[Float[np.ndarray, "d_in r"], Float[np.ndarray, "r d_out"]]:
    """A0, B0 with A0 B0 = the r largest singular triplets of W, which is c A0 B0 of PiSSA.

    Source: pissa_init of peft/tuners/lora/layer.py, which divides the singular values by c. The
    product does not depend on the signs of the vectors.
    """
    U, S, Vh = np.linalg.svd(W, full_matrices=False)
    root = np.sqrt(S[:r])
    return U[:, :r] * root, root[:, None] * Vh[:r]


def leading_part(
    W: Float[np.ndarray, "d_in d_out"], r: int
) -> tuple[Float[np.ndarray, "d_in r"], Float[np.ndarray, "r d_out"]]:
    """A0, B0 of OLoRA: with W^T = Q R, A0 = R[:r]^T and B0 = Q[:, :r]^T.

    Source: olora_init of peft/tuners/lora/layer.py. The first r columns of Q depend on the first r
    columns of W^T alone, and R[:r] = Q[:, :r]^T W^T.
    """
    Q, _ = np.linalg.qr(W[:r].T)
    return W @ Q, Q.T
