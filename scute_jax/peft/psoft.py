"""PSOFT:  F(x) = x W + bias + ((x U) (R - I)^T) V,   U and V from the SVD of W, cut to rank r.

Source: PSOFT (openreview FSHrinMArK); peft/tuners/psoft/layer.py. With W^T = V^T diag(S) U^T cut
to r, U is [d_in, r] and V = diag(S) V^T; with ab_svd_init="pissa_init" both carry the root of S.
The scale alpha / r cancels. Tensors: psoft_R.weight, psoft_R.vector_a and psoft_R.vector_b [r]: R
= vector_b R0 vector_a, R0 = (I + Q) (I - Q)^-1 with Q = T - T^T from the upper triangle T of
weight [r (r - 1) / 2], or a Neumann series of it; with psoft_orth=false R0 is weight [r, r].

U and V are not in the file, and R mixes the vectors, so their signs matter. They are those of
torch's SVD and of nothing else: the only method that needs torch while it is loaded. They are those
of the device, too: on a GPU torch finds other signs, so that an adapter made with its base on a GPU
is another function on a CPU, here and in PEFT. Nothing in the file tells: every load warns.
"""

import importlib
import warnings
from typing import Any

import numpy as np
from jaxtyping import Float

from scute_jax.normal_form import NormalForm, Term
from scute_jax.peft.oft import neumann, neumann_coefficients, skew
from scute_jax.peft.oft_blocks import cayley, projected
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site

INERT = (
    "psoft_dropout",
    "fan_in_fan_out",
    "init_weights",
    "use_cayley_neumann",  # with psoft_orth=false
    "num_cayley_neumann_terms",  # without use_cayley_neumann
    "cayley_neumann_eps",
    "psoft_svd_lowrank_niter",  # with psoft_svd="full"
    "random_seed",
)


ON_CPU = (
    "PSOFT's singular vectors are computed anew, here and in PEFT, with the signs of torch on this "
    "CPU; torch on a GPU finds others, and then an adapter made with its base on a GPU gives other "
    "text here, with no error. Compare one text with PEFT, or convert the adapter to a LoRA there."
)


@register("PSOFT", inert=INERT, replaces_bias=False)
def psoft(site: Site) -> NormalForm:
    """x W + ((x U) (R - I)^T) V, U and V from the SVD of W"""
    r = site.option("r", kind=int, required=True)
    alpha = site.option("psoft_alpha", kind=float, required=True)
    init = site.option("ab_svd_init", "psoft_init", choices=("psoft_init", "pissa_init"))
    if not 1 <= r <= min(site.d_in, site.d_out):
        site.refuse_field("r", f"needed 1 to the shorter side of {site.module}")
    if alpha == 0 or (alpha < 0 and init == "pissa_init"):
        site.refuse_field("psoft_alpha", "PEFT divides by it (and takes the root); needed above 0")
    warnings.warn(ON_CPU, stacklevel=2)
    R = _transform(site, r)
    U, S, V = _triplets(site, r)
    left = np.sqrt(S) if init == "pissa_init" else np.ones(r)
    return NormalForm(terms=(Term(U * left, (R - np.eye(r)).T @ ((S / left)[:, None] * V)),))


def _transform(site: Site, r: int) -> Float[np.ndarray, "r r"]:
    """R, which PEFT multiplies with from the left."""
    if site.option("psoft_orth", True, kind=bool):
        Q = skew(site.tensor("psoft_R.weight", (r * (r - 1) // 2,)).astype(np.float64)[None], r)
        R = _neumann(site, Q)[0] if _is_series(site) else cayley(-Q)[0]
    else:
        R = site.tensor("psoft_R.weight", (r, r)).astype(np.float64)
    if site.option("psoft_mag_b", True, kind=bool):
        R = site.tensor("psoft_R.vector_b", (r,))[:, None] * R
    if site.option("psoft_mag_a", True, kind=bool):
        R = R * site.tensor("psoft_R.vector_a", (r,))
    return R


def _is_series(site: Site) -> bool:
    return site.option("use_cayley_neumann", False, kind=bool)


def _neumann(site: Site, Q: Float[np.ndarray, "1 r r"]) -> Float[np.ndarray, "1 r r"]:
    terms = site.option("num_cayley_neumann_terms", 5, kind=int)
    radius = site.option("cayley_neumann_eps", kind=float)
    if not 1 <= terms <= 1000:
        site.refuse_field("num_cayley_neumann_terms", "needed a small number, at least 1")
    if radius is not None and not 0 < radius < 1:
        site.refuse_field("cayley_neumann_eps", "needed a radius between 0 and 1")
    return neumann(Q if radius is None else projected(Q, radius), neumann_coefficients(terms))


def _triplets(site: Site, r: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """U [d_in, r], S [r] and V [r, d_out] with W close to U diag(S) V, as PEFT gets them."""
    torch = _torch(site)
    W = np.array(site.weight("PSOFT turns its singular vectors").T, order="C")  # d_out, d_in
    W = torch.from_numpy(W)
    if site.option("psoft_svd", "full", choices=("full", "lowrank")) == "full":
        left, S, right = torch.linalg.svd(W, full_matrices=False)
    else:
        iterations = site.option("psoft_svd_lowrank_niter", 10, kind=int)
        seed = site.option("random_seed", 0, kind=int)
        if not 0 <= iterations <= 1000:
            site.refuse_field("psoft_svd_lowrank_niter", "needed a small number")
        if not -(2**63) <= seed < 2**64:
            site.refuse_field("random_seed", "torch takes no seed of more than 64 bits")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            left, S, right = torch.svd_lowrank(W, q=r, niter=iterations)
        right = right.T
    signs = f"the signs of torch {torch.__version__} on this CPU; a GPU finds others"
    site.note(f"singular vectors of W with {signs}")
    U, S, V = (array.double().numpy() for array in (right[:r].T, S[:r], left[:, :r].T))
    return U, S, V


def _torch(site: Site) -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError:
        site.refuse(
            "PSOFT keeps neither the singular vectors of W nor their signs in the file, and only "
            "torch's own SVD gives the signs that it was trained with; torch is not installed "
            "here. Install it, or convert the adapter to a LoRA with PEFT where it was trained."
        )
