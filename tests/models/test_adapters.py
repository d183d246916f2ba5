"""Input vectors of down_proj moved to up_proj: the same function of the whole MLP."""

import numpy as np
import pytest
from forms import (
    evaluate,
    normal,
    random_blocks,
    random_form,
    random_kronecker,
    random_sparse,
    random_term,
)

import scute_jax as sj
from scute_jax.models.adapters import for_llama

RNG = np.random.default_rng(0)
D, HIDDEN = 10, 24
UP, DOWN = normal(RNG, D, HIDDEN), normal(RNG, HIDDEN, D)
GATE, X = np.abs(normal(RNG, 6, HIDDEN)), normal(RNG, 6, D)

BESIDES = {
    "nothing": {},
    "Q": {"Q": (random_blocks(RNG, D, 2),)},
    "P": {"P": (random_blocks(RNG, HIDDEN, 3),)},
    "S": {"S": random_sparse(RNG, HIDDEN, D, 9)},
    "K": {"K": (random_kronecker(RNG, HIDDEN, D, 4, 2),)},
    "terms": {"terms": (random_term(RNG, HIDDEN, D, 3),)},
}


def mlp(sites) -> np.ndarray:
    up, down = (sites.get(f"layers.0.mlp.{m}_proj", sj.NormalForm()) for m in ("up", "down"))
    return evaluate(down, DOWN, GATE * evaluate(up, UP, X))


@pytest.mark.parametrize("besides", BESIDES)
@pytest.mark.parametrize("up_slots", [None, "sb"])
def test_an_input_vector_moves_only_where_nothing_else_reads_the_input(besides, up_slots):
    down = random_form(RNG, HIDDEN, D, "sb", block=1).replace(**BESIDES[besides])
    sites = {"layers.0.mlp.down_proj": down}
    if up_slots is not None:
        term = random_term(RNG, D, HIDDEN, 2)
        sites["layers.0.mlp.up_proj"] = random_form(RNG, D, HIDDEN, up_slots, terms=[term])
    served = for_llama(sj.Adapter(sites=sites, method="ANY", version="1")).sites
    expected = mlp(sites)
    np.testing.assert_allclose(mlp(served), expected, atol=1e-5 * np.abs(expected).max())
    moved = "R" not in served["layers.0.mlp.down_proj"].live
    assert moved == (besides in ("nothing", "Q"))


def test_a_product_at_up_proj_stays_one():
    lokr = sj.NormalForm(K=(random_kronecker(RNG, D, HIDDEN, 2, 4),))
    down = random_form(RNG, HIDDEN, D, block=1)
    sites = {"layers.0.mlp.down_proj": down, "layers.0.mlp.up_proj": lokr}
    served = for_llama(sj.Adapter(sites=sites, method="ANY", version="1")).sites
    assert served["layers.0.mlp.up_proj"].K == lokr.K
    np.testing.assert_allclose(mlp(served), mlp(sites))
