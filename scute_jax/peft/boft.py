"""BOFT:  F(x) = ((x R_m .. R_1) W) * s + bias,   each factor R_i orthogonal.

Source: BOFT (arXiv:2311.06243); Linear.forward of peft/tuners/boft/layer.py. Tensors: boft_R
[m, d_in / k, k, k] = M, with k the block size, and boft_s [d_out, 1] = s. Every block is the exact
Cayley transform (I - Q) (I + Q)^-1 of Q = (M - M^T) / 2. The factor R_1 is block-diagonal as in
OFT; that of level i is, too, in the order of the butterfly: each stretch of 2^(i - 1) k coordinates
is cut into halves of a block, k / 2 coordinates each, and those at even places come first. With
one factor, which is what PEFT makes wherever its CUDA extension cannot be built, there is R_1
alone. The base's own bias is not scaled: b = bias (1 - s).
"""

import numpy as np
from jaxtyping import Int

from scute_jax.normal_form import NormalForm
from scute_jax.peft.oft_blocks import Blocks, cayley
from scute_jax.peft.orders import permuted
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site

INERT = ("boft_dropout", "fan_in_fan_out", "init_weights")


@register("BOFT", live="PRsb", inert=INERT)
def boft(site: Site) -> NormalForm:
    """((x R_m .. R_1) W) * s, R_i = cayley(Q_i) in the order of a butterfly"""
    factors = _factors(site)
    k = factors[0].shape[-1]
    levels = [
        permuted(factor, butterfly(site.d_in, k, level)) for level, factor in enumerate(factors)
    ]
    s = site.tensor("boft_s", (site.d_out, 1)).reshape(-1)
    bias = site.bias("BOFT leaves it unscaled")
    return NormalForm(
        P=tuple(reversed(levels[1:])),
        R=factors[0],
        s=s,
        b=None if bias is None else bias * (1 - s),
    )


def butterfly(d_in: int, k: int, level: int) -> Int[np.ndarray, "d_in"]:
    """The coordinates in the order in which the blocks of a level take them.

    Source: block_butterfly_perm, which gives the place of each coordinate: the inverse of this.
    """
    if level == 0:
        return np.arange(d_in)
    halves = np.arange(2 ** (level + 1))
    taken = np.concatenate([halves[::2], halves[1::2]])
    stretch = taken[:, None] * (k // 2) + np.arange(k // 2)
    starts = np.arange(0, d_in, stretch.size)
    return np.argsort((starts[:, None] + stretch.reshape(-1)).reshape(-1))


def _factors(site: Site) -> list[Blocks]:
    """The blocks of R_1, R_2, ...

    The file says how many there are: where the CUDA extension is missing, PEFT trains one factor
    whatever boft_n_butterfly_factor says.
    """
    wanted = site.option("boft_n_butterfly_factor", 1, kind=int)
    if wanted < 1:
        site.refuse_field("boft_n_butterfly_factor", "needed at least 1")
    k = block_size(site)
    shapes = dict.fromkeys((n, site.d_in // k, k, k) for n in (1, wanted))
    M = site.tensor("boft_R", *shapes).astype(np.float64)
    if len(M) > 1 and (k % 2 or wanted > 64 or (site.d_in // k) % 2 ** (wanted - 1)):
        site.refuse_field(
            "boft_n_butterfly_factor",
            f"it needs blocks of even size and a multiple of 2^{wanted - 1} of them, but "
            f"{site.module} has {site.d_in // k} of size {k}",
        )
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
