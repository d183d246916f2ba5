"""What an adapter adds to one site, as a matrix and a shift: F(x) = base(x) + x D + b.

    D = (P R) W (Q s) - W + S + sum_j K_j + sum_k c_k u_k A_k d_k B_k e_k
    b' = bias (Q s) - bias + b

D stays a product of two thin factors where the form leaves W alone. Everything is in float64.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from scute_jax.blocks import blocks_times, times_blocks
from scute_jax.errors import AdapterError
from scute_jax.fold import fold
from scute_jax.kronecker import expanded
from scute_jax.normal_form import Blocks, NormalForm, Term, TokenRows


@dataclass(frozen=True)
class Delta:
    """D = left right, or D = left if `right` is None; `shift` is None where it is zero."""

    left: Float[np.ndarray, "d_in k"]
    right: Float[np.ndarray, "k d_out"] | None = None
    shift: Float[np.ndarray, "d_out"] | None = None

    def matrix(self) -> Float[np.ndarray, "d_in d_out"]:
        return self.left if self.right is None else self.left @ self.right


def delta_of(
    form: NormalForm,
    W: Float[np.ndarray, "d_in d_out"],
    bias: Float[np.ndarray, "d_out"] | None = None,
) -> Delta:
    """D and b' of a form over x W + bias; at an embedding, W holds the row of every token.

    Raises: AdapterError where the form has tokens that W has not.
    """
    form, (d_in, d_out) = fold(form), W.shape
    A, B = _side_by_side(expanded(form).terms, d_in, d_out)
    shift = None if form.b is None else _wide(form.b)
    acts = bool(form.P or form.Q or form.R is not None or form.s is not None)
    if not acts and form.S is None and 2 * A.shape[1] <= min(d_in, d_out):
        delta = Delta(A, B, shift)
    else:
        A, B = _side_by_side(form.terms, d_in, d_out)
        D = A @ B
        for product in form.K:
            D += np.kron(_wide(product.left), _wide(product.right))
        if acts:
            W = _wide(W)
            D += _behind(form, _before(form, W)) - W
            if bias is not None:
                moved = _behind(form, _wide(bias)[None])[0] - bias
                shift = moved if shift is None else shift + moved
        if form.S is not None:
            np.add.at(D, (np.asarray(form.S.rows), np.asarray(form.S.cols)), form.S.values)
        delta = Delta(D, None, shift)
    delta = delta if form.rows is None else _with_rows(delta, form.rows, W)
    shift = delta.shift
    return delta if shift is None or shift.any() else replace(delta, shift=None)


def through_norm(
    delta: Delta,
    W: Float[np.ndarray, "d_in d_out"],
    s: Float[np.ndarray, "d_in"] | None,
    b: Float[np.ndarray, "d_in"] | None,
) -> Delta:
    """The delta of a projection that reads y s + b of an adapted norm where the base reads y."""
    whole = _wide(W) + delta.matrix()
    shift = delta.shift
    if b is not None:
        moved = _wide(b) @ whole
        shift = moved if shift is None else shift + moved
    if s is None:
        return replace(delta, shift=shift)
    return Delta(_wide(s)[:, None] * whole - W, None, shift)


def norm_before(site: str) -> str:
    """The norm whose output a projection reads; "" if it reads none."""
    layer, _, module = site.rpartition(".")
    layer = layer.rpartition(".")[0]
    if site == "lm_head":
        return "norm"
    if module in ("q_proj", "k_proj", "v_proj"):
        return f"{layer}.input_layernorm"
    return f"{layer}.post_attention_layernorm" if module in ("gate_proj", "up_proj") else ""


def term_factors(
    term: Term,
) -> tuple[Float[np.ndarray, "d_in r"], Float[np.ndarray, "r d_out"]]:
    """Both factors of a folded term, with the vectors that stay live on a shared pair inside."""
    A, B = _wide(term.A), _wide(term.B)
    A = A if term.u is None else _wide(term.u)[:, None] * A
    A = A if term.d is None else A * _wide(term.d)
    return A, B if term.e is None else B * _wide(term.e)


def _side_by_side(
    terms: tuple[Term, ...], d_in: int, d_out: int
) -> tuple[Float[np.ndarray, "d_in r"], Float[np.ndarray, "r d_out"]]:
    factors = [term_factors(term) for term in terms]
    A = np.concatenate([np.zeros((d_in, 0)), *(a for a, _ in factors)], axis=1)
    return A, np.concatenate([np.zeros((0, d_out)), *(b for _, b in factors)], axis=0)


def _before(form: NormalForm, W: np.ndarray) -> np.ndarray:
    """P R W."""
    blocks = (*form.P, *(() if form.R is None else (Blocks(form.R),)))
    for one in reversed(blocks):
        W = np.asarray(blocks_times(one, W))
    return W


def _behind(form: NormalForm, W: np.ndarray) -> np.ndarray:
    """W Q s."""
    for blocks in form.Q:
        W = np.asarray(times_blocks(W, blocks))
    return W if form.s is None else W * _wide(form.s)


def _with_rows(delta: Delta, rows: TokenRows, W: np.ndarray) -> Delta:
    """The delta whose tokens of `rows` come out as these: rows of an embedding, columns of a head.

    The width of the rows tells which of the two it is.
    """
    ids, new = np.asarray(rows.ids), _wide(rows.rows)
    is_embedding = W.shape[1] == rows.rows.shape[1]
    tokens = W.shape[0] if is_embedding else W.shape[1]
    if (ids >= tokens).any():
        raise AdapterError(
            f"it adds tokens ({ids.max()} and fewer) to a vocabulary of {tokens}, and a LoRA "
            "cannot; resize the base first."
        )
    is_new = np.isin(np.arange(tokens), ids)
    if not is_embedding:
        return _with_columns(delta, ids, is_new, new.T - _wide(W[:, ids]))
    change = new - _wide(W[ids]) - (0 if delta.shift is None else delta.shift)
    left = np.where(is_new[:, None], 0, delta.left)
    if delta.right is None:
        left[ids] = change
        return replace(delta, left=left)
    return replace(
        delta,
        left=np.hstack([left, _wide(np.arange(tokens)[:, None] == ids)]),
        right=np.vstack([delta.right, change]),
    )


def _with_columns(delta: Delta, ids: np.ndarray, is_new: np.ndarray, change: np.ndarray) -> Delta:
    shift = None if delta.shift is None else np.where(is_new, 0, delta.shift)
    if delta.right is None:
        left = delta.left.copy()
        left[:, ids] = change
        return Delta(left, None, shift)
    right = np.where(is_new, 0, delta.right)
    chosen = _wide(ids[:, None] == np.arange(len(is_new)))
    return Delta(np.hstack([delta.left, change]), np.vstack([right, chosen]), shift)


def _wide(array: Any) -> np.ndarray:
    return np.asarray(array, np.float64)
