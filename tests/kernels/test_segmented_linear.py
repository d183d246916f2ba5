"""The product with frozen weights and what rides on it, in one kernel, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forms import evaluate_rows, normal, random_form, random_term
from hypothesis import given, settings
from hypothesis import strategies as st

import scute_jax as sj
from scute_jax.kernels import at_tiles
from scute_jax.kernels.segmented_linear import pallas_triton, segmented_linear
from scute_jax.kernels.segmented_linear.plan import LinearTile, Plan


def problem(rng, d_in, outs, rows, ranks, tile, dtype="float32"):
    """Forms per slice, ids, the weights, x, and the arguments of the op."""
    slots = ("", "s", "b", "sb")
    forms = [
        [
            random_form(rng, d_in, d, slots[k % 4], terms=[random_term(rng, d_in, d, r)] * (r > 0))
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


def summed(parts):
    return tuple(jnp.sum(own, axis=0) for own in parts)


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
        block_n=32, block_k=32, block_r=block_r, programs=99, most_parts=parts, shrink_k=32
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
    return summed(
        pallas_triton.segmented_linear(xs, x, Ws, *parts, tiles, None, tile, interpret=True)
    )


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
D_IN = {60: 1, 200: 4}  # and the parts of d_in in x A and in x W
TILE = LinearTile(shrink_k=64)


@pytest.mark.parametrize("d_in", D_IN)
@pytest.mark.parametrize("ranks", [FEW, MANY])
def test_what_a_row_does_not_use_never_reaches_it(ranks, d_in):
    rng = np.random.default_rng(1)
    _, ids, args = problem(rng, d_in, (130,), 45, ranks, 16)
    xs, x, Ws, factors, scale, shift, tiles = args
    (clean,) = _by_tile(args, TILE)
    bad, row = 2, 40  # an adapter, and a row of another one
    assert ids[row] not in (-1, bad) and (ids == bad).any()
    (f,) = factors
    pages = np.asarray(f.table)[bad, : -(-ranks[bad] // 16)]
    poisoned = f.replace(A=f.A.at[pages].set(jnp.nan), B=f.B.at[pages].set(jnp.inf))
    x = x.at[row].set(jnp.nan)
    (got,) = _by_tile(((x,), x, Ws, (poisoned,), scale, shift, tiles), TILE)
    others = (ids != bad) & (np.arange(len(ids)) != row)
    assert np.array_equal(np.asarray(got)[others], np.asarray(clean)[others])
    assert np.isnan(np.asarray(got)[row]).all()
    assert not np.isfinite(np.asarray(got)[ids == bad]).any()


@pytest.mark.parametrize("d_in", D_IN)
@pytest.mark.parametrize("ranks", [FEW, MANY])
def test_the_bits_of_a_row_do_not_hang_on_the_others(ranks, d_in):
    rng = np.random.default_rng(2)
    _, ids, args = problem(rng, d_in, (130,), 40, ranks, 16)
    xs, x, Ws, *parts, tiles = args
    plan = Plan.make(TILE, d_in, [130], parts[0], tiles, True)
    assert plan.spans.parts == plan.spans_low.parts == D_IN[d_in]
    (whole,) = np.asarray(_by_tile(args, TILE))
    for own in range(len(ranks)):  # the rows of an adapter last, base rows before them
        keep = np.flatnonzero(ids == own)
        other = np.full(40, -1)
        other[-len(keep) :] = own
        moved = jnp.zeros_like(x).at[-len(keep) :].set(x[keep])
        tiles = sj.segments(other, 4, presorted=True, tile=16).tiles
        (again,) = _by_tile(((moved,), moved, Ws, *parts, tiles), TILE)
        assert np.array_equal(np.asarray(again)[-len(keep) :], whole[keep])


def test_gradients_are_those_of_the_definition():
    rng = np.random.default_rng(3)
    _, _, args = problem(rng, 24, (10,), 20, (3, 5), 4)
    xs, x, Ws, *rest, tiles = args

    def loss(x, Ws, rest, how):
        (y,) = summed(segmented_linear((x,), x, Ws, *rest, tiles, implementation=how))
        return jnp.sum(jnp.sin(y))

    ours, expected = (
        jax.grad(loss, argnums=(0, 1, 2), allow_int=True)(x, Ws, rest, how)
        for how in ("pallas", "reference")
    )
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        if a.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
