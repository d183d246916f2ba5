"""PEANuT against the PEFT library: every depth, and every activation function that it has."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import peft, quiet, serve, torch
from targets_drawn import bases, modules
from transformers.activations import ACT2FN

from scute_jax.peft.activations import ACTIVATIONS


@settings(max_examples=30, deadline=None)
@given(
    r=st.integers(1, 8),
    depth=st.integers(0, 3),
    act=st.sampled_from(sorted(ACTIVATIONS)),
    scaling=st.sampled_from([1.0, 0.1, 7, -2.0]),
    init=st.booleans(),
    modules=modules,
    base=bases,
    seed=st.integers(0, 99),
)
def test_every_option(r, depth, act, scaling, init, modules, base, seed):
    config = quiet(
        peft.PeanutConfig,
        r=r,
        depth=depth,
        act_fn=act,
        scaling=scaling,
        init_weights=init,
        target_modules=modules,
    )
    adapter = serve(config, base, seed, tolerance=1e-4)
    assert adapter.method == "PEANUT" and adapter.live == ()
    assert {form.rank for form in adapter.sites.values()} == {r}


@pytest.mark.parametrize("name", sorted(ACT2FN.keys()))
def test_activations_are_those_of_transformers(name: str):
    x = np.concatenate([np.linspace(-20, 20, 401), np.linspace(-0.1, 0.1, 21)]).astype(np.float32)
    with torch.no_grad():
        theirs = ACT2FN[name](torch.tensor(x)).double().numpy()
    np.testing.assert_allclose(ACTIVATIONS[name](np.float64(x)), theirs, rtol=2e-6, atol=2e-6)
