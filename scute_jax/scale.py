"""The strength of an adapter: base(x) + f (F(x) - base(x)), as a normal form of its own.

f = 1 is the adapter, f = 0 the base, f < 0 turns against it. For terms, S, K and b the effect is
linear in the numbers, so f multiplies them. One matrix or vector M that acts on the base, which is
affine in x (R or P on its input, Q or s on its output), becomes I + f (M - I). A product of two of
them (BOFT: R and s) has no such form, and neither have rows that replace tokens of the base.
"""

import math
from dataclasses import replace
from numbers import Real

import numpy as np

from scute_jax.errors import AdapterError
from scute_jax.fold import fold
from scute_jax.identity import content_version
from scute_jax.normal_form import Adapter, Blocks, NormalForm, Sparse


def scaled(adapter: Adapter, factor: float) -> Adapter:
    """The adapter whose effect at every site, base(x) -> F(x), is `factor` times as large.

    Stacks scale by adapter: stack(scaled(a, 0.5), scaled(b, 2.0)).
    Raises: AdapterError naming the site and the slots where the normal form cannot say it;
    ValueError if the factor is no finite number.
    """
    factor = _checked(factor)
    if factor == 1:
        return adapter
    sites = {}
    for site, form in adapter.sites.items():
        try:
            sites[site] = scaled_form(form, factor)
        except AdapterError as error:
            raise AdapterError(f"{site}: {error}") from None
    return Adapter(
        sites=sites,
        method=f"{factor:g}*{adapter.method}",
        version=content_version([adapter.version, f"scaled by {factor!r}"]),
        metadata=(("scaled", (factor, adapter.metadata)),),
        invocation=adapter.invocation,
    )


def scaled_form(form: NormalForm, factor: float) -> NormalForm:
    """base(x) + factor (F(x) - base(x)) for the F of one form, folded."""
    factor = _checked(factor)
    if factor == 0:
        return NormalForm()
    if factor == 1:
        return fold(form)
    _check_scalable(form, factor)
    S = form.S
    scaled_sparse = None if S is None else Sparse(S.rows, S.cols, S.values * factor)
    return fold(
        NormalForm(
            R=None if form.R is None else _towards_identity(form.R, factor),
            s=None if form.s is None else 1 + factor * (form.s - 1),
            b=None if form.b is None else form.b * factor,
            terms=tuple(replace(term, c=term.c * factor) for term in form.terms),
            P=tuple(_blocks(blocks, factor) for blocks in form.P),
            Q=tuple(_blocks(blocks, factor) for blocks in form.Q),
            S=scaled_sparse,
            K=tuple(replace(product, left=product.left * factor) for product in form.K),
        )
    )


def _check_scalable(form: NormalForm, factor: float) -> None:
    """Raises AdapterError unless at most one slot acts on the base's input and output."""
    if form.rows is not None:
        raise AdapterError(
            f"it replaces {form.rows.ids.shape[0]} rows of the vocabulary, which cannot be scaled "
            f"by {factor:g} without the base's own rows; use a scale of 1 or 0."
        )
    acting = ["P"] * len(form.P) + ["R"] * (form.R is not None)
    acting += ["Q"] * len(form.Q) + ["s"] * (form.s is not None)
    if len(acting) > 1:
        raise AdapterError(
            f"its effect on the base is a product ({' '.join(acting)}), and a share of "
            f"{factor:g} of it is no product of this kind; use a scale of 1 or 0, or convert the "
            "adapter to a LoRA, which takes any scale."
        )


def _towards_identity(values, factor: float):
    """I + factor (M - I) for each block M."""
    eye = np.eye(values.shape[-1], dtype=values.dtype)[None]
    return eye + factor * (values - eye)


def _blocks(blocks: Blocks, factor: float) -> Blocks:
    return replace(blocks, values=_towards_identity(blocks.values, factor))


def _checked(factor: float) -> float:
    if isinstance(factor, bool) or not isinstance(factor, Real) or not math.isfinite(factor):
        raise ValueError(f"the scale of an adapter is {factor!r}, needed a finite number.")
    return float(factor)
