"""What an adapter adds to one site, as a matrix and a shift: F(x) = base(x) + x D + b.

    D = (P R) W (Q s) - W + S + sum_k c_k u_k A_k d_k B_k e_k,    b' = bias (Q s) - bias + b

D stays a product of two thin factors where the form leaves W alone. Everything is in float64.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from scute_jax.blocks import blocks_times, times_blocks
from scute_jax.errors import AdapterError
from scute_jax.fold import fold
from scute_jax.normal_form import Blocks, NormalForm, Sparse, Term, TokenRows


@dataclass(frozen=True)
class Delta:
    """D = left right, or D = left if `right` is None; `shift` is None where it is zero."""

    left: Float[np.ndarray, "d_in k"]
    right: Float[np.ndarray, "k d_out"] | None = None
    shift: Float[np.ndarray, "d_out"] | None = None

    @property
    def d_out(self) -> int:
        return (self.left if self.right is None else self.right).shape[1]

    def matrix(self) -> Float[np.ndarray, "d_in d_out"]:
        return self.left if self.right is None else self.left @ self.right


def delta_of(
    form: NormalForm,
    W: Float[np.ndarray, "d_in d_out"],
    bias: Float[np.ndarray, "d_out"] | None = None,
) -> Delta:
    """D and b' of a form over x W + bias; at an embedding, W holds the row of every token."""
    form = fold(form)
    if form.rows is not None and len(form.live) + len(form.terms) > 1:
        raise AdapterError("it replaces rows of the vocabulary and changes them besides.")
    d_in, d_out = W.shape
    factors = [term_factors(term) for term in form.terms]
    if form.rows is not None:
        factors.append(_replaced(form.rows, W))
    A = np.concatenate([np.zeros((d_in, 0)), *(a for a, _ in factors)], axis=1)
    B = np.concatenate([np.zeros((0, d_out)), *(b for _, b in factors)], axis=0)
    shift = None if form.b is None else np.float64(form.b)
    acts = bool(form.P or form.Q or form.R is not None or form.s is not None)
    if not acts and form.S is None and 2 * A.shape[1] <= min(d_in, d_out):
        return Delta(A, B, _none_if_zero(shift))
    D = A @ B
    if acts:
        W = np.float64(W)
        D += _behind(form, _before(form, W)) - W
        if bias is not None:
            moved = _behind(form, np.float64(bias)[None])[0] - bias
            shift = moved if shift is None else shift + moved
    if form.S is not None:
        _add_sparse(D, form.S)
    return Delta(D, None, _none_if_zero(shift))


def term_factors(
    term: Term,
) -> tuple[Float[np.ndarray, "d_in r"], Float[np.ndarray, "r d_out"]]:
    """Both factors of a folded term, with the vectors that stay live on a shared pair inside."""
    A, B = np.float64(term.A), np.float64(term.B)
    A = A if term.u is None else np.float64(term.u)[:, None] * A
    A = A if term.d is None else A * np.float64(term.d)
    return A, B if term.e is None else B * np.float64(term.e)


def _before(form: NormalForm, W: np.ndarray) -> np.ndarray:
    """P R W."""
    blocks = (*form.P, *(() if form.R is None else (Blocks(form.R),)))
    for one in reversed(blocks):
        W = blocks_times(one, W)
    return W


def _behind(form: NormalForm, W: np.ndarray) -> np.ndarray:
    """W Q s."""
    for blocks in form.Q:
        W = times_blocks(W, blocks)
    return W if form.s is None else W * np.float64(form.s)


def _replaced(rows: TokenRows, W: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What replaced tokens differ by: rows of an embedding, or columns of a head.

    The side whose width is that of the rows tells which of the two it is.
    """
    ids, new = np.asarray(rows.ids), np.float64(rows.rows)
    if W.shape[1] == new.shape[1]:
        chosen = np.zeros((W.shape[0], len(ids)))
        chosen[ids, np.arange(len(ids))] = 1
        return chosen, new - np.float64(W[ids])
    chosen = np.zeros((len(ids), W.shape[1]))
    chosen[np.arange(len(ids)), ids] = 1
    return (new - np.float64(W[:, ids].T)).T, chosen


def _add_sparse(D: Float[np.ndarray, "d_in d_out"], S: Sparse) -> None:
    np.add.at(D, (np.asarray(S.rows), np.asarray(S.cols)), np.float64(S.values))


def _none_if_zero(shift: np.ndarray | None) -> np.ndarray | None:
    return shift if shift is not None and shift.any() else None
