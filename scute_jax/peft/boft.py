"""BOFT:  F(x) = ((x R) W) * s + bias,   R = R_m ... R_1, each factor orthogonal.

Source: BOFT (arXiv:2311.06243); Linear.forward of peft/tuners/boft/layer.py. Tensors: boft_R
[m, d_in / k, k, k] = M, with k the block size, and boft_s [d_out, 1] = s. Every block is the exact
Cayley transform (I - Q) (I + Q)^-1 of Q = (M - M^T) / 2. With one factor, which is what PEFT makes
wherever its CUDA extension cannot be built, R is block-diagonal as in OFT. The base's own bias is
not scaled: b = bias (1 - s).
"""

import numpy as np

from scute_jax.normal_form import NormalForm
from scute_jax.peft.oft import Blocks, cayley
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site

INERT = ("boft_dropout", "fan_in_fan_out", "init_weights")


@register("BOFT", live="Rsb", inert=INERT)
def boft(site: Site) -> NormalForm:
    """((x R) W) * s, R = cayley(Q)"""
    factors = _factors(site)
    if len(factors) > 1:
        site.refuse_field(
            "boft_n_butterfly_factor",
            f"the file holds {len(factors)} permuted factors of R, and only one is served yet. "
            "Convert the adapter to a LoRA with `scute convert`, or train with one factor",
        )
    s = site.tensor("boft_s", (site.d_out, 1)).reshape(-1)
    bias = site.bias("BOFT leaves it unscaled")
    return NormalForm(R=factors[0], s=s, b=None if bias is None else bias * (1 - s))


def _factors(site: Site) -> list[Blocks]:
    """The blocks of R_1, R_2, ..., each still without its permutation (R_1 has none).

    The file says how many there are: where the CUDA extension is missing, PEFT trains one factor
    whatever boft_n_butterfly_factor says.
    """
    wanted = site.option("boft_n_butterfly_factor", 1, kind=int)
    if wanted < 1:
        site.refuse_field("boft_n_butterfly_factor", "needed at least 1")
    k = block_size(site)
    shapes = dict.fromkeys((n, site.d_in // k, k, k) for n in (1, wanted))
    M = site.tensor("boft_R", *shapes).astype(np.float64)
    Q = (M - np.swapaxes(M, 2, 3)) / 2
    return [cayley(blocks).astype(np.float32) for blocks in Q]


def block_size(site: Site) -> int:
    """k from boft_block_size, or from boft_block_num = d_in / k; one of the two is 0."""
    size = site.option("boft_block_size", 4, kind=int)
    number = site.option("boft_block_num", 0, kind=int)
    if min(size, number) < 0 or (size == 0) == (number == 0):
        site.refuse_field(
            "boft_block_size", f"exactly one of it and boft_block_num ({number}) has to be positive"
        )
    if site.d_in % (size or number):
        field = "boft_block_size" if size else "boft_block_num"
        site.refuse_field(field, f"it has to divide the width {site.d_in} of {site.module}")
    return size or site.d_in // number
