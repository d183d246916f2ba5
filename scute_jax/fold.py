"""The fold rule: multiply a slot into a tensor that the adapter owns, once, instead of per token.

A slot folds if and only if the adapter owns a tensor next to it in the product: c and d stand next
to A, e next to B. s, b and R stand next to the frozen W only and never fold; d and e on a shared
pair stay live, and its c moves into d.
"""

from dataclasses import replace

from jaxtyping import Array

from scute_jax.namespace import namespace
from scute_jax.normal_form import NormalForm, Term


def fold(nf: NormalForm) -> NormalForm:
    """The same function of x with fewer live slots: c and d inside A, e inside B, c of a pair in d.

    Dtypes: products are taken in float32 and rounded once to the dtype of A or B.
    Every owned term of the result has c == 1.0 and d is None and e is None.
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
    if term.d is not None:
        A = _product(A, term.d[None, :], term.c)
    elif scaled:
        A = _product(A, term.c)
    if term.e is not None:
        B = _product(B, term.e[None, :])
    return replace(term, A=A, B=B, c=1.0, d=None, e=None)


def _product(owned: Array, *slots: Array | float) -> Array:
    xp = namespace(owned, *slots)
    product = xp.asarray(owned, xp.float32)
    for slot in slots:
        product = product * xp.asarray(slot, xp.float32)
    return product.astype(owned.dtype)
