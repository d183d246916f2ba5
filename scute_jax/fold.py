"""The fold rule: multiply a slot into a tensor that the adapter owns, once, instead of per token.

A slot folds if and only if the adapter owns a tensor next to it in the product: c, d and u stand
next to A, e next to B. s, b, R and the blocks stand next to the frozen W only and never fold; d, e
and u on a shared pair stay live, and its c moves into d. S and K have their scalars inside already.
"""

from dataclasses import replace

from jaxtyping import Array

from scute_jax.namespace import namespace
from scute_jax.normal_form import NormalForm, Term


def fold(nf: NormalForm) -> NormalForm:
    """The same function of x with fewer live slots: c, d, u inside A, e inside B, c of a pair in d.

    Dtypes: products are taken in float32 and rounded once to the dtype of A or B.
    Every owned term of the result has c == 1.0 and neither d, e nor u.
    """
    return replace(nf, terms=tuple(map(_fold_term, nf.terms)))


def _fold_term(term: Term) -> Term:
    # c is exactly 1.0 in Python: nothing to multiply. An array c may be traced, so it always folds.
    scaled = not (isinstance(term.c, float | int) and term.c == 1)
    if term.pair is not None:
        if not scaled:
            return term
        xp = namespace(term.d, term.c)
        d = xp.ones((term.rank,), xp.float32) if term.d is None else term.d
        return replace(term, c=1.0, d=_product(d, term.c))
    A, B = term.A, term.B
    columns = [] if term.d is None else [term.d[None, :]]
    rows = [] if term.u is None else [term.u[:, None]]
    factors = [*columns, *([term.c] if scaled else []), *rows]
    if factors:
        A = _product(A, *factors)
    if term.e is not None:
        B = _product(B, term.e[None, :])
    return replace(term, A=A, B=B, c=1.0, d=None, e=None, u=None)


def _product(owned: Array, *slots: Array | float) -> Array:
    xp = namespace(owned, *slots)
    product = xp.asarray(owned, xp.float32)
    for slot in slots:
        product = product * xp.asarray(slot, xp.float32)
    return product.astype(owned.dtype)
