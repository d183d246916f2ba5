"""The fold rule: the same function, and each slot exactly where the rule says."""

import numpy as np
from forms import evaluate, extended_forms, normal, random_form, random_term, shared_pairs
from hypothesis import given, settings

import scute_jax as sj

RNG = np.random.default_rng(0)
W, X, BIAS = normal(RNG, 24, 10), normal(RNG, 6, 24), normal(RNG, 10)


@given(extended_forms(pairs=shared_pairs()))
@settings(max_examples=60, deadline=None)
def test_folding_keeps_the_function(form):
    expected = evaluate(form, W, X, BIAS)
    error = np.abs(evaluate(sj.fold(form), W, X, BIAS) - expected).max()
    assert error <= 1e-5 * np.abs(expected).max()


@given(extended_forms(pairs=shared_pairs()))
@settings(max_examples=60, deadline=None)
def test_owned_terms_keep_no_vector_and_shared_ones_no_scalar(form):
    for before, after in zip(form.terms, sj.fold(form).terms, strict=True):
        assert isinstance(after.c, float) and after.c == 1.0
        if before.pair is None:
            assert after.d is None and after.e is None and after.u is None
        else:  # the factors belong to others too: they must not change
            assert after.A is before.A and after.B is before.B
            assert (after.d is None) == (before.d is None and before.c == 1.0)
            assert (after.e is None) == (before.e is None)


@given(extended_forms(pairs=shared_pairs()))
@settings(max_examples=30, deadline=None)
def test_slots_beside_W_never_fold(form):
    folded = sj.fold(form)
    assert folded.s is form.s and folded.b is form.b and folded.R is form.R
    assert folded.P is form.P and folded.Q is form.Q and folded.S is form.S
    assert folded.K is form.K


def test_live_names_what_is_left():
    pair = shared_pairs()[0]
    lora = random_form(RNG, 24, 10, terms=[random_term(RNG, 24, 10, 4, "cde")])
    vera = random_form(RNG, 24, 10, terms=[random_term(RNG, 24, 10, 0, "cde", pair)])
    oft = random_form(RNG, 24, 10, "sb", block=4)
    assert [sj.fold(f).live for f in (lora, vera, oft)] == [(), ("d", "e"), ("R", "s", "b")]


def test_dtype_of_the_factors_stays():
    import ml_dtypes

    term = random_term(RNG, 24, 10, 4, "cde")
    half = term.replace(A=term.A.astype(ml_dtypes.bfloat16), B=term.B.astype(ml_dtypes.bfloat16))
    folded = sj.fold(sj.NormalForm(terms=(half,))).terms[0]
    assert folded.A.dtype == folded.B.dtype == ml_dtypes.bfloat16
