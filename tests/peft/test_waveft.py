"""WaveFT against the PEFT library: every wavelet that it has, and its ways to count entries."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import peft, quiet, save_adapter, serve
from targets_drawn import bases, modules
from tiny_checkpoints import CONFIGS

from scute_jax import AdapterError
from scute_jax.peft import load_peft
from scute_jax.peft.wavelets import FILTERS, high_pass, low_pass


def make(**fields) -> peft.WaveFTConfig:
    return quiet(peft.WaveFTConfig, **fields)


@settings(max_examples=40, deadline=None)
@given(
    n=st.sampled_from([1, 2, 40, 1152]),  # 1152 are all of v_proj
    scaling=st.sampled_from([25.0, -0.4]),
    family=st.sampled_from(["db1", "db1", *FILTERS]),
    transformed=st.sampled_from([True, True, False]),
    seed=st.integers(0, 2**40),
    pattern=st.sampled_from([{}, {"v_proj": 3}, {r"layers\.1\..*": 5, "q_proj": 7}]),
    proportional=st.booleans(),
    bias=st.sampled_from(["none", "all", "waveft_only"]),
    init=st.booleans(),
    modules=modules,
    base=bases,
)
def test_every_option(
    n, scaling, family, transformed, seed, pattern, proportional, bias, init, modules, base
):
    if proportional:
        n = min(n, 40)
    config = make(
        n_frequency=n,
        scaling=scaling,
        wavelet_family=family,
        use_idwt=transformed,
        random_loc_seed=seed,
        n_frequency_pattern=pattern,
        proportional_parameters=proportional,
        bias=bias,
        init_weights=init,
        target_modules=modules,
    )
    # A long wavelet reaches beyond the edge: all of a small adapter may lie outside.
    adapter = serve(config, base, needs_effect=False)
    assert set(adapter.live) - {"b"} == {"S"}


@pytest.mark.parametrize("family", FILTERS)
def test_every_wavelet(family: str):
    adapter = serve(make(n_frequency=60, wavelet_family=family, target_modules=["q_proj"]), "plain")
    assert len(adapter) == 2


@pytest.mark.parametrize("family", [name for name in FILTERS if name != "coif4"])
def test_the_filters_are_orthogonal(family: str):
    low = low_pass(family)
    high = high_pass(low)
    assert np.isclose(low @ low, 1) and np.isclose(low.sum(), np.sqrt(2))
    assert np.isclose(low @ high, 0) and np.isclose(high @ high, 1)


def test_a_haar_wavelet_keeps_it_sparse():
    config = make(n_frequency=30, target_modules=["q_proj"])
    adapter = serve(config, "plain")
    S = adapter["layers.0.self_attn.q_proj"].S
    assert 100 < len(S.values) <= 4 * 30
    assert len({*zip(S.rows.tolist(), S.cols.tolist(), strict=True)}) == len(S.values)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"wavelet_family": "db11"}, "wavelet_family' is 'db11'; known are 'db1', "),
        ({"wavelet_family": "coif5"}, "wavelet_family' is 'coif5'; known are 'db1', "),
        ({"n_frequency": 7}, r"waveft_spectrum' has shape \[30\].*need \[7\]"),
        ({"n_frequency": 1153}, "n_frequency' is 1153; it gives .* 1153 entries, .* 1 to 1152"),
        ({"n_frequency_pattern": {"v_proj": 0}}, "n_frequency_pattern.* gives .* 0 entries"),
        ({"n_frequency_pattern": {"v_proj": "9"}}, "n_frequency_pattern.*an integer"),
        ({"random_loc_seed": 2**64}, "random_loc_seed.*64 bits"),
    ],
)
def test_what_contradicts_the_file_is_refused(fields: dict, message: str, tmp_path: Path):
    save_adapter(make(n_frequency=30, target_modules=["v_proj"]), "plain", tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(AdapterError, match=message):
        load_peft(tmp_path, CONFIGS["plain"])
