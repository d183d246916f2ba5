"""MiSS:  F(x) = x W + bias + (x A) B,   A [d_in, r] adds up every r-th input: A[i, i mod r] = 1.

Source: MiSS eq. 5 (arXiv:2409.15371); peft/tuners/miss/layer.py. Tensor: miss_block [r, d_out] =
B, with init_weights="mini" [r, mini_r], repeated d_out / mini_r times side by side. There is no
scale. The mini block moves into A where that is narrower: B is then the repeated identity of
mini_r.

Bone is the name of the same in PEFT before 0.19: peft_type BONE, tensor bone_block. The variant
"bat" multiplies blocks of W, (x W_block) M, by matrices that differ per block: a dense delta.
"""

import numpy as np

from scute_jax.normal_form import NormalForm, Term
from scute_jax.peft.refused import CONVERT, DENSE
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site


@register("MISS", inert=("miss_dropout",))
def miss(site: Site) -> NormalForm:
    """x W + (x A) B, A[i, i mod r] = 1"""
    form = _variant(site, ("mini",))
    mini_r = site.option("mini_r", 1, kind=int)  # of no effect but with "mini"
    if form != "mini":
        return _form(site, "miss_block", site.d_out)
    if mini_r < 1 or site.d_out % mini_r:
        site.refuse_field("mini_r", f"it has to divide the width of {site.module}, {site.d_out}")
    return _form(site, "miss_block", mini_r)


@register("BONE")
def bone(site: Site) -> NormalForm:
    """x W + (x A) B, A[i, i mod r] = 1"""
    _variant(site, ())
    return _form(site, "bone_block", site.d_out)


def _variant(site: Site, names: tuple[str, ...]) -> bool | str:
    init = site.option("init_weights", True)
    if init == "bat":
        site.refuse_field(
            "init_weights",
            f"this variant multiplies blocks of W: {DENSE}. {CONVERT}",
        )
    if not isinstance(init, bool) and init not in names:
        known = ", ".join(["true", "false", *map(repr, names)])
        site.refuse_field("init_weights", f"it names the variant; known are {known}")
    return init


def _form(site: Site, name: str, width: int) -> NormalForm:
    """With a block of the width given, repeated to d_out."""
    r = site.option("r", kind=int, required=True)
    if not 1 <= r <= site.d_in:
        site.refuse_field("r", f"needed 1 to {site.d_in}, the width of the input of {site.module}")
    block = site.tensor(name, (r, width))
    A = np.eye(r, dtype=np.float32)[np.arange(site.d_in) % r]
    repeat = site.d_out // width
    if width < r:
        B = np.tile(np.eye(width, dtype=np.float32), (1, repeat))
        return NormalForm(terms=(Term(A @ block, B),))
    return NormalForm(terms=(Term(A, np.tile(block, (1, repeat))),))
