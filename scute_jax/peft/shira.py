"""SHiRA:  F(x) = x (W + S) + bias,   S sparse.

Source: SHiRA (arXiv:2406.13175); get_delta_weight of peft/tuners/shira/layer.py. Tensors:
shira_weight [n] with n = r (d_in + d_out), the entries of S, and shira_indices [2, n], the output
and the input coordinate of each. How they were chosen (mask_type, random_seed) no longer matters.
Files written on Windows hold the indices as float32.
"""

from scute_jax.normal_form import NormalForm, Sparse
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site
from scute_jax.peft.sparse import indices

INERT = ("mask_type", "random_seed", "fan_in_fan_out", "init_weights")


@register("SHIRA", live="S", inert=INERT, replaces_bias=False)
def shira(site: Site) -> NormalForm:
    """x (W + S), S sparse"""
    r = site.option("r", 32, kind=int)
    n = r * (site.d_in + site.d_out)
    if not 0 < n <= site.d_in * site.d_out:
        site.refuse_field(
            "r",
            f"it gives {site.module} {n} entries, needed a number from 1 to "
            f"{site.d_in * site.d_out}",
        )
    values = site.tensor("shira_weight", (n,))
    cols, rows = indices(site, "shira_indices", (2, n), (site.d_out, site.d_in))
    return NormalForm(S=Sparse(rows, cols, values))
