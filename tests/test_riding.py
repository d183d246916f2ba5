"""Few rows in half precision: adapters ride on the base product, whatever else there is, but for
ranks past what is worth it and output rotations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forms import (
    evaluate_rows,
    normal,
    random_blocks,
    random_form,
    random_sparse,
    random_term,
    shared_pairs,
)

import scute_jax as sj
from scute_jax.apply import apply_fused

D_IN, OUTS, ROWS = 96, (130, 48), 40


def forms_of(rng, d_out, kind):
    """Forms of a slice: factors, s and b only (of few or many ranks), or other routes as well."""
    pair = shared_pairs(D_IN, d_out)[0]

    def term(r, slots="", pair=None):
        return random_term(rng, D_IN, d_out, r, slots, pair)

    def form(*args, **kwargs):
        return random_form(rng, D_IN, d_out, *args, **kwargs)

    own = [form("sb", terms=[term(100)]), form("s"), form(terms=[term(5)]), form()]
    if kind == "many ranks":
        return [*own, form("b", terms=[term(257)])]
    if kind == "riding":
        return own
    more = form("s", terms=[term(3)]).replace(S=random_sparse(rng, D_IN, d_out, 200))
    tenant = form("s", terms=[term(0, "de", pair)])
    if kind == "more after it":
        return [*own, more, tenant]
    turned = form("b", terms=[term(2)]).replace(Q=(random_blocks(rng, d_out, 2),))
    return [
        *own,
        form("s", block=4, terms=[term(7)]),
        form(block=1),
        tenant,
        more,
        turned,
    ]


@pytest.mark.parametrize("kind", ["riding", "more after it", "many ranks", "every route"])
@pytest.mark.parametrize("parts", [True, False])
@pytest.mark.parametrize("presorted", [True, False])
def test_beside_every_other_route(kind, parts, presorted):
    rng = np.random.default_rng(0)
    forms = [forms_of(rng, d, kind) for d in OUTS]
    count = len(forms[0])
    ids = rng.integers(-1, count, ROWS)
    ids = np.sort(ids) if presorted else ids
    Ws, x = [normal(rng, D_IN, d) for d in OUTS], normal(rng, ROWS, D_IN)
    half = [jnp.asarray(a, jnp.bfloat16) for a in (*Ws, x)]
    sites = tuple(sj.site_params(W, own) for W, own in zip(half, forms, strict=False))
    seg = sj.segments(ids, count, presorted=presorted)
    how = {"out_dtype": jnp.float32, "parts": parts, "implementation": "pallas"}
    got = apply_fused(sites, half[-1], seg, **how)
    traced = str(jax.make_jaxpr(partial(apply_fused, **how))(sites, half[-1], seg))
    rides = kind in ("riding", "more after it")
    assert ("segmented_shrink" in traced) != rides
    for W, own, y in zip(half, forms, got, strict=False):
        y = np.asarray(jnp.sum(y, axis=0) if parts else y, np.float64)
        W64, x64 = (np.asarray(a, np.float64) for a in (W, half[-1]))
        expected = evaluate_rows(own, ids, W64, x64)
        effect = np.abs(expected - x64 @ W64).max()
        assert y.shape == expected.shape
        assert np.abs(y - expected).max() <= 0.03 * effect
        assert np.abs(y - expected)[ids < 0].max() <= 1e-5 * np.abs(expected).max()
