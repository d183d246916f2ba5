"""Random normal forms and the plain formula in float64: the oracle of the core's tests.

    forms = [random_form(rng, d_in, d_out, ...), ...]
    expected = evaluate(form, W, x, bias)

Vectors are amplified (1 + 0.3 z and the like): near the identity a dropped slot would not show.
"""

import hypothesis.strategies as st
import numpy as np

from scute_jax import NormalForm, Term


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def random_term(rng, d_in: int, d_out: int, r: int, slots: str = "", pair=None) -> Term:
    """A term with the slots named: c, d, e. A `pair` is (key, A, B)."""
    key, A, B = pair or (None, 0.3 * normal(rng, d_in, r), 0.3 * normal(rng, r, d_out))
    return Term(
        A=A,
        B=B,
        c=1.7 if "c" in slots else 1.0,
        d=1 + 0.3 * normal(rng, A.shape[1]) if "d" in slots else None,
        e=1 + 0.3 * normal(rng, d_out) if "e" in slots else None,
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


@st.composite
def forms(draw, d_in: int = 24, d_out: int = 10, pairs=()) -> NormalForm:
    """Any combination of slots; `pairs` are shared factors that terms may use."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    terms = []
    for _ in range(draw(st.integers(0, 3))):
        slots = "".join(draw(st.sets(st.sampled_from("cde"))))
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


def add_terms(form: NormalForm, x: np.ndarray) -> np.ndarray | float:
    """The sum of the terms of a form in float64."""
    total = 0.0
    for term in form.terms:
        low = x @ np.float64(term.A)
        low = low if term.d is None else low * np.float64(term.d)
        out = low @ np.float64(term.B)
        out = out if term.e is None else out * np.float64(term.e)
        total = total + float(term.c) * out
    return total


def evaluate(form: NormalForm, W, x, bias=0.0) -> np.ndarray:
    """F(x) = base(x R) * s + b + sum_k c_k (((x A_k) * d_k) B_k * e_k) in float64."""
    return apply_over(form, lambda z: z @ np.float64(W) + np.float64(bias), np.float64(x))


def apply_over(form: NormalForm, base, x: np.ndarray) -> np.ndarray:
    """The form over any base, a function of [t, d_in]."""
    y = base(rotate(form.R, x))
    y = y if form.s is None else y * np.float64(form.s)
    y = y if form.b is None else y + np.float64(form.b)
    return y + add_terms(form, x)


def evaluate_rows(all_forms, ids, W, x, bias=0.0) -> np.ndarray:
    """Each row under the form that its id names, -1 = base."""
    rows = [
        evaluate(NormalForm() if i < 0 else all_forms[i], W, x[n : n + 1], bias)
        for n, i in enumerate(ids)
    ]
    return np.concatenate(rows)
