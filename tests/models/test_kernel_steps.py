"""Decode steps on the kernels, in bfloat16 as on a GPU, beside the definitions in float32."""

import jax.numpy as jnp
import numpy as np
import pytest
from files import model_folder
from forms import random_form, random_term, shared_pairs
from tiny_checkpoints import projections

import scute_jax as sj
from scute_jax.models.cache import KVCache
from scute_jax.models.checkpoint import load_model
from scute_jax.models.llama import Batch, forward, logits
from scute_jax.slots import pack_site

IDS = np.array([-1, -1, 0, 0, 1, 2, 2, 3, 4])  # adapters of the rows
STEPS, PAGE = 2, 16


def forms(rng, d_in, d_out, kind):
    def term(r, slots="", pair=None):
        return random_term(rng, d_in, d_out, r, slots, pair)

    own = [
        random_form(rng, d_in, d_out, "", terms=[term(5)]),
        random_form(rng, d_in, d_out, "sb", terms=[term(33)]),
        random_form(rng, d_in, d_out, "s"),
        random_form(rng, d_in, d_out, "b"),
    ]
    if kind == "riding":
        return [*own, random_form(rng, d_in, d_out)]
    pair = shared_pairs(d_in, d_out)[0]
    return [
        *own[:3],
        random_form(rng, d_in, d_out, "", 4),
        random_form(rng, d_in, d_out, "s", terms=[term(0, "de", pair)]),
    ]


def steps(folder, kind, dtype, implementation, ids=IDS):
    """The logits of a few decode steps of rows of the tiny base."""
    config, params = load_model(folder, dtype)
    rng = np.random.default_rng(1)
    sites = {
        p.module.removeprefix("model."): p for p in projections("plain") if "layers" in p.module
    }
    slots = {
        site: pack_site(forms(rng, p.d_in, p.d_out, kind), p.d_in, p.d_out, dtype)
        for site, p in sites.items()
    }
    n = len(ids)
    seg = sj.segments(ids, 5, presorted=True)
    cache = KVCache.create(config, n, PAGE, params.embed_tokens.dtype)
    tokens = np.random.default_rng(2).integers(0, 95, (STEPS, n, 1))
    found = []
    for i in range(STEPS):
        where = jnp.full(n, i, jnp.int32), jnp.ones(n, jnp.int32)
        batch = Batch(jnp.asarray(tokens[i], jnp.int32), *where, jnp.arange(n)[:, None])
        how = {"implementation": implementation}
        hidden, cache = forward(params, slots, config, batch, seg, cache, **how)
        found.append(np.asarray(logits(params, slots, hidden, seg, **how), np.float64))
    return np.stack(found)


@pytest.mark.parametrize("kind", ["riding", "every route"])
def test_the_logits_are_those_of_the_definitions(kind, tmp_path):
    folder = model_folder(tmp_path / "base", False)
    expected = steps(folder, kind, "float32", "reference")
    effect = np.abs(expected - steps(folder, kind, "float32", "reference", np.full(9, -1))).max()
    rounding = np.abs(steps(folder, kind, "bfloat16", "reference") - expected).max()
    error = np.abs(steps(folder, kind, "bfloat16", "pallas") - expected).max()
    assert error <= 1.5 * rounding <= 0.03 * effect
