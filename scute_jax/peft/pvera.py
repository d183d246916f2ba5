"""PVeRA:  F(x) = x W + bias + (((x A) * d) B) * e,   the mean of a distribution over its low rank.

Source: PVeRA (arXiv:2512.07703); PveraLayer of peft/tuners/pvera/layer.py. In training, x A * d is
the mean and the logarithm of the variance of what goes into B: pvera_A [2 r, D_in] and
pvera_lambda_d [2 r] hold the mean in their first half. Without sampling, which is the default, the
mean alone is served, and the rest is VeRA; the second half changes nothing.
"""

from scute_jax.normal_form import NormalForm
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site
from scute_jax.peft.vera import shared_term

INERT = ("pvera_dropout", "d_initial", "fan_in_fan_out", "init_weights", "generator_seed")


@register("PVERA", live="de", inert=INERT)
def pvera(site: Site) -> NormalForm:
    """x W + (((x A) * d) B) * e, A and d of the mean"""
    if site.option("sample_at_inference", False, kind=bool):
        site.refuse_field(
            "sample_at_inference",
            "each run of such an adapter gives other numbers, so no request has one answer. Set it "
            "to false to serve the mean",
        )
    return shared_term(site, "pvera", stored=2)
