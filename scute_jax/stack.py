"""Stacking: two adapters at one site as one normal form.

Seen by the second adapter, the first one with its base is the projection that it adapts:

    F(x) = F1(x R2) * s2 + b2 + T2(x),     T2 = the terms of the second

so R = R2 R1, s = s1 * s2, b = b1 * s2 + b2, and each term of the first gets R2 in front of its A
and s2 behind its B. The other order is another function.
"""

import math
from dataclasses import replace

from jaxtyping import Array, Float

from scute_jax.errors import AdapterError
from scute_jax.fold import fold
from scute_jax.identity import content_version
from scute_jax.namespace import namespace
from scute_jax.normal_form import Adapter, NormalForm, Term


def stack(first: NormalForm | Adapter, second: NormalForm | Adapter) -> NormalForm | Adapter:
    """`second` applied to the output of `first`, folded.

    Two normal forms give the normal form of their site; two adapters give the adapter that holds
    every site of either. A shared pair of `first` under an R of `second` becomes a term that the
    adapter owns (of the rank of the pair), since R2 A is no longer shared.
    Raises: AdapterError if the widths or block sizes do not go together, TypeError on a mix.
    """
    if isinstance(first, Adapter) and isinstance(second, Adapter):
        return _stack_adapters(first, second)
    if isinstance(first, NormalForm) and isinstance(second, NormalForm):
        return fold(_stack_forms(first, second))
    raise TypeError(
        "stack takes two NormalForms or two Adapters, "
        f"not {type(first).__name__} and {type(second).__name__}."
    )


def _stack_adapters(first: Adapter, second: Adapter) -> Adapter:
    sites = {}
    for site in [*first.sites, *(name for name in second.sites if name not in first.sites)]:
        both = [a.sites[site] for a in (first, second) if site in a.sites]
        try:
            sites[site] = both[0] if len(both) == 1 else fold(_stack_forms(*both))
        except AdapterError as error:
            raise AdapterError(f"{site}: {error}") from None
    return Adapter(
        sites=sites,
        method=f"{first.method}+{second.method}",
        version=content_version([first.version, second.version]),
        metadata=(("stack", (first.metadata, second.metadata)),),
    )


def _stack_forms(first: NormalForm, second: NormalForm) -> NormalForm:
    _check_widths(first, second)
    R = _chain(second.R, first.R)
    s = _times(first.s, second.s)
    b = _times(first.b, second.s) if first.b is not None else None
    if second.b is not None:
        b = second.b if b is None else b + second.b
    moved = tuple(_behind(term, second.R, second.s) for term in first.terms)
    return NormalForm(R=R, s=s, b=b, terms=moved + second.terms)


def _behind(term: Term, R: Array | None, s: Array | None) -> Term:
    """The term of the first adapter as a term of the stack: R in front, s behind."""
    if R is not None:
        term = replace(term, A=_rotate_rows(R, term.A), pair=None)
    if s is not None:
        term = replace(term, e=_times(term.e, s))
    return term


def _chain(left: Array | None, right: Array | None) -> Float[Array, "d_in/m m m"] | None:
    """The block-diagonal product left @ right; blocks of different sizes meet in their lcm."""
    if left is None or right is None:
        return right if left is None else left
    m = math.lcm(left.shape[-1], right.shape[-1])
    return _widen(left, m) @ _widen(right, m)


def _widen(R: Float[Array, "n k k"], m: int) -> Float[Array, "n*k/m m m"]:
    """The same block-diagonal matrix in blocks of m, a multiple of k."""
    n, k, _ = R.shape
    per, xp = m // k, namespace(R)
    grouped = xp.reshape(R, (n // per, per, k, k))
    wide = xp.einsum("gpij,pq->gpiqj", grouped, xp.eye(per, dtype=grouped.dtype))
    return xp.reshape(wide, (n // per, m, m))


def _rotate_rows(R: Float[Array, "n m m"], A: Float[Array, "d_in r"]) -> Float[Array, "d_in r"]:
    n, m, _ = R.shape
    xp = namespace(R, A)
    blocks = xp.reshape(A, (n, m, -1))
    return xp.reshape(xp.einsum("npq,nqr->npr", R, blocks), A.shape).astype(A.dtype)


def _times(left: Array | None, right: Array | None) -> Array | None:
    if left is None or right is None:
        return right if left is None else left
    return left * right


def _check_widths(first: NormalForm, second: NormalForm) -> None:
    for axis, widths in (
        ("d_in", (_d_in(first), _d_in(second))),
        ("d_out", (_d_out(first), _d_out(second))),
    ):
        if None not in widths and widths[0] != widths[1]:
            raise AdapterError(
                f"cannot stack: the first adapter has {axis}={widths[0]} and the second "
                f"{axis}={widths[1]}; both must be made for the same projection."
            )


def _d_in(nf: NormalForm) -> int | None:
    if nf.R is not None:
        return nf.R.shape[0] * nf.R.shape[1]
    return nf.terms[0].A.shape[0] if nf.terms else None


def _d_out(nf: NormalForm) -> int | None:
    for vector in (nf.s, nf.b):
        if vector is not None:
            return vector.shape[0]
    return nf.terms[0].B.shape[1] if nf.terms else None
