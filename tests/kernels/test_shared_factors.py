"""The shared-factor route against float64 row by row: many pairs of different ranks in scattered
pages, terms that adapters have or not, tiles of every kind, and what is no number elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scute_jax.kernels.pools import LowRank, Shared
from scute_jax.kernels.shared_factors.pallas_triton import SharedTile
from scute_jax.kernels.shared_factors.pallas_triton import shared_factors as twin
from scute_jax.kernels.shared_factors.reference import shared_factors as reference

PAGE = 16
# Share of the largest number: of sums in float32, and of x A and the result once more each.
TOLERANCE = {"float32": 5e-6, "bfloat16": 2**-6, "float16": 2**-9}
TILES = (
    SharedTile(rows=16, block_k=16, block_r=16, block_q=32, block_n=32, most_parts=1),
    SharedTile(rows=16, block_k=32, block_r=32, block_q=16, block_n=64, column_programs=1),
    SharedTile(rows=32, block_k=64, programs=3),
    SharedTile(),
)


def pools(rng, ranks, tenants, terms, d_in, d_out, dtype, with_u=False):
    """A pool whose pages lie scattered; whatever no adapter has in it is NaN."""
    width = -(-max(ranks) // PAGE)
    pages = rng.permutation(len(ranks) * width + 2)
    table = pages[: len(ranks) * width].reshape(len(ranks), width)
    A, B = (np.full((len(pages), PAGE, d), np.nan) for d in (d_in, d_out))
    for p, rank in enumerate(ranks):
        q = np.arange(rank)
        for factor in (A, B):
            factor[table[p, q // PAGE], q % PAGE] = rng.normal(size=(rank, factor.shape[2]))
    row = np.where(rng.random((tenants, terms)) < 0.8, 0, -1)
    row[row == 0] = 1 + rng.permutation(np.count_nonzero(row == 0))  # entry 0 is nobody's
    pair = rng.integers(0, len(ranks), row.shape)
    n = row.max(initial=0) + 1
    d, e, u = (rng.normal(size=(n, size)) for size in (width * PAGE, d_out, d_in))
    for k, j in np.argwhere(row >= 0):
        d[row[k, j], ranks[pair[k, j]] :] = 0
    d[0] = e[0] = u[0] = np.nan
    A, B, d, e, u = (jnp.asarray(a, dtype) for a in (A, B, d, e, u))
    ints = (jnp.asarray(a, jnp.int32) for a in (table, ranks, row, pair))
    table, ranks, row, pair = ints
    return Shared(LowRank(A, B, table, ranks), d, e, u if with_u else None, row, pair)


def by_rows(h, x, shared, slot):
    """The definition in float64, one row and term after the other."""
    y, x = np.array(h, np.float64), np.asarray(x, np.float64)
    pool = jax.tree.map(lambda a: np.asarray(a, np.float64 if a.ndim > 1 else None), shared)
    table, rank = np.asarray(shared.pairs.table), np.asarray(shared.pairs.rank)
    for t, k in enumerate(np.asarray(slot)):
        for j in range(shared.row.shape[1] if k >= 0 else 0):
            own, p = int(shared.row[k, j]), int(shared.pair[k, j])
            if own < 0:
                continue
            q = np.arange(rank[p])
            A, B = (f[table[p, q // PAGE], q % PAGE] for f in (pool.pairs.A, pool.pairs.B))
            xs = x[t] if pool.u is None else x[t] * pool.u[own]
            y[t] += (A @ xs * pool.d[own, q]) @ B * pool.e[own]
    return y


def batch(rng, tenants, rows, d_in, d_out, dtype):
    h, x = (jnp.asarray(rng.normal(size=(rows, d)), dtype) for d in (d_out, d_in))
    return h, x, jnp.asarray(rng.integers(-1, tenants, rows), jnp.int32)


@given(
    ranks=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    terms=st.sampled_from([1, 1, 2, 5]),
    rows=st.sampled_from([1, 7, 33, 70]),
    widths=st.tuples(st.integers(1, 90), st.integers(1, 140)),
    dtype=st.sampled_from(list(TOLERANCE)),
    with_u=st.booleans(),
    tile=st.sampled_from(TILES),
    slices=st.sampled_from([1, 2]),
    parts=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=4, deadline=None)
def test_it_is_the_definition(ranks, terms, rows, widths, dtype, with_u, tile, slices, parts, seed):
    rng, (d_in, d_out), tenants = np.random.default_rng(seed), widths, 5
    shared = tuple(
        pools(rng, own, tenants, terms, d_in, d_out, dtype, with_u)
        for own in (ranks, ranks[:1])[:slices]
    )
    h, x, slot = batch(rng, tenants, rows, d_in, d_out, dtype)
    given_h = h
    if parts:
        given_h = jnp.asarray(rng.normal(size=(parts, *h.shape)), "float32")
        h = jnp.sum(given_h, axis=0)
    ys = twin((given_h,) * slices, x, shared, slot, tile=tile, interpret=True)
    for y, pool in zip(ys, shared, strict=True):
        assert y.dtype == h.dtype
        expected = by_rows(h, x, pool, slot)
        bound = TOLERANCE[dtype] * np.abs(expected).max() * np.sqrt(terms)
        np.testing.assert_allclose(np.float64(y), expected, rtol=0, atol=bound)
        none = ~np.asarray((slot >= 0) & (pool.row[slot] >= 0).any(axis=1))
        np.testing.assert_allclose(y[none], h[none], rtol=0, atol=1e-6 if parts else 0)


@pytest.mark.parametrize("terms", [1, 3])
def test_the_definition_is_that_of_each_row(terms):
    rng = np.random.default_rng(terms)
    pool = pools(rng, (20, 5, 33), 5, terms, 24, 40, "float32", with_u=True)
    h, x, slot = batch(rng, 5, 30, 24, 40, "float32")
    np.testing.assert_allclose(reference(h, x, pool, slot), by_rows(h, x, pool, slot), atol=1e-3)


@pytest.mark.parametrize("ranks", [(40,), (20, 5, 33)])
@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize("parts", [0, 2])
def test_a_row_has_the_same_bits_beside_any_other_rows(ranks, terms, parts):
    rng = np.random.default_rng(3)
    pool = pools(rng, ranks, 6, terms, 40, 50, "float32")
    pool = pool.replace(e=pool.e.at[:, 7].set(jnp.inf))  # zeros that are added would show
    h, x, slot = batch(rng, 6, 48, 40, 50, "float32")
    tile = SharedTile(rows=16, block_k=16, block_r=16, block_q=128, programs=4)

    def run(h, x, slot):
        h = jnp.stack([h, h / 3]) if parts else h
        (y,) = twin((h,), x, (pool,), jnp.asarray(slot), tile=tile, interpret=True)
        return np.asarray(y)

    first = run(h, x, slot)
    others = rng.integers(-1, 6, 48).astype(np.int32)
    for row in range(0, 48, 3):
        place, slots = 47 - row, others.copy() if row % 2 else np.full(48, -1, np.int32)
        slots[place] = slot[row]
        moved = run(
            jnp.full_like(h, jnp.inf).at[place].set(h[row]),
            jnp.full_like(x, jnp.nan).at[place].set(x[row]),
            slots,
        )
        np.testing.assert_array_equal(moved[place].view(np.int32), first[row].view(np.int32))


@pytest.mark.parametrize("terms, tile", [(1, TILES[0]), (1, TILES[1]), (3, TILES[1])])
@pytest.mark.parametrize("parts", [0, 2])
def test_what_is_no_number_stays_with_its_pair_and_entry(terms, tile, parts):
    """Pair 1, which adapters 3 and 4 have, and all entries of 4 are not finite; others are."""
    rng, tenants = np.random.default_rng(5), 6
    pool = pools(rng, (20, 30, 33), tenants, terms, 40, 50, "float32")
    pair = rng.choice([0, 2], (tenants, terms))
    pair[3:5, -1] = 1
    row = 1 + rng.permutation(tenants * terms).reshape(pair.shape)
    bad = jnp.asarray([0, *row[4]])
    d, e = (
        jnp.asarray(rng.normal(size=(row.size + 1, part.shape[1])), "float32").at[bad].set(jnp.nan)
        for part in (pool.d, pool.e)
    )
    pages = pool.pairs.table[1]
    A, B = (part.at[pages].set(jnp.inf) for part in (pool.pairs.A, pool.pairs.B))
    row, pair = (jnp.asarray(part, jnp.int32) for part in (row, pair))
    pool = pool.replace(pairs=pool.pairs.replace(A=A, B=B), d=d, e=e, row=row, pair=pair)
    h, x, slot = batch(rng, tenants, 45, 40, 50, "float32")
    h = jnp.stack([h, h / 3]) if parts else h
    (y,) = twin((h,), x, (pool,), slot, tile=tile, interpret=True)
    spoilt = np.isin(slot, (3, 4))
    assert np.isfinite(y[~spoilt]).all() and np.isnan(y[spoilt]).all()
