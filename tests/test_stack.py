"""Stacking against applying one adapter after the other, in both orders."""

import numpy as np
import pytest
from forms import (
    apply_over,
    evaluate,
    extended_forms,
    normal,
    random_blocks,
    random_form,
    random_sparse,
    random_term,
    shared_pairs,
)
from hypothesis import given, settings

import scute_jax as sj
from scute_jax.normal_form import TokenRows

RNG = np.random.default_rng(0)
W, X, BIAS = normal(RNG, 24, 10), normal(RNG, 6, 24), normal(RNG, 10)
PAIRS = shared_pairs()


def one_after_the_other(first, second):
    """The second adapter over a base that is the first adapter over W."""
    return apply_over(second, lambda z: evaluate(first, W, z, BIAS), np.float64(X))


@given(extended_forms(pairs=PAIRS, sparse=False), extended_forms(pairs=PAIRS, sparse=False))
@settings(max_examples=120, deadline=None)
def test_a_stack_equals_one_after_the_other(first, second):
    for a, b in ((first, second), (second, first)):
        expected = one_after_the_other(a, b)
        error = np.abs(evaluate(sj.stack(a, b), W, X, BIAS) - expected).max()
        assert error <= 2e-5 * np.abs(expected).max()


def test_the_order_matters():
    scale = random_form(RNG, 24, 10, "s")
    lora = random_form(RNG, 24, 10, terms=[random_term(RNG, 24, 10, 4)])
    a, b = (evaluate(sj.stack(*pair), W, X) for pair in ((scale, lora), (lora, scale)))
    effect = np.abs(a - X @ W).max()
    assert np.abs(a - b).max() > 0.05 * effect


def test_a_stack_of_three_is_associative():
    three = [
        random_form(RNG, 24, 10, "sb", block=m, terms=[random_term(RNG, 24, 10, 3)])
        for m in (2, 3, 4)
    ]
    left = sj.stack(sj.stack(three[0], three[1]), three[2])
    right = sj.stack(three[0], sj.stack(three[1], three[2]))
    np.testing.assert_allclose(evaluate(left, W, X), evaluate(right, W, X), rtol=1e-4, atol=1e-4)


def test_owned_terms_of_both_stay_one_segment_and_pairs_stay_shared():
    vera = random_form(RNG, 24, 10, terms=[random_term(RNG, 24, 10, 0, "de", PAIRS[0])])
    lora = random_form(RNG, 24, 10, terms=[random_term(RNG, 24, 10, 4)])
    both = sj.stack(vera, lora)
    assert both.rank == 4 and both.terms[0].pair == PAIRS[0][0] and both.terms[0].A is PAIRS[0][1]


def test_an_R_behind_a_pair_makes_the_term_the_adapters_own():
    vera = random_form(RNG, 24, 10, terms=[random_term(RNG, 24, 10, 0, "de", PAIRS[0])])
    oft = random_form(RNG, 24, 10, block=4)
    assert sj.stack(vera, oft).terms[0].pair is None
    assert sj.stack(oft, vera).terms[0].pair == PAIRS[0][0]


def adapter(version, **sites):
    return sj.Adapter(sites=sites, method="LORA", version=version)


def test_adapters_stack_site_by_site():
    one, two, three = (random_form(RNG, 24, 10, "s") for _ in range(3))
    both = sj.stack(adapter("v1", q=one, k=two), adapter("v2", k=three, v=one))
    assert list(both.sites) == ["q", "k", "v"]
    np.testing.assert_allclose(both["k"].s, two.s * three.s, rtol=1e-6)
    other = sj.stack(adapter("v2", k=three, v=one), adapter("v1", q=one, k=two))
    assert both.version != other.version


def test_errors_say_what_does_not_fit():
    small, large = random_form(RNG, 24, 8, "s"), random_form(RNG, 24, 10, "s")
    with pytest.raises(sj.AdapterError, match="d_out=8 and the second d_out=10"):
        sj.stack(small, large)
    with pytest.raises(sj.AdapterError, match="k: cannot stack"):
        sj.stack(adapter("v1", k=small), adapter("v2", k=large))
    with pytest.raises(TypeError, match="NormalForm and Adapter"):
        sj.stack(small, adapter("v1", k=large))


def test_a_sparse_delta_stacks_unless_it_is_turned():
    sparse = random_form(RNG, 24, 10, "b").replace(S=random_sparse(RNG, 24, 10, 30))
    scale = random_form(RNG, 24, 10, "sb").replace(S=random_sparse(RNG, 24, 10, 7))
    for a, b in ((sparse, scale), (scale, sparse)):
        expected = one_after_the_other(a, b)
        np.testing.assert_allclose(evaluate(sj.stack(a, b), W, X, BIAS), expected, atol=1e-5)
    turned = random_form(RNG, 24, 10).replace(Q=(random_blocks(RNG, 10, 2),))
    sj.stack(turned, sparse)
    for rotation in (turned, random_form(RNG, 24, 10, block=4)):
        with pytest.raises(sj.AdapterError, match="sparse delta under an adapter that rotates"):
            sj.stack(sparse, rotation)


def test_replaced_tokens_of_both_and_the_second_has_the_last_word():
    first = sj.NormalForm(rows=TokenRows(np.array([3, 5]), normal(RNG, 2, 4)))
    second = sj.NormalForm(rows=TokenRows(np.array([5, 9]), normal(RNG, 2, 4)))
    rows = sj.stack(first, second).rows
    np.testing.assert_array_equal(rows.ids, [3, 5, 9])
    np.testing.assert_array_equal(rows.rows, [first.rows.rows[0], *second.rows.rows])
