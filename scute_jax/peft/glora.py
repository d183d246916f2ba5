"""GLoRA:  F(x) = x (W * (1 + a) + b) + bias (1 + d) + e + c W,   c over inputs, others outputs.

Source: GLoRA eq. 7 (arXiv:2306.07967); peft/tuners/glora/layer.py. config_A_B says what a and b
are: vectors glora_A.X, glora_B.X [d_out, 1], constants [1], or none; config_D_E the same of d and
e [d_out]; config_C of c: a vector glora_C.X [d_in, 1] or a product glora_C.Xd [d_in, r] glora_C.Xu
[r, 1]. c, d and e are there where the base has a bias. PEFT saves zeros of what is none.

So s = 1 + a stays live, b is a term of rank 1 that adds up the input, and c W, made from W at
load, goes into the shift. With config_A_B="lora" a is a matrix: a dense delta.
"""

import numpy as np
from jaxtyping import Float

from scute_jax.normal_form import NormalForm, Term
from scute_jax.peft.factors import weight_product
from scute_jax.peft.refused import CONVERT, DENSE
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site

INERT = (
    "init_weights",
    "config_C",  # where the base has no bias
    "config_D_E",
    "r",  # without a product
)


@register("GLORA", live="sb", inert=INERT)
def glora(site: Site) -> NormalForm:
    """x (W * (1 + a) + b) + bias (1 + d) + e + c W"""
    a, b = (_vector(site, f"glora_{name}", "config_A_B", (site.d_out, 1)) for name in "AB")
    s = None if a is None else 1 + a
    terms = () if b is None else (Term(np.ones((site.d_in, 1)), b[None]),)
    return NormalForm(s=s, b=_shift(site, s), terms=terms)


def _shift(site: Site, s: Float[np.ndarray, "d_out"] | None) -> Float[np.ndarray, "d_out"] | None:
    """bias (1 + d) + e + c W, less what the base adds: bias s.

    The base's bias may be replaced, too. What is replaced, load_peft adds as a shift to every form;
    here, where the new bias is scaled, that shift is taken off again.
    """
    bias = site.bias("GLoRA scales it")
    if bias is None:
        for name, shape in (("C", (site.d_in, 1)), ("D", (site.d_out,)), ("E", (site.d_out,))):
            _expect_zeros(site, f"glora_{name}", shape)
        return None
    d, e = (_vector(site, f"glora_{name}", "config_D_E", (site.d_out,)) for name in "DE")
    new = bias
    if site.option("bias", "none", kind=str) != "none" and site.shape("base_layer.bias"):
        new = site.tensor("base_layer.bias", (site.d_out,))
    shift = new.astype(np.float64) * (1 if d is None else 1 + d) + (0 if e is None else e)
    coupled = _coupling(site)
    if coupled is not None:
        W = site.weight("GLoRA shifts the output by c W")
        shift += weight_product(W.T, coupled)[:, 0]
    return shift - bias * (1 if s is None else s) - (new - bias)


def _coupling(site: Site) -> Float[np.ndarray, "d_in 1"] | None:
    form = site.option("config_C", "lora", kind=str, choices=("lora", "vector", "none"))
    if form == "lora":
        r = site.option("r", kind=int, required=True)
        if r < 1:
            site.refuse_field("r", "needed at least 1")
        down = site.tensor("glora_C.Xd", (site.d_in, r))
        return np.float64(down) @ site.tensor("glora_C.Xu", (r, 1))
    if form == "vector":
        return site.tensor("glora_C.X", (site.d_in, 1))
    return _expect_zeros(site, "glora_C", (site.d_in, 1))


def _vector(
    site: Site, name: str, field: str, shape: tuple[int, ...]
) -> Float[np.ndarray, "d_out"] | None:
    """The vector of one path, one number for every output; None if there is none."""
    form = site.option(field, kind=str, required=True)
    if form == "lora" and field == "config_A_B":
        site.refuse_field(
            field,
            f"W * A with a matrix A is {DENSE}. {CONVERT}",
        )
    if form == "none":
        return _expect_zeros(site, name, (site.d_out, site.d_in) if len(shape) == 2 else shape)
    if form == "vector":
        return site.tensor(f"{name}.X", shape).reshape(-1).astype(np.float64)
    if form != "constant":
        site.refuse_field(field, "known are 'vector', 'constant', 'none'")
    return np.full(site.d_out, site.tensor(f"{name}.X", (1,)), np.float64)


def _expect_zeros(site: Site, name: str, shape: tuple[int, ...]) -> None:
    """Reads what PEFT saves of a path that is none."""
    zeros = site.tensor(f"{name}.zeros", shape, optional=True)
    if zeros is not None and zeros.any():
        site.refuse(f"{name}.zeros has to hold zeros, as its part of the configuration is none.")
