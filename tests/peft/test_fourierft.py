"""FourierFT against the PEFT library, whose own transform is in float32."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_oracle import compare, peft, quiet, save_adapter, serve
from test_peft_names import MODULES
from tiny_checkpoints import CONFIGS, projections, write

from scute_jax import AdapterError
from scute_jax.peft import load_peft

PATTERNS = (
    "q_proj",
    r"layers\.1\..*_proj",
    "model.layers.0.mlp.up_proj",
    "lm_head",
    "v_proj|o_proj",
)
counts = st.one_of(st.integers(1, 60), st.sampled_from([400, 24 * 48]))


@settings(max_examples=25, deadline=None)
@given(
    n=counts,
    patterns=st.dictionaries(st.sampled_from(PATTERNS), counts, max_size=3),
    scaling=st.one_of(st.floats(1, 300), st.just(-20)),
    location=st.integers(-(2**40), 2**40),
    bias=st.sampled_from(["none", "all", "fourier_only"]),
    init=st.booleans(),
    modules=st.sets(st.sampled_from((*MODULES, "lm_head")), min_size=1),
    base=st.sampled_from(["plain", "biased", "qwen2"]),
)
def test_every_option(n, patterns, scaling, location, bias, init, modules, base):
    config = quiet(
        peft.FourierFTConfig,
        n_frequency=n,
        n_frequency_pattern=dict(sorted(patterns.items())),
        scaling=scaling,
        random_loc_seed=location,
        bias=bias,
        init_weights=init,
        target_modules=list(modules),
    )
    adapter = serve(config, base, scale=3.0, save_embedding_layers=False)
    assert set(adapter.live) - {"b"} == {"d"}


def test_every_entry_of_the_spectrum():
    """As many frequencies as the weight has entries."""
    config = peft.FourierFTConfig(n_frequency=48 * 24, target_modules=["v_proj"])
    assert serve(config, "plain", scale=3.0)["layers.0.self_attn.v_proj"].terms[0].rank == 2304


def test_tenants_of_one_seed_share_the_waves(tmp_path: Path):
    def load(name: str, seed: int, **fields):
        config = peft.FourierFTConfig(**{"n_frequency": 9, "target_modules": ["q_proj"]} | fields)
        folder = save_adapter(config, "plain", tmp_path / name, seed, scale=3.0)
        adapter = load_peft(folder, CONFIGS["plain"])
        compare(adapter, folder, "plain")
        return adapter

    a, b = load("a", 1), load("b", 2, scaling=30.0)
    first, second = "layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj"
    assert a[first].terms[0].pair == b[second].terms[0].pair and a.version != b.version
    assert np.shares_memory(a[first].terms[0].A, b[second].terms[0].A)
    others = load("c", 1, n_frequency=8), load("d", 1, random_loc_seed=778)
    others += (load("e", 1, target_modules=["k_proj"]),)
    pairs = {a[first].terms[0].pair} | {f.terms[0].pair for o in others for f in o.sites.values()}
    assert len(pairs) == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_frequency": 0}, r"n_frequency' is 0; it gives .*q_proj 0 frequencies.*from 1 to 3456"),
        ({"n_frequency": 3457}, "n_frequency' is 3457; it gives"),
        ({"n_frequency": 8}, r"fourierft_spectrum' has shape \[9\].*need \[8\]"),
        ({"n_frequency_pattern": {"q_proj": 5000}}, "n_frequency_pattern.*gives.*5000"),
        ({"n_frequency_pattern": {"q_proj": "9"}}, "n_frequency_pattern.*gives"),
        ({"n_frequency_pattern": {"(": 9}}, "n_frequency_pattern.*not a regular expression"),
        ({"random_loc_seed": None}, "random_loc_seed.*needed an integer"),
        ({"random_loc_seed": 2**64}, "random_loc_seed.*64 bits"),
        ({"scaling": "big"}, "scaling.*needed a finite number"),
    ],
)
def test_what_peft_would_not_take_is_refused(fields, message, tmp_path: Path):
    key = "base_model.model.{}.fourierft_spectrum"
    tensors = {
        key.format(p.module): np.ones(9, np.float32)
        for p in projections("plain")
        if p.module.endswith("q_proj")
    }
    config = {"peft_type": "FOURIERFT", "target_modules": ["q_proj"], "n_frequency": 9}
    assert load_peft(write(tmp_path / "sound", config, tensors), CONFIGS["plain"]).sites
    with pytest.raises(AdapterError, match=message):
        load_peft(write(tmp_path / "odd", config | fields, tensors), CONFIGS["plain"])


def test_a_spectrum_that_is_missing(tmp_path: Path):
    folder = write(
        tmp_path,
        {"peft_type": "FOURIERFT", "target_modules": ["q_proj"]},
        {"base_model.model.model.layers.0.self_attn.q_proj.fourierft_spectrum": np.ones(1000, "f")},
    )
    with pytest.raises(AdapterError, match="1 tensor.s. missing: .*layers.1.*fourierft_spectrum"):
        load_peft(folder, CONFIGS["plain"])


def test_a_weight_too_large_for_torchs_first_rule_is_refused(tmp_path: Path):
    wide = CONFIGS["plain"] | {"vocab_size": 5_000_000}
    tensors = {"base_model.model.lm_head.fourierft_spectrum": np.ones(9, np.float32)}
    config = {"peft_type": "FOURIERFT", "target_modules": ["lm_head"], "n_frequency": 9}
    with pytest.raises(AdapterError, match="lm_head: torch draws the places.*another rule"):
        load_peft(write(tmp_path, config, tensors), wide)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["n_frequency"] == 9
