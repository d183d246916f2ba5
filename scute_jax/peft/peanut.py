"""PEANuT:  F(x) = x W + bias + c x h(W) B,   h a small network over the rows of W, c = scaling.

Source: PEANuT eq. 5 (arXiv:2410.01870); peft/tuners/peanut/layer.py. Tensors: peanut_A.weight [r,
d_out], peanut_B.weight [d_out, r], and with depth n peanut_encoders.0.weight to n - 1 and
peanut_decoders.0.weight to n - 1, [r, r] each. h = f(W A), then f(h E_i) for all encoders, then
f(h D_i) plus what h was before the encoder that faces this decoder. f is act_fn. The network sees
W and not x, so h(W) [d_in, r] is a factor of rank r, made at load.
"""

from scute_jax.normal_form import NormalForm, Term
from scute_jax.peft.activations import ACTIVATIONS
from scute_jax.peft.factors import weight_product
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site


@register("PEANUT", inert=("init_weights",), replaces_bias=False)
def peanut(site: Site) -> NormalForm:
    """x W + c x h(W) B, h a network over the rows of W"""
    r, depth = (site.option(name, kind=int, required=True) for name in ("r", "depth"))
    if r < 1 or depth < 0:
        site.refuse_field("depth", f"needed 0 or more, and r ({r}) of at least 1")
    f = ACTIVATIONS[site.option("act_fn", "relu", kind=str, choices=ACTIVATIONS)]
    A = site.tensor("peanut_A.weight", (r, site.d_out)).T
    B = site.tensor("peanut_B.weight", (site.d_out, r)).T
    h, before = f(weight_product(site.weight("PEANuT is a network over it"), A)), []
    for i in range(depth):
        before.append(h)
        h = f(h @ site.tensor(f"peanut_encoders.{i}.weight", (r, r)).T)
    for i in range(depth):
        h = f(h @ site.tensor(f"peanut_decoders.{i}.weight", (r, r)).T) + before.pop()
    return NormalForm(terms=(Term(h, B, c=site.option("scaling", 1.0, kind=float)),))
