"""The closest factors, against the SVD of numpy in float64."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from scute_jax import low_rank
from scute_jax.delta import Delta
from scute_jax.low_rank import fit, leading, root_of


def matrix(seed: int, d_in: int, d_out: int, k: int | None) -> Delta:
    rng = np.random.default_rng(seed)
    if k is None:
        return Delta(rng.standard_normal((d_in, d_out)))
    return Delta(rng.standard_normal((d_in, k)), rng.standard_normal((k, d_out)))


def trailing(D: np.ndarray, rank: int) -> float:
    """The least share of |D|^2 that factors of this rank leave."""
    s = np.linalg.svd(D, compute_uv=False) ** 2
    return s[rank:].sum() / s.sum()


sizes = st.integers(1, 30)


@given(st.integers(0, 2**31), sizes, sizes, st.none() | st.integers(0, 12), st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_no_factors_of_the_rank_are_closer(seed, d_in, d_out, k, rank):
    delta = matrix(seed, d_in, d_out, k)
    found = fit(delta, rank)
    D = delta.matrix()
    assert found.A.shape == (d_in, found.B.shape[0]) and found.B.shape[1] == d_out
    assert found.A.shape[1] <= min(rank, d_in, d_out, d_in if k is None else k)
    assert found.weighted_share is None
    np.testing.assert_allclose(found.squared_norm, (D**2).sum())
    if k == 0:
        assert found.share == 0 and found.A.shape[1] == 0
        return
    np.testing.assert_allclose(found.share, trailing(D, rank), atol=1e-12)
    rest = ((D - np.float64(found.A) @ np.float64(found.B)) ** 2).sum() / (D**2).sum()
    np.testing.assert_allclose(found.share, rest, atol=1e-13)


@given(st.integers(0, 2**31), sizes, sizes, st.none() | st.integers(1, 12), st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_with_moments_nothing_is_closer_on_the_data(seed, d_in, d_out, k, rank):
    delta = matrix(seed, d_in, d_out, k)
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((40, d_in)) @ rng.standard_normal((d_in, d_in)) * rng.random(d_in)
    for moments in (x.T @ x / 40, (x**2).mean(axis=0)):
        K = root_of(moments)
        weighted = (K[:, None] if K.ndim == 1 else K.T) * 1.0
        seen = weighted * delta.matrix() if K.ndim == 1 else weighted @ delta.matrix()
        found = fit(delta, rank, moments)
        np.testing.assert_allclose(found.weighted_share, trailing(seen, rank), atol=1e-9)


def test_the_root_is_that_of_the_moments_up_to_the_ridge():
    x = np.random.default_rng(0).standard_normal((50, 7))
    M = x.T @ x / 50
    for moments, full in ((M, M), (np.diag(M), np.diag(np.diag(M)))):
        K = root_of(moments)
        product = np.diag(K**2) if K.ndim == 1 else K @ K.T
        ridge = low_rank.RIDGE * np.diag(M).mean() * np.eye(7)
        np.testing.assert_allclose(product, full + ridge, atol=1e-12)


def test_moments_pay_on_data_of_few_directions():
    """The plain SVD spends its rank on inputs that hardly ever come."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 20)) * np.geomspace(1, 0.01, 20)
    delta = matrix(1, 20, 30, None)

    def share(moments) -> float:
        found = fit(delta, 4, moments)
        error = x @ (delta.left - np.float64(found.A) @ np.float64(found.B))
        return (error**2).sum() / ((x @ delta.left) ** 2).sum()

    full = share(x.T @ x / 400)
    assert full <= share((x**2).mean(axis=0)) * 1.01 and full < 0.25 * share(None)


@pytest.mark.parametrize("decay", [0.0, 0.02])
def test_large_matrices_are_decomposed_by_iteration(decay: float, monkeypatch):
    monkeypatch.setattr(low_rank, "EXACT", 50)
    rng = np.random.default_rng(0)
    D = np.exp(-decay * np.arange(200))[:, None] * rng.standard_normal((200, 300))
    U, s, Vt = leading(D, None, 8)
    assert s.shape == (8,)
    np.testing.assert_allclose(s, np.linalg.svd(D, compute_uv=False)[:8], rtol=3e-3)
    assert fit(Delta(D), 8).share <= trailing(D, 8) * (1 + 1e-4)
    np.testing.assert_allclose(U.T @ U, np.eye(8), atol=1e-12)
    np.testing.assert_allclose(Vt @ Vt.T, np.eye(8), atol=1e-12)
    exact = leading(D[:60], None, 50)  # the whole space is asked for: nothing to iterate
    np.testing.assert_allclose(exact[1], np.linalg.svd(D[:60], compute_uv=False)[:50])
