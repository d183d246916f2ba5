"""DoRA:  F(x) = (x W) * s + bias + c ((x A) B) * s,   s = m / norm(W + c A B) per output column.

Source: DoRA eq. 5 (arXiv:2402.09353). Tensors: those of LoRA and lora_magnitude_vector m [d_out],
in files of some versions lora_magnitude_vector.weight. s stands next to the frozen W and stays
live; in the term it is e, which folds into B. The base's own bias is not scaled: b = bias (1 - s).
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from scute_jax.normal_form import NormalForm, Term
from scute_jax.peft.lora import INERT, lora
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site
from scute_jax.peft.weights import as_float32

ROWS = 512  # rows of W + c A B that are formed at a time
LARGEST = np.sqrt(np.finfo(np.float32).max)  # of a norm whose square float32 holds
MAGNITUDE = "lora_magnitude_vector"


@register("LORA", variant="use_dora", name="DORA", live="sb", inert=INERT, also=["embedding"])
def dora(site: Site) -> NormalForm:
    """(x W + c (x A) B) * s, s = m / norm(W + c A B)"""
    if site.option("lora_bias", False, kind=bool):
        site.refuse_field("lora_bias", "DoRA has no such bias in PEFT")
    form = lora(site)
    spelt = f"{MAGNITUDE}.weight"
    m = site.tensor(spelt if site.shape(spelt) else MAGNITUDE, (site.d_out,))
    W = site.weight("DoRA divides by the norm of each column of W + c A B", as_held=True)
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
        terms=tuple(replace(term, e=s) for term in form.terms),
    )


def column_norms(
    W: Float[Array, "d_in d_out"], terms: tuple[Term, ...]
) -> Float[np.ndarray, "d_out"]:
    """norm(W + sum_k c_k A_k B_k) of every output column.

    A W that lives on an accelerator stays there; otherwise a slab of rows is formed at a time.
    Dtypes: sums in float32, on the host those of the slabs in float64.
    """
    if isinstance(W, jax.Array) and next(iter(W.devices())).platform != "cpu":
        factors = [(term.A, np.float32(term.c) * term.B) for term in terms]
        return np.asarray(_norms_on_device(W, factors), np.float64)
    factors = [np.asarray(term.B * term.c, np.float32) for term in terms]
    squares = np.zeros(W.shape[1])
    for i in range(0, W.shape[0], ROWS):
        rows = as_float32(W[i : i + ROWS])
        for term, factor in zip(terms, factors, strict=True):
            rows = rows + np.asarray(term.A[i : i + ROWS], np.float32) @ factor
        squares += np.einsum("io,io->o", rows, rows)
    return np.sqrt(squares)


@jax.jit
def _norms_on_device(W: Float[Array, "d_in d_out"], factors: list) -> Float[Array, "d_out"]:
    total = W.astype(jnp.float32)
    for A, B in factors:
        A, B = jnp.asarray(A, jnp.float32), jnp.asarray(B, jnp.float32)
        total += jnp.matmul(A, B, precision=jax.lax.Precision.HIGHEST)
    return jnp.sqrt(jnp.sum(jnp.square(total), axis=0))
