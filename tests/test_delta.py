"""What an adapter adds as a matrix, against the plain formula in float64."""

import numpy as np
import pytest
from forms import evaluate, extended_forms, normal, random_form, random_term, shared_pairs
from hypothesis import given, settings

import scute_jax as sj
from scute_jax.delta import Delta, delta_of, through_norm
from scute_jax.normal_form import TokenRows

RNG = np.random.default_rng(0)
W, X, BIAS = normal(RNG, 24, 10), normal(RNG, 6, 24), normal(RNG, 10)


def apply(delta: Delta, W, x, bias=0.0) -> np.ndarray:
    shift = 0.0 if delta.shift is None else delta.shift
    return np.float64(x) @ (np.float64(W) + delta.matrix()) + np.float64(bias) + shift


@given(extended_forms(pairs=shared_pairs()))
@settings(max_examples=100, deadline=None)
def test_x_times_the_delta_is_what_the_form_adds(form):
    for bias in (BIAS, None):
        plain = 0.0 if bias is None else bias
        expected = evaluate(form, W, X, plain)
        error = np.abs(apply(delta_of(form, W, bias), W, X, plain) - expected).max()
        assert error <= 1e-5 * np.abs(expected).max()


def test_few_terms_stay_thin_and_a_zero_shift_is_none():
    thin = random_form(RNG, 24, 10, terms=[random_term(RNG, 24, 10, 2, "cdeu")] * 2)
    delta = delta_of(thin.replace(b=np.zeros(10)), W)
    assert delta.left.shape == (24, 4) and delta.right.shape == (4, 10) and delta.shift is None
    assert delta_of(thin.replace(terms=thin.terms * 2), W).right is None


@pytest.mark.parametrize("slots", ["", "s", "b", "sb"])
@pytest.mark.parametrize("rank", [0, 2, 9])
def test_rows_replace_what_all_other_slots_make_of_a_token(slots: str, rank: int):
    ids = np.array([5, 2])
    for at_head in (False, True):
        form = random_form(RNG, 24, 10, slots, terms=[random_term(RNG, 24, 10, rank)])
        new = normal(RNG, 2, 24 if at_head else 10)
        delta = delta_of(form.replace(rows=TokenRows(ids, new)), W)
        whole = apply(delta, W, np.eye(24))
        expected = evaluate(form, W, np.eye(24))
        if at_head:
            expected[:, ids] = new.T  # a replaced token has no shift: its logit is x . row
        else:
            expected[ids] = new
        np.testing.assert_allclose(whole, expected, atol=1e-5)
    with pytest.raises(sj.AdapterError, match="it adds tokens .24 and fewer. to a vocabulary of"):
        delta_of(sj.NormalForm(rows=TokenRows(np.array([24]), normal(RNG, 1, 10))), W)


@pytest.mark.parametrize("slots", ["s", "b", "sb"])
def test_a_norm_that_is_adapted_is_seen_by_what_reads_it(slots: str):
    norm = random_form(RNG, 24, 24, slots)
    form = random_form(RNG, 24, 10, "sb", terms=[random_term(RNG, 24, 10, 2)])
    seen = X if norm.s is None else X * norm.s
    seen = seen if norm.b is None else seen + norm.b
    expected = evaluate(form, W, seen, BIAS)
    delta = through_norm(delta_of(form, W, BIAS), W, norm.s, norm.b)
    np.testing.assert_allclose(apply(delta, W, X, BIAS), expected, atol=1e-4)
