"""TinyLoRA:  F(x) = x W + bias + ((x A) R) B,   R = sum_i v_i P_i, [r, r].

Source: TinyLoRA (arXiv:2602.04118); peft/tuners/tinylora/layer.py. Tensors: at each module
tinylora_A [r, d_in] and tinylora_B [d_out, r], from the SVD of W, and tinylora_P [u, r, r]; for
the whole adapter tinylora_v.<group> [u], the only ones that are trained. Neighbouring modules form
the groups, as many as weight_tying leaves. r is the configured rank or the shorter side of W. R
folds into B.

With save_projection=false P is not in the file, but drawn from projection_seed plus the module's
place among the adapted ones: normal numbers of variance 1 / r, which torch rounds in a way of each
CPU's own.
"""

import math

import numpy as np
from jaxtyping import Float

from scute_jax.normal_form import NormalForm, Term
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site
from scute_jax.peft.torch_normal import torch_normal

AGREE = 1e-5  # of the largest number: what P may differ from the drawn one by rounding
INERT = (
    "tinylora_dropout",
    "fan_in_fan_out",
    "init_weights",
    "init_v_bound",
    "projection_seed",  # with save_projection
)


@register("TINYLORA", inert=INERT)
def tinylora(site: Site) -> NormalForm:
    """x W + ((x A) R) B, R = sum_i v_i P_i"""
    r, u = (site.option(name, kind=int, required=True) for name in ("r", "u"))
    if r < 1 or u < 1:
        site.refuse_field("u", f"needed at least 1, and r ({r}), too")
    r = min(r, site.d_in, site.d_out)
    place = next(i for i, p in enumerate(site.targets) if p.module == site.module)
    A = site.tensor("tinylora_A", (r, site.d_in)).T
    B = site.tensor("tinylora_B", (site.d_out, r)).T.astype(np.float64)
    v = site.shared(f"tinylora_v.{_group(site, place)}", (u,)).astype(np.float64)
    R = np.einsum("i,ijk->kj", v, _projection(site, place, (u, r, r)))
    return NormalForm(terms=(Term(A, R @ B),))


def _group(site: Site, place: int) -> int:
    """Source: _create_and_replace of peft/tuners/tinylora/model.py."""
    tying = site.option("weight_tying", 0.0, kind=float)
    if not 0 <= tying <= 1:
        site.refuse_field("weight_tying", "needed a share, 0 to 1")
    modules = len(site.targets)
    groups = max(1, round(modules * (1.0 - tying)))
    return min(place // max(1, modules // groups), groups - 1)


def _projection(site: Site, place: int, shape: tuple[int, int, int]) -> Float[np.ndarray, "u r r"]:
    if site.option("save_projection", True, kind=bool):
        return site.tensor("tinylora_P", shape)
    P = site.tensor("tinylora_P", shape, optional=True)
    seed = site.option("projection_seed", kind=int, required=True) + place
    if not -(2**63) <= seed < 2**64:
        site.refuse_field("projection_seed", "torch takes no seed of more than 64 bits")
    drawn = torch_normal(seed, shape, 1.0 / math.sqrt(shape[1]))
    if P is not None and np.abs(P - drawn).max() > AGREE * np.abs(drawn).max():
        site.refuse_field(
            "save_projection",
            f"so PEFT draws tinylora_P of {site.module} from projection_seed, but the file holds "
            "another one; set save_projection to true, or take it out of the file",
        )
    return drawn
