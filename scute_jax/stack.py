"""Stacking: two adapters at one site as one normal form.

Seen by the second adapter, the first one with its base is the projection that it adapts:

    F(x) = F1(x R2) * s2 + b2 + T2(x),     T2 = the terms of the second

so R = R2 R1, s = s1 * s2, b = b1 * s2 + b2, and each term of the first gets R2 in front of its A
and s2 behind its B (and likewise P and Q of the extensions). A Kronecker product of the first is
expanded to a term there, since it is none any longer. The other order is another function.
"""

import math
from dataclasses import replace

import numpy as np
from jaxtyping import Array, Float

from scute_jax.blocks import blocks_times, times_blocks
from scute_jax.errors import AdapterError
from scute_jax.fold import fold
from scute_jax.identity import content_version
from scute_jax.kronecker import expanded
from scute_jax.namespace import namespace
from scute_jax.normal_form import Adapter, Blocks, NormalForm, Sparse, Term, TokenRows


def stack(first: NormalForm | Adapter, second: NormalForm | Adapter) -> NormalForm | Adapter:
    """`second` applied to the output of `first`, folded.

    Two normal forms give the normal form of their site; two adapters give the adapter that holds
    every site of either. A shared pair of `first` under a rotation of `second` becomes a term that
    the adapter owns (of the rank of the pair), since R2 A is no longer shared.
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
    if first.invocation or second.invocation:
        raise AdapterError(
            "cannot stack: an activated LoRA acts on the tokens after its invocation only, and the "
            "other adapter on others; name it alone."
        )
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
    if first.rows is not None and (second.terms or set(second.live) - {"rows"}):
        raise AdapterError(
            "cannot stack: the second adapter would act on rows of the vocabulary that the first "
            "replaces; put the one that replaces rows last."
        )
    before = (*second.P, *(() if second.R is None else (Blocks(second.R),)))
    if before or second.Q or second.s is not None:
        first = expanded(first)
    moved = tuple(_behind(term, before, second.Q, second.s) for term in first.terms)
    P, R = _inputs(first, second)
    Q, s = first.Q + second.Q, _times(first.s, second.s)
    if second.Q and first.s is not None:  # Q stands before s in the form: s1 moves into Q2
        Q = (*first.Q, _scaled(first.s, second.Q[0]), *second.Q[1:])
        s = second.s
    b = first.b
    if b is not None:
        for blocks in second.Q:
            b = times_blocks(b[None, :], blocks)[0]
        b = _times(b, second.s)
    return NormalForm(
        R=R,
        s=s,
        b=second.b if b is None else b if second.b is None else b + second.b,
        terms=moved + second.terms,
        P=P,
        Q=Q,
        S=_sparse(first.S, second, bool(before)),
        K=first.K + second.K,
        rows=_rows(first.rows, second.rows),
    )


def _inputs(first: NormalForm, second: NormalForm) -> tuple[tuple[Blocks, ...], Array | None]:
    """P and R of x P2 R2 P1 R1."""
    if not first.P:
        return second.P, _chain(second.R, first.R)
    between = () if second.R is None else (Blocks(second.R),)
    return second.P + between + first.P, first.R


def _behind(
    term: Term, before: tuple[Blocks, ...], after: tuple[Blocks, ...], s: Array | None
) -> Term:
    """The term of the first adapter in the stack: blocks in front of it, blocks and s behind."""
    if before or after:  # A or B change: the adapter has to own them
        term = fold(NormalForm(terms=(replace(term, pair=None),))).terms[0]
    for blocks in reversed(before):
        term = replace(term, A=blocks_times(blocks, term.A))
    for blocks in after:
        term = replace(term, B=times_blocks(term.B, blocks))
    return term if s is None else replace(term, e=_times(term.e, s))


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


def _scaled(s: Float[Array, "d"], blocks: Blocks) -> Blocks:
    """diag(s) in front of the blocks."""
    ordered = s if blocks.order is None else s[blocks.order]
    n, m, _ = blocks.values.shape
    return replace(blocks, values=ordered.reshape(n, m, 1) * blocks.values)


def _sparse(first: Sparse | None, second: NormalForm, turned: bool) -> Sparse | None:
    if first is None:
        return second.S
    if turned or second.Q:
        raise AdapterError(
            "cannot stack: a sparse delta under an adapter that rotates is no longer sparse; put "
            "the rotation first, or convert one of the two to a LoRA."
        )
    scaled = (
        first if second.s is None else replace(first, values=first.values * second.s[first.cols])
    )
    if second.S is None:
        return scaled
    xp = namespace(scaled.values, second.S.values)
    names = ("rows", "cols", "values")
    return Sparse(*(xp.concatenate([getattr(p, n) for p in (scaled, second.S)]) for n in names))


def _rows(first: TokenRows | None, second: TokenRows | None) -> TokenRows | None:
    """Rows of both; where both replace a token, the second has the last word."""
    if first is None or second is None:
        return second if first is None else first
    kept = ~np.isin(np.asarray(first.ids), np.asarray(second.ids))
    xp = namespace(first.rows, second.rows)
    return TokenRows(
        ids=np.concatenate([np.asarray(first.ids)[kept], np.asarray(second.ids)]),
        rows=xp.concatenate([first.rows[kept], second.rows]),
    )


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
    if nf.K:
        return nf.K[0].shape[0]
    return nf.terms[0].A.shape[0] if nf.terms else None


def _d_out(nf: NormalForm) -> int | None:
    for vector in (nf.s, nf.b):
        if vector is not None:
            return vector.shape[0]
    if nf.K:
        return nf.K[0].shape[1]
    return nf.terms[0].B.shape[1] if nf.terms else None
