"""The Pallas kernels against float64 on random shapes, whole sites at a time."""

import jax.numpy as jnp
import numpy as np
from forms import evaluate_rows, normal, random_form, random_term, shared_pairs
from hypothesis import given, settings
from hypothesis import strategies as st

import scute_jax as sj


@given(
    st.integers(1, 40),  # d_in in blocks of 4
    st.integers(1, 150),
    st.integers(1, 70),
    st.sampled_from([1, 4, 16, 32]),
    st.lists(st.integers(1, 80), min_size=1, max_size=3),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=5, deadline=None)
def test_a_site_of_any_shape(blocks, d_out, rows, tile, ranks, seed):
    rng, d_in = np.random.default_rng(seed), 4 * blocks
    pair = shared_pairs(d_in, d_out)[0]
    forms = [
        random_form(rng, d_in, d_out, slots, terms=[random_term(rng, d_in, d_out, rank)])
        for rank, slots in zip(ranks, ("", "s", "sb"), strict=False)
    ]
    forms += [
        random_form(rng, d_in, d_out, block=4),
        random_form(rng, d_in, d_out, block=1),
        random_form(rng, d_in, d_out, "b", terms=[random_term(rng, d_in, d_out, 0, "de", pair)]),
    ]
    W, x = normal(rng, d_in, d_out), normal(rng, rows, d_in)
    ids = rng.integers(-1, len(forms), rows)
    params = sj.site_params(jnp.asarray(W), forms)
    seg = sj.segments(ids, len(forms), tile=tile)
    ours = sj.apply_normal_form(params, jnp.asarray(x), seg, implementation="pallas")
    expected = evaluate_rows(forms, ids, W, x)
    assert np.abs(np.asarray(ours, np.float64) - expected).max() <= 1e-5 * np.abs(expected).max()
