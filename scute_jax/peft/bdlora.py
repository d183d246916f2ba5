"""BD-LoRA:  F(x) = x W + bias + c (x A) B,   A or B block-diagonal with nblocks blocks.

Source: BD-LoRA (arXiv:2510.23346); BdLoraLinearVariant of peft/tuners/lora/variants.py. use_bdlora
says of which modules A is block-diagonal (target_modules_bd_a, parts of their paths), of which B
is (target_modules_bd_b). Tensors as in LoRA, the block-diagonal one with its blocks below each
other: lora_A.weight [r, d_in / nblocks] or lora_B.weight [d_out, r / nblocks]. A block-diagonal B
has no bias.
"""

import numpy as np
from jaxtyping import Float

from scute_jax.normal_form import NormalForm, Term
from scute_jax.peft.lora import INERT, rank_and_scale, taken_out
from scute_jax.peft.registry import register
from scute_jax.peft.site import Site

KNOWN = {"target_modules_bd_a", "target_modules_bd_b", "nblocks", "match_strict"}


@register("LORA", variant="use_bdlora", name="BDLORA", inert=INERT)
def bdlora(site: Site) -> NormalForm:
    """x W + c (x A) B, A or B block-diagonal"""
    r, c = rank_and_scale(site)
    side, n = _blocks(site)
    if (r % n or (site.d_in if side == "A" else site.d_out) % n) and side:
        site.refuse_field("use_bdlora", f"nblocks has to divide r ({r}) and the width it cuts")
    A = site.tensor("lora_A.weight", (r, site.d_in // n if side == "A" else site.d_in))
    B = site.tensor("lora_B.weight", (site.d_out, r // n if side == "B" else r))
    A, B = (
        (block_diagonal(A, n) if side == "A" else A),
        (block_diagonal(B, n) if side == "B" else B),
    )
    terms = (Term(A.T, B.T, c=c), *taken_out(site, r, c))
    if not site.option("lora_bias", False, kind=bool) or side == "B":
        return NormalForm(terms=terms)
    if len(terms) > 1:
        site.refuse_field("lora_bias", "PEFT has it only where the base is left unchanged")
    return NormalForm(b=site.tensor("lora_B.bias", (site.d_out,)) * np.float32(c), terms=terms)


def block_diagonal(
    stacked: Float[np.ndarray, "rows columns/n"], n: int
) -> Float[np.ndarray, "rows columns"]:
    """The n blocks below each other, moved onto the diagonal."""
    rows, columns = stacked.shape
    full = np.zeros((n, rows // n, n, columns), stacked.dtype)
    for k, block in enumerate(stacked.reshape(n, rows // n, columns)):
        full[k, :, k] = block
    return full.reshape(rows, n * columns)


def _blocks(site: Site) -> tuple[str | None, int]:
    """Which factor of this module is block-diagonal, and in how many blocks."""
    fields = site.option("use_bdlora", kind=dict)
    n, strict = fields.get("nblocks", 1), fields.get("match_strict", True)
    named = [fields.get(f"target_modules_bd_{side}") or [] for side in "ab"]
    if (
        not fields.keys() <= KNOWN
        or type(n) is not int
        or n < 1
        or not isinstance(strict, bool)
        or not all(isinstance(parts, list) for parts in named)
        or not all(isinstance(part, str) for parts in named for part in parts)
        or set(named[0]) & set(named[1])
    ):
        site.refuse_field(
            "use_bdlora", f"needed {', '.join(sorted(KNOWN))}, with two lists that share no name"
        )
    sides = [
        side
        for side, parts in zip("AB", named, strict=True)
        if any(part in site.module for part in parts)
    ]
    if len(sides) > 1 or (strict and not sides):
        found = "both lists name" if sides else "with match_strict it has to name"
        site.refuse_field("use_bdlora", f"{found} {site.module}")
    return (sides[0], n) if sides else (None, 1)
