"""OFT of PEFT 0.7 to 0.13:  F(x) = (x W) Q + bias,   Q block-diagonal, of the output.

Source: OFTLayer.get_delta_weight and forward of peft/tuners/oft/layer.py, PEFT 0.13.2. Tensor:
oft_r [r, k, k] = M, or one block for all (block_share), with r blocks of size k = d_out / r. Every
block is the exact Cayley transform of (M - M^T) / 2; where it is constrained (coft), M is first
scaled down to norm eps k^2 / sqrt(stored blocks). The base's bias is not rotated:
b = bias (I - Q). Where r does not divide d_out, PEFT cut the last block off.
"""

import math

import numpy as np

from scute_jax.normal_form import Blocks, NormalForm
from scute_jax.peft.oft_blocks import cayley, eps_of, projected, repeated
from scute_jax.peft.site import Site


def of_the_output(site: Site) -> NormalForm:
    r = site.matching("rank_pattern", site.option("r", 8, kind=int), int)
    if r < 1 or site.d_out % r:
        site.refuse_field(
            "r",
            f"needed a number of blocks that divides the width {site.d_out} of {site.module}; "
            "convert the adapter to a LoRA where it was trained",
        )
    site.option("alpha_pattern")  # LyCORIS's; OFT has no alpha
    k = site.d_out // r
    stored = 1 if site.option("block_share", False, kind=bool) else r
    M = site.tensor("oft_r", (stored, k, k)).astype(np.float64)
    if site.option("coft", False, kind=bool):
        M = projected(M, eps_of(site) * k**2 / math.sqrt(stored))
    Q = cayley((M - np.swapaxes(M, 1, 2)) / 2)
    bias = site.bias("OFT of PEFT 0.13 leaves it where it is")
    b = None if bias is None else bias - (bias.reshape(r, 1, k) @ Q).reshape(-1)
    return NormalForm(Q=(Blocks(repeated(Q, site.d_out)),), b=b)
