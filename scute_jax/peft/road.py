"""RoAD:  F(x) = (x W + bias) Q,   Q of one 2x2 block for each pair of output coordinates.

Source: RoAD (arXiv:2409.00119); _prepare_cols and _apply_road of peft/tuners/road/layer.py. With
h = x W + bias, coordinate i of the first half of a group of group_size is paired with coordinate j
at the same place of the second half:

    y_i = c_i h_i - t_i h_j,  y_j = c_j h_j + t_j h_i,  c = alpha cos(theta), t = alpha sin(theta)

Tensors: road_theta and road_alpha. In road_1 the two coordinates of a pair share theta and alpha
[d_out / 2], in road_2 each has its own [d_out], and in road_4 those of c are not those of t
[2 d_out]: of each group those of c first.
"""

import numpy as np
from jaxtyping import Float

from scute_jax.normal_form import NormalForm
from scute_jax.peft.orders import permuted
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site

VARIANTS = {"road_1": 0.5, "road_2": 1, "road_4": 2}  # numbers for each output coordinate


@register("ROAD", live="Q", inert=("init_weights",), replaces_bias=False)
def road(site: Site) -> NormalForm:
    """(x W + bias) Q, Q of scaled rotations of pairs"""
    variant = site.option("variant", "road_1", choices=VARIANTS)
    group = site.option("group_size", 64, kind=int)
    if group < 2 or group % 2 or site.d_out % group:
        site.refuse_field(
            "group_size", f"needed an even divisor of the width {site.d_out} of {site.module}"
        )
    shape = (int(site.d_out * VARIANTS[variant]),)
    theta, alpha = (site.tensor(name, shape) for name in ("road_theta", "road_alpha"))
    c, t = (_halves(v, variant, group) for v in _columns(theta, alpha, variant, group))
    blocks = np.stack([[c[0], t[1]], [-t[0], c[1]]])  # [from, to, pair]
    order = np.arange(site.d_out).reshape(-1, 2, group // 2).swapaxes(1, 2).reshape(-1)
    return NormalForm(Q=(permuted(blocks.transpose(2, 0, 1), order),))


def _columns(theta: np.ndarray, alpha: np.ndarray, variant: str, group: int):
    """alpha cos(theta) and alpha sin(theta) in the layout of the variant, float64."""
    theta, alpha = theta.astype(np.float64), alpha.astype(np.float64)
    if variant != "road_4":
        return alpha * np.cos(theta), alpha * np.sin(theta)
    theta, alpha = (v.reshape(-1, 2, group) for v in (theta, alpha))
    return alpha[:, 0] * np.cos(theta[:, 0]), alpha[:, 1] * np.sin(theta[:, 1])


def _halves(values: np.ndarray, variant: str, group: int) -> Float[np.ndarray, "2 pairs"]:
    """The numbers of the first and of the second coordinate of every pair."""
    if variant == "road_1":
        return np.broadcast_to(values, (2, values.size))
    return values.reshape(-1, 2, group // 2).swapaxes(0, 1).reshape(2, -1)
