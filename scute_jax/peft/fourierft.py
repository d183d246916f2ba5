"""FourierFT:  F(x) = x W + bias + x D^T,   D = scaling * Re(ifft2(S)), S sparse with n entries.

Source: FourierFT eq. 2 to 4 (arXiv:2405.03003); get_delta_weight of peft/tuners/fourierft/layer.py.
Tensor: fourierft_spectrum [n] = the entries of S [d_out, d_in]. Entry f stands at row u_f and
column v_f, the quotient and the rest of the f-th number of torch.randperm(d_out d_in) by d_in, so

    x D^T = c sum_f S_f (x cos_v cos_u^T - x sin_v sin_u^T),   c = scaling / (d_in d_out)

with cos_v[p] = cos(2 pi v_f p / d_in), cos_u[q] = cos(2 pi u_f q / d_out) and sin alike. That is a
term of rank 2 n with A = [cos_v, sin_v], B = [cos_u; -sin_u] and d = (S, S). A and B follow from
the widths, n and random_loc_seed alone: all tenants that agree on them share the pair, and d stays
live. n is n_frequency, or what n_frequency_pattern gives the module.
"""

import re

import numpy as np
from jaxtyping import Float, Int

from scute_jax.normal_form import NormalForm, Term
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site
from scute_jax.peft.torch_random import SMALL_PERMUTATION, TorchGenerator
from scute_jax.peft.vera import checked_seed, held

INERT = ("fan_in_fan_out", "init_weights")

Pair = tuple[Float[np.ndarray, "d_in 2*n"], Float[np.ndarray, "2*n d_out"]]


@register("FOURIERFT", live="d", inert=INERT)
def fourierft(site: Site) -> NormalForm:
    """x W + c ((x A) * d) B, A and B of waves"""
    n = _frequencies(site)
    field = "random_loc_seed"
    seed = checked_seed(site, field, site.option(field, 777, kind=int))
    S = site.tensor("fourierft_spectrum", (n,))
    scaling = site.option("scaling", 150.0, kind=float)
    if site.shape("fourierft_spectrum") is None:
        return NormalForm()  # it is missing, and nothing says that n is a number to draw
    d_in, d_out = site.d_in, site.d_out
    key = f"fourierft:{d_in}:{d_out}:{n}:{seed & 0xFFFFFFFF}"
    A, B = site.once(key, lambda: _waves(seed, n, d_in, d_out))
    c = scaling / (d_in * d_out)
    return NormalForm(terms=(Term(A, B, c=c, d=np.concatenate([S, S]), pair=key),))


def _frequencies(site: Site) -> int:
    """n of this module. Keys of n_frequency_pattern are patterns for the end of its path.

    Source: _create_and_replace of peft/tuners/fourierft/model.py: the first that matches counts,
    and a key that is the whole path if none does.
    """
    n = site.option("n_frequency", 1000, kind=int)
    patterns, field = site.option("n_frequency_pattern", {}, kind=dict), "n_frequency_pattern"
    for pattern in patterns:
        try:
            found = re.match(rf".*\.{pattern}$", site.module)
        except (re.error, RecursionError, OverflowError) as error:
            site.refuse_field(field, f"{pattern!r} is not a regular expression ({error})")
        if found:
            n = patterns[pattern]
            break
    else:
        n = patterns.get(site.module, n)
    size = site.d_in * site.d_out
    if isinstance(n, bool) or not isinstance(n, int) or not 0 < n <= size:
        site.refuse_field(
            field if n in patterns.values() else "n_frequency",
            f"it gives {site.module} {n!r} frequencies, needed a number from 1 to {size}",
        )
    if size >= SMALL_PERMUTATION:
        site.refuse(
            f"torch draws the places of the frequencies by another rule from {SMALL_PERMUTATION} "
            f"entries on, and this module has {size}; convert the adapter to a LoRA where it was "
            "trained."
        )
    return n


def _waves(seed: int, n: int, d_in: int, d_out: int) -> Pair:
    """A = [cos_v, sin_v] and B = [cos_u; -sin_u], float64 rounded once."""
    u, v = np.divmod(TorchGenerator(seed).permutation(d_out * d_in, n), d_in)
    cos_v, sin_v = _cos_sin(v, d_in)
    cos_u, sin_u = _cos_sin(u, d_out)
    A = np.concatenate([cos_v, sin_v]).astype(np.float32)
    B = np.concatenate([cos_u, -sin_u]).astype(np.float32)
    return held(A).T, held(B)


def _cos_sin(
    frequency: Int[np.ndarray, "n"], width: int
) -> tuple[Float[np.ndarray, "n width"], Float[np.ndarray, "n width"]]:
    """cos and sin of 2 pi frequency p / width for p = 0, 1, ..., whole turns taken out first."""
    turns = np.outer(frequency, np.arange(width)) % width
    angle = 2 * np.pi * turns / width
    return np.cos(angle), np.sin(angle)
