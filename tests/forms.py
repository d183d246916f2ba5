"""Random normal forms and the plain formula in float64: the oracle of the core's tests.

    forms = [random_form(rng, d_in, d_out, ...), ...]
    expected = evaluate(form, W, x, bias)

Vectors are amplified (1 + 0.3 z and the like): near the identity a dropped slot would not show.
"""

import hypothesis.strategies as st
import numpy as np

from scute_jax import NormalForm, Term
from scute_jax.normal_form import Blocks, Kronecker, Sparse


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def random_term(rng, d_in: int, d_out: int, r: int, slots: str = "", pair=None) -> Term:
    """A term with the slots named: c, d, e, u. A `pair` is (key, A, B)."""
    key, A, B = pair or (None, 0.3 * normal(rng, d_in, r), 0.3 * normal(rng, r, d_out))
    return Term(
        A=A,
        B=B,
        c=1.7 if "c" in slots else 1.0,
        d=1 + 0.3 * normal(rng, A.shape[1]) if "d" in slots else None,
        e=1 + 0.3 * normal(rng, d_out) if "e" in slots else None,
        u=1 + 0.3 * normal(rng, d_in) if "u" in slots else None,
        pair=key,
    )


def random_form(
    rng, d_in: int, d_out: int, slots: str = "", block: int | None = None, terms=()
) -> NormalForm:
    """A form with the slots named: s, b, and R if a block size is given."""
    R = None
    if block is not None:
        R = np.eye(block, dtype=np.float32) + 0.3 * normal(rng, d_in // block, block, block)
    return NormalForm(
        R=R,
        s=1 + 0.3 * normal(rng, d_out) if "s" in slots else None,
        b=0.5 * normal(rng, d_out) if "b" in slots else None,
        terms=tuple(terms),
    )


def random_blocks(rng, d: int, m: int, order: int | None = None) -> Blocks:
    """Blocks near the identity, permuted by the `order`-th of a few fixed permutations."""
    values = np.eye(m, dtype=np.float32) + 0.3 * normal(rng, d // m, m, m)
    if order is None:
        return Blocks(values)
    return Blocks(values, np.random.default_rng(order).permutation(d), f"order-{order}-of-{d}")


def random_sparse(rng, d_in: int, d_out: int, nnz: int) -> Sparse:
    rows, cols = rng.integers(0, d_in, nnz), rng.integers(0, d_out, nnz)
    return Sparse(rows.astype(np.int32), cols.astype(np.int32), normal(rng, nnz))


def random_kronecker(rng, d_in: int, d_out: int, a_in: int, a_out: int) -> Kronecker:
    """A product whose left factor is [a_in, a_out]."""
    right = normal(rng, d_in // a_in, d_out // a_out)
    return Kronecker(0.3 * normal(rng, a_in, a_out), right)


@st.composite
def extended_forms(draw, d_in: int = 24, d_out: int = 10, pairs=(), sparse=True) -> NormalForm:
    """Any combination of slots, those of the extensions among them."""
    form = draw(forms(d_in, d_out, pairs, "cdeu"))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    orders = st.sampled_from([None, 1, 2])
    P = [random_blocks(rng, d_in, draw(st.sampled_from([2, 3])), draw(orders)) for _ in range(2)]
    Q = [random_blocks(rng, d_out, 2, draw(orders)) for _ in range(2)]
    splits = draw(st.lists(st.sampled_from([(4, 2), (6, 5), (1, 10)]), max_size=2))
    return form.replace(
        P=tuple(P[: draw(st.integers(0, 2))]),
        Q=tuple(Q[: draw(st.integers(0, 2))]),
        S=random_sparse(rng, d_in, d_out, 13) if sparse and draw(st.booleans()) else None,
        K=tuple(random_kronecker(rng, d_in, d_out, *split) for split in splits),
    )


@st.composite
def forms(draw, d_in: int = 24, d_out: int = 10, pairs=(), slots_of_terms="cde") -> NormalForm:
    """Any combination of slots; `pairs` are shared factors that terms may use."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    terms = []
    for _ in range(draw(st.integers(0, 3))):
        slots = "".join(draw(st.sets(st.sampled_from(slots_of_terms))))
        pair = draw(st.sampled_from([None, *pairs]))
        terms.append(
            random_term(rng, d_in, d_out, draw(st.sampled_from([1, 5, 16, 37])), slots, pair)
        )
    slots = "".join(draw(st.sets(st.sampled_from("sb"))))
    block = draw(st.sampled_from([None, 1, 2, 3, 4, 12]))
    return random_form(rng, d_in, d_out, slots, block, terms)


def shared_pairs(d_in: int = 24, d_out: int = 10) -> tuple:
    """Two pairs of different ranks that several adapters may share."""
    rng = np.random.default_rng(7)
    return tuple(
        (f"pair-{r}", 0.3 * normal(rng, d_in, r), 0.3 * normal(rng, r, d_out)) for r in (5, 37)
    )


def rotate(R, x: np.ndarray) -> np.ndarray:
    """x R in float64."""
    if R is None:
        return x
    n, m, _ = R.shape
    blocks = x.reshape(len(x), n, m)
    return np.einsum("tnp,npq->tnq", blocks, np.float64(R)).reshape(x.shape)


def turn(blocks: Blocks, x: np.ndarray) -> np.ndarray:
    """x times a permuted block-diagonal matrix, in float64."""
    order = np.arange(x.shape[1]) if blocks.order is None else np.asarray(blocks.order)
    y = np.empty_like(x)
    y[:, order] = rotate(blocks.values, x[:, order])
    return y


def add_terms(form: NormalForm, x: np.ndarray, d_out: int) -> np.ndarray | float:
    """The sum of the terms, the sparse part and the products of a form, in float64."""
    total = 0.0
    if form.S is not None:
        dense = np.zeros((x.shape[1], d_out))
        np.add.at(dense, (form.S.rows, form.S.cols), np.float64(form.S.values))
        total = x @ dense
    for product in form.K:
        total = total + x @ np.kron(np.float64(product.left), np.float64(product.right))
    for term in form.terms:
        low = (x if term.u is None else x * np.float64(term.u)) @ np.float64(term.A)
        low = low if term.d is None else low * np.float64(term.d)
        out = low @ np.float64(term.B)
        out = out if term.e is None else out * np.float64(term.e)
        total = total + float(term.c) * out
    return total


def evaluate(form: NormalForm, W, x, bias=0.0) -> np.ndarray:
    """F(x) as the docstring of scute_jax.normal_form has it, in float64."""
    return apply_over(form, lambda z: z @ np.float64(W) + np.float64(bias), np.float64(x))


def apply_over(form: NormalForm, base, x: np.ndarray) -> np.ndarray:
    """The form over any base, a function of [t, d_in]."""
    turned = x
    for blocks in form.P:
        turned = turn(blocks, turned)
    y = base(rotate(form.R, turned))
    for blocks in form.Q:
        y = turn(blocks, y)
    y = y if form.s is None else y * np.float64(form.s)
    y = y if form.b is None else y + np.float64(form.b)
    return y + add_terms(form, x, y.shape[1])


def evaluate_rows(all_forms, ids, W, x, bias=0.0) -> np.ndarray:
    """Each row under the form that its id names, -1 = base."""
    rows = [
        evaluate(NormalForm() if i < 0 else all_forms[i], W, x[n : n + 1], bias)
        for n, i in enumerate(ids)
    ]
    return np.concatenate(rows)
