"""BEFT:  F(x) = x W + bias + v.

Source: BEFT (arXiv:2509.15974), which trains a bias that is added to a projection, by default
v_proj. Tensor: beft_bias [1, d_out] = v. It is the slot b, which never folds.
"""

from scute_jax.normal_form import NormalForm
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site


@register("BEFT", live="b", inert=("init_weights",), replaces_bias=False)
def beft(site: Site) -> NormalForm:
    """x W + bias + v"""
    return NormalForm(b=site.tensor("beft_bias", (1, site.d_out)).reshape(-1))
