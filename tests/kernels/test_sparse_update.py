"""The sparse update against a loop over its entries: the definition, whole and in slabs, and the
Pallas twin, with columns that have no entry, a few, and more than one step takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scute_jax.kernels import sparse_update
from scute_jax.kernels.pools import SparseEntries
from scute_jax.kernels.sparse_update import reference
from scute_jax.kernels.sparse_update.pallas_triton import SparseTile
from scute_jax.kernels.sparse_update.pallas_triton import sparse_update as twin
from scute_jax.kernels.tiles import make_tiles

D_IN, D_OUT, ENTRIES = 12, 70, 230
SLOTS = np.array([-1, -1, 0, 0, 0, 1, 2, 2])  # adapter 1 has no sparse matrix
ROW = np.array([1, -1, 0], np.int32)
COUNTS = (ENTRIES, 150)  # entries that each matrix has; what is behind them is no number


def case(dtype=np.float32, slots=SLOTS):
    rng = np.random.default_rng(0)
    h, x = rng.normal(size=(len(slots), D_OUT)), rng.normal(size=(len(slots), D_IN))
    rows = rng.integers(0, D_IN, (2, ENTRIES)).astype(np.int32)
    cols = np.sort(rng.choice([3, 4, 5, *range(20, D_OUT)], (2, ENTRIES)))
    cols[0, 20:80] = cols[0, 80]  # more at one column than a step takes, some at one place
    values = rng.normal(size=(2, ENTRIES))
    values[1, COUNTS[1] :] = np.nan
    starts = [
        np.searchsorted(c[:n], np.arange(D_OUT + 1)) for c, n in zip(cols, COUNTS, strict=True)
    ]
    h, x, values = (jnp.asarray(a, dtype) for a in (h, x, values))
    starts = jnp.asarray(np.stack(starts), jnp.int32)
    return h, x, SparseEntries(starts, jnp.asarray(rows), values, jnp.asarray(ROW))


def entries(sparse, slots=SLOTS):
    """Row of the batch, row of x, column and place in the pool of each product."""
    for t, slot in enumerate(slots):
        k = ROW[slot] if slot >= 0 else -1
        for c in range(D_OUT if k >= 0 else 0):
            for z in range(sparse.starts[k, c], sparse.starts[k, c + 1]):
                yield t, int(sparse.rows[k, z]), c, (k, z)


def loop(h, x, sparse, slots=SLOTS) -> np.ndarray:
    y, x, values = (np.array(a, np.float64) for a in (h, x, sparse.values))
    for t, row, c, z in entries(jax.tree.map(np.asarray, sparse), slots):
        y[t, c] += x[t, row] * values[z]
    return y


@pytest.fixture(params=["pallas", 50, ENTRIES, 1 << 14])
def how(request, monkeypatch: pytest.MonkeyPatch):
    """The twin, and slabs with a rest, of just the entries, and larger than them."""
    if request.param == "pallas":
        return "pallas"
    monkeypatch.setattr(reference, "SLAB", request.param)
    return "reference"


@pytest.mark.parametrize("size", [1, 3, 16])
def test_it_is_the_loop_over_the_entries(size: int, how):
    h, x, sparse = case()
    tiles = make_tiles(jnp.asarray(SLOTS, jnp.int32), 3, size)
    y = jax.jit(lambda *args: sparse_update(*args, implementation=how))(
        h, x, sparse, tiles
    )  # traced anew
    np.testing.assert_allclose(y, loop(h, x, sparse), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(y[:2], h[:2])
    np.testing.assert_array_equal(y[5], h[5])


@pytest.mark.parametrize(
    "rows, size, spoilt", [(2, 5, (-1, 1)), (4, 32, (-1, 0)), (8, 16, (1, 2)), (16, 20, (-1, 0, 1))]
)
def test_tiles_of_several_groups_of_rows(rows: int, size: int, spoilt: tuple[int, ...]):
    """Groups full and half full, beside rows whose x is no number."""
    slots = np.array([-1] * 2 + [0] * 17 + [1] * 3 + [2] * 9)
    h, x, sparse = case(slots=slots)
    sound = ~np.isin(slots, spoilt)
    expected = loop(h, x, sparse, slots)
    x = jnp.where(jnp.asarray(sound)[:, None], x, jnp.nan)
    tiles = make_tiles(jnp.asarray(slots, jnp.int32), 3, size)
    tile = SparseTile(columns=16, width=8, rows=rows)
    y = np.asarray(twin(h, x, sparse, tiles, tile=tile, interpret=True))
    np.testing.assert_allclose(y[sound], expected[sound], rtol=1e-5, atol=1e-5)
    without = np.isin(slots, (-1, 1))
    np.testing.assert_array_equal(y[without], h[without])


def test_half_precision_is_rounded_once(how):
    h, x, sparse = case(jnp.bfloat16)
    tiles = make_tiles(jnp.asarray(SLOTS, jnp.int32), 3, 4)
    y = sparse_update(h, x, sparse, tiles, implementation=how)
    assert y.dtype == jnp.bfloat16
    expected = loop(h, x, sparse)
    assert (np.abs(np.float64(y) - expected) <= 2**-8 * np.abs(expected) + 1e-6).all()


def test_gradients_are_those_of_the_products(how):
    h, x, pool = case()
    tiles = make_tiles(jnp.asarray(SLOTS, jnp.int32), 3, 4)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=h.shape), jnp.float32)

    def loss(h, x, values):
        y = sparse_update(h, x, pool.replace(values=values), tiles, implementation=how)
        return jnp.sum(weight * y)

    by_h, by_x, by_values = jax.grad(loss, (0, 1, 2))(h, x, pool.values)
    np.testing.assert_allclose(by_h, weight, rtol=1e-6)
    expected_x, expected_values = np.zeros(x.shape), np.zeros(pool.values.shape)
    x, host = np.asarray(x), jax.tree.map(np.asarray, pool)
    for t, row, c, z in entries(host):
        expected_x[t, row] += weight[t, c] * host.values[z]
        expected_values[z] += weight[t, c] * x[t, row]
    np.testing.assert_allclose(by_x, expected_x, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(by_values, expected_values, rtol=1e-4, atol=1e-5)


def test_a_row_has_the_same_bits_beside_other_rows():
    h, x, pool = case()

    def run(h, x, slots):
        tiles = make_tiles(jnp.asarray(slots, jnp.int32), 3, 16)
        return np.asarray(sparse_update(h, x, pool, tiles, implementation="pallas"))

    together, others = run(h, x, SLOTS), np.array([0, 0, 0, 0, 0, 0, 2, 2])
    h, x = (jnp.full_like(a, np.nan).at[5].set(a[2]) for a in (h, x))
    np.testing.assert_array_equal(run(h, x, others)[5], together[2])
