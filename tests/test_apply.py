"""apply_normal_form against the plain formula, for every slot, alone and mixed."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forms import (
    evaluate_rows,
    extended_forms,
    normal,
    random_blocks,
    random_form,
    random_kronecker,
    random_sparse,
    random_term,
    shared_pairs,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import scute_jax as sj
from scute_jax.normal_form import Kronecker

D_IN, D_OUT = 24, 10
RNG = np.random.default_rng(0)
W, BIAS = normal(RNG, D_IN, D_OUT), normal(RNG, D_OUT)
PAIRS = shared_pairs()


def every_kind():
    """Forms that use each slot alone and together, shared pairs of two ranks among them."""

    def term(r, slots="", pair=None):
        return random_term(RNG, D_IN, D_OUT, r, slots, pair)

    def form(*args, **kwargs):
        return random_form(RNG, D_IN, D_OUT, *args, **kwargs)

    return [
        form(terms=[term(3, "c")]),
        form("sb", terms=[term(33, "cde"), term(1)]),
        form(block=4),
        form(block=1),
        form("s", block=6),
        form(terms=[term(0, "cde", PAIRS[0])]),
        form("b", terms=[term(0, "de", PAIRS[0]), term(0, "d", PAIRS[1]), term(2)]),
        form(),
        form("b"),
        form("s", block=4, terms=[term(0, "due", PAIRS[1]), term(3, "u")]).replace(
            P=(random_blocks(RNG, D_IN, 3, 1), random_blocks(RNG, D_IN, 4, 2)),
            Q=(random_blocks(RNG, D_OUT, 2, 3), random_blocks(RNG, D_OUT, 5)),
            S=random_sparse(RNG, D_IN, D_OUT, 30),
        ),
        form().replace(S=random_sparse(RNG, D_IN, D_OUT, 5)),
        form("sb", terms=[term(2)]).replace(
            K=tuple(
                random_kronecker(RNG, D_IN, D_OUT, *split) for split in ((4, 2), (4, 2), (6, 5))
            )
        ),
        form().replace(K=(random_kronecker(RNG, D_IN, D_OUT, 4, 2),)),
    ]


@partial(jax.jit, static_argnames="num_adapters")
def apply(params, x, ids, num_adapters):
    return sj.apply_normal_form(params, x, sj.segments(ids, num_adapters))


def run(all_forms, ids, x):
    params = sj.site_params(jnp.asarray(W), all_forms, jnp.asarray(BIAS))
    y = apply(params, jnp.asarray(x), jnp.asarray(ids), num_adapters=len(all_forms))
    return np.asarray(y, np.float64)


@pytest.mark.parametrize("rows", [1, 7, 40, 700])
def test_a_mixed_batch_of_every_kind(rows):
    all_forms, x = every_kind(), normal(RNG, rows, D_IN)
    ids = RNG.integers(-1, len(all_forms), rows)
    expected = evaluate_rows(all_forms, ids, W, x, BIAS)
    assert np.abs(run(all_forms, ids, x) - expected).max() <= 2e-6 * np.abs(expected).max()


@given(st.lists(extended_forms(pairs=PAIRS), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
@settings(max_examples=12, deadline=None)
def test_any_forms_in_one_batch(all_forms, seed):
    rng = np.random.default_rng(seed)
    x, ids = normal(rng, 20, D_IN), rng.integers(-1, len(all_forms), 20)
    expected = evaluate_rows(all_forms, ids, W, x, BIAS)
    assert np.abs(run(all_forms, ids, x) - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 8, 16, 24, 32, 64, 96, 128, 256])
def test_every_rank_beside_every_other(rank):
    ranks = [rank, 1, 32, 256]
    all_forms = [
        random_form(RNG, D_IN, D_OUT, terms=[random_term(RNG, D_IN, D_OUT, r)]) for r in ranks
    ]
    x, ids = normal(RNG, 12, D_IN), np.arange(12) % 5 - 1
    expected = evaluate_rows(all_forms, ids, W, x, BIAS)
    assert np.abs(run(all_forms, ids, x) - expected).max() <= 1e-5 * np.abs(expected).max()


def test_it_works_under_jit_with_traced_ids_and_compiles_once():
    all_forms, traces = every_kind(), []

    @jax.jit
    def step(params, x, ids):
        traces.append(1)
        return sj.apply_normal_form(params, x, sj.segments(ids, len(all_forms)))

    params = sj.site_params(jnp.asarray(W), all_forms, jnp.asarray(BIAS))
    for _ in range(3):
        x, ids = normal(RNG, 30, D_IN), RNG.integers(-1, len(all_forms), 30)
        expected = evaluate_rows(all_forms, ids, W, x, BIAS)
        np.testing.assert_allclose(step(params, x, ids), expected, atol=1e-4)
    assert len(traces) == 1


def test_a_row_does_not_depend_on_the_rest_of_the_batch():
    all_forms, x = every_kind(), normal(RNG, 30, D_IN)
    ids = RNG.integers(-1, len(all_forms), 30)
    first = run(all_forms, ids, x)
    others, other_x = RNG.integers(-1, len(all_forms), 30), normal(RNG, 30, D_IN)
    for row in range(0, 30, 7):
        place = 29 - row  # another place in the batch, beside other rows
        mixed_ids, mixed_x = others.copy(), other_x.copy()
        mixed_ids[place], mixed_x[place] = ids[row], x[row]
        np.testing.assert_array_equal(run(all_forms, mixed_ids, mixed_x)[place], first[row])


def test_numbers_that_are_none_do_not_spread():
    all_forms, x = every_kind(), normal(RNG, 30, D_IN)
    poisoned = [
        *all_forms,
        jax.tree.map(lambda a: a * np.nan, all_forms[1]),
        all_forms[5].replace(
            terms=(
                random_term(
                    RNG, D_IN, D_OUT, 0, "d", ("bad", PAIRS[1][1] * np.nan, PAIRS[1][2] * np.nan)
                ),
            )
        ),
        random_form(RNG, D_IN, D_OUT, "s", block=4).replace(
            R=np.full((6, 4, 4), np.inf, np.float32)
        ),
        jax.tree.map(lambda a: a * np.nan, all_forms[-1]),
    ]
    ids = RNG.integers(-1, len(all_forms), 30)
    ids[:4] = range(len(all_forms), len(all_forms) + 4)
    x[4] = np.nan
    with np.errstate(invalid="ignore"):
        ours, expected = run(poisoned, ids, x), evaluate_rows(poisoned, ids, W, x, BIAS)
    assert not np.isfinite(ours[:5]).any(axis=1).all()
    np.testing.assert_allclose(ours[5:], expected[5:], atol=1e-4)


def test_gradients_for_x_and_every_slot():
    all_forms = [jax.tree.map(jnp.asarray, form) for form in every_kind()]
    ids = np.arange(28) % 14 - 1
    weight = normal(RNG, 28, D_OUT)

    @jax.jit
    def loss(all_forms, W, bias, x):
        params = sj.site_params(W, all_forms, bias)
        seg = sj.segments(ids, len(all_forms))
        return jnp.sum(sj.apply_normal_form(params, x, seg) * weight)

    x = jnp.asarray(normal(RNG, 28, D_IN))
    at = (all_forms, jnp.asarray(W), jnp.asarray(BIAS), x)
    gradient = jax.grad(loss, argnums=(0, 1, 2, 3), allow_int=True)(*at)
    leaves, tree = jax.tree.flatten(at)
    slopes = jax.tree.leaves(gradient)
    for i, (leaf, slope) in enumerate(zip(leaves, slopes, strict=True)):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            continue  # orders and places
        direction = jnp.asarray(normal(RNG, *jnp.shape(leaf)))

        def along(step, i=i, leaf=leaf, direction=direction):
            moved = [*leaves[:i], leaf + step * direction, *leaves[i + 1 :]]
            return float(loss(*jax.tree.unflatten(tree, moved)))

        numeric = (along(1e-2) - along(-1e-2)) / 2e-2
        assert float(jnp.sum(slope * direction)) == pytest.approx(numeric, rel=2e-2, abs=2e-2)


def test_half_precision_keeps_what_the_adapter_does():
    """Rounding a slot to bfloat16 costs a share of the adapter's effect, not of its identity."""
    near = [
        random_form(RNG, D_IN, D_OUT, "s").replace(s=1 + 0.01 * normal(RNG, D_OUT)),
        random_form(RNG, D_IN, D_OUT).replace(
            R=np.eye(4, dtype=np.float32) + 0.01 * normal(RNG, 6, 4, 4)
        ),
    ]
    params = sj.site_params(jnp.asarray(W, jnp.bfloat16), near)
    for k, (vectors, exact) in enumerate(
        [(params.slots.scale, near[0].s - 1), (params.slots.rotations[0], near[1].R - np.eye(4))]
    ):
        stored = np.asarray(vectors.values[0], np.float64)
        assert np.abs(stored - exact).max() <= 2**-8 * np.abs(exact).max(), k


def eager(ids, x, **how):
    seg = sj.segments(np.asarray(ids), 1)
    form = sj.NormalForm(s=np.ones(D_OUT, np.float32))
    return sj.apply_normal_form(sj.site_params(W, [form]), x, seg, **how)


@pytest.mark.parametrize(
    "broken, message",
    [
        (lambda: sj.site_params(W, [sj.NormalForm(s=W[0, :3])]), r"forms\[0\].s has shape \(3,\)"),
        (lambda: sj.site_params(W, [sj.NormalForm(terms=(sj.Term(W.T, W),))]), r"terms\[0\].A"),
        (lambda: sj.site_params(W, [], BIAS[:3]), "bias has shape"),
        (
            lambda: sj.site_params(W, [sj.NormalForm(K=(Kronecker(W[:5, :5], W[:5, :2]),))]),
            r"forms\[0\].K\[0\] has shape \(25, 10\)",
        ),
        (lambda: sj.segments(np.array([0, 5]), 3), r"adapter_ids\[1\] is 5, but there are 3"),
        (lambda: sj.segments(np.array([0.5]), 3), "vector of integers"),
        (lambda: sj.segments(np.array([1, 0]), 3, presorted=True), "non-decreasing"),
        (lambda: eager([-1], W[:5, 0][None]), "x has shape"),
        (lambda: eager([-1, -1], W.T[:1]), "x has 1 rows, but the segments were made for 2"),
        (lambda: eager([-1], W.T[:1], implementation="cuda"), "not one of"),
    ],
)
def test_errors(broken, message):
    with pytest.raises(ValueError, match=message):
        broken()
