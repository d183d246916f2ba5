"""The sparse update against a loop over its entries, whole and in slabs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scute_jax.kernels import sparse_update
from scute_jax.kernels.pools import SparseEntries
from scute_jax.kernels.sparse_update import api
from scute_jax.kernels.tiles import make_tiles

D_IN, D_OUT, ENTRIES = 12, 7, 23
SLOTS = np.array([-1, -1, 0, 0, 0, 1, 2, 2])  # adapter 1 has no sparse matrix
ROW = np.array([1, -1, 0], np.int32)


def case(dtype=np.float32):
    rng = np.random.default_rng(0)
    h, x = rng.normal(size=(len(SLOTS), D_OUT)), rng.normal(size=(len(SLOTS), D_IN))
    rows = rng.integers(0, D_IN, (2, ENTRIES)).astype(np.int32)
    cols = rng.integers(0, D_OUT, (2, ENTRIES)).astype(np.int32)
    cols[1, 15:] = D_OUT  # places that the adapter does not fill
    values = rng.normal(size=(2, ENTRIES))
    h, x, values = (jnp.asarray(a, dtype) for a in (h, x, values))
    return h, x, SparseEntries(jnp.asarray(rows), jnp.asarray(cols), values, jnp.asarray(ROW))


def loop(h, x, sparse) -> np.ndarray:
    y, x, values = (np.array(a, np.float64) for a in (h, x, sparse.values))
    for t, slot in enumerate(SLOTS):
        k = ROW[slot] if slot >= 0 else -1
        for z in range(ENTRIES if k >= 0 else 0):
            if sparse.cols[k, z] < D_OUT:
                y[t, sparse.cols[k, z]] += x[t, sparse.rows[k, z]] * values[k, z]
    return y


@pytest.fixture(params=[5, 23, 1 << 14])
def slab(request, monkeypatch: pytest.MonkeyPatch):
    """Slabs with a rest, of just the entries, and larger than them."""
    monkeypatch.setattr(api, "SLAB", request.param)


@pytest.mark.parametrize("size", [1, 3, 16])
def test_it_is_the_loop_over_the_entries(size: int, slab):
    h, x, sparse = case()
    tiles = make_tiles(jnp.asarray(SLOTS, jnp.int32), 3, size)
    y = jax.jit(lambda *args: sparse_update(*args))(h, x, sparse, tiles)  # traced anew
    np.testing.assert_allclose(y, loop(h, x, sparse), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(y[:2], h[:2])
    np.testing.assert_array_equal(y[5], h[5])


def test_half_precision_is_rounded_once(slab):
    h, x, sparse = case(jnp.bfloat16)
    tiles = make_tiles(jnp.asarray(SLOTS, jnp.int32), 3, 4)
    y = sparse_update(h, x, sparse, tiles)
    assert y.dtype == jnp.bfloat16
    expected = loop(h, x, sparse)
    assert (np.abs(np.float64(y) - expected) <= 2**-8 * np.abs(expected) + 1e-6).all()


def test_gradients_are_those_of_the_products(slab):
    h, x, sparse = case()
    tiles = make_tiles(jnp.asarray(SLOTS, jnp.int32), 3, 4)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=h.shape), jnp.float32)

    def loss(h, x, values):
        return jnp.sum(weight * sparse_update(h, x, sparse.replace(values=values), tiles))

    by_h, by_x, by_values = jax.grad(loss, (0, 1, 2))(h, x, sparse.values)
    np.testing.assert_allclose(by_h, weight, rtol=1e-6)
    expected_x, expected_values = np.zeros(x.shape), np.zeros(sparse.values.shape)
    for t, slot in enumerate(SLOTS):
        k = ROW[slot] if slot >= 0 else -1
        for z in range(ENTRIES if k >= 0 else 0):
            row, col = int(sparse.rows[k, z]), int(sparse.cols[k, z])
            if col < D_OUT:
                expected_x[t, row] += weight[t, col] * sparse.values[k, z]
                expected_values[k, z] += weight[t, col] * x[t, row]
    np.testing.assert_allclose(by_x, expected_x, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(by_values, expected_values, rtol=1e-4, atol=1e-5)
