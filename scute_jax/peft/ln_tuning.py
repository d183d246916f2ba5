"""LN tuning:  y = base(x) * s,  s = own weight / base weight, of a norm.

Source: arXiv:2312.11420; peft/tuners/ln_tuning/layer.py. Tensor: ln_tuning_layers.weight [d], the
weight itself. Where the base's is zero, the difference is added as x S (see saved_modules.py).
"""

from scute_jax.normal_form import NormalForm
from scute_jax.peft.registry import register
from scute_jax.peft.saved_modules import norm_form
from scute_jax.peft.site import Site


@register("LN_TUNING", live="s", also=("norms",), replaces_bias=False)
def ln_tuning(site: Site) -> NormalForm:
    """norm(x) * s"""
    if all(site.module != norm.module for norm in site.base.norms):
        site.refuse(
            "LN tuning of a module that is no norm replaces it whole, which is not served beside "
            "other adapters; name norms in target_modules, or merge it into a base of its own."
        )
    own = site.tensor("ln_tuning_layers.weight", (site.d_in,))
    return norm_form(own, site.norm_weight("the file holds its own weight of this norm"))
