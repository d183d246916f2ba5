"""The Kronecker update against the dense matrix of each row, all tiles at once and in slabs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scute_jax.kernels import kronecker_update
from scute_jax.kernels.kronecker_update import api
from scute_jax.kernels.pools import KroneckerFactors
from scute_jax.kernels.tiles import make_tiles

(A_IN, A_OUT), (B_IN, B_OUT) = (3, 5), (4, 2)
SLOTS = np.array([-1, -1, 0, 0, 0, 1, 2, 2, 3])
# Adapter 1 has no product and adapter 3 has two; the first of the pool belongs to nobody.
ROW = np.array([[2, -1], [-1, -1], [1, -1], [3, 1]], np.int32)


def case(dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = (9, A_OUT * B_OUT), (9, A_IN * B_IN), (4, A_IN, A_OUT), (4, B_IN, B_OUT)
    h, x, left, right = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    left, right = (part.at[0].set(jnp.nan) for part in (left, right))
    return h, x, KroneckerFactors(left, right, jnp.asarray(ROW))


def matrices(factors: KroneckerFactors) -> np.ndarray:
    """The matrix that each row is multiplied with."""
    pairs = zip(np.float64(factors.left), np.float64(factors.right), strict=True)
    products = [np.kron(*pair) for pair in pairs]
    nothing = np.zeros((A_IN * B_IN, A_OUT * B_OUT))
    rows = [() if slot < 0 else ROW[slot] for slot in SLOTS]
    return np.stack([sum((products[k] for k in own if k >= 0), nothing) for own in rows])


def expected(h, x, factors) -> np.ndarray:
    return np.float64(h) + np.einsum("ti,tio->to", np.float64(x), matrices(factors))


@pytest.fixture(params=[1, 2 * 23, api.NUMBERS])
def numbers(request, monkeypatch: pytest.MonkeyPatch):
    """Slabs of one tile, of two with a rest, and larger than all tiles."""
    monkeypatch.setattr(api, "NUMBERS", request.param)


@pytest.mark.parametrize("size", [1, 3, 16])
def test_it_is_the_dense_product_of_each_row(size: int, numbers):
    h, x, factors = case()
    tiles = make_tiles(jnp.asarray(SLOTS, jnp.int32), 4, size)
    y = jax.jit(lambda *args: kronecker_update(*args))(h, x, factors, tiles)  # traced anew
    np.testing.assert_allclose(y, expected(h, x, factors), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(y[:2], h[:2])
    np.testing.assert_array_equal(y[5], h[5])


def test_half_precision_is_rounded_between_the_products_and_once_at_the_end(numbers):
    h, x, factors = case(jnp.bfloat16)
    y = kronecker_update(h, x, factors, make_tiles(jnp.asarray(SLOTS, jnp.int32), 4, 4))
    assert y.dtype == jnp.bfloat16
    exact = expected(h, x, factors)
    assert (np.abs(np.float64(y) - exact) <= 2**-8 * (np.abs(exact) + 4)).all()


def test_gradients_are_those_of_the_dense_products(numbers):
    h, x, factors = case()
    tiles = make_tiles(jnp.asarray(SLOTS, jnp.int32), 4, 4)
    weight = np.random.default_rng(1).normal(size=h.shape)

    def loss(h, x, left, right):
        y = kronecker_update(h, x, factors.replace(left=left, right=right), tiles)
        return jnp.sum(jnp.asarray(weight, jnp.float32) * y)

    at = h, x, factors.left, factors.right
    by_h, by_x, by_left, by_right = jax.grad(loss, (0, 1, 2, 3))(*at)
    np.testing.assert_allclose(by_h, weight, rtol=1e-6)
    expected_x = np.einsum("to,tio->ti", weight, matrices(factors))
    np.testing.assert_allclose(by_x, expected_x, rtol=1e-4, atol=1e-5)
    X = np.float64(x).reshape(-1, A_IN, B_IN)
    Y = weight.reshape(-1, A_OUT, B_OUT)
    left, right = np.float64(factors.left), np.float64(factors.right)
    for k in range(1, 4):
        own = [t for t, slot in enumerate(SLOTS) if slot >= 0 and k in ROW[slot]]
        expected_left = np.einsum("tab,bd,tcd->ac", X[own], right[k], Y[own])
        expected_right = np.einsum("tab,ac,tcd->bd", X[own], left[k], Y[own])
        np.testing.assert_allclose(by_left[k], expected_left, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(by_right[k], expected_right, rtol=1e-4, atol=1e-4)
