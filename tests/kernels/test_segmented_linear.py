"""The product with frozen weights and what rides on it, in one kernel, against float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forms import evaluate_rows, normal, random_form, random_term
from hypothesis import given, settings
from hypothesis import strategies as st

import scute_jax as sj
from scute_jax.kernels import at_tiles
from scute_jax.kernels.arrivals import zero_counts
from scute_jax.kernels.parts import add_parts
from scute_jax.kernels.segmented_linear import pallas_triton, segmented_linear
from scute_jax.kernels.segmented_linear.low import Low
from scute_jax.kernels.segmented_linear.plan import LinearTile, Plan

INTERPRETED = jax.default_backend() != "gpu"


def problem(rng, d_in, outs, rows, ranks, tile, dtype="float32", slots=("", "s", "b", "sb")):
    """Forms per slice, ids, and the arguments of the op."""
    forms = [
        [
            random_form(
                rng, d_in, d, slots[k % len(slots)], terms=[random_term(rng, d_in, d, r)] * (r > 0)
            )
            for k, r in enumerate(ranks)
        ]
        for d in outs
    ]
    ids = np.sort(rng.integers(-1, len(ranks), rows))
    Ws, x = [normal(rng, d_in, d) for d in outs], normal(rng, rows, d_in)
    sites = [sj.site_params(jnp.asarray(W, dtype), f).slots for W, f in zip(Ws, forms, strict=True)]
    tiles = sj.segments(ids, len(ranks), presorted=True, tile=tile).tiles
    parts = [tuple(getattr(s, name) for s in sites) for name in ("factors", "scale", "shift")]
    x = jnp.asarray(x, dtype)
    args = ((x,) * len(outs), x, tuple(jnp.asarray(W, dtype) for W in Ws), *parts, tiles)
    return forms, ids, args


def test_parts_are_added_in_their_order():
    """XLA may group the terms of a sum over an axis, which the bits of a row would hang on."""
    added = jax.make_jaxpr(add_parts)(jnp.ones((24, 2, 3))).jaxpr.eqns
    names = [eqn.primitive.name for eqn in added]
    assert names.count("add") == 23 and "reduce_sum" not in names


def summed(parts):
    return tuple(map(add_parts, parts))


def check(forms, ids, args, got, share):
    _, x, Ws, *_ = args
    for own, W, y in zip(forms, Ws, got, strict=True):
        x64, W64 = np.asarray(x, np.float64), np.asarray(W, np.float64)
        expected = evaluate_rows(own, ids, W64, x64)
        effect = np.abs(expected - x64 @ W64).max()
        assert effect > 0.1 * np.abs(expected).max()
        assert np.abs(np.asarray(y, np.float64) - expected).max() <= share * effect


@given(
    st.integers(1, 300),
    st.lists(st.integers(1, 150), min_size=1, max_size=3),
    st.integers(1, 64),
    st.sampled_from([1, 4, 16, 64]),
    st.lists(st.integers(0, 80), min_size=2, max_size=5).filter(any),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([16, 64]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=4, deadline=None)
def test_any_shape(d_in, outs, rows, size, ranks, parts, block_r, seed):
    rng = np.random.default_rng(seed)
    forms, ids, args = problem(rng, d_in, outs, rows, ranks, size)
    tile = LinearTile(
        block_n=32,
        block_k=32,
        block_r=block_r,
        part_r=48,
        programs=99,
        most_parts=parts,
        shrink_k=32,
    )
    got = _by_tile(args, tile)
    _, x, Ws, *_ = args
    for own, W, y in zip(forms, Ws, got, strict=True):
        expected = evaluate_rows(own, ids, np.asarray(W), np.asarray(x))
        assert np.abs(np.asarray(y) - expected).max() <= 1e-5 * np.abs(expected).max()


def _by_tile(args, tile):
    """The twin with a tile of its own."""
    xs, x, Ws, *parts, tiles = args
    parts = [tuple(at_tiles(p, tiles.slot) for p in own) for own in parts]
    args = xs, x, Ws, *parts, tiles, None, tile
    return summed(pallas_triton.segmented_linear(*args, interpret=INTERPRETED))


@pytest.mark.parametrize("dtype, share", [("float32", 1e-5), ("bfloat16", 0.02), ("float16", 3e-3)])
@pytest.mark.parametrize("how", ["pallas", "reference"])
def test_every_dtype_and_definition(dtype, share, how):
    rng = np.random.default_rng(0)
    forms, ids, args = problem(rng, 96, (130, 48), 45, (3, 0, 33, 16), 16, dtype)
    got = summed(segmented_linear(*args, implementation=how))
    assert all(y.dtype == jnp.float32 for y in got)
    check(forms, ids, args, got, share)
    base = ids < 0
    expected = [np.asarray(args[1], np.float64) @ np.asarray(W, np.float64) for W in args[2]]
    for y, e in zip(got, expected, strict=True):
        assert np.abs(np.asarray(y)[base] - e[base]).max() <= 1e-5 * np.abs(e).max()


FEW, MANY = (3, 5, 7, 16), (3, 5, 33, 16)  # ranks: a product with B holds four tiles, or one
TILE = LinearTile(block_n=64, shrink_k=64, shrink_r=16)
# d_in, tile, slots, parts of d_in; with the last, low B is added in the midst of a product.
CASES = {
    "one product": (60, TILE, ("", "s", "b", "sb"), 1),
    "parts": (200, replace(TILE, part_r=32), ("", "s", "b", "sb"), 4),
    "parts of blocks": (
        200,
        replace(TILE, part_r=64, block_r=16, shrink_k=128, shrink_r=64),
        ("", "s", "b", "sb"),
        4,
    ),
    "after the product": (200, replace(TILE, programs=3), ("", "s", "b", "sb"), 1),
    "in the midst": (200, replace(TILE, programs=3), ("", "b"), 1),
}
of_cases = pytest.mark.parametrize("d_in, tile, slots, parts", CASES.values(), ids=list(CASES))
of_ranks = pytest.mark.parametrize("ranks", [FEW, MANY])


@of_cases
@of_ranks
def test_what_a_row_does_not_use_never_reaches_it(ranks, d_in, tile, slots, parts):
    rng = np.random.default_rng(1)
    _, ids, args = problem(rng, d_in, (130,), 45, ranks, 16, slots=slots)
    xs, x, Ws, factors, scale, shift, tiles = args
    (clean,) = _by_tile(args, tile)
    bad, row = 2, 40  # an adapter, and a row of another one
    assert ids[row] not in (-1, bad) and (ids == bad).any()
    (f,) = factors
    pages = np.asarray(f.table)[bad, : -(-ranks[bad] // 16)]
    poisoned = f.replace(A=f.A.at[pages].set(jnp.nan), B=f.B.at[pages].set(jnp.inf))
    for k, rank in enumerate(ranks):  # what lies behind the ranks of an adapter
        rest = np.asarray(f.table)[k, (rank - 1) // 16], slice(1 + (rank - 1) % 16, None)
        A, B = (pool.at[rest].set(jnp.inf) for pool in (poisoned.A, poisoned.B))
        poisoned = poisoned.replace(A=A, B=B)
    x = x.at[row].set(jnp.nan)
    (got,) = _by_tile(((x,), x, Ws, (poisoned,), scale, shift, tiles), tile)
    others = (ids != bad) & (np.arange(len(ids)) != row)
    assert np.array_equal(np.asarray(got)[others], np.asarray(clean)[others])
    assert np.isnan(np.asarray(got)[row]).all()
    assert not np.isfinite(np.asarray(got)[ids == bad]).any()


@of_cases
@of_ranks
def test_the_bits_of_a_row_do_not_hang_on_the_others(ranks, d_in, tile, slots, parts):
    rng = np.random.default_rng(2)
    forms, ids, args = problem(rng, d_in, (130,), 40, ranks, 16, slots=slots)
    xs, x, Ws, *pools, tiles = args
    plan = Plan.make(tile, d_in, [130], pools[0], tiles, True)
    assert (plan.low_parts > 1) == (parts > 1)  # a row has low B in one of them
    assert plan.spans.parts == parts and (plan.spans_low.parts > 1) == (d_in > 128)
    whole = _by_tile(args, tile)
    check(forms, ids, args, whole, 1e-5)
    for own in range(len(ranks)):  # the rows of an adapter last, base rows before them
        keep = np.flatnonzero(ids == own)
        other = np.full(40, -1)
        other[-len(keep) :] = own
        moved = jnp.zeros_like(x).at[-len(keep) :].set(x[keep])
        tiles = sj.segments(other, 4, presorted=True, tile=16).tiles
        (again,) = _by_tile(((moved,), moved, Ws, *pools, tiles), tile)
        assert np.array_equal(np.asarray(again)[-len(keep) :], np.asarray(whole[0])[keep])


def test_tiles_of_one_row():
    """The ranks of a tile are a power of two, as its place may show in no bit. Base rows are in
    tiles of slot 0, which they do not use."""
    rng, tile = np.random.default_rng(3), LinearTile(block_n=64, programs=8)
    forms, _, args = problem(rng, 200, (130,), 8, (70, 3, 90), 1)
    xs, x, Ws, (f,), scale, shift, _ = args
    ids = np.asarray([-1, -1, -1, 0, 1, 1, 2, 2])
    tiles = sj.segments(ids, 3, presorted=True, tile=1).tiles
    args = xs, x, Ws, (f,), scale, shift, tiles
    ranks = Plan.make(LinearTile(), 200, [130], (f,), tiles, True).ranks(0)
    assert ranks >= 90 and ranks & (ranks - 1) == 0
    (whole,) = _by_tile(args, tile)
    check(forms, ids, args, (whole,), 1e-5)
    first, alone = jnp.roll(x, 2, axis=0), sj.segments([2] * 8, 3, presorted=True, tile=1).tiles
    (again,) = _by_tile(((first,), first, *args[2:-1], alone), tile)  # its rows in other tiles
    assert np.array_equal(np.asarray(again)[:2], np.asarray(whole)[ids == 2])
    pages = np.asarray(f.table)[0]
    poisoned = f.replace(A=f.A.at[pages].set(jnp.nan), B=f.B.at[pages].set(jnp.inf))
    (got,) = _by_tile((xs, x, Ws, (poisoned,), scale, shift, tiles), tile)
    assert np.array_equal(np.asarray(got)[ids != 0], np.asarray(whole)[ids != 0])


def test_of_finite_numbers_nothing_is_made_anew(monkeypatch):
    """What the shrink leaves unwritten is NaN where kernels are interpreted."""
    monkeypatch.setattr(Low, "add_own", lambda self, z, total: total * jnp.nan)
    forms, ids, args = problem(np.random.default_rng(4), 200, (130, 40), 40, MANY, 16)
    check(forms, ids, args, _by_tile(args, LinearTile(block_n=32, shrink_k=64)), 1e-5)


def test_slices_have_factors_of_different_width_or_none():
    rng = np.random.default_rng(5)
    forms, ids, args = problem(rng, 200, (130, 40, 24), 40, FEW, 16)
    wide, _, wide_args = problem(rng, 200, (130, 40, 24), 40, (3, 5, 70, 16), 16)
    xs, x, Ws, factors, scale, shift, tiles = args
    factors = wide_args[3][0], factors[1], None
    got = _by_tile((xs, x, Ws, factors, scale, shift, tiles), TILE)
    no_terms = [form.replace(terms=()) for form in forms[2]]
    with_slots = [own.replace(terms=of.terms) for own, of in zip(forms[0], wide[0], strict=True)]
    for own, W, y in zip((with_slots, forms[1], no_terms), Ws, got, strict=True):
        expected = evaluate_rows(own, ids, np.asarray(W), np.asarray(x))
        assert np.abs(np.asarray(y) - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(
    "d_in, ranks, looked_up, parts",
    [(24, (3, 5), False, 1), (200, (3, 5), False, 4 + 1), (200, (3, 200), True, 4 + 2)],
)
def test_gradients_are_those_of_the_definition(d_in, ranks, looked_up, parts):
    rng = np.random.default_rng(3)
    _, _, args = problem(rng, d_in, (10,), 20, ranks, 4)
    xs, x, Ws, *rest, tiles = args
    if looked_up:
        rest = [tuple(at_tiles(pool, tiles.slot) for pool in own) for own in rest]

    def loss(x, Ws, rest, how):
        (counts,) = zero_counts(1)
        (y,) = segmented_linear((x,), x, Ws, *rest, tiles, counts, implementation=how)
        assert len(y) == (parts if how == "pallas" else 1)
        return jnp.sum(jnp.sin(jnp.sum(y, axis=0)))

    ours, expected = (
        jax.grad(loss, argnums=(0, 1, 2), allow_int=True)(x, Ws, rest, how)
        for how in ("pallas", "reference")
    )
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        if a.dtype != jax.dtypes.float0:
            assert np.abs(a - b).max() <= 1e-4 * np.abs(b).max()
