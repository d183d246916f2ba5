"""Kronecker products where their structure is lost: as terms of the least rank."""

import jax
import numpy as np
import pytest
from forms import evaluate, normal, random_blocks, random_form, random_kronecker

import scute_jax as sj
from scute_jax.delta import delta_of
from scute_jax.kronecker import as_term, expanded
from scute_jax.normal_form import Kronecker

RNG = np.random.default_rng(0)
W, X = normal(RNG, 24, 10), normal(RNG, 6, 24)


def of_ranks(left: int, right: int) -> Kronecker:
    """A product of 24 by 10 whose factors have these ranks."""
    (a_in, a_out), (b_in, b_out) = (4, 2), (6, 5)
    return Kronecker(
        normal(RNG, a_in, left) @ normal(RNG, left, a_out),
        normal(RNG, b_in, right) @ normal(RNG, right, b_out),
    )


@pytest.mark.parametrize("left, right", [(1, 1), (2, 1), (1, 3), (2, 5)])
def test_a_term_has_the_rank_of_the_product_and_its_numbers(left: int, right: int):
    product = of_ranks(left, right)
    term = as_term(product)
    assert term.rank == left * right
    dense = np.kron(product.left, product.right)
    np.testing.assert_allclose(term.A @ term.B, dense, atol=1e-5 * np.abs(dense).max())


def test_small_singular_values_are_kept_as_far_as_float32_has_them():
    left = np.diag(np.float32([1, 1e-6]))
    assert as_term(Kronecker(left, np.ones((1, 1), np.float32))).rank == 2
    zero = as_term(Kronecker(0 * left, np.ones((1, 1), np.float32)))
    assert zero.rank == 1 and not (zero.A @ zero.B).any()


def test_traced_factors_are_expanded_by_their_shapes():
    product = of_ranks(1, 1)
    term = jax.jit(as_term)(product)
    assert term.rank == 2 * 5
    np.testing.assert_allclose(term.A @ term.B, np.kron(product.left, product.right), atol=1e-5)


def test_a_product_stays_one_where_the_second_only_adds():
    product = random_kronecker(RNG, 24, 10, 4, 2)
    lokr = sj.NormalForm(K=(product,))
    adds = random_form(RNG, 24, 10, "b").replace(K=(random_kronecker(RNG, 24, 10, 6, 5),))
    assert sj.stack(lokr, adds).K == (product, *adds.K) and not sj.stack(lokr, adds).terms
    for acts in (
        random_form(RNG, 24, 10, "s"),
        random_form(RNG, 24, 10, block=1),
        random_form(RNG, 24, 10).replace(P=(random_blocks(RNG, 24, 2),)),
        random_form(RNG, 24, 10).replace(Q=(random_blocks(RNG, 10, 2),)),
    ):
        assert sj.stack(acts, lokr).K == (product,)
        below = sj.stack(lokr, acts)
        assert not below.K and below.rank == 2 * 5
    wide = sj.NormalForm(K=(random_kronecker(RNG, 24, 12, 4, 2),))
    with pytest.raises(sj.AdapterError, match="d_out=10 and the second d_out=12"):
        sj.stack(lokr, wide)


def test_a_delta_is_thin_where_the_rank_is_low():
    thin, whole = (sj.NormalForm(K=(of_ranks(*ranks),)) for ranks in ((1, 2), (2, 5)))
    assert delta_of(thin, W).left.shape == (24, 2) and delta_of(whole, W).right is None
    for form in (thin, whole, expanded(whole)):
        delta = delta_of(form, W)
        effect = evaluate(form, W, X) - np.float64(X) @ W
        np.testing.assert_allclose(np.float64(X) @ delta.matrix(), effect, atol=1e-5)


def test_its_bytes_are_those_of_the_factors():
    form = sj.NormalForm(K=(random_kronecker(RNG, 24, 10, 4, 2),))
    adapter = sj.Adapter(sites={"q": form}, method="LOKR", version="v")
    assert adapter.nbytes == 4 * (4 * 2 + 6 * 5) and adapter.live == ("K",)
