"""VB-LoRA:  F(x) = x W + bias + (x A) B,   A and B put together from a bank of short vectors.

Source: VB-LoRA eq. 3 (arXiv:2405.15179); peft/tuners/vblora/layer.py. Tensors: for the whole
adapter vblora_vector_bank [n, v]; at each module vblora_logits_A [r, d_in / v, n], vblora_logits_B
[d_out / v, r, n]. A piece of v numbers is the sum of the topk vectors with the largest logits,
weighted by the softmax of these logits alone. With save_only_topk_weights the file has, instead of
logits, ..._topk_indices [..., topk] and ..._topk_weights [..., topk - 1]; the last weight is 1
less the others.
"""

import numpy as np
from jaxtyping import Float, Int

from scute_jax.normal_form import NormalForm, Term
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site

ROUNDING = 1e-5  # by which weights that were rounded may exceed 1 in sum
INERT = ("vblora_dropout", "fan_in_fan_out", "init_vector_bank_bound", "init_logits_std")


@register("VBLORA", inert=INERT)
def vblora(site: Site) -> NormalForm:
    """x W + (x A) B, A and B from a bank of vectors"""
    r, n, v, k = (
        site.option(name, kind=int, required=True)
        for name in ("r", "num_vectors", "vector_length", "topk")
    )
    if v < 1 or site.d_in % v or site.d_out % v:
        site.refuse_field(
            "vector_length", f"it has to divide {site.d_in} and {site.d_out}, as at {site.module}"
        )
    if r < 1 or not 1 <= k <= n:
        site.refuse_field("topk", f"needed 1 to num_vectors ({n}), and r ({r}) of at least 1")
    bank = site.shared("vblora_vector_bank", (n, v))
    A = _pieces(site, "vblora_logits_A", (r, site.d_in // v), bank, k)  # r, tile, v
    B = _pieces(site, "vblora_logits_B", (site.d_out // v, r), bank, k)  # tile, r, v
    B = np.swapaxes(B, 0, 1).reshape(r, site.d_out)
    return NormalForm(terms=(Term(A.reshape(r, site.d_in).T, B),))


def _pieces(
    site: Site, name: str, shape: tuple[int, int], bank: Float[np.ndarray, "n v"], k: int
) -> Float[np.ndarray, "rows columns v"]:
    """The weighted sums of k vectors each."""
    if site.option("save_only_topk_weights", False, kind=bool):
        chosen, weights = _saved_choice(site, name, shape, len(bank), k)
    else:
        chosen, weights = _choice(site, name, site.tensor(name, (*shape, len(bank))), bank, k)
    pieces = np.zeros((*shape, bank.shape[1]))
    for j in range(k):
        pieces += weights[..., j, None] * bank[chosen[..., j]]
    return pieces


def _choice(
    site: Site, name: str, logits: Float[np.ndarray, "rows columns n"], bank, k: int
) -> tuple[Int[np.ndarray, "rows columns k"], Float[np.ndarray, "rows columns k"]]:
    """The k largest logits and the softmax over them."""
    order = np.argsort(-logits, axis=-1, kind="stable")
    chosen = order[..., :k]
    top = np.take_along_axis(logits, chosen, axis=-1).astype(np.float64)
    if k < len(bank) and site.shape(name) is not None:
        tied = (logits == top[..., -1:].astype(np.float32)).sum(-1)
        kept = (top == top[..., -1:]).sum(-1)
        if (tied > kept).any():
            site.refuse(
                f"{name} has equal logits at place {k} and after it, so which vectors are the "
                f"topk={k} is not determined; torch chooses one of them."
            )
    weights = np.exp(top - top[..., :1])
    return chosen, weights / weights.sum(-1, keepdims=True)


def _saved_choice(
    site: Site, name: str, shape: tuple[int, int], n: int, k: int
) -> tuple[Int[np.ndarray, "rows columns k"], Float[np.ndarray, "rows columns k"]]:
    chosen = site.tensor(f"{name}_topk_indices", (*shape, k), integer=True)
    weights = site.tensor(f"{name}_topk_weights", (*shape, k - 1)).astype(np.float64)
    if site.shape(f"{name}_topk_indices") is None:
        return chosen, np.ones((*shape, k))  # missing, which is the news
    ordered = np.sort(chosen, axis=-1)
    if chosen.min() < 0 or chosen.max() >= n or (ordered[..., 1:] == ordered[..., :-1]).any():
        site.refuse(
            f"{name}_topk_indices has to name {k} different vectors out of the {n} of the bank."
        )
    last = 1 - weights.sum(-1, keepdims=True)
    if (weights < 0).any() or last.min() < -ROUNDING:
        site.refuse(f"{name}_topk_weights has to hold shares of 1: none below 0, at most 1 in sum.")
    return chosen, np.concatenate([weights, last.clip(0)], axis=-1)
